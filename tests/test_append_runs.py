"""append: killed at any moment it goes on; within its memory; on workers; a model of the older set begins one of the grown."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.clusters import Worker, cluster
from helpers.damage import damage
from helpers.forked import Forked
from helpers.problems import TIGHT, problem
from helpers.tools import load_tool

import xmc_stream as xs
from xmc_stream.datasets.append import append_report
from xmc_stream.runtime import making
from xmc_stream.runtime.ledger import Ledger

LIMIT = {"memory_limit": "2GB"}
N_KILLS = int(os.environ.get("XMC_STREAM_KILLS", "3"))


def named(path: Path, X: Any, Y: Any, names: str) -> xs.Dataset:
    """A dataset whose labels have these letters for names."""
    words = path.with_suffix(".names")
    words.write_text("".join(f"{name}\n" for name in names))
    return xs.convert(sp.csr_matrix(X), path, labels=sp.csr_matrix(Y), label_names=words, **LIMIT)


def grows(folder: str, when: str, key: str) -> None:
    """What a child does: it is killed before or behind a line of the ledger, or while the work folder is removed."""
    note = Ledger.add

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def add(self: Ledger, name: str, receipt: dict[str, Any]) -> None:
        if name == key and when == "before":
            kill()
        note(self, name, receipt)
        if name == key:
            kill()

    def removing(works: Any) -> None:
        making.empty(works[0], works[0] / "ledger")
        kill()

    Ledger.add = add  # type: ignore[method-assign]
    if when == "removed":
        making._drop = removing
    place = Path(folder)
    print("begun", flush=True)
    grown, report = append_report(
        place / "a.xmc", [place / "b.xmc", place / "c.xmc"], place / "g.xmc", threads=2, columns=True, **LIMIT
    )
    print(grown.fingerprint, report["resumed"], flush=True)


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Path, str]:
    """A folder with three sets, and the fingerprint of what they grow to."""
    rng = np.random.default_rng(0)
    X = sp.random(4000, 300, 0.1, "csr", np.float32, rng)
    Y = sp.csr_matrix((rng.random((4000, 12)) < 0.2).astype(np.float32))
    for name, rows, labels in (
        ("a", slice(0, 3000), "abcdefghi"),
        ("b", slice(3000, 3500), "ilkj"),
        ("c", slice(3500, 4000), "lab"),
    ):
        named(tmp_path / f"{name}.xmc", X[rows], Y[rows][:, ["abcdefghilkj".index(label) for label in labels]], labels)
    whole = xs.append(tmp_path / "a.xmc", [tmp_path / "b.xmc", tmp_path / "c.xmc"], tmp_path / "w.xmc", **LIMIT)
    assert list(whole.label_names() or ()) == list("abcdefghilkj")
    return tmp_path, whole.fingerprint


def finished(folder: Path, resumed: bool | None) -> str:
    """The fingerprint of the same work, done to its end."""
    with Forked(grows, str(folder), "", "") as child:
        assert child.wait(100) == 0, child.stderr
        _, fingerprint, went_on = child.stdout.split()
    assert resumed in (None, went_on == "True")
    assert not (folder / "g.xmc.partial").exists()
    assert damage(folder / "g.xmc") == []
    return fingerprint


@pytest.mark.slow
def test_killed_at_each_step_it_goes_on(parts: tuple[Path, str]) -> None:
    folder, fingerprint = parts
    for when, key, resumed in (
        ("before", "join/match", False), ("behind", "join/match", True), ("behind", "join/X/rows/data", True),
        ("before", "join/names/labels", True), ("before", "whole", True), ("behind", "whole", True), ("removed", "", True),
    ):  # fmt: skip
        with Forked(grows, str(folder), when, key) as child:
            assert child.wait(100) == -signal.SIGKILL, (when, key, child.stderr)
        assert (folder / "g.xmc").exists() == (when == "removed")
        assert (folder / "g.xmc.partial" / "ledger").exists()
        assert finished(folder, resumed) == fingerprint, (when, key)
        assert damage(folder / "a.xmc") == []
        shutil.rmtree(folder / "g.xmc")


@pytest.mark.slow
def test_killed_at_random_moments_it_goes_on(parts: tuple[Path, str]) -> None:
    folder, fingerprint = parts
    rng, n_killed = random.Random(3), 0
    began = time.perf_counter()
    assert finished(folder, False) == fingerprint
    most = time.perf_counter() - began
    for _ in range(N_KILLS):
        shutil.rmtree(folder / "g.xmc")
        with Forked(grows, str(folder), "", "") as child:
            assert child.wait_until(lambda child=child: child.stdout.startswith("begun"))
            child.wait(rng.uniform(0, most))
            child.kill()
            n_killed += child.poll() != 0
        if (folder / "g.xmc").exists():
            assert xs.open_dataset(folder / "g.xmc").fingerprint == fingerprint
        assert finished(folder, None) == fingerprint
    assert damage(folder / "a.xmc") == []


@pytest.mark.slow
def test_sets_larger_than_the_limit_grow_within_it(disk_path: Path, cli: Callable[..., Any]) -> None:
    make = load_tool("make_synthetic").make_synthetic
    sizes = {"n_features": 20_000, "n_labels": 500}
    old = make(disk_path / "old.xmc", size="64MB", logical="640MB", **sizes)
    new = make(disk_path / "new.xmc", n_samples=20_000, seed=1, **sizes)
    told = cli("append", old, new, disk_path / "grown.xmc", "--memory-limit", "320MB", "--threads", 2)
    grown, before = xs.open_dataset(disk_path / "grown.xmc"), xs.open_dataset(old)
    assert told["peak_rss"] < 320e6
    assert 8 * grown.attributes["nnz_features"] > 640e6
    assert grown.n_samples == before.n_samples + 20_000
    assert told["bytes_linked"] > 0.9 * 8 * before.attributes["nnz_features"]
    for name in ("data", "indices"):
        chunks = before.X_rows().data.n_chunks  # type: ignore[union-attr]
        for k in range(chunks - 1):
            files = [path / "X/rows" / name / "c" / str(k) for path in (old, grown.path)]
            assert files[0].samefile(files[1])
    rows = slice(before.n_samples - 3, before.n_samples + 3)
    a, b = before.X_rows().block(before.n_samples - 3, before.n_samples), xs.open_dataset(new).X_rows().block(0, 3)
    both = grown.X_rows().block(rows.start, rows.stop)
    assert (both.indices == np.concatenate([a.indices, b.indices])).all()
    assert (both.values == np.concatenate([a.values, b.values])).all()


@pytest.mark.slow
def test_two_workers_give_the_dataset_of_this_process(parts: tuple[Path, str], tmp_path: Path) -> None:
    folder, fingerprint = parts
    with cluster(tmp_path / "cluster", workers=[Worker(), Worker()]) as (_, address):
        grown = xs.append(
            folder / "a.xmc", [folder / "b.xmc", folder / "c.xmc"], folder / "g.xmc", scheduler=address, **LIMIT
        )
    assert grown.fingerprint == fingerprint
    assert damage(grown.path) == []


@pytest.mark.slow
def test_a_model_of_the_older_set_begins_one_of_the_grown_set(tmp_path: Path) -> None:
    X, labels = problem(n=260, k=6, seed=2)
    Y = labels.toarray()
    Y[:240, 5] = 0  # a new label
    old = named(tmp_path / "old.xmc", X[:240], Y[:240, :5], "abcde")
    new = named(tmp_path / "new.xmc", X[240:], Y[240:, [5, 0, 1, 2, 3, 4]], "fabcde")
    settings = {**TIGHT, "tol": 1e-4, "added": 300, "lam": 0.02, **LIMIT}
    start = xs.PPDSparse(**settings).fit(old).model_
    grown = xs.append(old, new, tmp_path / "grown.xmc", **LIMIT)
    assert grown.fingerprint == named(tmp_path / "whole.xmc", X, Y, "abcdef").fingerprint
    warm = xs.PPDSparse(**settings).fit(grown, warm_start=start)
    assert Y[240:, 5].any()
    assert warm.report_["warm_start_labels"] == {"by_name": True, "kept": 5, "new": 1, "gone": 0}
    cold = xs.PPDSparse(**settings).fit(tmp_path / "whole.xmc")
    assert warm.report_["violation"] <= 1e-4
    assert warm.report_["objective"] == pytest.approx(cold.report_["objective"], rel=1e-3)
