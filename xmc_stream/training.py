"""Training a model on disk: a solver's plan joined with an engine, a ledger, and what a run says of itself."""

from __future__ import annotations

import platform
import shutil
import sys
import time
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

from xmc_stream.engine.ledger import Ledger, check_identity, refuse_in_progress
from xmc_stream.engine.runner import BESIDE, Engine, wait_for_interrupted
from xmc_stream.errors import InputError, StoreError
from xmc_stream.jobs.check import check_jobs, check_model_jobs, check_state_jobs, key_of_state, legs_again, pass_of
from xmc_stream.jobs.job import Loop, Notes, Phase
from xmc_stream.jobs.plan import MemoryPlan
from xmc_stream.jobs.warm import warm_up
from xmc_stream.memory import available_threads, peak_resident
from xmc_stream.methods.lowrank import cplst, leml
from xmc_stream.methods.lowrank.parameters import CPLSTParameters, LEMLParameters
from xmc_stream.methods.pdsparse import run as pdsparse
from xmc_stream.methods.pdsparse.parameters import PDSparseParameters
from xmc_stream.methods.ppdsparse import run as ppdsparse
from xmc_stream.methods.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.models import Execution, Model, load_model
from xmc_stream.planning import (
    Parameters,
    lowrank_figures,
    memory_plan,
    pass_figures,
    plan_line,
    probe_training,
    training_figures,
)
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.encoding import folder_bytes, remove, writing
from xmc_stream.store.model import begin_model, finish_model, model_attributes, write_label_counts
from xmc_stream.store.names import copy_vocabulary
from xmc_stream.store.nodes import understood

# of a solver's own, in the report of a training
_FIGURES = (
    "duality_gap_mean", "violation", "n_open", "n_empty", "rounds", "lam", "best_pass", "held_out_P@1", "held_out_P@3",
    "held_out_P@5", "held_out_auc", "rank", "n_learned", "n_held_out", "n_skipped", "history",
)  # fmt: skip


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
) -> tuple[Model, dict[str, Any]]:
    """Train, or go on training, a model at `path`; returns it, opened, and the figures of the run."""
    with writing(path.with_name(path.name + ".partial"), "give the same command again, it goes on"):
        return _train(dataset, path, parameters, seed, execution, overwrite, force, check, warm_start)


