"""Fits of lightning's CDClassifier, in an environment of its own: what benchmarks/group_lasso.py measures ours against."""

from __future__ import annotations

import subprocess
import venv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.sparse as sp

HERE = Path(__file__).resolve().parent
NEEDED = ["numpy==1.23.5", "scipy==1.10.1", "scikit-learn==1.2.2", "joblib", "cython<3", "setuptools<60", "wheel"]
LIGHTNING = "sklearn-contrib-lightning==0.6.2.post0"


def environment(path: Path) -> Path | None:
    """The interpreter of an environment with lightning, made where it is not there; None where it cannot be had."""
    python = path / "bin" / "python"
    if not python.exists():
        venv.create(path, with_pip=True)
    if subprocess.run([python, "-c", "import lightning"], capture_output=True, check=False).returncode:
        for words in (["--only-binary", ":all:", *NEEDED[:4]], NEEDED[4:], ["--no-build-isolation", LIGHTNING]):
            install = [str(python), "-m", "pip", "install", "--quiet", *words]
            if subprocess.run(install, capture_output=True, check=False).returncode:
                return None
    return python


@dataclass
class Fit:
    """A fit of lightning. seconds, processor, objectives: at W = 0 and after each pass; cut: whether time was up."""

    W: np.ndarray
    peak: float
    cut: bool
    seconds: np.ndarray
    processor: np.ndarray
    objectives: np.ndarray

    def reached(self, objective: float) -> int:
        """The first pass that ends at an objective."""
        return int(np.argmax(self.objectives <= objective))


@dataclass(frozen=True)
class Lightning:
    """How lightning is run."""

    python: Path
    folder: Path
    tol: float
    passes: int
    cap: float
    seed: int

    def fit(self, X: sp.csr_matrix, y: np.ndarray, lam: float) -> Fit:
        """In a process of its own."""
        data, out, columns = self.folder / "lightning-data.npz", self.folder / "lightning-fit.npz", X.tocsc()
        np.savez(data, data=columns.data, indices=columns.indices, indptr=columns.indptr, shape=X.shape, y=y)
        words = (HERE / "lightning_program.py", data, lam, self.tol, self.passes, self.cap, self.seed, out)
        subprocess.run([self.python, *map(str, words)], check=True)
        with np.load(out) as arrays:
            return Fit(*(arrays[name] for name in ("W", "peak", "cut", "seconds", "processor", "objectives")))
