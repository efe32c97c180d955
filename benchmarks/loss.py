"""What a kill costs: a training killed (SIGKILL) at instants drawn at random, one after another, and let go on each time.

    python benchmarks/loss.py FOLDER --method pdsparse --labels 600 --samples 200000 --kills 10 --threads 2
    python benchmarks/loss.py FOLDER --method memoir --set variant=lsh --labels 2000 --kills 0

Makes a synthetic set in FOLDER (kept for other calls) and trains it undisturbed. Then kills and continues the same training;
where it comes to its end before all kills, another one begins. All seconds are of the processor, of all threads of a process,
from /proc and wait4. They are shared equally among the jobs under way (events.jsonl). Prints

- of the undisturbed run: seconds, those of start-up (up to the first phase that is no comparison with checksums, and such
  phases), the longest jobs (wall and processor seconds), and the most that was at risk: seconds of the jobs under way, and of
  what was done since the last job whose receipt the ledger keeps, as a kill at that instant would lose
- of each kill: after how many seconds of its session, in which phase, and what it lost by the same count
- in sum: the most that was lost, and what was repeated: seconds of all sessions without start-up, minus those of as many
  undisturbed runs. This differs by some per cent of a run from call to call, as a processor's speed does.

Ends with exit code 1 where a kill lost more than 30 seconds, more than that was at risk, or a model is not the same.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
from commands import machine

import xmc_stream as xs
from xmc_stream.store.dataset import open_dataset
from xmc_stream.store.new_dataset import new_dataset

TOOLS = Path(__file__).resolve().parent.parent / "tools"
TRAIN = [sys.executable, "-m", "xmc_stream.cli", "train"]
MOST = 30.0  # seconds that a kill may lose
_TICK = os.sysconf("SC_CLK_TCK")
_SHOWN = 5  # longest jobs
_FEW = 500  # rows that are learned from first, which compiles kernels


@dataclass
class Job:
    """A job in the event log: wall clock from begin to end, and the processor seconds that were its own."""

    key: str
    begin: float
    end: float
    seconds: float = 0.0


@dataclass
class Session:
    """A process that trained. samples: (wall clock, processor seconds) so far; logs: lines of events and ledgers by file."""

    samples: list[tuple[float, float]] = field(default_factory=list)
    logs: dict[str, bytes] = field(default_factory=dict)
    seconds: float = 0.0
    ended: bool = False

    def read(self, work: Path) -> None:
        """Logs as they are now, those of a training within the training too; what was removed stays as it was last."""
        for name in ("events.jsonl", "ledger.jsonl"):
            for path in [work / name, *work.glob(f"decision/model*/{name}")]:
                try:
                    self.logs[str(path.relative_to(work)).replace(".partial", "")] = path.read_bytes()
                except OSError:
                    continue  # it is not there yet, or not any more

    def lines(self, name: str) -> Iterator[dict[str, Any]]:
        """Of this session's events, or of ledgers."""
        for file, content in self.logs.items():
            for line in content.splitlines() if file.endswith(name) else ():
                try:
                    event = json.loads(line.partition(b"\t")[0])
                except ValueError:  # a kill came while it was written
                    continue
                if "time" not in event or event["time"] >= self.samples[0][0]:
                    yield event


def train(command: list[str], model: Path, until: float = float("inf")) -> Session:
    """Run a training up to its end, or kill it when it has taken so many seconds of the processor."""
    session, work = Session([(time.time(), 0.0)]), model.with_name(model.name + ".partial")
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    looked = 0.0
    while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        times = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        session.samples.append((time.time(), (int(times[11]) + int(times[12])) / _TICK))
        if session.samples[-1][1] >= until:
            child.send_signal(signal.SIGKILL)
            break
        if time.monotonic() - looked > 0.5:
            session.read(work)
            looked = time.monotonic()
        time.sleep(0.02)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    session.ended, session.seconds = child.returncode == 0, usage.ru_utime + usage.ru_stime
    session.samples.append((time.time(), session.seconds))
    session.read(model if session.ended else work)
    if child.returncode not in (0, -signal.SIGKILL):
        assert child.stderr is not None
        raise click.ClickException(child.stderr.read().decode())
    return session


