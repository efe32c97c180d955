"""Training a model on disk: a method's plan joined with an engine, a ledger, and what a run says of itself.

Another training, on a part of the rows, may come before: what its model says of the rest calibrates this one, or decides
which labels it predicts.
"""

from __future__ import annotations

import shutil
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xmc_stream import flags
from xmc_stream.datasets.split import split_once
from xmc_stream.errors import InputError, MemoryLimitError, StoreError, XmcStreamError
from xmc_stream.methods.contract import WEIGHTS, Method, Task, state_of_trial
from xmc_stream.methods.registry import method_of
from xmc_stream.metrics import among
from xmc_stream.models import Execution, Model, behind, load_model, planned, predict_to
from xmc_stream.models.decisions import JUST_THE_BEST, LEAST_ROWS, HeldOut
from xmc_stream.runtime.check import check_jobs, check_state_jobs
from xmc_stream.runtime.engine import UNKEPT, Engine, environment_of, wait_for_interrupted
from xmc_stream.runtime.job import Loop, Notes, Phase, Receipt
from xmc_stream.runtime.ledger import Ledger, check_identity
from xmc_stream.runtime.making import remove_unbegun
from xmc_stream.runtime.plan import Forecaster, MemoryPlan, least_named
from xmc_stream.store.encoding import folder_bytes
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
from xmc_stream.store.names import SELECTED, VOCABULARY
from xmc_stream.store.nodes import understood
from xmc_stream.store.places import (
    LEDGER,
    LOCK,
    copy_folders,
    put_back,
    refuse_foreign_names,
    remove,
    remove_held,
    remove_left,
    remove_tree,
    remove_work,
    target_path,
    work_folder,
    writing,
)
from xmc_stream.store.predictions import Predictions
from xmc_stream.system.memory import format_size, peak_resident
from xmc_stream.system.progress import LOG, Progress, working
from xmc_stream.training.plan import (
    TRUE_BYTES,
    decides_by_another,
    plan_line,
    plan_training,
    refuse_together,
    refuse_unfit,
    with_process,
)

_DECIDED = 0.45  # of a training: where the one ends that says which labels to predict, if there is one
_HELD_OUT = 0.2  # of the rows, that it does not see
_CHECKING = 0.02  # of a training, that comparing checksums takes
_SPLIT_OFF, _HALF, _TRAINED = 0.03, 0.5, 0.97  # of a calibrated one: where the split and the two trainings end
RUN_FORMAT = 7  # raised when what a run keeps between its jobs changes: a run does not go on in another format


def train(
    task: Task, path: Path, execution: Execution, *, overwrite: bool = False, force: bool = False, check: bool = True,
    calibrate: float | None = None, decide: bool = True,
) -> tuple[Model, dict[str, Any]]:  # fmt: skip
    """Train, or go on training, a model at `path`; returns it, opened, and the report of the run.

    calibrate: the share of the rows that is held out to calibrate the model. One that stands there may be calibrated by this
    share, or not yet.
    decide: where neither the method nor its run says which labels of a row are to be predicted, train another model before,
    on four fifths of the rows, and learn it from the others. Else it is the best label.
    """
    with (
        working("train", execution.progress) as progress,
        writing(work_folder(target_path(path)), "give the same command again, it goes on"),
    ):
        return Training(task, path, execution, overwrite, force, check, calibrate, decide, progress).run()


