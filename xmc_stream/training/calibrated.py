"""Training a model, and another one on a part of the rows whose scores of the rest calibrate it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from xmc_stream.datasets.split import split_once
from xmc_stream.errors import InputError, MemoryLimitError
from xmc_stream.evaluation.calibrate import calibrate_with, refuse_few
from xmc_stream.methods.contract import Task
from xmc_stream.methods.registry import method_of
from xmc_stream.models import Execution, Model
from xmc_stream.runtime.ledger import Ledger
from xmc_stream.store.model import CALIBRATION, FRACTION
from xmc_stream.store.places import LOCK, remove_held, remove_left, remove_work
from xmc_stream.system.progress import working
from xmc_stream.training.plan import plan_training
from xmc_stream.training.train import train

_SPLIT, _HALF, _TRAINED = 0.03, 0.5, 0.97  # of the whole: where the split, the first and the second training end


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
    foreseen = plan_training(dataset, parameters, seed, execution, calibrate=fraction)
    if not foreseen["fits"]:
        raise MemoryLimitError(foreseen["why"], foreseen["least_limit"])
    if overwrite:
        remove_work(work / LOCK)
    with Ledger(work / LOCK, {"command": "calibrate"}), working("train", execution.progress) as bar:
        with bar.part(0.0, _SPLIT):
            part, held_out = split_once(dataset, work, fraction, seed, execution.memory_limit, check)
        try:
            refuse_few(held_out)
        except InputError:
            remove_held(work / LOCK)
            raise
        with bar.part(_SPLIT, _HALF):
            of_part = Task(part, parameters, seed)
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
