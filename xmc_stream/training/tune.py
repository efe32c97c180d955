"""Choosing parameters: settings of a method compared on rows held out of the training set."""

from __future__ import annotations

import itertools
import json
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from xmc_stream import flags
from xmc_stream.arguments import native_arguments
from xmc_stream.errors import InputError, MemoryLimitError, ResumeError
from xmc_stream.evaluation.evaluate import COMPARING, comparing_needs
from xmc_stream.methods import registry
from xmc_stream.methods.contract import Task
from xmc_stream.methods.parameters import Parameters, spelled
from xmc_stream.models import Execution, load_model
from xmc_stream.runtime.ledger import check_identity
from xmc_stream.store.dataset import Dataset, as_dataset
from xmc_stream.store.places import (
    LEDGER,
    put_back,
    refuse_foreign_names,
    refuse_unwritable,
    remove_left,
    target_paths,
    writing,
)
from xmc_stream.system.files import regular, temporary_folder
from xmc_stream.system.memory import MemoryLimit, peak_resident
from xmc_stream.system.progress import LOG, working
from xmc_stream.training.plan import plan_training
from xmc_stream.training.train import train
from xmc_stream.training.trials import Trials

RANKED = ("P", "nDCG", "R", "PSP", "PSnDCG")
OF_LABELS = ("average_auc", "hamming_loss", "macro_F1", "macro_F1_present")
FALLING = ("hamming_loss",)  # the lower, the better
_KS = (1, 3, 5)
_COMPARED = 0.8  # of the whole, that comparing settings takes where the best one is trained on all rows then


