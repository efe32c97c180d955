"""The scikit-learn face: an estimator joins a solver's plan with an engine, and a dataset with a model on disk."""

from __future__ import annotations

import platform
import shutil
import sys
import tempfile
import time
import weakref
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.convert import convert
from xmc_stream.engine.ledger import Ledger, check_identity, refuse_in_progress
from xmc_stream.engine.runner import Engine, wait_for_interrupted
from xmc_stream.errors import InputError, StoreError
from xmc_stream.jobs.check import check_jobs, check_state_jobs, key_of_state
from xmc_stream.jobs.job import Loop, Notes, Phase
from xmc_stream.jobs.plan import Cuts
from xmc_stream.jobs.ppdsparse import PPDSparseRun, model_attributes
from xmc_stream.jobs.warm import WarmUp
from xmc_stream.memory import available_threads, peak_resident
from xmc_stream.models import Execution, Model, load_model
from xmc_stream.planning import memory_plan, plan_line, plan_training, probe_training, training_figures
from xmc_stream.solvers.ppdsparse import DISMEC, PPDSparseParameters
from xmc_stream.store.dataset import Dataset, open_dataset
from xmc_stream.store.encoding import folder_bytes, writing
from xmc_stream.store.model import begin_model, finish_model
from xmc_stream.store.names import copy_vocabulary


