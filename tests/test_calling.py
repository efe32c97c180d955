"""One way of calling: paths and objects alike, the same keywords everywhere, errors in the caller's own words."""

from __future__ import annotations

import gc
import inspect
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import distributed
import numpy as np
import pytest
from helpers.forked import Forked

import xmc_stream as xs
from xmc_stream.runtime import cluster as of_cluster
from xmc_stream.runtime.ledger import Ledger
from xmc_stream.runtime.making import COMMAND
from xmc_stream.store.predictions import Predictions
from xmc_stream.system import memory
from xmc_stream.system.memory import MemoryLimit, of_cgroups

KEYWORDS = ("memory_limit", "threads", "scheduler", "progress")


@pytest.mark.parametrize(
    "function", [xs.convert, xs.predict, xs.evaluate, xs.verify, xs.calibrate, xs.tune, xs.Model.predict_topk],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_options_have_names_and_types(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in KEYWORDS)
    assert not any(one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL) for one in parameters.values())
    assert all(one.annotation is not one.empty for name, one in parameters.items() if name != "self")
    assert "execution" not in parameters


@pytest.mark.parametrize("function", [xs.split, xs.export, xs.select_features], ids=lambda f: f.__name__)
def test_what_one_thread_does_has_a_limit(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters
    assert {"memory_limit", "progress"} <= set(parameters)


def test_paths_and_objects_are_the_same(small: Path, trained: Path, tmp_path: Path) -> None:
    test, how = small.with_name("small-test.xmc"), {"memory_limit": "2GB", "threads": 1}
    data, model = xs.open_dataset(test), xs.load_model(trained)
    for name, (one, other) in {"a": (str(trained), str(test)), "b": (model, data), "c": (trained, test)}.items():
        xs.predict(one, other, tmp_path / name, 3, **how)
    stored = [Predictions(tmp_path / name).rows(0, data.n_samples) for name in "abc"]
    assert all(np.array_equal(labels, stored[0][0]) for labels, _ in stored)
    figures = [
        xs.evaluate(str(trained), str(test), str(small), **how),
        xs.evaluate(model, data, xs.open_dataset(small), **how),
    ]
    assert figures[0] == figures[1]
    assert [xs.verify(one, **how)["sound"] for one in (str(small), small, xs.open_dataset(small), model)] == [True] * 4
    x = xs.open_dataset(test).X_rows().block(0, 4)
    import scipy.sparse

    matrix = scipy.sparse.csr_matrix((x.values, x.indices, x.indptr), shape=(4, data.n_features))
    xs.predict(trained, matrix, tmp_path / "d", 3, **how)
    assert np.array_equal(Predictions(tmp_path / "d").rows(0, 4)[0], stored[0][0][:4])


def test_errors_name_the_argument_in_python_and_the_flag_in_the_shell(
    small: Path, trained: Path, tmp_path: Path, here: Callable[..., Any]
) -> None:
    (tmp_path / "p").mkdir()
    with pytest.raises(xs.InputError, match=r"or overwrite=True to replace it$"):
        xs.predict(trained, small, tmp_path / "p")
    assert here("predict", trained, small, tmp_path / "p", fails=True).endswith("or --overwrite to replace it")
    with pytest.raises(xs.MemoryLimitError, match=r"[^-]memory_limit"):
        xs.predict(trained, small, tmp_path / "q", memory_limit="50MB")
    said = here("predict", trained, small, tmp_path / "q", "--memory-limit", "50MB", fails=True)
    assert "--memory-limit" in said


def test_names_that_a_program_needs_are_there() -> None:
    assert xs.__version__[0].isdigit()
    assert issubclass(xs.InputError, xs.XmcStreamError)
    assert {"CPLST", "InputError", "__version__"} <= set(xs.__all__)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "nonsense", "foo://x:1", "tls://127.0.0.1:9"])
def test_a_wrong_scheduler_fails_within_seconds_and_leaves_nothing(
    small: Path, tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_cluster, "_SECONDS", 0.5)  # dask itself would take 30
    calls: list[Callable[[], Any]] = [
        lambda: xs.PPDSparse(scheduler=address).fit(small, model=tmp_path / "m"),
        lambda: xs.tune(small, grid={"C": [1.0, 2.0]}, out=tmp_path / "t.json", scheduler=address),
        lambda: xs.PPDSparse(scheduler=address).fit(small, model=tmp_path / "c", calibrate=0.2),
    ]
    for call in calls:
        began = time.monotonic()
        with pytest.raises(xs.InputError, match=r"no dask scheduler answers at .*correct scheduler$"):
            call()
        assert time.monotonic() - began < 20
        assert list(tmp_path.iterdir()) == []


def test_a_client_that_reaches_no_scheduler_is_closed(small: Path, tmp_path: Path) -> None:
    # the garbage collector closes one that is open wherever it runs, and may wait there for ever
    gc.disable()
    try:
        with pytest.raises(xs.InputError, match="no dask scheduler answers"):
            xs.PPDSparse(scheduler="foo://x:1").fit(small, model=tmp_path / "m")
        assert {one.status for one in gc.get_objects() if isinstance(one, distributed.Client)} == {"closed"}
    finally:
        gc.enable()


