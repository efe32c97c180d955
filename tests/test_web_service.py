"""The example of a web service, by a real server: concurrent requests have the model's own answers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers import text_files
from helpers.commands import environment

import xmc_stream as xs

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
DOCUMENTS = text_files.documents(260)
LIMIT = "2GB"


@contextmanager
def serving(model: Path, said: Path) -> Iterator[str]:
    """The address of a server, which ends with the block; what it says is in `said`."""
    command = [sys.executable, "-m", "uvicorn", "--app-dir", str(EXAMPLES), "--port", "0", "web_service:app"]
    with open(said, "w", encoding="utf-8") as log:
        more = {**environment(), "XMC_MODEL": str(model), "XMC_MEMORY_LIMIT": LIMIT}
        with subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=more) as server:
            try:
                found = None
                while found is None:
                    assert server.poll() is None, said.read_text()
                    found = re.search(r"running on (http://127\.0\.0\.1:\d+)", said.read_text())
                    if found is None:
                        with pytest.raises(subprocess.TimeoutExpired):
                            server.wait(0.1)
                yield found[1]
            finally:
                server.terminate()
                server.wait(60)


def ask(url: str, **asked: Any) -> Any:
    request = urllib.request.Request(f"{url}/predict", json.dumps(asked).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def refused(url: str, **asked: Any) -> str:
    with pytest.raises(urllib.error.HTTPError) as error:
        ask(url, **asked)
    with error.value as answer:
        assert answer.code == 422
        return str(json.load(answer)["detail"])


@pytest.mark.slow
def test_concurrent_requests_have_the_answers_of_the_model(tmp_path: Path) -> None:
    source = text_files.write_jsonl(tmp_path / "train.jsonl", DOCUMENTS[:200])
    train = xs.convert(source, tmp_path / "train.xmc", memory_limit=LIMIT)
    model = xs.PPDSparse(max_rounds=1, memory_limit=LIMIT).fit(train, model=tmp_path / "m").model_
    names = list(model.label_names() or ())
    test = xs.convert(
        text_files.write_jsonl(tmp_path / "test.jsonl", DOCUMENTS[200:]),
        tmp_path / "test.xmc",
        like=train,
        memory_limit=LIMIT,
    )
    texts = [f"{document['title']}\n{document['content']}" for document in DOCUMENTS[200:]]
    x = test.X_rows().block(0, test.n_samples)
    rows = [
        dict(zip(x.indices[a:b].tolist(), x.values[a:b].tolist(), strict=True))
        for a, b in zip(x.indptr, x.indptr[1:], strict=False)
    ]
    labels, scores = model.predict_topk(test, 4, memory_limit=LIMIT)
    expected = [
        [[names[label], score] for label, score in zip(*best, strict=True)]
        for best in zip(labels.tolist(), scores.tolist(), strict=True)
    ]
    with serving(model.path, tmp_path / "said") as url, ThreadPoolExecutor(8) as pool:
        of_texts = pool.map(lambda text: ask(url, texts=[text], k=4), texts)
        of_rows = pool.map(lambda row: ask(url, rows=[row], k=4), rows)
        assert [answer for (answer,) in of_texts] == expected
        assert [answer for (answer,) in of_rows] == expected
        assert ask(url, texts=texts, k=4) == expected
        assert len(ask(url, texts=["ba"], k=10**6)[0]) <= model.n_labels
        assert refused(url) == "give either texts or rows"
        assert "greater than or equal to 1" in refused(url, texts=["ba"], k=0)
        assert "is not from 0 to" in refused(url, rows=[{str(model.n_features): 1.0}])
        assert "1000" in refused(url, texts=["ba"] * 1001)
        with urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
            assert json.load(answer) == {"model": "m", "n_features": model.n_features, "n_labels": model.n_labels}
    assert "Traceback" not in (tmp_path / "said").read_text()