def _train(
    dataset: Dataset, path: Path, parameters: Parameters, seed: int, execution: Execution, overwrite: bool,
    force: bool, check: bool, warm_start: Model | None,
) -> tuple[Model, dict[str, Any]]:  # fmt: skip
    began = time.perf_counter()
    if dataset.n_samples == 0 or dataset.n_labels == 0 or dataset.n_features == 0:
        raise InputError(f"{dataset.path} has no samples, features or labels: there is nothing to learn from")
    if warm_start is not None and not isinstance(parameters, PPDSparseParameters):
        raise InputError(f"{parameters.solver} takes no warm start: leave it out")
    if warm_start is not None and warm_start.shape != (dataset.n_features, dataset.n_labels):
        raise InputError(
            f"{warm_start.path} is a model of {warm_start.n_features} features and {warm_start.n_labels} labels, and "
            f"{dataset.path} has {dataset.n_features} and {dataset.n_labels}: a warm start needs as many of both"
        )
    limit = execution.limit()
    start = {} if warm_start is None else {"warm_start": warm_start.digest()}
    identity = {**_identity(dataset, parameters, seed), "warm_start": start.get("warm_start")}
    work = path.with_name(path.name + ".partial")
    wait_for_interrupted()
    if path.exists():
        if overwrite:
            load_model(path)  # only a model is replaced
        else:
            finished = load_model(path)
            with understood(path / "zarr.json"):
                check_identity(path / "ledger.jsonl", finished.attributes["identity"], identity, force=True)
                return finished, _report(finished, limit.limit, began, finished.attributes["run"], True)
    if overwrite:
        refuse_in_progress(work / "ledger.jsonl")
        shutil.rmtree(work, ignore_errors=True)
    begin_model(work)
    with Ledger(work / "ledger.jsonl", identity, force) as ledger:
        shutil.rmtree(work / "scratch", ignore_errors=True)  # of jobs that were killed
        threads = execution.threads or available_threads()
        events = work / "events.jsonl"
        with Engine(limit, threads, execution.scheduler, events, execution.progress) as engine:
            held = engine.warm(warm_up(dataset, parameters, warm_start is not None))
            plan = memory_plan(engine, limit, held, execution.cuts)
            run, figures = _run(engine, dataset, work, parameters, seed, plan, ledger, held, warm_start)
            if execution.progress:
                print(f"plan: {plan_line(figures)}", file=sys.stderr, flush=True)

            checks = [
                *check_jobs(dataset, _mask_is_read(parameters)),
                *(check_model_jobs(warm_start) if warm_start is not None else ()),
            ]
            if ledger.resumed:  # what was read and written before may have been damaged since
                ledger.forget([job.key for job in checks])
                _forget_damaged(ledger, engine, work, warm_start is not None, execution.progress)

            def whole() -> Loop:
                if check:
                    yield Phase("check the data", checks)
                return (yield from run.loop())

            with understood(ledger.path) if ledger.resumed else nullcontext():  # receipts that another session wrote
                result = engine.run(whole(), ledger)
            peak = max(engine.peak, peak_resident() if engine.in_process else 0)
        receipts = [receipt for _, receipt in ledger.items()]
        beside = [receipt[BESIDE] for receipt in receipts if BESIDE in receipt]
        receipts += beside
        n_bytes = sum(receipt.get("bytes_read", 0) for receipt in receipts)
        streamed = sum(receipt.get("bytes_read", 0) for receipt in beside) + sum(
            receipt.get("bytes_read", 0)
            for key, receipt in ledger.items()
            if key.startswith(("search/", "pass/", "objective/", "w/", "scale"))
        )
        totals = {
            "passes": round(sum(receipt.get("passes", 0.0) for receipt in receipts), 6),
            "solve_passes": sum(receipt.get("solve_passes", 0) for receipt in receipts),
            "bytes_read": n_bytes,
            "bytes_streamed": streamed,
            "bytes_gathered": n_bytes - streamed,
            "class_blocks": max((receipt.get("class_blocks", 0) for receipt in receipts), default=0),
            "row_blocks": _row_blocks(ledger),
            "peak_rss": peak,
            **_search_work(ledger, parameters),
        }
        for folder in ("state", "scratch"):
            shutil.rmtree(work / folder, ignore_errors=True)
        taken: dict[str, Any] = {
            name: dataset.attributes[name] for name in ("normalize", "base") if name in dataset.attributes
        }
        attributes = {
            **model_attributes(dataset, parameters.solver, parameters.to_dict(), seed, result),
            **start,
            **taken,
        }
        copy_vocabulary(dataset.path, work)
        write_label_counts(work, dataset)
        finish_model(work, path, {**attributes, "identity": identity, "run": totals})
        resumed = ledger.resumed
    model = load_model(path)
    return model, _report(model, limit.limit, began, totals, resumed)


def _run(
    engine: Engine, dataset: Dataset, work: Path, parameters: Parameters, seed: int, plan: MemoryPlan, ledger: Ledger,
    held: int, warm_start: Model | None,
) -> tuple[ppdsparse.PPDSparseRun | pdsparse.PDSparseRun | leml.LEMLRun | cplst.CPLSTRun, dict[str, Any]]:  # fmt: skip
    """The run of a solver, and what is foreseen of it."""
    if isinstance(parameters, LEMLParameters):
        alternations = leml.LEMLRun(dataset, work, parameters, seed, plan, ledger)
        return alternations, lowrank_figures(engine, dataset, parameters, seed, plan, held)
    if isinstance(parameters, CPLSTParameters):
        steps = parameters.steps(dataset.n_features, dataset.n_labels)
        iterations = cplst.CPLSTRun(dataset, work, parameters, seed, plan, ledger)
        return iterations, lowrank_figures(engine, dataset, steps, seed, plan, held)
    if isinstance(parameters, PDSparseParameters):
        passes = pdsparse.PDSparseRun(dataset, work, parameters, seed, plan, ledger)
        return passes, pass_figures(engine, dataset, parameters, seed, plan, held)
    forecast = probe_training(engine, dataset, parameters, seed, plan, warm_start).forecast(plan)
    begin_from = str(warm_start.path.absolute()) if warm_start else ""
    rounds = ppdsparse.PPDSparseRun(dataset, work, parameters, seed, plan, ledger, begin_from, forecast.blocks)
    return rounds, training_figures(forecast, plan.limit, held, peak_resident())


