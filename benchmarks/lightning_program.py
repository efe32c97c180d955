"""One fit of lightning's CDClassifier: what benchmarks/group_lasso.py runs in an environment of its own.

    python lightning_program.py DATA.npz LAM TOL PASSES OUT.npz

lightning needs numpy < 1.24, so nothing of xmc_stream is imported here. DATA.npz has X as CSR arrays and y, the class of
each row. With C = 1 and alpha = N lam its objective is N times ours. OUT.npz gets the weights (D x K), the seconds of
`fit`, resident memory when the libraries are loaded and its peak in the end, in bytes.
"""

import resource
import sys
import time

import numpy as np
import scipy.sparse as sp
from lightning.classification import CDClassifier


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def main(data, lam, tol, passes, out):
    bare = resident()
    with np.load(data) as arrays:
        X = sp.csr_matrix((arrays["data"].astype(np.float64), arrays["indices"], arrays["indptr"]), arrays["shape"])
        y = arrays["y"]
    X = X.tocsc()
    classifier = CDClassifier(
        penalty="l1/l2", multiclass=True, loss="squared_hinge", C=1.0, alpha=X.shape[0] * float(lam), tol=float(tol),
        max_iter=int(passes), random_state=0,
    )  # fmt: skip
    began = time.perf_counter()
    classifier.fit(X, y)
    seconds = time.perf_counter() - began
    np.savez(out, W=classifier.coef_.T, seconds=seconds, bare=bare, peak=peak())


if __name__ == "__main__":
    main(*sys.argv[1:])
