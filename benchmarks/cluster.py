"""Runs on dask workers of this machine: how much two gain on one, and that a run goes on when workers come and go.

    python benchmarks/cluster.py scale DATA.xmc TEST.xmc FOLDER          # --trained: MODEL in the place of DATA.xmc
    python benchmarks/cluster.py tune DATA.xmc FOLDER --grid lam=0.03,0.1 --set max_passes=3
    python benchmarks/cluster.py disturb DATA.xmc FOLDER --kills 10 --freeze 120
    python benchmarks/cluster.py memory DATA.xmc TEST.xmc FOLDER --memory-limit 550MB
    python benchmarks/cluster.py large DATA.xmc TEST.xmc FOLDER --memory-limit 1GB --set lam=1

`scale` trains, predicts and evaluates with one thread, two threads, one worker of one thread and two, in turns, from one
process, and prints ratios of the medians; all models must be the same. `tune` does the same with a tuning of PD-Sparse, whose
settings are trained beside each other; all figures must be the same. `disturb` trains while workers are killed (SIGKILL, a
nanny starts them again), one is frozen (SIGSTOP), one is retired, one is added and the scheduler is killed, after which the
same command goes on with another cluster; the model must be that of an undisturbed run in one process. `memory` trains,
predicts and evaluates on a worker whose limit is near what the work takes; dask's memory manager must neither pause it nor
end it. `large` trains, predicts and evaluates on two workers with data that are larger than their memory, in a memory cgroup
of both limits and --page-cache, and prints the seconds of each phase. All end with exit code 1 otherwise.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import distributed
from commands import drop_cache, machine, run
from watch import Cgroup, cgroup_or_none

import xmc_stream as xs
from xmc_stream.system.memory import format_size, parse_size

sys.path.append(str(Path(__file__).resolve().parent.parent / "tools"))
from start_cluster import SETTINGS

_PATH = click.Path(path_type=Path, resolve_path=True)  # workers run in folders of their own
_AGAIN = "takes long: once more, on "  # what a run logs of a straggler
_SCHEDULER = "kill the scheduler"
_MEMORY = ("Worker is at", "terminated by", "Restarting worker", "exceeded")  # what dask logs of its memory manager


class Workers:
    """A scheduler and workers of one thread, processes of their own with nannies. A context manager."""

    def __init__(self, folder: Path, n: int, memory_limit: str, cgroup: Cgroup | None = None) -> None:
        self._file, self._memory_limit, self.log = folder / "scheduler.json", memory_limit, folder / "cluster.log"
        self._cgroup = cgroup
        self._folder, self._processes, self._n = folder, ExitStack(), 0
        self._started: list[subprocess.Popen[bytes]] = []
        self._file.unlink(missing_ok=True)
        self._start("distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0")
        for _ in range(n):
            self.add()

    def __enter__(self) -> Workers:
        while not self._file.exists() or not self._file.read_text().strip():
            time.sleep(0.1)
        self.address = json.loads(self._file.read_text())["address"]
        self.client = distributed.Client(self.address)
        self.wait()
        return self

    def wait(self) -> None:
        """Wait until all workers are there; those whose scheduler stood still for minutes come back."""
        self.client.wait_for_workers(self._n, timeout=60)

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self._processes.close()

    def add(self) -> None:
        """Start one more."""
        self._n += 1
        options = ("--nthreads", "1", "--memory-limit", self._memory_limit, "--local-directory", str(self._folder))
        self._start("distributed.cli.dask_worker", *options)

    def end_scheduler(self) -> None:
        """SIGKILL: this cluster is of no use any more."""
        self.client.close()
        self._started[0].kill()

    def processes(self) -> list[int]:
        """Numbers of all its processes."""
        return [*(process.pid for process in self._started), *self.pids().values()]

    def pids(self) -> dict[str, int]:
        """Process numbers of those that the scheduler has, by address."""
        return dict(self.client.run(os.getpid, on_error="ignore"))

    def _start(self, module: str, *options: str) -> None:
        command = [sys.executable, "-m", module, "--scheduler-file", str(self._file), "--no-dashboard", *options]
        with self.log.open("ab") as log:
            enter = self._cgroup.join if self._cgroup else None
            settings = {**SETTINGS, **os.environ}
            process = subprocess.Popen(command, cwd=self._folder, stderr=log, preexec_fn=enter, env=settings)
        self._started.append(process)
        self._processes.callback(_end, process)


@contextmanager
def standing_still(*clusters: Workers) -> Iterator[None]:
    """A block in which the processes of some clusters are stopped: those of dask take time while they are idle, too."""
    processes = [process for cluster in clusters for process in cluster.processes()]
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            os.kill(process, signal.SIGCONT)
        for cluster in clusters:
            cluster.wait()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end; a frozen one does not hear."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def clean(model: Path) -> None:
    """Remove a model and a run of it."""
    for path in (model, model.with_name(model.name + ".partial")):
        shutil.rmtree(path, ignore_errors=True)


@click.group()
def main() -> None:
    """Runs on dask workers of this machine."""


@main.command()
@click.argument("data", type=_PATH)
@click.argument("test", type=_PATH)
@click.argument("folder", type=_PATH)
@click.option("--memory-limit", default="1GB", show_default=True, help="Of each worker, and of this process.")
@click.option("--repeats", default=3, show_default=True)
@click.option("--trained", is_flag=True, help="DATA is a model: predict and evaluate alone, on workers alone.")
@click.option("--solver", type=click.Choice(["ppdsparse", "tree"]), default="ppdsparse", show_default=True)
def scale(
    data: Path, test: Path, folder: Path, memory_limit: str, repeats: int, trained: bool, solver: str
) -> None:  # fmt: skip
    """Two threads of this process against one, and two workers of one thread against one; kernels are loaded before."""
    folder.mkdir(parents=True, exist_ok=True)
    predictions = folder.absolute() / "scale.pred"
    models = [data.absolute()] if trained else []
    took: dict[tuple[str, str], list[float]] = {}
    digests = set()
    learner: Any = xs.LabelTree if solver == "tree" else xs.PPDSparse
    print(f"{machine()}; {memory_limit}; {solver}")

    def in_turns(places: dict[str, tuple[dict[str, Any], Workers | None]]) -> None:
        """As the machine's speed changes by the minute; the first turn loads kernels."""
        for _, (way, (how, at_work)) in itertools.product(range(repeats + 1), places.items()):
            commands: dict[str, Callable[[], Any]] = {}
            if not trained:
                # a new name, and none removed before the end: for a minute ext4 searches long for a number that no file had
                models.append(folder.absolute() / f"scale-{len(models)}.model")
                clean(models[-1])
                commands["train"] = partial(learner(memory_limit=memory_limit, **how).fit, data, model=models[-1])
            model = models[-1]
            commands |= {
                "predict": partial(
                    xs.predict, model, test, predictions, overwrite=True, memory_limit=memory_limit, **how
                ),
                "evaluate": partial(xs.evaluate, model, test, memory_limit=memory_limit, **how),
            }
            # with --trained a turn may take minutes: a scheduler that stood still so long gives its workers up
            others = [cluster for _, cluster in places.values() if cluster is not None and cluster is not at_work]
            with standing_still(*([] if trained else others)):
                for name, command in commands.items():
                    began = time.perf_counter()
                    command()
                    took.setdefault((name, way), []).append(time.perf_counter() - began)
            digests.add(xs.load_model(model).digest())

    if not trained:  # before this process has clients, which look after their schedulers all the time
        in_turns({"1 thread": ({"threads": 1}, None), "2 threads": ({"threads": 2}, None)})
    with ExitStack() as stack:
        one, two = (stack.enter_context(_workers(folder, n, memory_limit)) for n in (1, 2))
        in_turns({"1 worker": ({"scheduler": one.client}, one), "2 workers": ({"scheduler": two.client}, two)})
    ways = dict.fromkeys(way for _, way in took)
    pairs = [pair for pair in (("1 thread", "2 threads"), ("1 worker", "2 workers")) if pair[0] in ways]
    of = "".join(f" ratio of {pair[1][2:]} |" for pair in pairs)
    print("| | " + " | ".join(f"{way}, s" for way in ways) + f" |{of}\n" + "|---" * (1 + len(ways) + len(pairs)) + "|")
    for name in dict.fromkeys(name for name, _ in took):
        seconds = {way: median(took[name, way][1:]) for way in ways}
        ratios = (seconds[one] / seconds[two] for one, two in pairs)
        print(f"| {name} | " + " | ".join(f"{figure:.2f}" for figure in (*seconds.values(), *ratios)) + " |")
    for model in () if trained else models:
        clean(model)
    sys.exit(len(digests) > 1)