def train_calibrated(
    task: Task,
    path: Path,
    execution: Execution,
    fraction: float,
    overwrite: bool = False,
    force: bool = False,
    check: bool = True,
) -> tuple[Model, dict[str, Any]]:
    """Train on all rows as `train` does, and calibrate by a model of the same parameters that has not seen `fraction` of them.

    A model that stands there is calibrated if it is not yet, and returned if this share was held out for it. In
    `path`.calibration lie, until it is done, the two parts of the rows and the other model; a run that was killed goes
    on from there. The report is that of `train`, of both trainings where they are seconds and peak_rss, and what
    `calibrate` returns in `evaluation.calibrate`. Raises what these and `split` raise.
    """
    from xmc_stream.evaluation.calibrate import calibrate_with, refuse_few  # `train` starts in less time without

    refuse_together(task.warm_start, task.given)
    given = task.given  # a tree, if anything
    began = time.perf_counter()
    work = path.with_name(f"{path.name}.calibration")
    dataset, parameters, seed = task.dataset, task.parameters, task.seed
    if method_of(parameters).reads_mask(parameters):
        raise InputError(
            "calibration needs all labels of the rows held out, and with observed=given some are not known"
        )
    if not overwrite and path.exists():
        model, report = train(task, path, execution, force=force, check=check, calibrate=fraction)
        done = model.attributes.get(CALIBRATION, {})
        if FRACTION in done:
            remove_left(work / LOCK)
            return model, {**report, CALIBRATION: done}
    execution.limit([dataset.path], [path.parent])
    foreseen = plan_training(dataset, parameters, seed, execution, given=given, calibrate=fraction)
    if not foreseen["fits"]:
        raise MemoryLimitError(foreseen["why"], foreseen["least_limit"])
    if overwrite:
        remove_work(work / LOCK)
    with Ledger(work / LOCK, {"command": "calibrate"}), working("train", execution.progress) as bar:
        with bar.part(0.0, _SPLIT_OFF):
            part, held_out = split_once(dataset, work, fraction, seed, execution.memory_limit, check)
        try:
            refuse_few(held_out)
        except InputError:
            remove_held(work / LOCK)
            raise
        with bar.part(_SPLIT_OFF, _HALF):
            of_part = Task(part, parameters, seed, given=given)
            other, before = train(of_part, work / "model", execution, force=force, check=check, decide=False)
        with bar.part(_HALF, _TRAINED):
            model, report = train(
                task, path, execution, overwrite=overwrite, force=force, check=check, calibrate=fraction
            )
        with bar.part(_TRAINED, 1.0):
            about = calibrate_with(model, held_out, other, execution, check, fraction)
        remove_held(work / LOCK)
    return model, {
        **report,
        "seconds": round(time.perf_counter() - began, 3),
        "peak_rss": max(report["peak_rss"], before["peak_rss"]),
        CALIBRATION: about,
    }