def _forget_damaged(ledger: Ledger, engine: Engine, work: Path, warm_start: bool, progress: bool) -> None:
    """Compare what an earlier session left with its checksums; what is damaged is made again, and all that came from it.

    Raises StoreError where what it was made from is gone.
    """

    def state() -> Loop:
        receipts = yield Phase("check the state", check_state_jobs(work))
        return {"damaged": [receipt for receipt in receipts if receipt["damage"]]}

    def again(damage: str, key: str) -> None:
        engine.note_again(key)
        if progress:
            print(f"note: {damage}: {key} and what came from it is made again", file=sys.stderr, flush=True)

    passes: dict[tuple[int, int], str] = {}
    for receipt in engine.run(state(), Notes())["damaged"]:
        folder, damage = Path(receipt["folder"]), receipt["damage"]
        if (of := pass_of(folder.parent.name)) is not None:
            passes[of] = damage
            continue
        key = key_of_state(work, folder, warm_start)
        if key is None:
            raise StoreError(f"{damage}: the run cannot go on from it: remove {work} (or --overwrite) and train anew")
        ledger.forget([key])
        again(damage, key)
    if passes:
        (stage, number), legs, folders = legs_again(work, passes, [key for key, _ in ledger.items()])
        ledger.undo(legs)
        for folder in folders:
            remove(folder)
        again(passes[min(passes)], f"pass/{stage}/{number}")


def _row_blocks(ledger: Ledger) -> int:
    """Row blocks of one pass: of the search that had the most."""
    blocks: dict[str, int] = {}
    for key, receipt in ledger.items():
        if key.startswith("search/"):
            searched = key.rsplit("/", 1)[0]
            blocks[searched] = blocks.get(searched, 0) + receipt["row_blocks"]
    return max(blocks.values(), default=0)


def _search_work(ledger: Ledger, parameters: Parameters) -> dict[str, int]:
    """Multiply-adds of all searches, and of as many exact ones, one after each solve; nothing where all are exact."""
    if not (isinstance(parameters, PPDSparseParameters) and parameters.approximate):
        return {}
    work = {"search": 0, "solve": 0}
    for key, receipt in ledger.items():
        kind = key.partition("/")[0]
        if kind in work and not key.startswith("search/0/"):  # which a warm start begins with
            work[kind] += receipt["work"]
    return {"search_work": work["search"], "search_work_exact": work["solve"]}


def _identity(dataset: Dataset, parameters: Parameters, seed: int) -> dict[str, Any]:
    """What must be the same for a run to go on."""
    packages = {name: version(name) for name in ("xmc-stream", "numpy", "numba", "llvmlite")}
    mask = {}
    if _mask_is_read(parameters):
        mask = {"observed": dataset.observed_rows().fingerprint}
    return {
        "solver": parameters.solver,
        "params": parameters.to_dict(),
        "seed": seed,
        "data": dataset.fingerprint,
        **mask,
        "environment": {"processor": _processor(), "python": platform.python_version(), **packages},
    }


def _mask_is_read(parameters: Parameters) -> bool:
    return isinstance(parameters, LEMLParameters) and parameters.observed == "given"


def _processor() -> str:
    """The processor's type: compiled kernels round the same on the same type."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as cpuinfo:
            for line in cpuinfo:
                if line.startswith("model name"):
                    return f"{platform.machine()} {line.partition(':')[2].strip()}"
    except OSError:
        pass
    return f"{platform.machine()} {platform.processor()}".strip()


def _report(model: Model, limit: int, began: float, totals: dict[str, Any], resumed: bool) -> dict[str, Any]:
    a = model.attributes
    return {
        "model": str(model.path),
        "solver": a["solver"],
        "params": a["params"],
        "seed": a["seed"],
        "seconds": round(time.perf_counter() - began, 3),
        "peak_rss": totals["peak_rss"],
        "memory_limit": limit,
        "passes": totals["passes"],
        "bytes_read": totals["bytes_read"],
        "nnz": a["nnz"],
        "model_bytes": folder_bytes(model.path),
        "objective": a["objective"],
        "duality_gap": a["duality_gap"],
        "resumed": resumed,
        **{name: a[name] for name in _FIGURES if name in a},
        "bytes_streamed": totals["bytes_streamed"],
        "bytes_gathered": totals["bytes_gathered"],
        "solve_passes": totals["solve_passes"],
        "class_blocks": totals["class_blocks"],
        "row_blocks": totals["row_blocks"],
        "search_work": totals.get("search_work"),
        "search_work_exact": totals.get("search_work_exact"),
        "warm_start": a.get("warm_start"),
    }