@main.command()
@click.argument("data", type=_PATH)
@click.argument("folder", type=_PATH)
@click.option("--solver", default="pdsparse", show_default=True)
@click.option("--grid", default="lam=0.03,0.1", show_default=True)
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="The same in all settings.")
@click.option("--memory-limit", default="1GB", show_default=True, help="Of each worker, and of this process.")
@click.option("--repeats", default=2, show_default=True)
def tune(
    data: Path, folder: Path, solver: str, grid: str, settings: tuple[str, ...], memory_limit: str, repeats: int
) -> None:
    """Settings in turn, on one thread or worker, against settings beside each other, on two."""
    folder.mkdir(parents=True, exist_ok=True)
    name, _, values = grid.partition("=")
    how: dict[str, Any] = {
        "grid": {name: [float(value) for value in values.split(",")]},
        "fixed": {name: json.loads(value) for name, _, value in (one.partition("=") for one in settings)},
        "memory_limit": memory_limit, "work": folder / "tuning",
    }  # fmt: skip
    took: dict[str, list[float]] = {}
    figures = set()
    print(f"{machine()}; {memory_limit}; {data.name}, {solver} {grid} {' '.join(settings)}")
    with ExitStack() as stack:
        one, two = (stack.enter_context(_workers(folder, n, memory_limit)) for n in (1, 2))
        places: dict[str, dict[str, Any]] = {
            "1 thread": {"threads": 1}, "2 threads": {"threads": 2}, "1 worker": {"scheduler": one.client},
            "2 workers": {"scheduler": two.client},
        }  # fmt: skip
        for _, (way, where) in itertools.product(range(repeats + 1), places.items()):  # the first turn loads kernels
            with standing_still(*(of for of in (one, two) if of.client is not where.get("scheduler"))):
                report = xs.tune(data, solver, **how, **where)
            took.setdefault(way, []).append(report["seconds"])
            figures.add(json.dumps([(of["figures"], of["nnz"]) for of in report["settings"]]))
            alone = ", ".join(f"{of['seconds']:.1f}" for of in report["settings"])
            print(f"{way}: {report['seconds']:.1f} s, of settings {alone}", flush=True)
    seconds = {way: median(times[1:]) for way, times in took.items()}
    for first, second in (("1 thread", "2 threads"), ("1 worker", "2 workers")):
        ratio = seconds[first] / seconds[second]
        print(f"{first} {seconds[first]:.1f} s, {second} {seconds[second]:.1f} s: ratio {ratio:.2f}")
    sys.exit(len(figures) > 1)