@dataclass
class Training:
    """One call of `train`."""

    task: Task
    path: Path
    execution: Execution
    overwrite: bool
    force: bool
    check: bool
    calibrate: float | None
    decide: bool
    progress: Progress

    def run(self) -> tuple[Model, dict[str, Any]]:
        """See `train`."""
        self.began = time.perf_counter()
        self.method, self.work = method_of(self.task.parameters), work_folder(self.path)
        dataset, start, path = self.task.dataset, self.task.warm_start, self.path
        refuse_unfit(self.method, self.task)
        self.limit = self.execution.limit([dataset.path, *([] if start is None else [start.path])], [path.parent])
        self.start = {} if start is None else {"warm_start": start.digest()}
        self.identity = self._identity()
        wait_for_interrupted()
        refuse_foreign_names(path, LEDGER)
        put_back(path)
        if path.exists():
            stands = load_model(path)  # only a model is replaced
            if not self.overwrite:
                return self._trained_before(stands)
        if self.overwrite:
            remove_work(self.work / LEDGER)
        with Ledger(self.work / LEDGER, {**self.identity, "format": RUN_FORMAT}, self.force) as ledger:
            try:
                if path.exists() and not self.overwrite:
                    raise InputError(f"{path} was made by another process meanwhile: give the same command again")
                self._begin(ledger)
                result, peak = self._learn(ledger)
                totals = self._totals(ledger, peak)
                self._finish(ledger, result, totals)
            except (
                XmcStreamError
            ):  # what cannot be begun leaves nothing: no scheduler answers, or the limit is too small
                if not any(ledger.items()) and not (self.work / DECISION).exists():
                    remove_held(ledger.path)
                raise
        model = load_model(path)
        return model, self._report(model, totals, ledger.resumed)

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a run to go on; the environment is that of those who work on it."""
        task, dataset = self.task, self.task.dataset
        masked = self.method.reads_mask(task.parameters)
        return {
            "solver": self.method.name,
            "params": task.parameters.to_dict(),
            "seed": task.seed,
            "data": dataset.fingerprint,
            **({"observed": dataset.observed_rows().fingerprint} if masked else {}),
            **({"weights": None} if task.given is None else task.given.identity),
            "environment": dict(environment_of(self.execution.scheduler)),
            "warm_start": self.start.get("warm_start"),
            **({"trial": True} if task.trial else {}),
        }

    def _trained_before(self, model: Model) -> tuple[Model, dict[str, Any]]:
        """The model that stands there. Raises ResumeError where it is of another training."""
        with understood(self.path / "zarr.json"):
            held_out = model.attributes.get(CALIBRATION, {}).get(FRACTION)
            before = {**model.attributes["identity"], "calibrate": held_out}
            now = {**self.identity, "calibrate": None if held_out is None else self.calibrate}
            check_identity(self.path / LEDGER, before, now, force=True)
            if not (self.work / DECISION).exists():
                remove_unbegun(self.work / LEDGER)
            return model, self._report(model, model.attributes["run"], True)

    def _begin(self, ledger: Ledger) -> None:
        """Make the folder of the unfinished model; learn from another model, if need be, which labels are to be predicted."""
        task, work = self.task, self.work
        begin_model(work)
        shutil.rmtree(work / "scratch", ignore_errors=True)  # of jobs that were killed
        if task.trial and not ledger.resumed:
            remove(state_of_trial(self.path))
        if task.given is not None:
            task.given.write(work / WEIGHTS)
        guesses = decides_by_another(self.method, task.parameters, task.dataset)
        if self.decide and guesses and ledger.get(DECISION) is None:
            with self.progress.part(0.0, _DECIDED):
                given = task.given and task.given.of_labels
                foreseen = plan_training(task.dataset, task.parameters, task.seed, self.execution, given=given)
                if not foreseen["fits"]:
                    raise MemoryLimitError(foreseen["why"], foreseen["least_limit"])
                ledger.add(DECISION, self._decided())

    def _decided(self) -> dict[str, Any]:
        """What a model of the same parameters says of a fifth of the rows, which it has not seen: see `models.decisions`.

        In a folder lie, until it is done, both parts of the rows and the model; a run that was killed goes on from there.
        """
        task, folder, execution, check = self.task, self.work / DECISION, self.execution, self.check
        if task.dataset.n_samples * _HELD_OUT < LEAST_ROWS:
            return JUST_THE_BEST
        LOG.info("first another training, on four fifths of the rows: the others say which labels are to be predicted")
        part, rows = split_once(task.dataset, folder, _HELD_OUT, task.seed, execution.memory_limit, check)
        of_part = Task(part, task.parameters, task.seed, given=task.given and task.given.of_labels)
        model, _ = train(of_part, folder / "model", execution, force=self.force, check=check, decide=False)
        held_out, Y, out = HeldOut(rows.n_samples, rows), rows.Y_rows(), folder / "predictions"
        predict_to(model, rows, out, held_out.k, execution, overwrite=True, check=check)
        for start, labels, scores in Predictions(out).blocks():
            for y in Y.blocks(TRUE_BYTES, start, start + len(labels)):
                mine = slice(y.start - start, y.start - start + y.n)
                true = among(np.arange(y.n)[:, None], labels[mine].astype(np.int64), y.indptr, y.indices)
                held_out.add(scores[mine], true, np.diff(y.indptr))
        return held_out.decision()

    def _learn(self, ledger: Ledger) -> tuple[Receipt, int]:
        """Run the jobs of the method; returns what its loop does, and peak resident memory."""
        task, execution, method = self.task, self.execution, self.method
        log = self.work / "events.jsonl"
        with planned(execution, self.limit, method.warm_up(task), log=log) as (engine, plan):
            self.progress.phase("looking at the data", (0.0, 0.0))

            def forecasters(plan: MemoryPlan) -> Forecaster:
                return method.forecaster(task, plan, engine.once)

            with (
                least_named(forecasters, plan) if plan.parts == 1 else nullcontext()
            ):  # one of several goes on by itself
                foreseen = forecasters(plan).forecast(plan)
                run = method.run(task, self.work, plan, ledger, foreseen)
            whole = with_process(foreseen, plan, peak_resident(), trains=True)
            if plan.keeps_freed(foreseen["peak_parts"]):
                engine.keep_freed()
            LOG.info("%splan: %s", self.progress.about, plan_line(whole, self.progress.elapsed()))
            if "disk_bytes" in foreseen:
                self._look_at_disk(foreseen["disk_bytes"])
            self.progress.expect(foreseen["seconds"])
            if ledger.resumed:  # what was read and written before may have been damaged since
                _forget_damaged(method, ledger, engine, self.work, task.warm_start is not None)
            with understood(ledger.path) if ledger.resumed else nullcontext():  # receipts that another session wrote
                result = engine.run(self._checked(run.loop()), ledger)
            return result, max(engine.peak, peak_resident() if engine.in_process else 0)

    def _look_at_disk(self, n_bytes: int) -> None:
        """Say where the disk has less room than the bytes that the run may take: it would stop when the disk is full."""
        missing = n_bytes - folder_bytes(self.work)
        free = shutil.disk_usage(self.work).free
        if missing > free:
            LOG.warning(
                "note: the run may take about %s more of the disk of %s, which has %s free: make room, or it stops when the "
                "disk is full, and the same command goes on when there is room", format_size(missing), self.work.parent,
                format_size(free),
            )  # fmt: skip

    def _checked(self, loop: Loop) -> Loop:
        """A loop, behind the comparison of what it reads with its checksums, unless that is left out."""
        task, start = self.task, self.task.warm_start
        checks = [
            *check_jobs(task.dataset, self.method.reads_mask(task.parameters)),
            *(start.check_jobs() if start is not None else ()),
        ]
        words = "comparing the data with their checksums"
        return behind("check the data", checks, words, _CHECKING, loop) if self.check else loop

    def _totals(self, ledger: Ledger, peak: int) -> dict[str, Any]:
        """Sums over the receipts of a run."""
        receipts = [receipt for _, receipt in ledger.items()]
        receipts += [receipt[UNKEPT] for receipt in receipts if UNKEPT in receipt]
        read, gathered = (
            sum(receipt.get(name, 0) for receipt in receipts) for name in ("bytes_read", "bytes_gathered")
        )
        return {
            "passes": round(sum(receipt.get("passes", 0.0) for receipt in receipts), 6),
            "bytes_read": read,
            "bytes_streamed": read - gathered,
            "bytes_gathered": gathered,
            "peak_rss": peak,
            **self.method.totals(ledger.items(), self.task.parameters),
        }

    def _finish(self, ledger: Ledger, result: Receipt, totals: dict[str, Any]) -> None:
        """Remove what the run needed, write what the model says of itself, and give it its name."""
        task, work, dataset = self.task, self.work, self.task.dataset
        if task.trial and (work / "state").exists() and not state_of_trial(self.path).exists():
            (work / "state").rename(state_of_trial(self.path))
        for folder in ("state", "scratch", DECISION):
            remove_tree(work / folder)
        (work / WEIGHTS).unlink(missing_ok=True)
        given = ("normalize", "base", "beside", SELECTED)
        taken: dict[str, Any] = {name: dataset.attributes[name] for name in given if name in dataset.attributes}
        if dataset.one_label:
            taken[DECISION] = {"one_label": True}
        elif not self.method.has_zero(task.parameters):
            taken[DECISION] = result.get(DECISION) or ledger.get(DECISION) or JUST_THE_BEST
        attributes = {
            **model_attributes(dataset, task.parameters.solver, task.parameters.to_dict(), task.seed, result),
            **self.start, **taken, KIND: self.method.kind_of(task.parameters), "identity": self.identity, "run": totals,
        }  # fmt: skip
        copy_folders(dataset.path, work, VOCABULARY)
        write_label_counts(work, dataset)
        finish_model(work, self.path, attributes)

    def _report(self, model: Model, totals: dict[str, Any], resumed: bool) -> dict[str, Any]:
        """What `train` says of a training. totals: sums over its receipts, some of the method's own."""
        a = model.attributes
        return {
            "model": str(model.path),
            **{name: a[name] for name in ("solver", "params", "seed")},
            "seconds": round(time.perf_counter() - self.began, 3),
            "memory_limit": self.limit.limit,
            "nnz": a["nnz"],
            "model_bytes": folder_bytes(model.path),
            **{name: a[name] for name in ("objective", "duality_gap")},
            "resumed": resumed,
            **{name: a[name] for name in (*self.method.reported, DECISION) if name in a},
            **totals,
            "warm_start": a.get("warm_start"),
        }


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
            raise StoreError(
                f"{redo}: the run cannot go on from it: remove {work} (or " + flags.OVERWRITE + ") and train anew"
            )
        ledger.undo(redo.undo)
        for folder in redo.remove:
            remove(folder)
        engine.note_again(redo.key)
        LOG.info("note: %s: %s and what came from it is made again", redo.damage, redo.key)
