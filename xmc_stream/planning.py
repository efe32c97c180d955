"""What a command would do under its limit, before it does it: passes, bytes, blocks, peak memory, time, least limit.

Everything here calls the plans that the commands themselves use; nothing is written.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xmc_stream.convert import opened_source, taken_over
from xmc_stream.convert.jobs import LoadJob
from xmc_stream.convert.plan import ConversionPlan, plan_memory
from xmc_stream.convert.run import threads_for
from xmc_stream.convert.source import Part
from xmc_stream.engine.runner import Engine
from xmc_stream.errors import InputError, MemoryLimitError
from xmc_stream.evaluation import comparing_needs
from xmc_stream.jobs.plan import MIB, Cuts, MemoryPlan
from xmc_stream.jobs.warm import warm_up, warm_up_prediction
from xmc_stream.memory import MemoryLimit, available_threads, format_size, resident
from xmc_stream.methods.lowrank.leml import LEMLProbe, lowrank_needs, plan_lowrank
from xmc_stream.methods.lowrank.leml import most_passes as most_lowrank_passes
from xmc_stream.methods.lowrank.parameters import CPLSTParameters, LEMLParameters
from xmc_stream.methods.pdsparse.parameters import PDSparseParameters
from xmc_stream.methods.pdsparse.passes import PassProbe
from xmc_stream.methods.pdsparse.plan import pass_needs, plan_pass
from xmc_stream.methods.pdsparse.run import most_passes
from xmc_stream.methods.ppdsparse.forecast import Forecast, Forecaster
from xmc_stream.methods.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.methods.ppdsparse.probe import ProbeJob
from xmc_stream.methods.ppdsparse.run import solve_plan
from xmc_stream.models import Execution, Model
from xmc_stream.models.counts import COUNT_BYTES
from xmc_stream.models.linear.predict import (
    PredictPlan,
    PredictProbe,
    PredictRun,
    plan_predict,
    predict_bytes,
    predict_needs,
)
from xmc_stream.models.linear.units import cut_units
from xmc_stream.models.lowrank.predict import plan_scores, score_needs
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.model import StoredModel

_EDGES = 16 * MIB  # what no component names: ledger, events, the scheduler's own objects, pages from run to run
_MARGIN = 1.1  # on what the beginning of an input says of all of it
_PROBE_ROOM = 64 * MIB  # for reading that beginning
_PROBE_SECONDS = 0.3
_CLASS_BYTES = 144  # of a class while a training is planned: what it holds and takes in each round, as foreseen
_MULTIPLY_ADDS = (
    5e9  # in a second, of dense products on one thread: a guess, for a time that is said to be about so long
)
_FINEST = 10**6  # limits are proposed to a megabyte

Figures = dict[str, Any]
Parameters = PPDSparseParameters | PDSparseParameters | LEMLParameters | CPLSTParameters


def memory_plan(engine: Engine, limit: MemoryLimit, held: int, cuts: Cuts | None = None) -> MemoryPlan:
    """What the jobs may hold when libraries and kernels hold so many bytes."""
    budget = limit.limit - held - limit.reserve
    return MemoryPlan(limit.limit, budget, engine.threads, engine.processes, cuts or Cuts())


def probe_training(
    engine: Engine, dataset: Dataset, parameters: PPDSparseParameters, seed: int, plan: MemoryPlan,
    warm_start: StoredModel | None = None,
) -> Forecaster:  # fmt: skip
    """Solve some classes and score some rows within the plan, and spread what was seen over all classes.

    Raises MemoryLimitError where no solve fits at all, or sizes of so many classes do not.
    """
    statistics = {f"sizes of {dataset.n_labels} classes": _CLASS_BYTES * dataset.n_labels}
    plan.refuse_unless(statistics, "planning the training")
    sizes = solve_plan(plan, dataset, parameters, warm_start is not None, cut_units(dataset))
    probe = engine.once(ProbeJob(str(dataset.path), parameters, seed, plan, sizes))
    return Forecaster(dataset, parameters, probe, warm_start)


def training_figures(forecast: Forecast, limit: int, held: int, before: int = 0) -> Figures:
    """A forecast and the process's own memory as figures; keys as in `plan --json`. before: a peak that has been."""
    parts = {"process": held + _EDGES, **forecast.phases[forecast.largest]}
    return {
        "command": "train",
        "fits": True,
        "memory_limit": limit,
        "passes": forecast.passes,
        "solve_passes": forecast.solve_passes,
        "rounds_known": forecast.capped,
        "class_blocks": list(forecast.blocks),
        "row_blocks": forecast.row_blocks,
        "bytes_read": forecast.bytes_streamed + forecast.bytes_gathered,
        "bytes_streamed": forecast.bytes_streamed,
        "bytes_gathered": forecast.bytes_gathered,
        "peak_rss": max(min(sum(parts.values()), limit), before),
        "peak_phase": forecast.largest,
        "peak_parts": parts,
        "seconds": round(forecast.seconds, 1),
    }


