"""A web service: texts or rows of features in, names of labels out, by a model that stays in memory.

    pip install xmc-stream fastapi uvicorn
    XMC_MODEL=xmc-stream-demo/docs.model uvicorn --app-dir docs/examples web_service:app

docs/web-service.md tells more.
"""

from __future__ import annotations

import os
from typing import Annotated, Any

import scipy.sparse as sp
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field

import xmc_stream as xs

MODEL = xs.load_model(os.environ["XMC_MODEL"])
NAMES = list(MODEL.label_names() or map(str, range(MODEL.n_labels)))
LIMIT = os.environ.get("XMC_MEMORY_LIMIT")  # as "2GB"; None: what it holds, and three quarters of what is free

Text = Annotated[str, Field(max_length=100_000)]
Row = Annotated[dict[int, float], Field(max_length=10_000)]  # values by the numbers of their features


class Asked(BaseModel):
    """What a request has: texts, or rows."""

    texts: Annotated[list[Text], Field(max_length=1000)] = []
    rows: Annotated[list[Row], Field(max_length=1000)] = []
    k: Annotated[int, Field(ge=1)] = 5


app = FastAPI()


@app.post("/predict")
def predict(asked: Asked) -> list[list[tuple[str, float]]]:
    """Of each text, or row, the k best labels with their scores."""
    # a plain `def`: FastAPI runs it in a thread, so that others are served meanwhile
    if bool(asked.texts) == bool(asked.rows):
        raise HTTPException(422, "give either texts or rows")
    k = min(asked.k, MODEL.n_labels)
    try:
        labels, scores = MODEL.predict_topk(asked.texts or _matrix(asked.rows), k, memory_limit=LIMIT)
    except xs.errors.InputError as error:
        raise HTTPException(422, str(error)) from None
    return [
        [(NAMES[label], score) for label, score in zip(*best, strict=True) if label >= 0]
        for best in zip(labels.tolist(), scores.tolist(), strict=True)
    ]


@app.get("/health")
def health() -> dict[str, Any]:
    """What is served."""
    return {"model": MODEL.path.name, "n_features": MODEL.n_features, "n_labels": MODEL.n_labels}


def _matrix(rows: list[dict[int, float]]) -> sp.csr_matrix:
    for row in rows:
        for feature in row:
            if not 0 <= feature < MODEL.n_features:
                raise HTTPException(422, f"feature {feature} is not from 0 to {MODEL.n_features - 1}")
    indices = [feature for row in rows for feature in row]
    values = [value for row in rows for value in row.values()]
    ends = [0]
    for row in rows:
        ends.append(ends[-1] + len(row))
    return sp.csr_matrix((values, indices, ends), shape=(len(rows), MODEL.n_features))


# the first prediction reads the model and loads what is compiled: before the first request, not in it
MODEL.predict_topk(sp.csr_matrix((1, MODEL.n_features)), 1, memory_limit=LIMIT)
if (MODEL.path / "vectorizer").exists():
    MODEL.predict_topk([""], 1, memory_limit=LIMIT)