def test_a_cluster_object_is_a_scheduler_and_a_client_that_cannot_be_asked_is_refused(
    small: Path, tmp_path: Path
) -> None:
    here = xs.PPDSparse(memory_limit="2GB").fit(small, model=tmp_path / "here").model_.digest()
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0", memory_limit=0
    ) as cluster:
        there = xs.PPDSparse(memory_limit="4GB", scheduler=cluster).fit(small, model=tmp_path / "there")
        assert cluster.scheduler.transition_counter > 0  # tasks went through it
        assert there.model_.digest() == here
        client = distributed.Client(cluster, set_as_default=False)
        client.close()
        with pytest.raises(xs.InputError, match=r"^the dask client given is closed: give one that is connected"):
            xs.PPDSparse(scheduler=client).fit(small, model=tmp_path / "m")


def test_logs_of_dask_are_as_before_when_the_last_of_some_clusters_is_closed() -> None:
    log, error = logging.getLogger("distributed.core"), logging.makeLogRecord({"levelno": logging.ERROR})
    with distributed.LocalCluster(n_workers=1, processes=False, dashboard_address="127.0.0.1:0") as cluster:
        first, second = (of_cluster.Cluster(cluster, "", lambda: False, MemoryLimit(10**9)) for _ in range(2))
        first.close()
        assert not log.filter(error)
        second.close()
    assert log.filter(error)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can write to")
def test_a_folder_that_workers_cannot_be_shown_is_named(small: Path) -> None:
    with (
        distributed.LocalCluster(n_workers=1, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        pytest.raises(
            xs.InputError, match=r"^/proc cannot be written \(.*\), and workers write there: make it writable"
        ),
    ):
        xs.PPDSparse(scheduler=cluster).fit(small, model="/proc/m")


def test_a_limit_above_that_of_the_cgroup_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "box").mkdir()
    for folder, most in ((tmp_path, "max"), (tmp_path / "box", str(10**9))):
        (folder / "memory.max").write_text(most)
        (folder / "memory.current").write_text("1000")
        (folder / "memory.stat").write_text("active_file 0\ninactive_file 0\n")
    assert [bound for bound, _ in of_cgroups("0::/box\n", tmp_path)] == [10**9]
    assert not of_cgroups("0::/\n", tmp_path)
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "_memberships", lambda: "0::/box\n")
    assert MemoryLimit.kept("1GB").limit == 10**9
    with pytest.raises(xs.InputError, match=r"more than the 1 GB .* set memory_limit to 900MB or less"):
        MemoryLimit.kept("2GB")


def test_info_and_verify_know_what_is_not_finished(
    small: Path, trained: Path, tmp_path: Path, here: Callable[..., Any]
) -> None:
    (tmp_path / "p.partial").mkdir()
    with Ledger(tmp_path / "p.partial" / "ledger", {COMMAND: "predict"}):
        pass
    for path in (tmp_path / "p", tmp_path / "p.partial"):
        assert here("info", path)["kind"] == "unfinished predictions"
        assert "unfinished predictions" in here("verify", path, fails=True)
    work = tmp_path / "m.partial"
    work.mkdir()
    (work / "ledger.jsonl").write_bytes(b"")
    assert here("info", tmp_path / "m")["kind"] == "unfinished model"
    with pytest.raises(xs.StoreError, match=r"is an unfinished model.*give the same train command again"):
        xs.verify(tmp_path / "m")
    work = tmp_path / "d.xmc.partial"
    work.mkdir()
    (work / "ledger").write_bytes(b"")
    assert here("info", tmp_path / "d.xmc")["next"] == "give the same convert command again: it goes on"
    with pytest.raises(xs.StoreError, match="unfinished dataset"):
        xs.verify(tmp_path / "d.xmc")
    xs.predict(trained, small, tmp_path / "done", 2)
    told = here("info", tmp_path / "done")
    assert (told["kind"], told["k"], told["n_samples"]) == ("predictions", 2, 1500)


def script(folder: str) -> None:
    """What stands in a script, in a process of its own."""
    os.chdir(folder)
    data = xs.convert("t.txt", "d.xmc")
    xs.PPDSparse(memory_limit="1GB").fit(data, model="m")
    try:
        xs.predict("m", "d.xmc", "p", 1)
    except xs.InputError as error:
        print(error)


@pytest.mark.slow
def test_a_script_that_is_run_twice_goes_on(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("3 4 2\n0 0:1 2:1\n1 1:3 2:4\n0 0:1 3:1\n")
    for said in ("", "p exists: give another name, or overwrite=True to replace it\n"):
        with Forked(script, str(tmp_path)) as run:
            assert run.wait() == 0, run.stderr
            assert (run.stdout, run.stderr) == (said, "")


@pytest.mark.slow
def test_a_wrong_scheduler_is_one_line_of_a_command(small: Path, tmp_path: Path, commands: Callable[..., Any]) -> None:
    line = commands("train", small, tmp_path / "m", "--scheduler", "tcp://127.0.0.1:9", fails=True)
    assert line.endswith("correct --scheduler")
    assert list(tmp_path.iterdir()) == []