class PPDSparse:
    """Class-separable primal-dual sparse one-vs-rest learning (Yen et al. 2017), from data on disk, in bounded memory.

    Per class:  F(w) = lam sum_{j>=1} |w_j| + (tau/2) ||w||^2 + C sum_i loss(w.x_i, y_i),  a bias apart from the l1 term

    Parameters of the model: lam, tau, C, loss ("squared_hinge" or "hinge"), bias, tol, max_rounds (None for no cap),
    epochs, last_epochs, added, prune, delta, min_value (see `solvers.ppdsparse`), seed. Of its execution, without
    influence on the model: memory_limit ("4GB" or bytes; of each worker on a cluster), threads, scheduler (a dask client
    or address), progress.

    After `fit`: model_ (an opened Model) and report_ (figures of the run, see DESIGN: train).
    """

    def __init__(
        self,
        lam: float = 0.01,
        tau: float = 1.0,
        C: float = 1.0,
        loss: str = "squared_hinge",
        bias: bool = True,
        tol: float = 0.01,
        max_rounds: int | None = 3,
        epochs: int = 2,
        last_epochs: int = 6,
        added: int = 50,
        prune: float = 0.0,
        delta: float = 0.0,
        min_value: float = 0.0,
        seed: int = 0,
        memory_limit: str | int | None = None,
        threads: int | None = None,
        scheduler: Any = None,
        progress: bool = False,
    ) -> None:
        self.lam = lam
        self.tau = tau
        self.C = C
        self.loss = loss
        self.bias = bias
        self.tol = tol
        self.max_rounds = max_rounds
        self.epochs = epochs
        self.last_epochs = last_epochs
        self.added = added
        self.prune = prune
        self.delta = delta
        self.min_value = min_value
        self.seed = seed
        self.memory_limit = memory_limit
        self.threads = threads
        self.scheduler = scheduler
        self.progress = progress
        self._folder = ""

    @classmethod
    def dismec(cls, **parameters: Any) -> PPDSparse:
        """With DiSMEC's setting (Babbar, Schoelkopf 2017): lam 0, tau 1, C 2, max_rounds 5, prune 0.01, unless given."""
        return cls(**{**DISMEC, **parameters})

    _EXECUTION = ("memory_limit", "threads", "scheduler", "progress")

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Parameters by name, as scikit-learn's tools ask for them."""
        names = [field.name for field in fields(PPDSparseParameters)]
        return {name: getattr(self, name) for name in (*names, "seed", *self._EXECUTION)}

    def set_params(self, **values: Any) -> PPDSparse:
        """Set parameters by name. Raises InputError for a name that is none."""
        for name, value in values.items():
            if name not in self.get_params():
                raise InputError(f"PPDSparse has no parameter {name!r}: it has {', '.join(self.get_params())}")
            setattr(self, name, value)
        return self

    def parameters(self) -> PPDSparseParameters:
        """The model's parameters, checked. Raises InputError naming the one that is out of range."""
        return PPDSparseParameters(**{field.name: getattr(self, field.name) for field in fields(PPDSparseParameters)})

    def fit(
        self,
        X: Any,
        Y: Any = None,
        model: str | Path | None = None,
        *,
        overwrite: bool = False,
        force: bool = False,
        check: bool = True,
        warm_start: Model | str | Path | None = None,
        cuts: Cuts | None = None,
    ) -> PPDSparse:
        """Train from a Dataset (or its path), or from scipy matrices X (n x D) and Y (n x K, non-zero where positive).

        model: where the model goes; without it a temporary folder, which lives as long as the estimator. A run that was
        killed goes on when the same call is made again. overwrite: replace a model of other data or parameters. force:
        resume on another processor type or package versions. check: compare the data with their checksums first.
        warm_start: a model of as many features and labels (or its path) to begin from instead of from nothing.
        Raises InputError, StoreError, ResumeError, MemoryLimitError, JobError.
        """
        parameters = self.parameters()
        if not isinstance(self.seed, int) or self.seed < 0:
            raise InputError(
                f"The 'seed' parameter of PPDSparse must be an int in [0, inf). Got {self.seed!r} instead."
            )
        if model is None or Y is not None:
            # lives as long as the estimator
            self._folder = tempfile.mkdtemp(prefix="xmc_stream-")
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        if Y is not None:
            dataset = convert(X, f"{self._folder}/data.xmc", labels=Y, memory_limit=self.memory_limit)
        else:
            dataset = X if isinstance(X, Dataset) else open_dataset(X)
        path = Path(f"{self._folder}/model" if model is None else model).absolute()
        execution = Execution(self.memory_limit, self.threads, self.scheduler, self.progress, cuts)
        start = warm_start if warm_start is None or isinstance(warm_start, Model) else load_model(warm_start)
        self.model_, self.report_ = train(
            dataset, path, parameters, self.seed, execution, overwrite, force, check, start
        )  # fmt: skip
        return self

    def plan(self, X: Any) -> dict[str, Any]:
        """What `fit` would do with a Dataset (or its path): passes, bytes, peak memory, seconds; keys as `plan --json`."""
        dataset = X if isinstance(X, Dataset) else open_dataset(X)
        execution = Execution(self.memory_limit, self.threads, self.scheduler)
        return plan_training(dataset, self.parameters(), self.seed, execution)

    def predict_topk(self, data: Any, k: int = 5) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The k best classes of each sample of a Dataset, scipy matrix or list of texts, and their scores: (n, k) each."""
        if not hasattr(self, "model_"):
            raise InputError("this PPDSparse is not fitted yet: call fit first, or load_model for a model on disk")
        execution = Execution(self.memory_limit, self.threads, self.scheduler, self.progress)
        return self.model_.predict_topk(data, k, execution)


def train(
    dataset: Dataset,
    path: Path,
    parameters: PPDSparseParameters,
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
    dataset: Dataset, path: Path, parameters: PPDSparseParameters, seed: int, execution: Execution, overwrite: bool,
    force: bool, check: bool, warm_start: Model | None,
) -> tuple[Model, dict[str, Any]]:  # fmt: skip
    began = time.perf_counter()
    if dataset.n_samples == 0 or dataset.n_labels == 0 or dataset.n_features == 0:
        raise InputError(f"{dataset.path} has no samples, features or labels: there is nothing to learn from")
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
            held = engine.warm(WarmUp.for_training(dataset, parameters, warm_start is not None))
            plan = memory_plan(engine, limit, held, execution.cuts)
            forecast = probe_training(engine, dataset, parameters, seed, plan, warm_start).forecast(plan)
            if execution.progress:
                figures = training_figures(forecast, limit.limit, held, peak_resident())
                print(f"plan: {plan_line(figures)}", file=sys.stderr, flush=True)
            begin_from = str(warm_start.path.absolute()) if warm_start else ""
            run = PPDSparseRun(dataset, work, parameters, seed, plan, ledger, begin_from, forecast.blocks)

            if ledger.resumed:  # what was read and written before may have been damaged since
                ledger.forget([job.key for job in check_jobs(dataset)])
                _forget_damaged(ledger, engine, work, bool(begin_from))

            def whole() -> Loop:
                if check:
                    yield Phase("check the data", check_jobs(dataset))
                return (yield from run.loop())

            result = engine.run(whole(), ledger)
            peak = max(engine.peak, peak_resident() if engine.in_process else 0)
        receipts = [receipt for _, receipt in ledger.items()]
        n_bytes = sum(receipt.get("bytes_read", 0) for receipt in receipts)
        streamed = sum(receipt["bytes_read"] for key, receipt in ledger.items() if key.startswith("search/"))
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
        attributes = {**model_attributes(dataset, parameters, seed, result), **start, **taken}
        copy_vocabulary(dataset.path, work)
        finish_model(work, path, {**attributes, "identity": identity, "run": totals})
        resumed = ledger.resumed
    model = load_model(path)
    return model, _report(model, limit.limit, began, totals, resumed)


def _forget_damaged(ledger: Ledger, engine: Engine, work: Path, warm_start: bool) -> None:
    """Compare what an earlier session left with its checksums; what is damaged is made again.

    Raises StoreError where what it was made from is gone.
    """

    def state() -> Loop:
        receipts = yield Phase("check the state", check_state_jobs(work))
        return {"damaged": [receipt for receipt in receipts if receipt["damage"]]}

    for receipt in engine.run(state(), Notes())["damaged"]:
        key = key_of_state(work, Path(receipt["folder"]), warm_start)
        if key is None:
            raise StoreError(
                f"{receipt['damage']}: the run cannot go on from it: remove {work} (or --overwrite) and train anew"
            )
        ledger.forget([key])


def _row_blocks(ledger: Ledger) -> int:
    """Row blocks of one pass: of the search that had the most."""
    blocks: dict[str, int] = {}
    for key, receipt in ledger.items():
        if key.startswith("search/"):
            searched = key.rsplit("/", 1)[0]
            blocks[searched] = blocks.get(searched, 0) + receipt["row_blocks"]
    return max(blocks.values(), default=0)


def _search_work(ledger: Ledger, parameters: PPDSparseParameters) -> dict[str, int]:
    """Multiply-adds of all searches, and of as many exact ones, one after each solve; nothing where all are exact."""
    if not parameters.approximate:
        return {}
    work = {"search": 0, "solve": 0}
    for key, receipt in ledger.items():
        kind = key.partition("/")[0]
        if kind in work and not key.startswith("search/0/"):  # which a warm start begins with
            work[kind] += receipt["work"]
    return {"search_work": work["search"], "search_work_exact": work["solve"]}


def _identity(dataset: Dataset, parameters: PPDSparseParameters, seed: int) -> dict[str, Any]:
    """What must be the same for a run to go on."""
    packages = {name: version(name) for name in ("xmc-stream", "numpy", "numba", "llvmlite")}
    return {
        "solver": "ppdsparse",
        "params": parameters.to_dict(),
        "seed": seed,
        "data": dataset.fingerprint,
        "environment": {"processor": _processor(), "python": platform.python_version(), **packages},
    }


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
        "duality_gap_mean": a["duality_gap_mean"],
        "violation": a["violation"],
        "n_open": a["n_open"],
        "n_empty": a["n_empty"],
        "rounds": a["rounds"],
        "bytes_streamed": totals["bytes_streamed"],
        "bytes_gathered": totals["bytes_gathered"],
        "solve_passes": totals["solve_passes"],
        "class_blocks": totals["class_blocks"],
        "row_blocks": totals["row_blocks"],
        "search_work": totals.get("search_work"),
        "search_work_exact": totals.get("search_work_exact"),
        "warm_start": a.get("warm_start"),
    }
