"""The memory limit: sizes in words, what a process may plan with, and the guard that watches it.

This module covers: parsing "512MB", measuring what the process already holds, refusing a plan that cannot work, and
sampling resident memory while a run goes on. It does not allocate and does not cut work: memory plans do (`runtime.plan`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import resource
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from xmc_stream import flags
from xmc_stream.errors import InputError, MemoryLimitError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", re.IGNORECASE)
# so few are taken from the reserve of a limit: to ask the system what is free takes longer than what is done with them
FEW_BYTES = 2**20
_RESERVED = 32  # a limit's share that no plan uses
# What a process counts as before it works, at least. It is more than Python, libraries and kernels take, also those that are
# loaded later, so that commands which hold a little more or less of them (`plan` and `train`) have the same least limit.
_PROCESS = 200 * 2**20
_GROWTH = 16 * 2**20  # by which a process that has more may have grown when it is given the limit that was named
_MEGABYTE = 10**6  # limits are named in whole ones
_MOST = 2**62  # bytes of a limit
# Freed buffers below this share of a limit may stay resident: eight of them take the share that no plan uses.
_KEPT, _LEAST_KEPT, _MOST_KEPT = 256, 256 * 2**10, 16 * 2**20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's mallopt parameters
_LARGEST_OF_HEAP = 32 * 2**20  # glibc gives larger buffers back at once, whatever it is told
_CGROUPS = Path("/sys/fs/cgroup")


def parse_size(size: str | float) -> int:
    """Bytes in a size such as "512MB" (decimal), "4GiB" (binary) or a plain number of bytes.

    Raises InputError for anything else, zero and negative sizes included.
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if match is None or match[2].upper() not in _UNITS:
            raise InputError(f"memory size {size!r} is not understood: write it as 512MB, 4GB or 4GiB")
        size = float(match[1]) * _UNITS[match[2].upper()]
    if not 1 <= size < 2**63:
        raise InputError(f"memory size {size!r} is not a positive number of bytes: write it as 512MB, 4GB or 4GiB")
    return int(size)


def format_size(n_bytes: float) -> str:
    """A size for people: three digits and a decimal unit, "210 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(n_bytes) < 999.5:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.4g} TB"


def resident() -> int:
    """Bytes of this process in memory now, mapped pages included."""
    return _in_memory()[0]


def _in_memory() -> tuple[int, int]:
    """Bytes of this process in memory, and of these the mapped ones; 0 where the system does not tell them apart."""
    try:
        with open("/proc/self/statm", "rb") as pages:
            every, mapped = map(int, pages.read().split()[1:3])
    except OSError:  # not Linux
        import psutil

        info = psutil.Process().memory_info()
        return int(info.rss), int(getattr(info, "shared", 0))
    return every * mmap.PAGESIZE, mapped * mmap.PAGESIZE


def available_memory() -> int:
    """Bytes that this process may still get: free on the machine, and in every memory cgroup that it is in.

    What the page cache holds counts as free.
    """
    import psutil  # 0.01 s, which a command that is told its limit does without

    free = (free for _, free in of_cgroups(_memberships(), _CGROUPS))
    return min([int(psutil.virtual_memory().available), *free])


def _memberships() -> str:
    """The cgroups of this process; nothing where the system has none."""
    try:
        return Path("/proc/self/cgroup").read_text(encoding="utf-8")
    except OSError:
        return ""


def of_cgroups(memberships: str, root: Path) -> list[tuple[int, int]]:
    """The limit, and what is free, of each memory cgroup (v1, v2) that has one, of those that /proc/PID/cgroup names.

    Inside a container the names may be the host's: what is not there under `root` is looked for at the top.
    """
    found = []
    for line in memberships.splitlines():
        number, controllers, name = line.split(":", 2)
        if "memory" in controllers.split(","):
            top, limit, usage, prefix = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        elif number == "0":
            top, limit, usage, prefix = root, "memory.max", "memory.current", ""
        else:
            continue
        for group in (Path(name.lstrip("/")) / "any").parents:
            try:
                bound, used = ((top / group / file).read_text().strip() for file in (limit, usage))
                stat = dict(line.split() for line in (top / group / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):  # no such group here
                continue
            if bound != "max":
                cache = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
                found.append((int(bound), max(int(bound) - int(used) + cache, 0)))
    return found


@dataclass(frozen=True)
class Usage:
    """Bytes of a process in memory: resident, of these private (anonymous) and mapped (file-backed and shared)."""

    resident: int
    private: int
    mapped: int

    @classmethod
    def now(cls) -> Usage:
        """Of this process; where the system does not tell them apart, all is private."""
        every, mapped = _in_memory()
        return cls(every, every - mapped, mapped)

    def largest(self, other: Usage) -> Usage:
        """The larger of each."""
        return Usage(*map(max, astuple(self), astuple(other)))


def peak_resident() -> int:
    """The largest resident size this process ever had, in bytes (VmHWM on Linux, else the present size)."""
    return _told("VmHWM") or resident()


def _told(name: str) -> int:
    """Bytes that Linux says of this process; 0 elsewhere."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            for line in status:
                if line.startswith(f"{name}:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


_bounded = threading.Lock()


@contextmanager
def at_most_more(n_bytes: int) -> Iterator[None]:
    """In the block Linux gives this process so many bytes more at most; one thread at a time.

    A library that would take what a damaged file promises then ends with an error of its own, at last a ValueError.
    """
    with _bounded:
        if not (held := _told("VmData")):
            yield
            return
        before, most = resource.getrlimit(resource.RLIMIT_DATA)
        bound = held + n_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (bound if before < 0 else min(bound, before), most))
        try:
            yield
        except MemoryError:
            raise ValueError(f"it would take more than {format_size(n_bytes)}") from None
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (before, most))


