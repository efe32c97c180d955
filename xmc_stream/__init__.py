"""Out-of-core streaming library for extreme multi-class and multi-label classification.

    import xmc_stream as xs
    train = xs.convert("train.txt.gz", "train.xmc", normalize="l2", memory_limit="2GB")
    clf = xs.PPDSparse(lam=0.01, memory_limit="4GB", seed=0).fit(train, model="wiki.model")
    labels, scores = clf.predict_topk(xs.open_dataset("test.xmc"), k=5)

Names are loaded when first used: importing this package loads neither numba nor dask nor zarr.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# The package `convert` and the function of that name share an attribute: importing the package first, once, and light
# as it is, lets the function have it for good.
from xmc_stream.convert import convert
from xmc_stream.errors import (
    InputError,
    JobError,
    MemoryLimitError,
    ResumeError,
    StoreError,
    XmcStreamError,
)
from xmc_stream.version import __version__

if TYPE_CHECKING:
    from xmc_stream import errors
    from xmc_stream.convert.options import ConvertOptions, TextOptions
    from xmc_stream.datasets.append import append
    from xmc_stream.datasets.copy import copy
    from xmc_stream.datasets.export import export
    from xmc_stream.datasets.select import select_features
    from xmc_stream.datasets.split import split
    from xmc_stream.datasets.verify import verify
    from xmc_stream.estimators import CPLST, LEML, MEMOIR, GroupLasso, LabelTree, PDSparse, PPDSparse
    from xmc_stream.evaluation.calibrate import calibrate, uncalibrate
    from xmc_stream.evaluation.evaluate import evaluate
    from xmc_stream.mips.index import InnerProductIndex
    from xmc_stream.models import Model, load_model, predict
    from xmc_stream.store.dataset import Dataset, open_dataset
    from xmc_stream.training.tune import tune

_HOME = {
    "CPLST": "xmc_stream.estimators",
    "GroupLasso": "xmc_stream.estimators",
    "LabelTree": "xmc_stream.estimators",
    "MEMOIR": "xmc_stream.estimators",
    "LEML": "xmc_stream.estimators",
    "PDSparse": "xmc_stream.estimators",
    "PPDSparse": "xmc_stream.estimators",
    "ConvertOptions": "xmc_stream.convert.options",
    "TextOptions": "xmc_stream.convert.options",
    "Model": "xmc_stream.models",
    "append": "xmc_stream.datasets.append",
    "calibrate": "xmc_stream.evaluation.calibrate",
    "uncalibrate": "xmc_stream.evaluation.calibrate",
    "copy": "xmc_stream.datasets.copy",
    "evaluate": "xmc_stream.evaluation.evaluate",
    "load_model": "xmc_stream.models",
    "predict": "xmc_stream.models",
    "InnerProductIndex": "xmc_stream.mips.index",
    "Dataset": "xmc_stream.store.dataset",
    "open_dataset": "xmc_stream.store.dataset",
    "export": "xmc_stream.datasets.export",
    "select_features": "xmc_stream.datasets.select",
    "split": "xmc_stream.datasets.split",
    "tune": "xmc_stream.training.tune",
    "verify": "xmc_stream.datasets.verify",
}

__all__ = [
    "CPLST",
    "LEML",
    "MEMOIR",
    "ConvertOptions",
    "Dataset",
    "GroupLasso",
    "InnerProductIndex",
    "InputError",
    "JobError",
    "LabelTree",
    "MemoryLimitError",
    "Model",
    "PDSparse",
    "PPDSparse",
    "ResumeError",
    "StoreError",
    "TextOptions",
    "XmcStreamError",
    "__version__",
    "append",
    "calibrate",
    "convert",
    "copy",
    "errors",
    "evaluate",
    "export",
    "load_model",
    "open_dataset",
    "predict",
    "select_features",
    "split",
    "tune",
    "uncalibrate",
    "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module 'xmc_stream' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
