"""The scikit-learn face: estimators learn from matrices, or from a dataset on disk, and leave a model on disk."""

from xmc_stream.estimators.base import Estimator
from xmc_stream.estimators.methods import CPLST, LEML, MEMOIR, GroupLasso, LabelTree, PDSparse, PPDSparse

__all__ = ["CPLST", "LEML", "MEMOIR", "Estimator", "GroupLasso", "LabelTree", "PDSparse", "PPDSparse"]