def jobs_of(session: Session, threads: int) -> list[Job]:
    """Finished jobs, and at a kill those under way, which began when the phase or a place beside them became free."""
    jobs: list[Job] = []
    starts: list[float] = []
    waiting = 0
    for event in sorted(session.lines("events.jsonl"), key=lambda event: event["time"]):
        if event["event"] == "phase":
            waiting = event["jobs"] - event["done"]
            starts = [event["time"]] * min(threads, waiting)
            waiting -= len(starts)
        elif event["event"] == "job":
            begin = event["time"] - event["seconds"]
            jobs.append(Job(event["job"], begin, event["time"]))
            if starts:
                starts.remove(min(starts, key=lambda start: abs(start - begin)))
            if waiting:
                starts.append(event["time"])
                waiting -= 1
    return jobs + [Job("", start, float("inf")) for start in starts if not session.ended]


@dataclass
class Counted:
    """Seconds of a session. at_risk: the most, and in which phase; lost: at its last instant, which a kill lost."""

    jobs: list[Job]
    startup: float = 0.0
    at_risk: float = 0.0
    where: str = ""
    lost: float = 0.0
    phase: str = "start"


def count(session: Session, threads: int) -> Counted:
    """Share out the seconds between each two samples."""
    jobs = jobs_of(session, threads)
    kept = {line["key"] for line in session.lines("ledger.jsonl")}
    phases = sorted((e["time"], e["phase"]) for e in session.lines("events.jsonl") if e["event"] == "phase")
    counted, loose, n_ended, n_phases = Counted(jobs), 0.0, 0, 0
    by_end = sorted(jobs, key=lambda job: job.end)
    for (begin, before), (end, after) in zip(session.samples, session.samples[1:], strict=False):
        while n_phases < len(phases) and phases[n_phases][0] <= end:
            counted.phase = phases[n_phases][1]
            n_phases += 1
        under_way = [job for job in jobs if job.begin < end and job.end > begin]
        for job in under_way:
            job.seconds += (after - before) / len(under_way)
        starting = counted.phase in ("start", "") or counted.phase.startswith("check")
        counted.startup += (after - before) * starting
        loose += (after - before) * (not under_way and not starting)
        now = loose + sum(job.seconds for job in under_way if not starting)
        if now > counted.at_risk:
            counted.at_risk, counted.where = now, counted.phase
        while n_ended < len(by_end) and by_end[n_ended].end <= end:
            job = by_end[n_ended]
            loose = 0.0 if job.key in kept else loose + job.seconds * (not starting)
            n_ended += 1
        counted.lost = loose + sum(job.seconds for job in jobs if job.begin < end < job.end and not starting)
    return counted


def make_set(
    folder: Path, labels: int, samples: int, features: int, per_sample: float, labels_per_sample: float
) -> Path:
    """A synthetic set; of one label, half of the rows have it."""
    path = folder / f"{samples}-{features}-{labels}-{per_sample:g}-{labels_per_sample:g}.xmc"
    if path.exists():
        return path
    source = folder / "two.xmc" if labels == 1 else path
    words = f"--samples {samples} --features {features} --labels {max(labels, 2)} --features-per-sample {per_sample}"
    words += f" --labels-per-sample {1 if labels == 1 else labels_per_sample} --overwrite"
    subprocess.run([sys.executable, str(TOOLS / "make_synthetic.py"), str(source), *words.split()], check=True)
    if labels == 1:
        two = open_dataset(source)
        X, Y = two.X_rows(), two.Y_rows()
        with new_dataset(path, features, 1, {"normalize": "l2"}) as writer:
            for first in range(0, samples, 1 << 14):
                x, y = (matrix.block(first, min(first + (1 << 14), samples)) for matrix in (X, Y))
                ends = np.concatenate([[0], np.cumsum(y.indices == 0)])[y.indptr]
                writer.append(x.indptr, x.indices, x.values, ends, np.zeros(ends[-1], np.int32))
        shutil.rmtree(source)
    return path


