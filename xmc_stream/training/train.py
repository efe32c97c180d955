"""Training a model on disk: a method's plan joined with an engine, a ledger, and what a run says of itself."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from xmc_stream.datasets.split import split_once
from xmc_stream.errors import InputError, MemoryLimitError, StoreError, XmcStreamError
from xmc_stream.methods.contract import WEIGHTS, Method, Task, state_of_trial
from xmc_stream.methods.parameters import Parameters
from xmc_stream.methods.registry import method_of
from xmc_stream.methods.weights import Given
from xmc_stream.metrics import among
from xmc_stream.models import Execution, Model, load_model, memory_plan
from xmc_stream.models.decisions import JUST_THE_BEST, LEAST_ROWS, HeldOut
from xmc_stream.models.prediction import predict_to
from xmc_stream.runtime.check import check_jobs, check_state_jobs
from xmc_stream.runtime.engine import UNKEPT, Engine, environment_of, wait_for_interrupted
from xmc_stream.runtime.job import Loop, Notes, Phase
from xmc_stream.runtime.ledger import Ledger, check_identity
from xmc_stream.runtime.making import remove_unbegun
from xmc_stream.runtime.plan import Forecaster, MemoryPlan, least_named
from xmc_stream.store.dataset import Dataset, open_dataset
from xmc_stream.store.encoding import folder_bytes, remove, remove_tree, writing
from xmc_stream.store.model import (
    CALIBRATION,
    DECISION,
    FRACTION,
    KIND,
    begin_model,
    finish_model,
    model_attributes,
    write_label_counts,
)
from xmc_stream.store.names import copy_vocabulary
from xmc_stream.store.nodes import understood
from xmc_stream.store.places import (
    LEDGER,
    put_back,
    refuse_foreign_names,
    remove_held,
    remove_work,
    target_path,
    work_folder,
)
from xmc_stream.store.predictions import Predictions
from xmc_stream.store.removal import wait_for_removals
from xmc_stream.store.selection import SELECTED
from xmc_stream.system.memory import available_threads, peak_resident
from xmc_stream.system.progress import LOG, Progress, working
from xmc_stream.training.plan import (
    TRUE_BYTES,
    decides_by_another,
    plan_line,
    plan_training,
    with_process,
)

_DECIDED = 0.45  # of a training: where the one ends that says which labels to predict, if there is one
_HELD_OUT = 0.2  # of the rows, that it does not see
_CHECKING = 0.02  # of a training, that comparing checksums takes
RUN_FORMAT = 6  # raised when what a run keeps between its jobs changes: a run does not go on in another format


def train(
    dataset: Dataset,
    path: Path,
    parameters: Parameters,
    seed: int,
    execution: Execution,
    overwrite: bool = False,
    force: bool = False,
    check: bool = True,
    warm_start: Model | None = None,
    trial: bool = False,
    given: Given | None = None,
    calibrate: float | None = None,
    decide: bool = True,
) -> tuple[Model, dict[str, Any]]:
    """Train, or go on training, a model at `path`; returns it, opened, and the report of the run.

    trial, given: see `Task`. calibrate: the share of the rows that is held out to calibrate the model. One that stands there
    may be calibrated by this share, or not yet.
    decide: where neither the method nor its run says which labels of a row are to be predicted, train another model before,
    on four fifths of the rows, and learn it from the others. Else it is the best label.
    """
    with (
        working("train", execution.progress) as progress,
        writing(work_folder(target_path(path)), "give the same command again, it goes on"),
    ):
        return _train(
            dataset, path, parameters, seed, execution, overwrite, force, check, warm_start, trial, given, calibrate, decide,
            progress,
        )  # fmt: skip


def _train(
    dataset: Dataset, path: Path, parameters: Parameters, seed: int, execution: Execution, overwrite: bool,
    force: bool, check: bool, warm_start: Model | None, trial: bool, given: Given | None, calibrate: float | None,
    decide: bool, progress: Progress,
) -> tuple[Model, dict[str, Any]]:  # fmt: skip
    began = time.perf_counter()
    if dataset.n_samples == 0 or dataset.n_labels == 0 or dataset.n_features == 0:
        raise InputError(f"{dataset.path} has no samples, features or labels: there is nothing to learn from")
    method, task = method_of(parameters), Task(dataset, parameters, seed, warm_start, trial, given)
    method.check(task)
    reads = [dataset.path, *([] if warm_start is None else [warm_start.path])]
    limit = execution.limit(reads, [path.parent])
    start = {} if warm_start is None else {"warm_start": warm_start.digest()}
    identity = {
        **_identity(method, task, environment_of(execution.scheduler)),
        "warm_start": start.get("warm_start"),
        **({"trial": True} if trial else {}),
    }
    work = work_folder(path)
    wait_for_interrupted()
    wait_for_removals()
    refuse_foreign_names(path, LEDGER)
    put_back(path)
    if path.exists():
        if overwrite:
            load_model(path)  # only a model is replaced
        else:
            finished = load_model(path)
            with understood(path / "zarr.json"):
                held_out = finished.attributes.get(CALIBRATION, {}).get(FRACTION)
                before = {**finished.attributes["identity"], "calibrate": held_out}
                now = {**identity, "calibrate": None if held_out is None else calibrate}
                check_identity(path / LEDGER, before, now, force=True)
                if not (work / DECISION).exists():
                    remove_unbegun(work / LEDGER)
                return finished, _report(method, finished, limit.limit, began, finished.attributes["run"], True)
    if overwrite:
        remove_work(work / LEDGER)
    with Ledger(work / LEDGER, {**identity, "format": RUN_FORMAT}, force) as ledger, _refused(ledger):
        if path.exists() and not overwrite:
            raise InputError(f"{path} was made by another process meanwhile: give the same command again")
        begin_model(work)
        shutil.rmtree(work / "scratch", ignore_errors=True)  # of jobs that were killed
        if trial and not ledger.resumed:
            remove(state_of_trial(path))
        if given is not None:
            given.write(work / WEIGHTS)
        guesses = decides_by_another(method, parameters, dataset)
        if decide and guesses and ledger.get(DECISION) is None:
            with progress.part(0.0, _DECIDED):
                foreseen = plan_training(dataset, parameters, seed, execution)
                if not foreseen["fits"]:
                    raise MemoryLimitError(foreseen["why"], foreseen["least_limit"])
                decided = _decided(dataset, work / DECISION, parameters, seed, execution, force, check)
                ledger.add(DECISION, decided)
        threads = execution.threads or available_threads()
        events = work / "events.jsonl"
        with Engine(limit, threads, execution.scheduler, events) as engine:
            of, resident_bytes = execution.part or (1, engine.warm(method.warm_up(task)))
            plan = memory_plan(engine, limit, resident_bytes, execution.cuts, of)
            progress.phase("looking at the data", (0.0, 0.0))

            def forecasters(plan: MemoryPlan) -> Forecaster:
                return method.forecaster(task, plan, engine.once)

            with least_named(forecasters, plan) if of == 1 else nullcontext():  # one of several goes on by itself
                foreseen = forecasters(plan).forecast(plan)
                run = method.run(task, work, plan, ledger, foreseen)
            LOG.info(
                "%splan: %s",
                progress.about,
                plan_line(with_process(foreseen, plan, resident_bytes, peak_resident()), progress.elapsed()),
            )
            progress.expect(foreseen["seconds"])

            checks = [
                *check_jobs(dataset, method.reads_mask(parameters)),
                *(warm_start.check_jobs() if warm_start is not None else ()),
            ]
            if ledger.resumed:  # what was read and written before may have been damaged since
                _forget_damaged(method, ledger, engine, work, warm_start is not None)

            def whole() -> Loop:
                if check:
                    words = "comparing the data with their checksums"
                    yield Phase(
                        "check the data", checks, words, (0.0, _CHECKING), twice=True, kept=False
                    )  # nothing goes on from it
                with progress.part(_CHECKING if check else 0.0, 1.0):
                    return (yield from run.loop())

            with understood(ledger.path) if ledger.resumed else nullcontext():  # receipts that another session wrote
                result = engine.run(whole(), ledger)
            peak = max(engine.peak, peak_resident() if engine.in_process else 0)
        receipts = [receipt for _, receipt in ledger.items()]
        unkept = [receipt[UNKEPT] for receipt in receipts if UNKEPT in receipt]
        receipts += unkept
        sums = {name: sum(receipt.get(name, 0) for receipt in receipts) for name in ("bytes_read", "bytes_gathered")}
        totals = {
            "passes": round(sum(receipt.get("passes", 0.0) for receipt in receipts), 6),
            "bytes_read": sums["bytes_read"],
            "bytes_streamed": sums["bytes_read"] - sums["bytes_gathered"],
            "bytes_gathered": sums["bytes_gathered"],
            "peak_rss": peak,
            **method.totals(ledger.items(), parameters),
        }
        if trial and (work / "state").exists() and not state_of_trial(path).exists():
            (work / "state").rename(state_of_trial(path))
        for folder in ("state", "scratch", DECISION):
            remove_tree(work / folder)
        (work / WEIGHTS).unlink(missing_ok=True)
        taken: dict[str, Any] = {
            name: dataset.attributes[name]
            for name in ("normalize", "base", "beside", SELECTED)
            if name in dataset.attributes
        }
        if dataset.one_label:
            taken[DECISION] = {"one_label": True}
        elif not method.has_zero(parameters):
            taken[DECISION] = result.get(DECISION) or ledger.get(DECISION) or JUST_THE_BEST
        attributes = {
            **model_attributes(dataset, parameters.solver, parameters.to_dict(), task.seed, result),
            **start,
            **taken,
            KIND: method.kind_of(parameters),
        }
        copy_vocabulary(dataset.path, work)
        write_label_counts(work, dataset)
        finish_model(work, path, {**attributes, "identity": identity, "run": totals})
        resumed = ledger.resumed
    model = load_model(path)
    return model, _report(method, model, limit.limit, began, totals, resumed)


def _decided(
    dataset: Dataset, folder: Path, parameters: Parameters, seed: int, execution: Execution, force: bool, check: bool,
) -> dict[str, Any]:  # fmt: skip
    """What a model of the same parameters says of a fifth of the rows, which it has not seen: see `models.decisions`.

    In the folder lie, until it is done, both parts of the rows and the model; a run that was killed goes on from there.
    """
    part, others = folder / "train.xmc", folder / "held.xmc"
    if dataset.n_samples * _HELD_OUT < LEAST_ROWS:
        return JUST_THE_BEST
    LOG.info("first another training, on four fifths of the rows: the others say which labels are to be predicted")
    if split_once(dataset, part, others, _HELD_OUT, seed, execution.memory_limit, check):
        remove(folder / "model")  # of other parts
        remove(folder / "model.partial")
    model, _ = train(
        open_dataset(part), folder / "model", parameters, seed, execution, force=force, check=check, decide=False
    )
    rows, out = open_dataset(others), folder / "predictions"
    held_out, Y = HeldOut(rows.n_samples, rows), rows.Y_rows()
    predict_to(model, rows, out, held_out.k, execution, overwrite=True, check=check)
    for start, labels, scores in Predictions(out).blocks():
        for y in Y.blocks(TRUE_BYTES, start, start + len(labels)):
            mine = slice(y.start - start, y.start - start + y.n)
            true = among(np.arange(y.n)[:, None], labels[mine].astype(np.int64), y.indptr, y.indices)
            held_out.add(scores[mine], true, np.diff(y.indptr))
    return held_out.decision()


@contextmanager
def _refused(ledger: Ledger) -> Iterator[None]:
    """What cannot be begun, as no scheduler answers or the limit is too small, leaves nothing behind."""
    try:
        yield
    except XmcStreamError:
        if not any(ledger.items()) and not (ledger.path.parent / DECISION).exists():
            remove_held(ledger.path)
        raise


def _forget_damaged(method: Method, ledger: Ledger, engine: Engine, work: Path, warm_start: bool) -> None:
    """Compare what an earlier session left with its checksums; what is damaged is made again, and all that came from it.

    Raises StoreError where what it was made from is gone.
    """

    def state() -> Loop:
        receipts = yield Phase(
            "check the state",
            check_state_jobs(work, method.sealed),
            "comparing what was done with its checksums",
            (0.0, 0.0),
            twice=True,
        )
        return {"damaged": [receipt for receipt in receipts if receipt["damage"]]}

    damaged = {Path(receipt["folder"]): receipt["damage"] for receipt in engine.run(state(), Notes())["damaged"]}
    for redo in method.redo(work, damaged, [key for key, _ in ledger.items()], warm_start):
        if isinstance(redo, str):
            raise StoreError(f"{redo}: the run cannot go on from it: remove {work} (or --overwrite) and train anew")
        ledger.forget(redo.forget)
        ledger.undo(redo.undo)
        for folder in redo.remove:
            remove(folder)
        engine.note_again(redo.key)
        LOG.info("note: %s: %s and what came from it is made again", redo.damage, redo.key)


def _identity(method: Method, task: Task, environment: Mapping[str, str]) -> dict[str, Any]:
    """What must be the same for a run to go on. environment: of those who work on it."""
    dataset, mask = task.dataset, {}
    if method.reads_mask(task.parameters):
        mask = {"observed": dataset.observed_rows().fingerprint}
    return {
        "solver": method.name,
        "params": task.parameters.to_dict(),
        "seed": task.seed,
        "data": dataset.fingerprint,
        **mask,
        "weights": None if task.given is None else task.given.identity,
        "environment": dict(environment),
    }


def _report(
    method: Method, model: Model, limit: int, began: float, totals: dict[str, Any], resumed: bool
) -> dict[str, Any]:
    """What `train` says of a training. totals: sums over its receipts, some of the method's own."""
    a = model.attributes
    return {
        "model": str(model.path),
        "solver": a["solver"],
        "params": a["params"],
        "seed": a["seed"],
        "seconds": round(time.perf_counter() - began, 3),
        "memory_limit": limit,
        "nnz": a["nnz"],
        "model_bytes": folder_bytes(model.path),
        "objective": a["objective"],
        "duality_gap": a["duality_gap"],
        "resumed": resumed,
        **{name: a[name] for name in (*method.reported, DECISION) if name in a},
        **totals,
        "warm_start": a.get("warm_start"),
    }
