"""Jobs of a conversion, and of append, that run in two places: a late copy does no harm to what the other one has made."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import distributed
import numpy as np
import pytest
from helpers.clusters import Worker, cluster
from helpers.commands import wait_until
from helpers.conversions import cut_into, lines_of
from helpers.text_files import documents, write_jsonl

import xmc_stream as xs
from xmc_stream.convert.conversion import ConversionRun
from xmc_stream.convert.opening import open_source
from xmc_stream.convert.options import ConvertOptions, TextOptions
from xmc_stream.convert.plan import plan_memory
from xmc_stream.datasets.append import _Sets
from xmc_stream.runtime.job import Job, Loop, Receipt
from xmc_stream.runtime.making import make
from xmc_stream.system.stop import StoppedError, wanted_while

LIMIT: dict[str, Any] = {"memory_limit": "2GB"}


def run_beside(job: Job, at: int, how: str, held: list[str]) -> Receipt:
    """What a job gives whose first copy is held at its look number `at`; held: gets the keys of those that were.

    how: "goes on" when the second copy has run, and learns nothing of it; "stops" then; "stops early", while the second one
    is held at its look number `at`.
    """
    looks, receipts = [0, 0], []
    is_there, may_go_on = threading.Event(), threading.Event()

    def second_wanted() -> bool:
        looks[1] += 1
        if how == "stops early" and looks[1] == at:
            is_there.set()
            assert may_go_on.wait(60)
        return True

    def second() -> None:
        try:
            with wanted_while(second_wanted, "second"):
                receipts.append(job.run())
        finally:
            is_there.set()

    other = threading.Thread(target=second)

    def first_wanted() -> bool:
        looks[0] += 1
        if looks[0] == at:
            held.append(job.key)
            other.start()
            assert is_there.wait(60)
            if how != "stops early":
                other.join(60)
        return how == "goes on" or looks[0] < at + 1

    try:
        with wanted_while(first_wanted, "first"):
            receipts.append(job.run())
    except StoppedError:
        pass
    may_go_on.set()
    if other.ident is not None:
        other.join(60)
    assert receipts
    assert all(receipt == receipts[0] for receipt in receipts)
    return receipts[0]


def run_all(loop: Loop, run: Callable[[Job], Receipt]) -> Receipt:
    """A loop to its end, its jobs run so."""
    receipts = None
    while True:
        try:
            phase = loop.send(receipts)  # type: ignore[arg-type]
        except StopIteration as end:
            result: Receipt = end.value
            return result
        receipts = [run(job) for job in phase.jobs]


@dataclass(frozen=True)
class Input:
    """What a conversion is given, and the fingerprint of what it makes where nothing disturbs it."""

    path: Path
    options: dict[str, Any]
    fingerprint: str


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Input]:
    """Conversions whose phases together are all that there are."""
    folder = tmp_path_factory.mktemp("inputs")
    write_jsonl(folder / "in.jsonl", documents(150))
    (folder / "in.svm").write_bytes(b"\n".join([*lines_of(300, 1), b""]))
    np.save(folder / "x.npy", np.random.default_rng(0).random((150, 5), np.float32))
    for what, n in (("feature", 40), ("label", 9)):
        (folder / f"{what}s").write_text("".join(f"{what} {i}\n" for i in range(n)))
    names = {"label_names": folder / "labels", "feature_names": folder / "features"}
    given: dict[str, tuple[str, dict[str, Any]]] = {
        "text": ("in.jsonl", {"text": TextOptions(id_field="uid"), "beside": [folder / "x.npy"]}),
        "hashed": ("in.jsonl", {"text": TextOptions(hash_features=2**10)}),
        "names": ("in.svm", names),
    }
    return {
        kind: Input(
            folder / name,
            options,
            xs.convert(folder / name, folder / f"{kind}.xmc", columns=True, **LIMIT, **options).fingerprint,
        )
        for kind, (name, options) in given.items()
    }


@pytest.fixture(scope="module")
def sets(inputs: dict[str, Input]) -> tuple[xs.Dataset, xs.Dataset, xs.Dataset]:
    """Two datasets, and the one that they grow to where nothing disturbs it."""
    path = inputs["text"].path
    folder = path.parent
    (folder / "pairs").write_text("0 1\n2 0\n")
    more: dict[str, Any] = {"observed": folder / "pairs", **LIMIT}
    old = xs.convert(path, folder / "old.xmc", text=TextOptions(id_field="uid"), **more)
    grows = write_jsonl(folder / "new.jsonl", documents(100, 1))
    new = xs.convert(grows, folder / "new.xmc", like=old, new_labels=True, **more)
    return old, new, xs.append(old, new, folder / "grown.xmc", columns=True, **LIMIT)


@pytest.mark.parametrize("at", [2, 4])
@pytest.mark.parametrize("how", ["goes on", "stops", "stops early"])
@pytest.mark.parametrize("kind", ["text", "hashed", "names"])
def test_a_late_copy_of_a_job_leaves_what_is_finished(
    kind: str, at: int, how: str, tmp_path: Path, inputs: dict[str, Input], monkeypatch: pytest.MonkeyPatch
) -> None:
    given, held = inputs[kind], list[str]()
    cut_into(monkeypatch, 10_000)
    source = open_source(given.path, ConvertOptions(**given.options), None)
    plan = plan_memory(source, 2**30, 1)
    work = tmp_path / "work"
    run = ConversionRun(source, work, ConvertOptions(columns=True), None, plan, {})
    run_all(run.loop(), lambda job: run_beside(job, at, how, held))
    assert xs.open_dataset(run.store).fingerprint == given.fingerprint
    assert xs.verify(run.store)["damage"] == []
    assert not [*work.rglob("*.partial")]
    assert {"read/00001", "write/X/data"} <= set(held)


@pytest.mark.parametrize("at", [2, 4])
@pytest.mark.parametrize("how", ["goes on", "stops", "stops early"])
def test_a_late_copy_of_a_job_of_append(
    at: int, how: str, tmp_path: Path, sets: tuple[xs.Dataset, xs.Dataset, xs.Dataset]
) -> None:
    old, new, undisturbed = sets
    work, held = tmp_path / "work", list[str]()
    run_all(_Sets((old, new), True, 2**26, "").loop(work), lambda job: run_beside(job, at, how, held))
    assert xs.open_dataset(work / "store").fingerprint == undisturbed.fingerprint
    assert xs.verify(work / "store")["damage"] == []
    assert not [*work.rglob("*.partial")]
    assert {"join/match", "join/X/rows/data"} <= set(held)


def test_what_killed_copies_left_goes_when_the_run_goes_on(tmp_path: Path) -> None:
    work = tmp_path / "d.partial"

    def killed(_: Path, ledger: Any) -> Receipt:
        ledger.add("read/00000", {})
        for left in ("pieces/00000-own.copy.partial/0000", "store/X/rows", "store-X-rows-data.copy.partial/c"):
            (work / left).mkdir(parents=True)
            (work / left / "zarr.json.partial").write_bytes(b"")
        raise KeyboardInterrupt

    def goes_on(_: Path, ledger: Any) -> Receipt:
        left = {str(path.relative_to(work)) for path in work.rglob("*")}
        assert left == {"ledger", "pieces", "store", "store/X", "store/X/rows"}
        return {"said": ""}

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "d", {}, killed, lambda _: None)
    assert make(tmp_path / "d", {}, goes_on, lambda _: None)["resumed"]
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


@pytest.mark.slow
def test_a_worker_that_thaws_when_its_job_has_been_given_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dask drops a worker that is frozen in a job; it thaws while the other one is at that job."""
    monkeypatch.setenv("DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL", "2s")
    cut_into(monkeypatch, 450_000)
    source, how = (
        write_jsonl(tmp_path / "in.jsonl", documents(2500)),
        {"text": TextOptions(analyzer="char", ngrams=(2, 3))},
    )
    there, failed = tmp_path / "there.xmc", []

    def copies(part: str) -> set[str]:
        return {path.name for path in (tmp_path / "there.xmc.partial" / "pieces").glob(f"{part}-own.*.partial")}

    def convert(address: str) -> None:
        try:
            xs.convert(source, there, scheduler=address, **how, **LIMIT)
        except BaseException as error:  # noqa: BLE001 (looked at below)
            failed.append(error)

    with cluster(tmp_path / "cluster", workers=[Worker(), Worker()]) as (_, address):
        run = threading.Thread(target=convert, args=(address,), daemon=True)
        with distributed.Client(address, set_as_default=False) as client:
            pids = client.run(os.getpid)
            run.start()
            at: dict[str, str] = {}

            def begun() -> bool:
                at.clear()
                for worker, keys in client.processing().items():
                    for key in keys:
                        if found := re.search(r"read/(\d+)", key):
                            at[found[1]] = worker
                return any(copies(part) for part in at)

            wait_until(None, begun)
            part = next(part for part in at if copies(part))
            pid, first = pids[at[part]], copies(part)
            os.kill(pid, signal.SIGSTOP)
            try:
                undisturbed = xs.convert(source, tmp_path / "here.xmc", threads=1, **how, **LIMIT)
                wait_until(None, lambda: len(copies(part) | first) > 1 or not run.is_alive())
            finally:
                os.kill(pid, signal.SIGCONT)
            run.join(60)
    assert not failed
    assert xs.open_dataset(there).fingerprint == undisturbed.fingerprint
    assert xs.verify(there)["damage"] == []
    assert not [*tmp_path.glob("*.partial")]
