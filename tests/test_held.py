"""Few rows are predicted in the calling thread by a model in memory: as an engine does it, bit for bit, within the limit."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.executed import ranked
from helpers.problems import LIMIT
from helpers.row_sparse import weights, written

import xmc_stream as xs
from xmc_stream.errors import InputError, StoreError
from xmc_stream.models import Execution, held
from xmc_stream.runtime.plan import Cuts

HERE, ENGINE = Execution(LIMIT, 1), Execution(LIMIT, 2, cuts=Cuts(rows=700, classes=20))
KINDS = ("linear", "guided", "calibrated", "dense rows", "low-rank", "row-sparse", "tree", "trees")
N, D, K = 4500, 40, 60  # more rows than a chunk of predictions has, and than a block of any kind


def learned(kind: str, folder: Path) -> tuple[xs.Model, xs.Dataset, sp.csr_matrix]:
    """A model of a kind, rows that it has not seen, and these as a matrix."""
    rng = np.random.default_rng(0)
    X = sp.random(N, D, 0.9 if kind == "dense rows" else 0.15, format="csr", dtype=np.float32, random_state=0)
    wanted = X @ rng.normal(size=(D, K)) + 0.3 * rng.normal(size=(N, K))
    Y = sp.csr_matrix((wanted > np.quantile(wanted, 0.95, axis=0)).astype(np.float32))
    train = xs.convert(X[:400], folder / "train.xmc", labels=Y[:400], memory_limit=LIMIT)
    data = xs.convert(X, folder / "data.xmc", labels=Y, memory_limit=LIMIT)
    if kind == "low-rank":
        model = xs.LEML(rank=5, alternations=1, bias=True, memory_limit=LIMIT).fit(train, model=folder / "m").model_
    elif kind == "row-sparse":
        model = written(folder / "m", train, weights(D, K, 20))
    elif kind in ("tree", "trees"):
        clf = xs.LabelTree(max_leaf=8, n_trees=3 if kind == "trees" else 1, memory_limit=LIMIT)
        model = clf.fit(train, model=folder / "m").model_
    else:
        guide = 1.5 if kind == "guided" else 0.0
        clf = xs.PPDSparse(guide=guide, memory_limit=LIMIT).fit(train, model=folder / "m")
        model = clf.model_
    if kind == "calibrated":
        xs.calibrate(model, data, memory_limit=LIMIT, threads=1)
        about = {**model.attributes["calibration"], "applied": True}
        model.set_calibration(about)
    return model, data, X


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return learned(request.param, tmp_path_factory.mktemp("held"))


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return learned("linear", tmp_path_factory.mktemp("held"))


def same(one: Any, other: Any) -> bool:
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


def is_held(model: xs.Model) -> bool:
    return model in held._kept


def test_it_equals_the_engine_bit_for_bit(case: Any) -> None:
    model, data, X = case
    engine = ranked(model, data, 5, ENGINE)
    assert not is_held(model)
    assert same(ranked(model, data, 5, HERE), engine)
    assert is_held(model)
    assert same(ranked(model, data, 5, HERE), engine)
    backwards = X[:, ::-1].tocsr()[:, ::-1]  # whose entries do not ascend
    for matrix in (X, X.tocsc(), X.tocoo(), backwards, X.astype(np.float64)):
        assert same(ranked(model, matrix, 5, HERE), engine)
    for rows in (slice(0, 1), slice(7, 12), slice(1000, 2100)):
        assert same(ranked(model, X[rows], 5, HERE), [a[rows] for a in engine]) or model.kind == "low-rank"
    every = ranked(model, data, K, HERE)
    assert same(every, ranked(model, data, K, ENGINE))
    assert same(
        [of[:, :20] for of in every], ranked(model, data, 20, HERE)
    )  # a shorter list is the beginning of a longer one


def test_one_row_of_a_low_rank_model_is_that_of_an_engine(tmp_path: Path) -> None:
    """Its products are those of as many rows: their rounding may depend on the shape."""
    model, _, X = learned("low-rank", tmp_path)
    assert same(ranked(model, X[:1], 5, HERE), ranked(model, X[:1], 5, ENGINE))


def test_a_changed_model_is_noticed(tmp_path: Path) -> None:
    model, data, X = learned("linear", tmp_path)
    raw = ranked(model, X, 3, HERE)
    slopes = {"slope": [2.0, 0.5], "least": 0.1, "shift": [0.0, 0.0], "fewest": 1, "cap": None}
    xs.load_model(model.path).set_calibration({"applied": True, **slopes})
    calibrated = ranked(model, X, 3, HERE)
    assert not np.array_equal(raw[1], calibrated[1])
    assert same(calibrated, ranked(xs.load_model(model.path), data, 3, ENGINE))
    xs.uncalibrate(model.path)
    assert same(ranked(model, X, 3, HERE), raw)
    Y = sp.csr_matrix(np.eye(D, 4, dtype=np.float32)[np.arange(200) % D])
    xs.PPDSparse(memory_limit=LIMIT).fit(X[:200], Y, model=model.path, overwrite=True)
    labels, _ = ranked(model, X, 3, HERE)
    assert labels.max() < 4
    with pytest.raises(InputError, match="4 labels"):
        ranked(model, X, 5, HERE)
    (model.path / "zarr.json").unlink()
    with pytest.raises(StoreError):
        ranked(model, X, 3, HERE)


def test_two_threads_predict_at_once(case: Any) -> None:
    model, data, X = case
    HERE.limit()  # so that both find no model in memory
    given = [data, X, X[:300], X[300:900]] * 3
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda rows: ranked(model, rows, 5, HERE), given))
    for rows, mine in zip(given, found, strict=True):
        assert same(mine, ranked(model, rows, 5, HERE))


def test_what_is_held_gives_way_to_other_work(linear: Any, tmp_path: Path) -> None:
    model, _, X = linear
    ranked(model, X[:5], 1, HERE)
    assert is_held(model)
    xs.convert(X[:5], tmp_path / "other.xmc", labels=X[:5], memory_limit=LIMIT)
    assert not is_held(model)


def test_it_is_held_as_long_as_the_model_lives(linear: Any) -> None:
    other = xs.load_model(linear[0].path)
    ranked(other, linear[2][:5], 1, HERE)
    n = len(held._kept)
    del other
    assert len(held._kept) == n - 1


def test_what_an_engine_refuses_is_refused(linear: Any) -> None:
    model, data, X = linear
    twice = sp.csr_matrix((np.ones(2, np.float32), [1, 1], [0, 2]), shape=(1, D))
    infinite = sp.csr_matrix((np.full(1, np.inf), [1], [0, 1]), shape=(1, D))
    for rows, k, said in (
        (data, 0, "between 1 and"), (X, K + 1, "between 1 and"), (X[:, :9], 1, "a matrix of 9 features"),
        (X.toarray()[0], 1, "give rows"), (twice, 1, "index 1 twice"), (infinite, 1, "not finite"),
    ):  # fmt: skip
        for execution in (HERE, ENGINE):
            with pytest.raises(InputError, match=said):
                ranked(model, rows, k, execution)


def test_few_rows_without_a_limit_ask_the_system_nothing(linear: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, X = linear
    few, many = model.predict_topk(X[:9], 5), model.predict_topk(X[:4000], K)
    monkeypatch.setattr("xmc_stream.system.memory.available_memory", lambda: 2**40)
    assert same(model.predict_topk(X[:4000], K), many)
    monkeypatch.setattr("xmc_stream.system.memory.available_memory", None)
    assert same(model.predict_topk(X[:9], 5), few)
    with pytest.raises(TypeError):
        model.predict_topk(X[:4000], K)


def test_many_rows_are_shared_by_threads(linear: Any) -> None:
    model, data, X = linear
    HERE.limit()
    model.predict_topk(data, 1, memory_limit=LIMIT, threads=2)
    assert not is_held(model)
    model.predict_topk(X[:4096], 1, memory_limit=LIMIT, threads=2)
    assert is_held(model)


PEAK = """
import json, sys
import scipy.sparse as sp
import xmc_stream as xs
from xmc_stream.system.memory import peak_resident
model, X, limit = xs.load_model(sys.argv[1]), sp.load_npz(sys.argv[2]), int(sys.argv[3])
for _ in range(2):
    model.predict_topk(X, 5, memory_limit=limit, threads=1)
