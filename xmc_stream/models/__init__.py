"""Trained models: opening them and predicting with them. A kind of model has a folder."""

from xmc_stream.models.api import predict
from xmc_stream.models.execution import Execution, advising, behind, planned
from xmc_stream.models.model import Model, as_model, load_model
from xmc_stream.models.prediction import answer, predict_to, stored_filter

__all__ = [
    "Execution", "Model", "advising", "answer", "as_model", "behind", "load_model", "planned",
    "predict", "predict_to", "stored_filter",
]  # fmt: skip