def pass_figures(
    engine: Engine, dataset: Dataset, parameters: PDSparseParameters, seed: int, plan: MemoryPlan, held: int
) -> Figures:  # fmt: skip
    """What a training of PD-Sparse would do, as figures: at most so many passes; its tables grow as they are needed."""
    sizes = plan_pass(plan, dataset, parameters)
    probe = engine.once(PassProbe(str(dataset.path), parameters, seed, sizes))
    passes = most_passes(parameters, dataset.n_samples)
    n_bytes = dataset.X_rows().nnz * 8 + dataset.Y_rows().nnz * 4
    parts = {"process": held + _EDGES, **pass_needs(dataset, parameters), "tables, at most": probe["tables"]}
    return {
        "command": "train",
        "fits": True,
        "memory_limit": plan.limit,
        "passes": passes,
        "at_most": True,
        "bytes_read": passes * n_bytes,
        "bytes_streamed": passes * n_bytes,
        "bytes_gathered": 0,
        "peak_rss": min(sum(parts.values()), plan.limit),
        "peak_phase": "pass",
        "peak_parts": parts,
        "seconds": round(passes * probe["seconds"] * dataset.n_samples, 1),
    }


def lowrank_figures(
    engine: Engine, dataset: Dataset, parameters: LEMLParameters, seed: int, plan: MemoryPlan, held: int
) -> Figures:  # fmt: skip
    """What a training of LEML would do, as figures: at most so many passes over X, each over as many columns as there are."""
    sizes = plan_lowrank(plan, dataset, parameters)
    probe = engine.once(LEMLProbe(str(dataset.path), parameters, seed))
    passes = most_lowrank_passes(parameters)
    runs = len(sizes.cuts)
    n_bytes = dataset.X_rows().nnz * 8 * runs
    width = max(last - first for first, last in sizes.cuts)
    parts = {"process": held + _EDGES, **lowrank_needs(plan, dataset, parameters, width)}
    return {
        "command": "train",
        "fits": True,
        "memory_limit": plan.limit,
        "passes": passes,
        "at_most": True,
        "column_blocks": runs,
        "bytes_read": passes * n_bytes,
        "bytes_streamed": passes * n_bytes,
        "bytes_gathered": 0,
        "peak_rss": min(sum(parts.values()), plan.limit),
        "peak_phase": "W step",
        "peak_parts": parts,
        "seconds": round(passes * probe["seconds"] / (engine.threads * engine.processes), 1),
    }