def clean(model: Path) -> None:
    """Remove a model, whole or not."""
    for path in (model, model.with_name(model.name + ".partial")):
        shutil.rmtree(path, ignore_errors=True)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
@click.option("--method", default="ppdsparse", show_default=True, help="As --solver of `train`.")
@click.option("--set", "settings", multiple=True, help="NAME=VALUE, as of `train`.")
@click.option("--labels", default=600, show_default=True)
@click.option("--samples", default=100_000, show_default=True)
@click.option("--features", default=50_000, show_default=True)
@click.option("--features-per-sample", "per_sample", default=100.0, show_default=True)
@click.option("--labels-per-sample", default=1.0, show_default=True)
@click.option("--kills", default=10, show_default=True)
@click.option("--threads", default=1, show_default=True)
@click.option("--memory-limit", default="4GB", show_default=True)
@click.option("--seed", default=0, show_default=True, help="Of the instants.")
def main(
    folder: Path, method: str, settings: tuple[str, ...], labels: int, samples: int, features: int, per_sample: float,
    labels_per_sample: float, kills: int, threads: int, memory_limit: str, seed: int,
) -> None:  # fmt: skip
    model = folder / f"{method}-{os.getpid()}.model"
    few, data = (make_set(folder, labels, n, features, per_sample, labels_per_sample) for n in (_FEW, samples))
    options = ["--solver", method, "--memory-limit", memory_limit, "--threads", str(threads)]
    options += [word for setting in settings for word in ("--set", setting)]
    few_command, command = ([*TRAIN, str(path), str(model), *options] for path in (few, data))
    train(few_command, model)
    clean(model)
    print(f"{machine()}; {' '.join([method, *settings])}, {data.name}, {threads} threads", flush=True)
    try:
        at_risk, lost, same = measure(command, model, kills, threads, random.Random(seed))
    finally:
        clean(model)
    if max(at_risk, lost) > MOST or not same:
        raise SystemExit(1)


def measure(
    command: list[str], model: Path, kills: int, threads: int, draws: random.Random
) -> tuple[float, float, bool]:
    """Train undisturbed, and with kills: the most at risk, the most that was lost, and whether models are the same."""
    whole = train(command, model)
    counted, digest = count(whole, threads), xs.load_model(model).digest()
    work = whole.seconds - counted.startup
    print(
        f"undisturbed: {whole.seconds:.1f} s, of these start-up {counted.startup:.1f}, {len(counted.jobs)} jobs; at risk at "
        f"most {counted.at_risk:.1f} s, in {counted.where!r}; the longest jobs:"
    )
    for job in sorted(counted.jobs, key=lambda job: -job.seconds)[:_SHOWN]:
        print(f"  {job.seconds:6.1f} s of the processor, {job.end - job.begin:6.1f} s of time  {job.key}", flush=True)
    lost: list[float] = []
    session, sessions, runs, same = whole, 0.0, 0, True
    while kills and (len(lost) < kills or not session.ended):
        if session.ended:
            clean(model)
            runs += 1
        more = counted.startup + draws.uniform(0.0, 2.0 * work / (kills + 1)) if len(lost) < kills else float("inf")
        session = train(command, model, more)
        told = count(session, threads)
        sessions += session.seconds - told.startup
        if session.ended:
            same = same and xs.load_model(model).digest() == digest
        else:
            lost.append(told.lost)
            print(f"killed after {session.seconds:6.1f} s, in {told.phase!r}: lost {told.lost:5.1f} s", flush=True)
    if lost:
        repeated = sessions - runs * work
        print(
            f"{len(lost)} kills lost {max(lost):.1f} s at most, {sum(lost):.1f} s in sum; repeated, by all sessions' seconds: "
            f"{repeated:.1f} s in sum; same model: {same}"
        )
    return counted.at_risk, max(lost, default=0.0), same


if __name__ == "__main__":
    main()
