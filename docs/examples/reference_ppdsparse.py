"""PPDSparse in plain NumPy and SciPy: the method, without what makes it fast.

    python docs/examples/reference_ppdsparse.py

X (N x D) has the features of N rows, Y (N x K) a 1 where a row has a label. Each label is a class: it is learned by
itself, one against the rest. Its rows are the positives (y_i = 1), all other rows the negatives (y_i = -1). The score of
a row is w.x_i. Each row has x_i0 = 1, so w_0 is the bias; lam_0 is 0. A class minimises

    F(w) = sum_j lam_j |w_j|  +  tau/2 ||w||^2  +  sum_i C_i/2 max(0, 1 - y_i w.x_i)^2

Its dual problem has a variable alpha_i >= 0 for each row. Most are 0: rows that are easy change nothing.

    w = soft(v, lam) / tau,   v = sum_i alpha_i y_i x_i
    minimise  G(alpha) = tau/2 ||w||^2  +  sum_i (alpha_i^2 / (2 C_i) - alpha_i)

So a class is solved on few rows, its active set. Then all rows are searched for those that violate: with them G would
fall. They are added. F(w) + G(alpha) is the duality gap: F(w) is above the optimum by no more than this.

Yen, Huang, Dai, Ravikumar, Dhillon, Xing: PPDSparse, KDD 2017. By default the library ends sooner, after some rounds:
docs/ppdsparse.md says when, and what else it does.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Problem(NamedTuple):
    """What a class minimises."""

    X: sp.csr_array  # (N, 1 + D): 1 in column 0
    y: Floats  # (N,): 1 or -1
    lam: Floats  # (1 + D,): weight of the l1 term, 0 for the bias
    tau: float  # weight of the l2 term
    C: Floats  # (N,): weight of each row's loss


def problem(
    X: sp.csr_array, Y: sp.csr_array, k: int, lam: float = 0.01, tau: float = 1.0, C: float = 1.0,
    positive_weight: float = 1.0,
) -> Problem:  # fmt: skip
    """Label k against the rest: C_i = C for negatives, positive_weight C for positives."""
    y = np.where(Y[:, [k]].toarray().ravel() > 0, 1.0, -1.0)
    extended = sp.csr_array(sp.hstack([sp.csr_array(np.ones((X.shape[0], 1))), X]))
    l1 = np.append(0.0, np.full(X.shape[1], lam))
    return Problem(extended, y, l1, tau, np.where(y > 0, positive_weight * C, C))


def soft(v: Floats, lam: Floats) -> Floats:
    """sign(v_j) max(|v_j| - lam_j, 0): what is small becomes 0, so w is sparse."""
    return np.sign(v) * np.maximum(np.abs(v) - lam, 0.0)


def objective(p: Problem, w: Floats) -> float:
    """F(w)."""
    loss: Floats = np.maximum(0.0, 1.0 - p.y * (p.X @ w)) ** 2 / 2
    return float(p.lam @ np.abs(w) + p.tau / 2 * w @ w + p.C @ loss)


def dual_objective(p: Problem, w: Floats, alpha: Floats) -> float:
    """G(alpha), with its w."""
    return float(p.tau / 2 * w @ w + np.sum(alpha**2 / (2 * p.C) - alpha))


def violations(p: Problem, w: Floats, alpha: Floats) -> Floats:
    """|dG/dalpha_i|, dG/dalpha_i = y_i w.x_i - 1 + alpha_i / C_i; 0 where alpha_i = 0 and could only fall."""
    slope: Floats = p.y * (p.X @ w) - 1.0 + alpha / p.C
    return np.abs(np.where(alpha > 0, slope, np.minimum(slope, 0.0)))


def start_set(y: Floats, rng: np.random.Generator) -> NDArray[np.intp]:
    """The first active set: all positives, and min(10 n_positive, N/10) negatives, drawn. With w = 0 all are alike."""
    positives, negatives = np.flatnonzero(y > 0), np.flatnonzero(y < 0)
    size = np.clip(min(10 * len(positives), len(y) // 10), 1, len(negatives))
    return np.concatenate([positives, rng.choice(negatives, size, replace=False)])


def descend(p: Problem, alpha: Floats, active: NDArray[np.intp], tol: float, rng: np.random.Generator) -> Floats:
    """Dual coordinate descent on the active rows: alpha_i <- max(0, alpha_i - dG/dalpha_i / (||x_i||^2/tau + 1/C_i))."""
    v = p.X.T @ (alpha * p.y)
    while violations(p, w := soft(v, p.lam) / p.tau, alpha)[active].max() > tol:
        for i in rng.permutation(active):
            entries = slice(p.X.indptr[i], p.X.indptr[i + 1])
            j, x = p.X.indices[entries], p.X.data[entries]
            slope = p.y[i] * (soft(v[j], p.lam[j]) @ x) / p.tau - 1.0 + alpha[i] / p.C[i]
            new = max(0.0, alpha[i] - slope / (x @ x / p.tau + 1.0 / p.C[i]))
            v[j] += (new - alpha[i]) * p.y[i] * x
            alpha[i] = new
    return w


def search(p: Problem, w: Floats, alpha: Floats, active: NDArray[np.intp], added: int, tol: float) -> NDArray[np.intp]:
    """The max(|A|, added) rows outside A that violate most: negatives whose score is above -1 + tol."""
    found = violations(p, w, alpha)
    found[active] = 0.0
    worst = np.argsort(-found)[: max(len(active), added)]
    return worst[found[worst] > tol]


def solve(p: Problem, added: int = 50, tol: float = 0.01, seed: int = 0) -> tuple[Floats, Floats]:
    """w and alpha of a class: solve, drop negatives with alpha = 0, search, until no row violates by more than tol."""
    rng = np.random.default_rng(seed)
    w, alpha = np.zeros(p.X.shape[1]), np.zeros(len(p.y))
    if abs(p.y.sum()) == len(p.y):  # no positives, or no negatives: nothing to learn, it comes last or first
        w[0] = p.y[0] * np.inf
        return w, alpha
    active = found = start_set(p.y, rng)
    while len(found):
        w = descend(p, alpha, active, tol, rng)
        active = active[(p.y[active] > 0) | (alpha[active] > 0)]
        found = search(p, w, alpha, active, added, tol)
        active = np.concatenate([active, found])
    return w, alpha


def predict_topk(X: sp.csr_array, W: Floats, k: int) -> NDArray[np.intp]:
    """The k labels of each row with the best scores, best first: W (1 + D, K) has the w of each class."""
    return np.argsort(-(W[0] + X @ W[1:]), axis=1, kind="stable")[:, :k]


if __name__ == "__main__":
    draw = np.random.default_rng(0)
    X = sp.csr_array(draw.normal(size=(300, 30)) * (draw.random((300, 30)) < 0.2))
    Y = sp.csr_array(np.eye(6)[np.asarray(X @ draw.normal(size=(30, 6))).argmax(axis=1)])
    classes = [problem(X[:200], Y[:200], k) for k in range(6)]
    solved = [solve(p) for p in classes]
    F = sum(objective(p, w) for p, (w, _) in zip(classes, solved, strict=True))
    G = sum(dual_objective(p, w, alpha) for p, (w, alpha) in zip(classes, solved, strict=True))
    best = predict_topk(X[200:], np.column_stack([w for w, _ in solved]), 1)[:, 0]
    hits = Y[200:].toarray()[np.arange(100), best]
    print(f"objective {F:.4f}, duality gap {F + G:.2g}; P@1 on rows held out: {100 * hits.mean():.1f} %")