def plan_training(
    dataset: Dataset, parameters: Parameters, seed: int, execution: Execution,
    warm_start: StoredModel | None = None,
) -> Figures:  # fmt: skip
    """What `train` would do. A limit that cannot work gives fits=False and why, instead of an error."""
    if not dataset.n_samples or not dataset.n_labels or not dataset.n_features:
        raise InputError(f"{dataset.path} has no samples, features or labels: there is nothing to learn from")
    limit = execution.limit()
    with _engine(execution, limit) as engine:
        held = engine.warm(warm_up(dataset, parameters, warm_start is not None))

        def at(size: int) -> MemoryPlan:
            return memory_plan(engine, MemoryLimit(size), held, execution.cuts)

        if isinstance(parameters, CPLSTParameters):
            parameters = parameters.steps(dataset.n_features, dataset.n_labels)
        if not isinstance(parameters, PPDSparseParameters):
            return _plan_passes(engine, dataset, parameters, seed, at, limit.limit, held)
        room = limit.limit
        while True:  # the probe gets what it needs, also where the limit asked for is too small
            try:
                forecaster = probe_training(engine, dataset, parameters, seed, at(room), warm_start)
                break
            except MemoryLimitError:
                room *= 2

        def passes(size: int) -> int | None:
            try:
                return forecaster.forecast(at(size)).passes
            except MemoryLimitError:
                return None

        least = _least(lambda size: passes(size) is not None, limit.limit)
        fewest = _least(lambda size: passes(size) == forecaster.searches, limit.limit)
        advice = {"least_limit": least, "limit_for_fewest_passes": fewest, "threads": engine.threads}
        try:
            figures = training_figures(forecaster.forecast(at(limit.limit)), limit.limit, held)
        except MemoryLimitError as error:
            figures = {"command": "train", "fits": False, "memory_limit": limit.limit, "why": str(error)}
    return {**figures, **advice}


def _plan_passes(
    engine: Engine, dataset: Dataset, parameters: PDSparseParameters | LEMLParameters, seed: int,
    at: Callable[[int], MemoryPlan], limit: int, held: int,
) -> Figures:  # fmt: skip
    def works(size: int) -> bool:
        try:
            if isinstance(parameters, LEMLParameters):
                plan_lowrank(at(size), dataset, parameters)
            else:
                plan_pass(at(size), dataset, parameters)
        except MemoryLimitError:
            return False
        return True

    least = _least(works, limit)
    advice = {"least_limit": least, "limit_for_fewest_passes": least, "threads": 1}
    try:
        if isinstance(parameters, LEMLParameters):
            advice["threads"] = engine.threads
            return {**lowrank_figures(engine, dataset, parameters, seed, at(limit), held), **advice}
        return {**pass_figures(engine, dataset, parameters, seed, at(limit), held), **advice}
    except MemoryLimitError as error:
        return {"command": "train", "fits": False, "memory_limit": limit, "why": str(error), **advice}


def plan_prediction(
    model: Model, dataset: Dataset, k: int, execution: Execution, filtered: bool = False, evaluate: bool = False
) -> Figures:
    """What `predict` would do, or `evaluate` with a model. A limit that cannot work gives fits=False and why.

    filtered: whether a filter file is given; it is not read.
    """
    limit = execution.limit()
    with _engine(execution, limit) as engine:
        held = engine.warm(warm_up_prediction(model, evaluate))
        if model.rank:
            return _plan_scores(engine, model, dataset, k, limit.limit, held, evaluate)
        PredictRun(model, dataset, k, model.path, memory_plan(engine, limit, held))  # the shapes fit each other
        of_labels = COUNT_BYTES * model.n_labels if evaluate else 0

        def at(size: int) -> MemoryPlan:
            return memory_plan(engine, MemoryLimit(size), held, execution.cuts)

        def sizes_at(size: int) -> PredictPlan:
            return plan_predict(at(size), model, dataset.n_samples, k, filtered or evaluate, of_labels)

        def works(size: int) -> bool:
            try:
                sizes_at(size)
            except MemoryLimitError:
                return False
            return True

        def once(size: int) -> bool:
            return works(size) and sizes_at(size).keeps_tiles

        advice = {
            "least_limit": _least(works, limit.limit),
            "limit_for_fewest_passes": _least(once, limit.limit),
            "threads": engine.threads,
        }
        name = "evaluate" if evaluate else "predict"
        plan = at(limit.limit)
        try:
            sizes = sizes_at(limit.limit)
        except MemoryLimitError as error:
            return {"command": name, "fits": False, "memory_limit": limit.limit, "why": str(error), **advice}
        parts = {"process": held + _EDGES, **predict_needs(plan, model, dataset, k, sizes)}
        if evaluate:
            parts |= {"counts of labels": engine.threads * of_labels, "comparing": sum(comparing_needs(k).values())}
        probe = engine.once(PredictProbe(str(model.path), str(dataset.path), sizes))
        n_bytes = predict_bytes(dataset, sizes, evaluate)
        times, sweeps = sizes.times_made(dataset), 1 + evaluate
        work = probe["score"] * dataset.n_samples * model.n_labels + probe["make"] * times * model.nnz
        work *= sweeps
    return {
        "command": name,
        "fits": True,
        "memory_limit": limit.limit,
        "passes": 1,
        "row_blocks": sizes.row_blocks(dataset),
        "bytes_read": n_bytes,
        "bytes_streamed": n_bytes,
        "bytes_gathered": 0,
        "tiles_made": times,
        "peak_rss": min(sum(parts.values()), limit.limit),
        "peak_phase": name,
        "peak_parts": parts,
        "seconds": round(work / (engine.threads * engine.processes) + probe["read"] * n_bytes + 0.5, 1),
        **advice,
    }


