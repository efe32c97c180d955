"""A command of the library in a child process, watched from outside: peak memory, disk reads, processors; in a cgroup."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass
class Watched:
    """What a child did. figures: the JSON object that it printed. peak: VmHWM; from_disk: bytes that came from the disk.

    samples: (time, processor seconds, bytes from the disk) so far, five a second.
    """

    figures: dict[str, Any]
    seconds: float
    peak: int
    from_disk: int
    samples: list[tuple[float, float, int]] = field(repr=False)

    def between(self, begin: float, end: float) -> tuple[float, int]:
        """Processor seconds and bytes from the disk between two times (`time.time`)."""
        before = max((s for s in self.samples if s[0] <= begin), default=(begin, 0.0, 0))
        after = min((s for s in self.samples if s[0] >= end), default=self.samples[-1])
        return after[1] - before[1], after[2] - before[2]


def watch(*arguments: Any, cgroup: Cgroup | None = None) -> Watched:
    """`xmc-stream ARGUMENTS --json` in a child. Raises RuntimeError with the last line it said where it fails."""
    command = [sys.executable, "-m", "xmc_stream.cli", *map(str, arguments), "--json"]
    began = time.perf_counter()
    enter = cgroup.join if cgroup else None
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=enter)
    samples: list[tuple[float, float, int]] = [(time.time(), 0.0, 0)]
    ended = threading.Event()
    sampler = threading.Thread(target=_sample, args=(child.pid, samples, ended))
    sampler.start()
    said: dict[str, str] = {}
    readers = [threading.Thread(target=_read, args=(said, name, getattr(child, name))) for name in ("stdout", "stderr")]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    ended.set()
    sampler.join()
    _, status, usage = os.wait4(child.pid, 0)  # of this child alone, to its end
    child.returncode = os.waitstatus_to_exitcode(status)
    samples.append((time.time(), usage.ru_utime + usage.ru_stime, usage.ru_inblock * 512))
    if child.returncode:
        lines = said["stderr"].strip().splitlines() or [f"ended with {child.returncode}"]
        raise RuntimeError(f"{' '.join(command[3:])}: exit code {child.returncode}: {lines[-1]}")
    return Watched(
        json.loads(said["stdout"]), time.perf_counter() - began, usage.ru_maxrss * 1024, usage.ru_inblock * 512, samples
    )


def _read(said: dict[str, str], name: str, stream: Any) -> None:
    said[name] = stream.read()


def _sample(pid: int, samples: list[tuple[float, float, int]], ended: threading.Event) -> None:
    while not ended.wait(0.2):
        try:
            times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            io = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        except (OSError, ValueError):  # it has just ended
            return
        samples.append((time.time(), (int(times[11]) + int(times[12])) / _TICK, int(io["read_bytes"])))


class Cgroup:
    """A memory cgroup, v1 or v2, whose page cache counts too. Raises OSError where none can be made."""

    def __init__(self, name: str, limit: int) -> None:
        self.limit = limit
        self.v1 = (_V1 / "memory.limit_in_bytes").exists()
        if not self.v1:
            controllers = (_V2 / "cgroup.controllers").read_text()
            if "memory" not in controllers.split():
                raise OSError("the memory controller is not there")
            (_V2 / "cgroup.subtree_control").write_text("+memory")
        self.path = (_V1 if self.v1 else _V2) / name
        with suppress(FileNotFoundError):
            self.path.rmdir()  # of a run that was killed, with its figures
        self.path.mkdir()
        (self.path / ("memory.limit_in_bytes" if self.v1 else "memory.max")).write_text(str(limit))

    @property
    def join(self) -> Callable[[], Any]:
        """What a child calls before it becomes the command."""
        procs = str(self.path / "cgroup.procs")

        def enter() -> None:
            with open(procs, "w") as file:
                file.write("0")

        return enter

    def figures(self) -> dict[str, int]:
        """at_limit: how often memory had to be reclaimed for a page; peak: bytes, page cache included; oom_kills."""
        if self.v1:
            control = dict(line.split() for line in (self.path / "memory.oom_control").read_text().splitlines())
            return {
                "at_limit": int((self.path / "memory.failcnt").read_text()),
                "peak": int((self.path / "memory.max_usage_in_bytes").read_text()),
                "oom_kills": int(control.get("oom_kill", 0)),
            }
        events = dict(line.split() for line in (self.path / "memory.events").read_text().splitlines())
        peak = self.path / "memory.peak"  # since Linux 5.19
        return {
            "at_limit": int(events["max"]),
            "peak": int(peak.read_text()) if peak.exists() else 0,
            "oom_kills": int(events["oom_kill"]),
        }

    def remove(self) -> None:
        """Remove it, when its processes have ended."""
        for _ in range(50):
            try:
                self.path.rmdir()
                return
            except OSError:  # the last one is still being taken down
                time.sleep(0.1)


def cgroup_or_none(name: str, limit: int) -> Cgroup | None:
    """A memory cgroup, or a line on stderr that says why there is none."""
    try:
        return Cgroup(name, limit)
    except OSError as error:
        print(f"no memory cgroup can be made here ({error}): the page cache is not capped", file=sys.stderr)
        return None


def sequential_rate(files: Sequence[Path], most: int = 1 << 30) -> float:
    """Bytes a second of reading files by pread of 4 MiB, cold, one after another; up to `most` bytes of them."""
    buffer = bytearray(4 << 20)
    chosen, total = [], 0
    for file in files:
        if total >= most:
            break
        chosen.append(os.open(file, os.O_RDONLY))
        total += os.fstat(chosen[-1]).st_size
        os.posix_fadvise(chosen[-1], 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.perf_counter()
    for fd in chosen:
        at = 0
        while n := os.preadv(fd, [buffer], at):
            at += n
    seconds = time.perf_counter() - began
    for fd in chosen:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # as it was: the run begins with a cold cache
        os.close(fd)
    return total / seconds
