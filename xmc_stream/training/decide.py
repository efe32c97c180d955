"""What rows that a model has not seen say of which labels are to be predicted: see `models.decisions`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from xmc_stream.metrics import among
from xmc_stream.models import Execution, Model
from xmc_stream.models.decisions import HeldOut
from xmc_stream.models.prediction import predict_to
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.predictions import Predictions
from xmc_stream.training.plan import TRUE_BYTES


def decided_on(rows: Dataset, model: Model, out: Path, execution: Execution, check: bool) -> dict[str, Any]:
    """The decision that serves these rows best. out: predictions, which are written."""
    held_out, Y = HeldOut(rows.n_samples, rows), rows.Y_rows()
    predict_to(model, rows, out, held_out.k, execution, overwrite=True, check=check)
    for start, labels, scores in Predictions(out).blocks():
        for y in Y.blocks(TRUE_BYTES, start, start + len(labels)):
            mine = slice(y.start - start, y.start - start + y.n)
            true = among(np.arange(y.n)[:, None], labels[mine].astype(np.int64), y.indptr, y.indices)
            held_out.add(scores[mine], true, np.diff(y.indptr))
    return held_out.decision()