def _plan_scores(
    engine: Engine, model: Model, dataset: Dataset, k: int, limit: int, held: int, evaluate: bool
) -> Figures:  # fmt: skip
    """What `predict` would do with a low-rank model, or `evaluate`."""
    of_labels, n = COUNT_BYTES * model.n_labels if evaluate else 0, dataset.n_samples

    def works(size: int) -> bool:
        try:
            plan_scores(memory_plan(engine, MemoryLimit(size), held), model, n, k, of_labels)
        except MemoryLimitError:
            return False
        return True

    least, plan = _least(works, limit), memory_plan(engine, MemoryLimit(limit), held)
    advice = {"least_limit": least, "limit_for_fewest_passes": least, "threads": engine.threads}
    name = "evaluate" if evaluate else "predict"
    try:
        sizes = plan_scores(plan, model, n, k, of_labels)
    except MemoryLimitError as error:
        return {"command": name, "fits": False, "memory_limit": limit, "why": str(error), **advice}
    width = max(last - first for first, last in sizes.cuts)
    parts = {"process": held + _EDGES, **score_needs(plan, model, k, width, min(sizes.rows_per_job, n), of_labels)}
    n_bytes = len(sizes.cuts) * dataset.X_rows().nnz * 8
    work = (dataset.X_rows().nnz + (1 + evaluate) * n * model.n_labels) * model.rank
    return {
        "command": name,
        "fits": True,
        "memory_limit": limit,
        "passes": 1,
        "row_blocks": len(sizes.ranges(n)),
        "bytes_read": n_bytes,
        "bytes_streamed": n_bytes,
        "bytes_gathered": 0,
        "peak_rss": min(sum(parts.values()), limit),
        "peak_phase": name,
        "peak_parts": parts,
        "seconds": round(work / _MULTIPLY_ADDS / (engine.threads * engine.processes) + 0.5, 1),
        **advice,
    }