_spare: list[Callable[[], None]] = []  # each lets go of what is kept for speed alone


def when_room_is_needed(let_go: Callable[[], None]) -> None:
    """Have `let_go` called before memory is planned: it frees what the process keeps for speed alone."""
    _spare.append(let_go)


def make_room() -> None:
    """Let go of what the process keeps for speed alone."""
    for let_go in _spare:
        let_go()


def _glibc(function: str) -> Any:
    """A function of glibc, or one that does nothing where the C library has none of that name."""
    return getattr(ctypes.CDLL(None), function, lambda *_: 0) if sys.platform == "linux" else lambda *_: 0


def return_freed_memory() -> None:
    """Give what was freed and stayed resident back to the system (glibc only)."""
    _glibc("malloc_trim")(0)


@dataclass(frozen=True)
class MemoryLimit:
    """A bound on the peak resident memory of a process, mapped pages included.

    limit: bytes. A plan may use what `budget` gives: the limit less what the process holds when it plans, less a
    reserve for what no plan can count (the allocator's edges, the interpreter's own objects).
    """

    limit: int

    @classmethod
    def of(cls, size: str | float | None) -> MemoryLimit:
        """The limit of a size in words or bytes; None: what this process holds, and three quarters of what is free now."""
        return cls(resident() + int(available_memory() * 0.75) if size is None else parse_size(size))

    @classmethod
    def kept(cls, size: str | float | None, spare: bool = False) -> MemoryLimit:
        """As `of`, and this process keeps to it from then on (`give_back_freed`).

        spare: what is kept for speed alone stays; else it is let go, see `when_room_is_needed`. Raises InputError where the
        limit is more than the process's memory cgroup has: the system would kill it before.
        """
        if not spare:
            make_room()
        limit = cls.of(size)
        bounds = [] if size is None else [bound for bound, _ in of_cgroups(_memberships(), _CGROUPS)]
        bound = min(bounds, default=limit.limit)
        if limit.limit > bound:
            raise InputError(
                flags.MEMORY_LIMIT
                + f" {size} is more than the {format_size(bound)} that this container or service may have (its "
                "memory cgroup): set "
                + flags.MEMORY_LIMIT
                + f" to {int(0.9 * bound) // 10**6}MB or less, or leave it out"
            )
        limit.give_back_freed()
        return limit

    def give_back_freed(self) -> None:
        """From now on, large buffers of this process go back to the system as soon as they are freed (glibc only).

        Large is 1 / 256 of the limit, from 256 KiB to 16 MiB. By default glibc raises that bound to 32 MiB as a program
        frees large blocks, after which freed buffers stay resident and a planned peak is exceeded by what was planned,
        and freed, before. With a small bound under a large limit, getting the same pages again and again takes a tenth
        of a training's time.
        """
        large = min(max(self.limit // _KEPT, _LEAST_KEPT), _MOST_KEPT)
        for parameter in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            _glibc("mallopt")(parameter, large)

    def keep_freed(self) -> None:
        """From now on, freed buffers of this process stay resident for the next ones, until `give_back_freed` (glibc only).

        Threads that get and give back the same pages again and again wait for each other: they share one address space.
        """
        _glibc("mallopt")(_M_MMAP_THRESHOLD, _LARGEST_OF_HEAP)
        _glibc("mallopt")(_M_TRIM_THRESHOLD, min(self.limit, 2**31 - 1))

    def budget(self, resident_bytes: int | None = None) -> int:
        """Bytes a plan may hand out: the limit less what the process holds and the reserve.

        resident_bytes: held once libraries and kernels are loaded. None: what this process holds now.
        """
        return self.limit - max(resident() if resident_bytes is None else resident_bytes, _PROCESS) - self.reserve

    @property
    def reserve(self) -> int:
        """Bytes kept out of every plan."""
        return 24 * 2**20 + self.limit // _RESERVED

    def check(
        self, needs: Mapping[str, int] | Callable[[int], Mapping[str, int]], what: str, budget: int | None = None
    ) -> None:
        """Refuse a plan that does not fit.

        needs: bytes by component, or what gives them for a budget. Raises MemoryLimitError naming the need, what there is,
        and the least limit that works.
        """
        budget = self.budget() if budget is None else budget
        here = needs(budget) if callable(needs) else needs
        need = sum(here.values())
        if need > budget:
            process = max(self.limit - budget - self.reserve, grown(resident()))

            def works(size: int) -> bool:
                there = MemoryLimit(size).budget(process)
                return sum((needs(there) if callable(needs) else needs).values()) <= there

            parts = ", ".join(f"{name} {format_size(size)}" for name, size in here.items() if size)
            raise MemoryLimitError(
                f"{what} needs {format_size(need)} ({parts}) beside the process itself, and the memory limit of "
                f"{format_size(self.limit)} leaves {format_size(max(budget, 0))}",
                least_limit(works),
            )


def grown(resident_bytes: int) -> int:
    """What a process that holds so many bytes may hold when it, or another one like it, is given the limit that was named."""
    return resident_bytes + _GROWTH


def least_limit(works: Callable[[int], bool], too_small: int = 0) -> int | None:
    """The smallest limit that works, in whole megabytes; None where none does. too_small: one that does not."""
    low = too_small // _MEGABYTE
    high = max(64, 2 * low)
    while not works(high * _MEGABYTE):
        low, high = high, 2 * high
        if high * _MEGABYTE > _MOST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle * _MEGABYTE) else (middle, high)
    return high * _MEGABYTE


class Guard:
    """Samples resident memory in a thread; `check` ends a run that comes too near the limit.

    The second line of defence: plans keep the limit by construction. peak: the largest sample, in bytes. watch: is told
    each sample.
    """

    def __init__(
        self, limit: MemoryLimit, interval: float = 0.05, watch: Callable[[Usage], None] | None = None
    ) -> None:
        self.limit = limit
        self._watch = watch
        self.peak = resident()
        self.now = self.peak
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="xmc-stream-memory-guard", daemon=True)

    def __enter__(self) -> Guard:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(self._interval):
            usage = Usage.now()
            self.now = usage.resident
            self.peak = max(self.peak, self.now)
            if self._watch is not None:
                self._watch(usage)

    def crowded(self) -> bool:
        """True when no further job should be admitted for the present (over 95 % of the limit)."""
        return self._over(0.95)

    def _over(self, share: float) -> bool:
        """Whether more than this share of the limit is resident, also without what was freed."""
        if self.now > share * self.limit.limit:
            return_freed_memory()
            self.now = resident()
        return self.now > share * self.limit.limit

    def check(self) -> None:
        """Raise MemoryLimitError when resident memory is over 98 % of the limit."""
        if self._over(0.98):
            raise MemoryLimitError(
                f"resident memory is {format_size(self.now)}, at the limit of {format_size(self.limit.limit)}: the run "
                "was ended and can be resumed; run the same command with a larger "
                + flags.MEMORY_LIMIT
                + " or fewer "
                + flags.THREADS
            )


def available_threads() -> int:
    """Processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