@native_arguments
def tune(
    data: Dataset | str | Path,
    solver: str = "ppdsparse",
    grid: Mapping[str, Sequence[Any]] | None = None,
    *,
    fixed: Mapping[str, Any] | None = None,
    metric: str = "P@1",
    held_out: float = 0.1,
    seed: int = 0,
    out: str | Path | None = None,
    work: str | Path | None = None,
    model: str | Path | None = None,
    overwrite: bool = False,
    force: bool = False,
    check: bool = True,
    memory_limit: str | int | None = None,
    threads: int | None = None,
    scheduler: Any = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Train a method with each setting of a grid on a part of the rows, and compare the models on the rest.

    The rows are split as `split` does it: every label keeps its share. All combinations of the values in `grid` are
    tried, on the same rows. Where the method can, a setting begins from the model of another one and takes a part of a
    training's work: PPDSparse does, for lam, tau and C. Where a training has one job at a time (PD-Sparse, MEMOIR), several
    are trained beside each other, as many as there are threads, or threads of workers, and as their parts of the memory
    limit allow. A run that was killed goes on when the same
    call is made again, with every setting that was finished. docs/tuning.md says more.

    Parameters
    ----------
    data : Dataset, str or Path
        The training set, or its path.
    solver : str, default "ppdsparse"
        The method, by its name behind `--solver`.
    grid : dict of str to sequence, or None, default None
        Values to try, by the names of parameters. None: those that the method names, see docs/tuning.md.
    fixed : dict or None, default None
        Other parameters, the same in all settings.
    metric : str, default "P@1"
        What is compared: P@k, nDCG@k, R@k, PSP@k or PSnDCG@k for a k from 1 on, average_auc, hamming_loss (the lowest is
        best), macro_F1 or macro_F1_present. `evaluate` has their formulas.
    held_out : float in (0, 1), default 0.1
        The share of the rows that no model is trained on: 100 rows at least.
    seed : int in [0, 2**63), default 0
        For the split and all trainings.
    out : str, Path or None, default None
        A file for what is returned, as JSON. The same call then returns it without work, also by another metric.
    work : str, Path or None, default None
        The folder of the parts, the models and the ledger while it runs; it is removed at the end. None: `out` with
        .partial behind it, or without `out` a temporary folder, so that a run cannot go on after a kill.
    model : str, Path or None, default None
        Train the best setting on all rows in the end, into this model: the one that `fit` makes with these parameters.
    overwrite : bool, default False
        Replace `out`, `model` and an unfinished run.
    force : bool, default False
        Go on with a run that began on another type of processor or with other package versions.
    check : bool, default True
        Compare the data with their checksums before the first training.
    memory_limit : str, int or None, default None
        Peak resident memory of the process, as "4GB" or in bytes. On a cluster: of each worker. None: what it holds,
        and three quarters of what is free.
    threads : int or None, default None
        Threads of this process, from 1 on. None: as many as it has processors.
    scheduler : dask client, str or None, default None
        A client of dask.distributed, or the address of a scheduler, to run the jobs there: `work` and the
        folder for temporary files must be shared ones then. None: this process.
    progress : bool, default False
        Show a bar on stderr, where that is a terminal.

    Returns
    -------
    dict
        solver, metric, fixed, seed, held_out, n_train and n_held_out (rows), settings, best (an index of settings),
        parameters (of the best, with the fixed ones), set (these, as options of `train`), seconds and peak_rss (bytes) of
        this session, memory_limit, resumed, and model (the path, or None). settings has a dict for each, in the order of
        the grid: parameters (those of the grid), figures (all metrics), nnz, model_bytes, seconds, passes, bytes_streamed,
        bytes_gathered, and start (the setting whose model it began from, or None).

    Raises
    ------
    InputError
        A parameter or value that the method does not take, a metric that does not exist, or too few rows to hold out:
        before any work.
    ResumeError
        At `out` or `work` there is another tuning, or another process writes there.
    StoreError
        The data are damaged, or a file cannot be written.
    MemoryLimitError
        The memory limit cannot work, or was nearly reached.
    JobError
        A job failed on a worker of a cluster.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, xmc_stream as xs
    >>> X = sp.csr_matrix(np.repeat(np.eye(4, dtype=np.float32), 250, axis=0))  # row i has label i // 250
    >>> data = xs.convert(X, "tune.xmc", labels=X)
    >>> report = xs.tune(data, grid={"lam": [0.01, 1000.0]}, metric="P@1")
    >>> report["n_held_out"], report["parameters"], report["set"]
    (100, {'lam': 0.01}, '--solver ppdsparse --set lam=0.01')
    >>> [setting["figures"]["P@1"] for setting in report["settings"]]
    [100.0, 25.0]
    """
    began = time.perf_counter()
    dataset = as_dataset(data)
    execution = Execution(memory_limit, threads, scheduler, progress)
    values, settings = _tried(solver, grid, fixed or {})
    fixed = {name: getattr(settings[0], name) for name in fixed or {}}
    kept, path = (None if name is None else name.absolute() for name in _targets(out, model))
    if work is None and kept is not None:
        work = kept.with_name(f"{kept.name}.partial")
    limit = execution.limit([dataset.path], [tempfile.gettempdir() if work is None else work])
    asked = Trials(values, settings, dataset, seed, held_out, _ks(metric, dataset), execution, force, check)
    asked.refuse_unfit()
    _refuse_targets(kept, path)
    scratch = temporary_folder() if work is None else nullcontext(Path(work).absolute())
    with working("tune", execution.progress) as bar, scratch as place:
        folder = place / "tuning" if work is None else place
        if kept is not None and kept.exists() and not overwrite:
            found, resumed = _stored(kept, asked.identity, force), True
        else:
            with bar.part(0.0, 1.0 if model is None else _COMPARED):
                found, resumed = _compared(asked, folder, limit, overwrite)
        said = found.pop("metric", None)
        about = {"solver": solver, "metric": metric, "fixed": fixed, "seed": seed, "held_out": held_out}
        report = {**about, **found, **_chosen(found["settings"], metric, solver, fixed, values)}
        if path is not None:
            LOG.info("training %s on all rows: %s", path.name, report["set"])
            with bar.part(_COMPARED, 1.0):
                task = Task(dataset, settings[report["best"]], seed)
                _, report["model_report"] = train(task, path, execution, overwrite=overwrite, force=force, check=check)
        if kept is not None and said != metric:
            _store(kept, {**report, "identity": asked.identity})
        remove_left(folder / LEDGER)
    return {
        **report,
        "model": None if model is None else str(model),
        "seconds": round(time.perf_counter() - began, 3),
        "peak_rss": peak_resident(),
        "memory_limit": limit.limit,
        "resumed": resumed,
    }


def _compared(asked: Trials, folder: Path, limit: MemoryLimit, overwrite: bool) -> tuple[dict[str, Any], bool]:
    """What the trials found, and whether a run went on. A refusal names the least limit for all of them."""
    dataset, execution = asked.dataset, asked.execution
    try:
        if execution.scheduler is None:  # else the limit is that of workers
            limit.check(comparing_needs(max(asked.ks), dataset, dataset), COMPARING)
        return asked.run(folder, overwrite)
    except MemoryLimitError as error:
        if error.least is None:
            raise
        plans = [plan_training(dataset, setting, asked.seed, execution) for setting in asked.settings]
        raise MemoryLimitError(error.args[0], max(error.least, *(plan["least_limit"] or 0 for plan in plans))) from None


def _tried(
    solver: str, grid: Mapping[str, Sequence[Any]] | None, fixed: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[Parameters]]:
    """All combinations of a grid, the first parameter slowest: its values, and all parameters of each.

    Raises InputError for one that the method does not take.
    """
    declared = registry.declared(solver)
    if grid is None:
        grid = {name: values for name, values in declared.grids.get(solver, {}).items() if name not in fixed}
    if not grid:
        raise InputError(
            f"there is nothing to choose: give values of {declared.label}'s parameters, as "
            + flags.GRID
            + " lam=0.01,0.1"
        )
    grid = {
        name: values.tolist() if hasattr(values, "tolist") else values for name, values in grid.items()
    }  # an array's
    for name, values in grid.items():
        if name in fixed:
            raise InputError(f"{name} is given as one value and in the grid: leave one of them out")
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise InputError(f"the grid's {name} must be a list of values. Got {values!r}.")
    tried: list[dict[str, Any]] = []
    settings: list[Parameters] = []
    for combination in itertools.product(*grid.values()):
        setting = registry.parameters(solver, {**fixed, **dict(zip(grid, combination, strict=True))})
        if setting not in settings:
            settings.append(setting)
            tried.append({name: getattr(setting, name) for name in grid})
    return tried, settings


def _ks(metric: str, dataset: Dataset) -> tuple[int, ...]:
    """The k of all figures, that of the metric among them. Raises InputError for a metric that is none."""
    named = re.fullmatch(rf"({'|'.join(RANKED)})@([1-9]\d*)", metric)
    if named is None and metric not in OF_LABELS:
        ranked = ", ".join(f"{name}@k" for name in RANKED)
        raise InputError(f"there is no metric {metric!r}: there are {ranked} and {', '.join(OF_LABELS)}")
    mine = (int(named[2]),) if named else ()
    if max(mine, default=1) > dataset.n_labels:
        raise InputError(
            f"{metric} asks for more labels than the {dataset.n_labels} of {dataset.path}: take a smaller k"
        )
    return tuple(sorted({*mine, *(k for k in _KS if k <= dataset.n_labels)}))


def _chosen(
    found: Sequence[Mapping[str, Any]], metric: str, solver: str, fixed: dict[str, Any], tried: list[dict[str, Any]]
) -> dict[str, Any]:
    """The settings, and that with the best metric; of equal ones that with the smallest model, then the first."""
    if any(metric not in one["figures"] for one in found):
        raise InputError(
            f"{metric} is left out of the figures of {solver}, as not every label has a score: compare by another metric"
        )
    sign = 1 if metric in FALLING else -1
    best = min(range(len(found)), key=lambda i: (sign * found[i]["figures"][metric], found[i]["nnz"], i))
    chosen = {**fixed, **tried[best]}
    return {
        "settings": [{**one, "parameters": values} for one, values in zip(found, tried, strict=True)],
        "best": best,
        "parameters": chosen,
        "set": " ".join(("--solver", solver, *(f"--set {name}={_word(value)}" for name, value in chosen.items()))),
    }


def _word(value: Any) -> str:
    """A value as `--set` takes it, without loss."""
    return json.dumps(value) if isinstance(value, float | tuple | list) else spelled(value)


def _targets(out: str | Path | None, model: str | Path | None) -> tuple[Path | None, Path | None]:
    """The paths of what is written in the end."""
    paths = iter(target_paths([name for name in (out, model) if name is not None]))
    return (None if out is None else next(paths), None if model is None else next(paths))


def _refuse_targets(out: Path | None, model: Path | None) -> None:
    """Raise InputError or StoreError where what is found could not be written in the end."""
    for path in (out, model):
        if path is not None:
            refuse_foreign_names(path, LEDGER)
            put_back(path)
            with writing(path, "give the same command again, or another name"):
                refuse_unwritable(path)
    if out is not None and out.exists() and not out.is_file():
        raise InputError(f"{out} exists and is no file: give another name, or remove it yourself")
    if model is not None and model.exists():
        load_model(model)  # only a model is replaced, or was trained before


def _stored(out: Path, identity: Mapping[str, Any], force: bool) -> dict[str, Any]:
    """What an earlier run found, of a file that it wrote. Raises ResumeError where it was another one."""
    try:
        with open(out, "rb", opener=regular) as file:
            kept = json.load(file)
        before = kept["identity"]
        found = {name: kept[name] for name in ("metric", "n_train", "n_held_out", "settings")}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise InputError(
            f"{out} exists and is not what `tune` writes: give another name, or remove it yourself"
        ) from None
    try:
        check_identity(out, before, identity, force)
    except ResumeError as error:
        raise ResumeError(error.said.each(lambda text: text.replace(str(out.parent), str(out), 1))) from None
    return found


def _store(out: Path, report: Mapping[str, Any]) -> None:
    """Write the file, under its name when it is whole."""
    with writing(out, "give the same command again, it goes on"):
        out.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(out.parent) as scratch:
            (scratch / "tuning").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            (scratch / "tuning").replace(out)
