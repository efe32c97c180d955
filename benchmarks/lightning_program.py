"""One fit of lightning's CDClassifier: what benchmarks/group_lasso.py runs in an environment of its own.

    python lightning_program.py DATA.npz LAM TOL PASSES SECONDS SEED OUT.npz

lightning needs numpy < 1.24, so nothing of xmc_stream is imported here. DATA.npz has X as CSC arrays in float64, as
lightning wants them, and y, the class of each row. With C = 1 and alpha = N lam its objective is N times ours. OUT.npz gets
the weights (D x K), peak memory in bytes, and, for W = 0 and each pass: seconds so far, processor seconds, the objective.

lightning calls `Watch` as a pass begins. The objective comes from lightning's own margins, so that it costs little, and the
time that it takes is left out. A fit that takes more than SECONDS of the processor ends with the pass under way; `cut` says so.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import scipy.sparse as sp
from lightning.classification import CDClassifier
from numpy.typing import NDArray

LINES = 2048  # whose losses or norms are summed at a time


class Watch:
    """Notes time and objective of each pass, and ends a fit that is too long."""

    def __init__(self, y: NDArray[Any], lam: float, most: float) -> None:
        self.y, self.lam, self.most = y, lam, most
        self.seconds: list[float] = []
        self.processor: list[float] = []
        self.objectives: list[float] = []
        self.cut = False
        self.began = self.now()

    def now(self) -> NDArray[np.float64]:
        return np.array([time.perf_counter(), time.process_time()])

    def __call__(self, classifier: Any) -> bool | None:
        called = self.now()
        self.note(called, classifier)
        self.began = self.began + (self.now() - called)
        return True if self.cut else None

    def note(self, called: NDArray[np.float64], classifier: Any) -> None:
        seconds, processor = called - self.began
        self.seconds.append(seconds)
        self.processor.append(processor)
        self.objectives.append(self.objective(classifier.errors_, classifier.coef_))
        self.cut = processor > self.most

    def objective(self, margins: NDArray[Any], coef: NDArray[Any]) -> float:
        """Of the margins 1 - (z_y - z_r), K x N, and the weights, K x D."""
        loss = penalty = 0.0
        for first in range(0, margins.shape[1], LINES):
            some = np.maximum(margins[:, first : first + LINES], 0.0)
            some[self.y[first : first + LINES], np.arange(some.shape[1])] = 0.0
            loss += float(np.square(some, out=some).sum())
        for first in range(0, coef.shape[1], LINES):
            penalty += float(np.linalg.norm(coef[:, first : first + LINES], axis=0).sum())
        return float(loss / margins.shape[1] + self.lam * penalty)


def peak_memory() -> int:
    """VmHWM: unlike getrusage's maximum, it forgets the process that this one was forked from."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def main(data: str, lam: str, tol: str, passes: str, seconds: str, seed: str, out: str) -> None:
    with np.load(data) as arrays:
        X = sp.csc_matrix((arrays["data"], arrays["indices"], arrays["indptr"]), arrays["shape"])
        y = arrays["y"]
    watch = Watch(y, float(lam), float(seconds))
    classifier = CDClassifier(
        penalty="l1/l2", multiclass=True, loss="squared_hinge", C=1.0, alpha=X.shape[0] * float(lam), tol=float(tol),
        max_iter=int(passes), random_state=int(seed), callback=watch, n_calls=X.shape[1],
    )  # fmt: skip
    watch.began = watch.now()
    classifier.fit(X, y)
    ended, cut = watch.now(), watch.cut
    peak = peak_memory()
    watch.note(ended, classifier)
    np.savez(
        out, W=classifier.coef_.T, peak=peak, cut=cut, seconds=watch.seconds, processor=watch.processor,
        objectives=watch.objectives,
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