def _workers(folder: Path, n: int, memory_limit: str) -> Workers:
    """A cluster in a folder of its own."""
    place = folder / f"cluster-{n}"
    place.mkdir(exist_ok=True)
    return Workers(place, n, memory_limit)


@main.command()
@click.argument("data", type=_PATH)
@click.argument("folder", type=_PATH)
@click.option("--kills", default=10, show_default=True, help="Workers killed, one after another.")
@click.option("--every", default=4.0, show_default=True, help="Seconds from one disturbance to the next.")
@click.option("--freeze", default=120.0, show_default=True, help="Seconds that a worker is stopped.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Of the training: make it last.")
@click.option("--memory-limit", default="1GB", show_default=True, help="Of each worker.")
@click.option("--seed", default=0, show_default=True)
@click.option("--solver", default="ppdsparse", show_default=True)
def disturb(
    data: Path, folder: Path, kills: int, every: float, freeze: float, settings: tuple[str, ...], memory_limit: str,
    seed: int, solver: str,
) -> None:  # fmt: skip
    """A training whose workers are killed, frozen, retired and added."""
    folder.mkdir(parents=True, exist_ok=True)
    folder, rng = folder.absolute(), random.Random(seed)
    here, model = folder / "here.model", folder / "there.model"
    options = ["--solver", solver, "--memory-limit", memory_limit]
    options += [word for setting in settings for word in ("--set", setting)]
    clean(here)
    clean(model)
    began = time.perf_counter()
    run("train", data.absolute(), here, *options)
    print(f"{machine()}; undisturbed, in one process: {time.perf_counter() - began:.0f} s")
    command = [*map(str, (sys.executable, "-m", "xmc_stream.cli", "train", data.absolute(), model, *options))]
    began = time.perf_counter()
    sessions = again = 0
    to_do = ["kill"] * kills + ["freeze", "add", "retire", _SCHEDULER]
    rng.shuffle(to_do)
    while not model.exists():
        with Workers(folder, 2, memory_limit) as workers:
            done = ""
            while done != _SCHEDULER and not model.exists():
                sessions += 1
                words = [*command, "--scheduler", workers.address]
                with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as training:
                    time.sleep(every)
                    while training.poll() is None:
                        if to_do and done != _SCHEDULER:
                            done = to_do.pop()
                            _disturb(done, workers, freeze, rng, training)
                        time.sleep(every)
                    said = training.stderr.read().strip() if training.stderr else ""
                again += said.count(_AGAIN)
                if training.returncode:
                    print(f"session {sessions} ended: {said.splitlines()[-1]}", flush=True)
    same = run("info", model, "--digest")["digest"] == run("info", here, "--digest")["digest"]
    print(
        f"disturbed: {time.perf_counter() - began:.0f} s in {sessions} sessions; stragglers begun again: {again}; left undone: "
        f"{to_do}; same model: {same}"
    )
    sys.exit(not same or bool(to_do))