from xmc_stream.models import held
print(json.dumps([peak_resident(), "xmc_stream.runtime.engine" in sys.modules, len(held._kept)]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_limit_holds_and_what_does_not_fit_goes_to_an_engine(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    n, d, k = 500, 2000, 8000  # 64 MB of weights
    X = sp.random(n, d, 0.05, format="csr", dtype=np.float32, random_state=0)
    sp.save_npz(tmp_path / "X.npz", X)
    Y = sp.csr_matrix((np.ones(n, np.float32), rng.integers(0, k, n), np.arange(n + 1)), shape=(n, k))
    model = written(tmp_path / "m", xs.convert(X, tmp_path / "d.xmc", labels=Y, memory_limit=LIMIT), weights(d, k, d))

    def child(limit: int) -> list[Any]:
        words = [sys.executable, "-c", PEAK, str(model.path), str(tmp_path / "X.npz"), str(limit)]
        return json.loads(subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout)  # type: ignore[no-any-return]

    peak, engine, kept = child(1_000_000_000)
    assert not engine
    assert kept == 1
    assert peak < 1_000_000_000
    bare = peak - 64_000_000
    limit = bare + 120_000_000  # more than the weights, less than twice as much
    peak, engine, kept = child(limit)
    assert engine
    assert kept == 0
    assert peak <= limit
