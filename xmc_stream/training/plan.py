"""What a command would do under its limit, before it does it: passes, bytes, blocks, peak memory, time, least limit.

Everything here calls the plans that the commands themselves use; nothing is written.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmc_stream import flags
from xmc_stream.datasets.split import split_needs
from xmc_stream.errors import InputError, MemoryLimitError, in_megabytes
from xmc_stream.methods.contract import Forecast, Method, Task
from xmc_stream.methods.parameters import Parameters
from xmc_stream.methods.registry import method_of
from xmc_stream.methods.weights import Given
from xmc_stream.models import Execution, Model, planned
from xmc_stream.models.decisions import LEARNED_BYTES, labels_ranked
from xmc_stream.models.prediction import file_needs
from xmc_stream.models.runs import RESULT_BYTES
from xmc_stream.runtime.engine import Engine
from xmc_stream.runtime.plan import MIB, Forecaster, Forecasters, MemoryPlan, Needs, Together, least_that_works
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.predictions import CHUNK_ROWS
from xmc_stream.system.memory import MemoryLimit, format_size, least_limit, resident
from xmc_stream.system.progress import current, duration

if TYPE_CHECKING:
    from xmc_stream.convert.plan import ConversionPlan
    from xmc_stream.convert.source import Part

_EDGES = 16 * MIB  # what no component names: ledger, events, the scheduler's own objects, pages from run to run
_KEPT = 4  # of what is foreseen: the part that was freed and is of no use to the jobs that come next, about
_MARGIN = 1.1  # on what the beginning of an input says of all of it
_PROBE_ROOM = 64 * MIB  # for reading that beginning
_PROBE_SECONDS = 0.3

TRUE_BYTES = 2**20  # of true labels that are compared at a time
_RANK_BYTES = 48  # of a row and rank: as they are stored, and what comparing makes of them
_RANKING = 8 * MIB  # that a thread takes at least which ranks labels of rows


def with_process(foreseen: Forecast, plan: MemoryPlan, before: int = 0, trains: bool = False) -> Forecast:
    """What a forecaster says, with the process's own memory; keys as in `plan --json`. before: a peak that has been.

    trains: whether it is a training, which may keep what its jobs free.
    """
    parts = {"process": plan.process + _EDGES, **foreseen["peak_parts"]}
    if trains and plan.keeps_freed(foreseen["peak_parts"]):
        parts["kept for the next jobs, about"] = sum(foreseen["peak_parts"].values()) // _KEPT
    return {
        "fits": True,
        "memory_limit": plan.limit,
        **foreseen,
        "peak_parts": parts,
        "peak_rss": max(min(sum(parts.values()), plan.limit), before),
    }


def plan_training(
    dataset: Dataset,
    parameters: Parameters,
    seed: int,
    execution: Execution,
    warm_start: Model | None = None,
    workers: int | None = None,
    given: Given | None = None,
    calibrate: float | None = None,
) -> Forecast:
    """What `train` would do. A limit that cannot work gives fits=False and why, instead of an error.

    workers: of a cluster that is not there yet, each with the threads and the limit of `execution`, and as fast as this
    machine. None: who would do it now. given: see `Task`. calibrate: the share of the rows that a second training leaves out.
    """
    if calibrate is not None:
        refuse_together(warm_start, given)
    method, task = method_of(parameters), Task(dataset, parameters, seed, warm_start, given=given)
    refuse_unfit(method, task)
    limit = execution.limit([dataset.path, *([] if warm_start is None else [warm_start.path])])
    with planned(execution, limit, method.warm_up(task), processes=workers) as (engine, plan):
        current().phase("looking at the data", (0.0, 0.0))

        def forecasters(plan: MemoryPlan) -> Forecaster:
            forecaster = method.forecaster(task, plan, engine.once)
            if decides_by_another(method, parameters, dataset):
                forecaster = Together(forecaster, _deciding(dataset))
            if calibrate is not None:
                forecaster = _Calibrated(forecaster, _calibrating(dataset, calibrate), calibrate)
            return forecaster

        return {"command": "train", **_advised(forecasters, plan, engine, workers, trains=True)}


def refuse_unfit(method: Method, task: Task) -> None:
    """Raise InputError where there is nothing to learn, or the method cannot."""
    dataset = task.dataset
    if not dataset.n_samples or not dataset.n_labels or not dataset.n_features:
        raise InputError(f"{dataset.path} has no samples, features or labels: there is nothing to learn from")
    method.check(task)


def refuse_together(warm_start: Model | None, given: Given | None) -> None:
    """Raise InputError for what does not go together with a calibration."""
    if warm_start is not None or (given is not None and given.weighs):
        raise InputError(
            flags.CALIBRATE
            + " and "
            + flags.WARM_START
            + ", "
            + flags.SAMPLE_WEIGHT
            + " or numbers as "
            + flags.CLASS_WEIGHT
            + " do not go together: leave out "
            + flags.CALIBRATE
        )


def decides_by_another(method: Method, parameters: Parameters, dataset: Dataset) -> bool:
    """Whether another training, of a part of the rows, says which labels a model predicts."""
    return not (dataset.one_label or method.has_zero(parameters) or method.decides(parameters))


def _deciding(dataset: Dataset) -> dict[str, Needs]:
    """What that training needs beside what a training does."""
    results = CHUNK_ROWS * labels_ranked(dataset)
    of_rows = results * RESULT_BYTES + _RANKING + 10 * dataset.n_features
    of_labels = 16 * dataset.Y_rows().block_bytes(TRUE_BYTES)
    return {
        "split": lambda plan: split_needs(dataset, plan.budget),
        "predicting": lambda plan: {"rows": plan.threads * (of_rows + dataset.X_rows().block_bytes(MIB))},
        "learning which labels to predict": lambda _: {
            "predictions": _RANK_BYTES * results,
            "true labels": of_labels,
            "candidates": LEARNED_BYTES,
        },
    }


@dataclass(frozen=True)
class _Calibrated(Together):
    """A training, and the one that calibrates it: without a share of the rows, which are split off before."""

    share: float

    def forecast(self, plan: MemoryPlan) -> Forecast:
        """Of both."""
        foreseen = super().forecast(plan)
        for name in ("passes", "bytes_read", "bytes_streamed", "bytes_gathered", "seconds"):
            foreseen[name] = type(foreseen[name])(foreseen[name] * (2 - (name != "passes") * self.share))
        return foreseen


def _calibrating(dataset: Dataset, share: float) -> dict[str, Needs]:
    """What calibrating needs beside two trainings. What it predicts with one thread takes less than these."""
    from xmc_stream.evaluation.calibrate import CALIBRATING, calibrating_needs  # `train` starts in less time without

    rows = int(share * dataset.n_samples) + dataset.n_labels  # a row of each label more, at most
    return {
        "split": lambda plan: split_needs(dataset, plan.budget),
        CALIBRATING: lambda _: calibrating_needs(dataset, rows),
    }


def plan_prediction(
    model: Model,
    dataset: Dataset,
    k: int,
    execution: Execution,
    filtered: bool = False,
    evaluate: bool = False,
    workers: int | None = None,
    out: Path | None = None,
    train: Dataset | None = None,
) -> Forecast:
    """What `predict` would do, or `evaluate` with a model. A limit that cannot work gives fits=False and why.

    filtered: whether a filter file is given; it is not read. workers: as of `plan_training`. out: of `predict`; train: of
    `evaluate`.
    """
    limit, name = execution.limit([model.path, dataset.path]), "evaluate" if evaluate else "predict"
    with planned(execution, limit, model.warm_up(evaluate), processes=workers) as (engine, plan):
        current().phase("looking at the data", (0.0, 0.0))
        forecaster: Forecaster = model.ranking(dataset, k, filtered, evaluate, engine.once)
        if evaluate:
            from xmc_stream.evaluation.evaluate import comparing  # `train` starts in less time without

            forecaster = Together(forecaster, comparing(k, dataset, train))
        elif out is not None:
            forecaster = Together(forecaster, file_needs(out, dataset, k))
        forecast = _advised(lambda _: forecaster, plan, engine, workers)
    return {"command": name, "peak_phase": name, **forecast}


def _advised(
    forecasters: Forecasters, plan: MemoryPlan, engine: Engine, workers: int | None, trains: bool = False
) -> Forecast:
    """What is foreseen under a plan, or why that cannot work, and the limits that would do."""
    forecaster, foreseen, why = None, None, ""
    try:
        forecaster = forecasters(plan)
        foreseen = with_process(forecaster.forecast(plan), plan, trains=trains)
    except MemoryLimitError as error:
        why = error.args[0]
    least = least_that_works(forecasters, plan, forecaster)
    advice: Forecast = {
        "least_limit": least,
        "limit_for_fewest_passes": None if least is None else _fewest_passes(forecaster, forecasters, plan, least),
    }
    common: Forecast = {"threads": engine.threads, "compiling": round(engine.compiling, 1)}
    if forecaster is None or foreseen is None:
        return {"fits": False, "memory_limit": plan.limit, "why": why, **common, **advice}
    if workers is not None:
        common["workers"] = workers
        common["seconds_by_workers"] = {
            n: round(seconds + engine.loading, 1)
            for n in sorted({1, max(1, workers // 4), max(1, workers // 2), workers, 2 * workers, 4 * workers})
            if (seconds := _seconds(forecaster, replace(plan, processes=n))) is not None
        }
    # the command loads the kernels too
    return {**common, **foreseen, "seconds": round(foreseen["seconds"] + engine.loading, 1), **advice}


def _fewest_passes(forecaster: Forecaster | None, forecasters: Forecasters, plan: MemoryPlan, least: int) -> int | None:
    """The limit from which on more memory saves no pass."""
    foreseen = forecaster or forecasters(plan.under(least))

    def saves_none(size: int) -> bool:
        there = plan.under(size)
        try:
            foreseen.check(there)
            return foreseen.reads_least(there)
        except MemoryLimitError:
            return False

    return least if saves_none(least) else least_limit(saves_none, least)


def _seconds(forecaster: Forecaster, plan: MemoryPlan) -> float | None:
    """What a plan takes; None where it does not fit: fewer workers have longer jobs."""
    try:
        return float(forecaster.forecast(plan)["seconds"])
    except MemoryLimitError:
        return None


def plan_conversion(
    source: Any, memory_limit: str | int | None, threads: int | None = None, like: Any = None, labels: Any = None,
    format: str | None = None, new_labels: bool = False, **options: Any,
) -> Forecast:  # fmt: skip
    """What `convert` would do: the beginning of the input is read to foresee sizes and time."""
    # `train` starts in less time without what converts
    from xmc_stream.convert.conversion import LoadJob, threads_for
    from xmc_stream.convert.opening import open_source
    from xmc_stream.convert.options import ConvertOptions, taken_over, without_labels
    from xmc_stream.convert.plan import least_of_conversion, plan_memory, refuse_unless_it_fits

    limit = Execution(memory_limit).limit()
    train = None if like is None else taken_over(like)
    read = ConvertOptions(labels=labels, format=format, **options)
    opened = open_source(source, read, without_labels(train, options) if new_labels else train)
    if opened.alone:
        raise InputError("standard input and pipes can be read once: plan the conversion of a file")
    try:
        LoadJob(opened).run()
        resident_bytes = resident()
        threads = threads_for(opened, threads)

        def plan(size: int) -> ConversionPlan:
            return plan_memory(opened, MemoryLimit(size).budget(resident_bytes), threads)

        chosen = plan(limit.limit)
        least = least_of_conversion(opened, limit, chosen)
        forecast: Forecast = {"command": "convert", "fits": True, "memory_limit": limit.limit}
        try:
            refuse_unless_it_fits(opened, limit, chosen)
        except MemoryLimitError as error:
            forecast |= {"fits": False, "why": error.args[0]}
        plan(max(limit.limit, resident_bytes + _PROBE_ROOM))
        seen, x_seen, y_seen, took, whole = _read_a_little(opened.parts())
        part = 1.0 if whole else min(1.0, seen / max(opened.bytes_in - getattr(opened, "bytes_beside", 0), 1)) or 1.0
        x, y = (int(n / part * (1.0 if part == 1.0 else _MARGIN)) for n in (x_seen, y_seen))
        opened.x_entries, opened.y_entries = (
            x + getattr(opened, "entries_beside", 0),
            y,
        )  # as foreseen, no longer at most
        parts = {"process": resident_bytes + _EDGES, **plan(limit.limit).needs}
        forecast |= {
            "passes": 1,
            "row_blocks": len(opened.parts()),
            "n_samples": opened.n_samples,
            "nnz_features": x,
            "nnz_labels": y,
            "bytes_read": opened.bytes_in,
            "peak_rss": min(sum(parts.values()), limit.limit),
            "peak_phase": "convert",
            "peak_parts": parts,
            "seconds": round(2.0 * took / part / chosen.threads + 0.3, 1),
        }
    finally:
        opened.close()
    return {**forecast, "least_limit": least, "limit_for_fewest_passes": least, "threads": chosen.threads}


def _read_a_little(parts: Sequence[Part]) -> tuple[int, int, int, float, bool]:
    """Bytes of input, values of X, positives and seconds of the first rows of each kind of part; whether this is all."""
    found = {"X": 0, "Y": 0}
    seen, began = 0, time.perf_counter()
    kinds = {part.sides: part for part in reversed(parts)}
    whole = len(kinds) == len(parts)
    for part in kinds.values():
        with tempfile.TemporaryDirectory(prefix="xmc_stream-") as folder:
            notes: dict[str, Any] = {"folder": folder}
            for block in part.blocks(notes):
                for side, rows in zip(part.sides, block, strict=True):
                    found[side] += len(rows[1])
                if time.perf_counter() - began > _PROBE_SECONDS:
                    whole = False
                    break
            seen += notes.get("bytes_read", 0)
    return seen, found["X"], found["Y"], time.perf_counter() - began, whole


def plan_line(forecast: Mapping[str, Any], spent: float = 0.0) -> str:
    """A plan in one line. spent: seconds that have gone by, with loading and compiling kernels."""
    disk = f", at most about {format_size(forecast['disk_bytes'])} of disk" if "disk_bytes" in forecast else ""
    return (
        f"about {duration(spent + forecast['seconds'])}, peak memory {format_size(forecast['peak_rss'])} of "
        f"{format_size(forecast['memory_limit'])}, {_passes(forecast, brief=True)} "
        f"({format_size(forecast['bytes_read'])} to read{disk})"
    )


def plan_lines(forecast: Mapping[str, Any]) -> list[str]:
    """A plan that fits, for a terminal: a table of what memory goes to, the limits that would do."""
    parts = sorted(forecast["peak_parts"].items(), key=lambda part: -part[1])
    lines = [
        f"reading        {_passes(forecast)}, {format_size(forecast['bytes_read'])} in all",
        f"time           about {duration(forecast['seconds'])}; threads: {forecast['threads']}",
    ]
    if "workers" in forecast:
        times = ", ".join(f"{n}: {duration(seconds)}" for n, seconds in forecast["seconds_by_workers"].items())
        lines.append(f"workers        {times}")
    if compiling := forecast.get("compiling"):
        lines.append(f"               and {duration(compiling)} for compiling kernels, once on this machine: done now")
    lines += [
        f"peak memory    {format_size(forecast['peak_rss'])} of {format_size(forecast['memory_limit'])}, in the phase "
        f"'{forecast['peak_phase']}':",
        *(f"  {format_size(size):>10}   {name}" for name, size in parts),
    ]
    if "disk_bytes" in forecast:
        lines.append(f"disk           at most about {format_size(forecast['disk_bytes'])} until the model is whole")
    least, fewest = forecast["least_limit"], forecast["limit_for_fewest_passes"]
    lines.append("least limit    " + flags.MEMORY_LIMIT + f" {in_megabytes(least)}")
    if fewest != least:
        lines.append("fewest passes  from " + flags.MEMORY_LIMIT + f" {in_megabytes(fewest)} on")
    return lines


def _passes(forecast: Mapping[str, Any], brief: bool = False) -> str:
    blocks = forecast.get("class_blocks")
    if blocks is None:
        again = forecast.get("tiles_made", 1)
        most = "at most " if forecast.get("at_most") else ""
        again = 1 if brief else again
        return most + passes_in_words(forecast["passes"]) + (f", tiles made {again} times" if again > 1 else "")
    if not forecast["rounds_known"]:
        return f"{passes_in_words(blocks[-1])} in each round, as many rounds as the tolerance takes"
    if brief:
        return passes_in_words(forecast["passes"])
    more = f" (class blocks of each search: {', '.join(map(str, blocks))})" if max(blocks, default=0) > 1 else ""
    if forecast["solve_passes"]:
        more += f" and {forecast['solve_passes']} for large classes"
    return passes_in_words(forecast["passes"]) + more


def passes_in_words(passes: float) -> str:
    return "1 pass over the data" if passes == 1 else f"{passes:g} passes over the data"