@main.command()
@click.argument("data", type=_PATH)
@click.argument("test", type=_PATH)
@click.argument("folder", type=_PATH)
@click.option("--memory-limit", default="550MB", show_default=True, help="Of the worker.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Of the training.")
def memory(data: Path, test: Path, folder: Path, memory_limit: str, settings: tuple[str, ...]) -> None:
    """A worker with little memory, and data that do not fit in it."""
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.absolute()
    model, predictions = folder / "memory.model", folder / "memory.pred"
    clean(model)
    shutil.rmtree(predictions, ignore_errors=True)
    options = [word for setting in settings for word in ("--set", setting)]
    print(f"{machine()}; a worker of {memory_limit}")
    with Workers(folder, 1, memory_limit) as workers:
        workers.log.write_bytes(b"")
        before, at = workers.pids(), ("--scheduler", workers.address)
        for name, command in {
            "train": ("train", data.absolute(), model, *options, *at),
            "predict": ("predict", model, test.absolute(), predictions, *at),
            "evaluate": ("evaluate", model, test.absolute(), *at),
        }.items():
            began = time.perf_counter()
            told = run(*command)
            more = f", peak of the worker {told['peak_rss'] / 1e6:.0f} MB" if "peak_rss" in told else ""
            print(f"{name}: {time.perf_counter() - began:.0f} s{more}")
        said = [line for line in workers.log.read_text().splitlines() if any(word in line for word in _MEMORY)]
        same = workers.pids() == before
    print(
        "\n".join(said) or "the log has no line of dask's memory manager",
        "the same process" if same else "restarted",
        sep="; ",
    )
    sys.exit(bool(said) or not same)


@main.command()
@click.argument("data", type=_PATH)
@click.argument("test", type=_PATH)
@click.argument("folder", type=_PATH)
@click.option("--workers", default=2, show_default=True)
@click.option("--memory-limit", default="1GB", show_default=True, help="Of each worker.")
@click.option("--page-cache", default="512MB", show_default=True, help="That the cgroup allows beside the limits.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Of the training.")
def large(
    data: Path, test: Path, folder: Path, workers: int, memory_limit: str, page_cache: str, settings: tuple[str, ...]
) -> None:
    """Data that fit neither in the workers' memory nor in the page cache beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.absolute()
    model, predictions = folder / "large.model", folder / "large.pred"
    clean(model)
    shutil.rmtree(predictions, ignore_errors=True)
    drop_cache(data)
    options = [word for setting in settings for word in ("--set", setting)]
    print(f"{machine()}; {workers} workers of {memory_limit}", flush=True)
    allowed = workers * parse_size(memory_limit) + parse_size(page_cache)
    cgroup = cgroup_or_none("xmc_stream_cluster", allowed)
    with Workers(folder, workers, memory_limit, cgroup) as cluster:
        at = ("--scheduler", cluster.address)
        before = cluster.pids()
        for name, command in {
            "train": ("train", data.absolute(), model, *options, *at),
            "predict": ("predict", model, test.absolute(), predictions, *at),
            "evaluate": ("evaluate", predictions, test.absolute(), *at),
        }.items():
            began = time.perf_counter()
            told = run(*command)
            more = f", peak of a worker {format_size(told['peak_rss'])}" if "peak_rss" in told else ""
            print(f"{name}: {time.perf_counter() - began:.0f} s{more}", flush=True)
        same = cluster.pids() == before
    kills = 0
    if cgroup is not None:
        held = cgroup.figures()
        kills = held["oom_kills"]
        print(f"cgroup of {format_size(allowed)}: peak {format_size(held['peak'])} with page cache, {kills} kills")
        cgroup.remove()
    print(
        subprocess.run(
            [sys.executable, "-m", "xmc_stream.cli", "info", model], stdout=subprocess.PIPE, text=True
        ).stdout
    )
    print(f"P@1 {told['P@1']:.2f}; {'the same processes' if same else 'workers were started again'}")
    sys.exit(not same or bool(kills))


def _disturb(what: str, workers: Workers, freeze: float, rng: random.Random, training: Any) -> None:
    """Do something to a worker that the scheduler has, or to the scheduler."""
    if what == _SCHEDULER:
        print(what, flush=True)
        workers.end_scheduler()
        return
    pids = workers.pids()
    address = rng.choice(sorted(pids)) if pids else ""
    print(f"{what} {address}", flush=True)
    if what == "add":
        workers.add()
    elif not address:
        time.sleep(1)
    elif what == "kill":
        os.kill(pids[address], signal.SIGKILL)
    elif what == "retire":
        workers.client.retire_workers([address], close_workers=False)
    else:
        os.kill(pids[address], signal.SIGSTOP)
        end = time.monotonic() + freeze
        while time.monotonic() < end and training.poll() is None:
            time.sleep(0.5)
        with suppress(ProcessLookupError):  # its nanny has ended it: the scheduler drops who is silent for a minute
            os.kill(pids[address], signal.SIGCONT)


if __name__ == "__main__":
    main()