def plan_conversion(
    source: Any, memory_limit: str | int | None, threads: int | None = None, like: Any = None, labels: Any = None,
    format: str | None = None, **options: Any,
) -> Figures:  # fmt: skip
    """What `convert` would do: the beginning of the input is read to foresee sizes and time."""
    limit = Execution(memory_limit).limit()
    opened = opened_source(source, labels, None if like is None else taken_over(like), format, options)
    if opened.alone:
        raise InputError("standard input and pipes can be read once: plan the conversion of a file")
    try:
        LoadJob(opened).run()
        held = resident()
        threads = threads_for(opened, threads)

        def plan(size: int) -> ConversionPlan:
            return plan_memory(opened, size - held - MemoryLimit(size).reserve, threads)

        def works(size: int) -> bool:
            return plan(size).need <= size - held - MemoryLimit(size).reserve

        figures: Figures = {"command": "convert", "fits": works(limit.limit), "memory_limit": limit.limit}
        least = _least(works, limit.limit)
        chosen = plan(limit.limit)
        if not figures["fits"]:
            try:
                limit.check(chosen.needs, "convert", limit.limit - held - limit.reserve)
            except MemoryLimitError as error:
                figures["why"] = str(error)
        plan(max(limit.limit, held + _PROBE_ROOM))
        seen, x_seen, y_seen, took, whole = _read_a_little(opened.parts())
        part = 1.0 if whole else min(1.0, seen / max(opened.bytes_in, 1)) or 1.0
        x, y = (int(n / part * (1.0 if part == 1.0 else _MARGIN)) for n in (x_seen, y_seen))
        opened.x_entries, opened.y_entries = x, y  # as foreseen, no longer at most
        parts = {"process": held + _EDGES, **plan(limit.limit).needs}
        figures |= {
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
    return {**figures, "least_limit": least, "limit_for_fewest_passes": least, "threads": chosen.threads}


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


def plan_line(figures: Mapping[str, Any]) -> str:
    """A plan in one line, for people."""
    parts = ", ".join(f"{name} {format_size(size)}" for name, size in figures["peak_parts"].items() if size >= MIB)
    return (
        f"{_passes(figures)}, {format_size(figures['bytes_read'])} to read, peak memory "
        f"{format_size(figures['peak_rss'])} of {format_size(figures['memory_limit'])} ({parts}), "
        f"about {_duration(figures['seconds'])}"
    )


def plan_lines(figures: Mapping[str, Any]) -> list[str]:
    """A plan for a terminal: the line, a table of what memory goes to, the limits that would do."""
    lines = []
    if figures["fits"]:
        lines = [
            f"reading        {_passes(figures)}, {format_size(figures['bytes_read'])} in all",
            f"time           about {_duration(figures['seconds'])}, from a short probe; threads: {figures['threads']}",
            f"peak memory    {format_size(figures['peak_rss'])} of {format_size(figures['memory_limit'])}, in the phase "
            f"'{figures['peak_phase']}':",
        ]
        parts = sorted(figures["peak_parts"].items(), key=lambda part: -part[1])
        lines += [f"  {format_size(size):>10}   {name}" for name, size in parts]
    else:
        lines = [f"does not fit   {figures['why']}"]
    least, fewest = figures["least_limit"], figures["limit_for_fewest_passes"]
    lines += [f"least limit    --memory-limit {_megabytes(least)}"]
    if fewest != least:
        lines += [f"fewest passes  from --memory-limit {_megabytes(fewest)} on"]
    return lines


def _megabytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size // 10**6}MB"


def _passes(figures: Mapping[str, Any]) -> str:
    blocks = figures.get("class_blocks")
    if blocks is None:
        again = figures.get("tiles_made", 1)
        most = "at most " if figures.get("at_most") else ""
        return most + _number(figures["passes"]) + (f", tiles made {again} times" if again > 1 else "")
    if not figures["rounds_known"]:
        return f"{_number(blocks[-1])} in each round, as many rounds as the tolerance takes"
    more = f" (class blocks of each search: {', '.join(map(str, blocks))})" if max(blocks) > 1 else ""
    if figures["solve_passes"]:
        more += f" and {figures['solve_passes']} for large classes"
    return _number(figures["passes"]) + more


def _number(passes: int) -> str:
    return "1 pass over the data" if passes == 1 else f"{passes} passes over the data"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _engine(execution: Execution, limit: MemoryLimit) -> Engine:
    return Engine(limit, execution.threads or available_threads(), execution.scheduler)


def _least(works: Callable[[int], bool], start: int) -> int | None:
    """The smallest limit that works, to a megabyte; None where none up to a thousand times the start does."""
    high = start
    while not works(high):
        high *= 2
        if high > 1000 * start:
            return None
    low = 0
    while high - low > _FINEST:
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle, high)
    return -(-high // _FINEST) * _FINEST
