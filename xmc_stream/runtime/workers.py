"""What the workers of a cluster say of themselves before their first job, and which of them a run refuses.

This module covers: versions, processor, memory, open files and folders of a worker, the memory limit that suits all of
them, what one that joins later must have. It does not cover: how workers are reached (`cluster`).
"""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import socket
import sys
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from xmc_stream import flags
from xmc_stream.errors import InputError, XmcStreamError
from xmc_stream.runtime.ledger import environment
from xmc_stream.store.remote import refuse_unreachable
from xmc_stream.system.memory import MemoryLimit, available_memory, format_size, make_room, parse_size, resident

_LIBRARIES = ("dask", "distributed", "zarr", "scipy")  # beside what the last bits of a run depend on
_LEAST_FILES = 256  # open files that a process must be allowed
_LEAST_ROOM = 64 * 10**6  # bytes on the disk of a folder that is written to
_SHARE = 0.75  # of what is free that a run takes where no limit is given
_PAUSED = 0.95  # of the memory at which dask pauses a worker, that a run takes of it at most


@dataclass(frozen=True)
class Folders:
    """Folders and stores that a run reads, and folders that it writes to, each with a file that this process wrote there.

    reads: absolute paths. writes: absolute paths of such files.
    """

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


@dataclass(frozen=True)
class About:
    """One worker. allowed: bytes at which dask's memory manager pauses it, 0 where nothing does.

    unread: what it says of stores that it cannot read. unwritten: folders that it cannot write to. full: of those that it
    can write to, the ones without room.
    """

    name: str
    environment: Mapping[str, str]
    host: str
    free: int
    resident: int
    allowed: int
    open_files: int
    unread: tuple[str, ...]
    unwritten: tuple[str, ...]
    full: tuple[tuple[str, int], ...]


@cache
def sources() -> str:
    """A digest of this library's own sources: its version alone does not tell two working trees apart."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for source in sorted(package.rglob("*.py")):
        digest.update(str(source.relative_to(package)).encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:12]


@cache
def environment_here() -> Mapping[str, str]:
    """What this process has that all workers of a run must have, and its type of processor."""
    return environment() | {name: version(name) for name in _LIBRARIES} | {"xmc-stream sources": sources()}


@dataclass(frozen=True)
class Terms:
    """What every worker of a run must keep to, also one that joins later.

    run: its name: of a file in its folder, if it has one, then # and a number. limit: of memory. threads: that it is planned
    for. environment: versions of the client, and the processor of the workers.
    """

    run: str
    limit: MemoryLimit
    threads: int
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Unfit:
    """What a worker that must not work for a run answers in the place of a job's outcome."""

    address: str
    why: str


def common_environment(workers: Iterable[Mapping[str, str]]) -> Mapping[str, str]:
    """Of a run: versions of this process, and the type of processor that most of the workers have."""
    kinds = Counter(environment["processor"] for environment in workers)
    return {**environment_here(), **({"processor": kinds.most_common(1)[0][0]} if kinds else {})}


def misfit(terms: Terms, name: str, threads: int, allowed: int) -> str:
    """Why this process, a worker that may have joined late, must not work for a run; nothing where it may.

    name, allowed: see `About`. It is asked for each job.
    """
    who = f"worker {name} on {socket.gethostname()}"
    if differs := _differs(who, environment_here(), terms.environment):
        return differs
    if threads > terms.threads:
        return (
            f"{who} has {threads} threads, and the memory of this run is planned for {terms.threads}: start it with "
            + flags.NTHREADS
            + f" {terms.threads}"
        )
    if allowed and int(_PAUSED * allowed) < terms.limit.limit:
        return (
            f"{who} is paused by dask from {format_size(allowed)} on, and this run takes up to "
            f"{format_size(terms.limit.limit)} of each worker: start it with a larger " + flags.MEMORY_LIMIT
        )
    file = terms.run.partition("#")[0]
    if (
        file and not Path(file).parents[1].is_dir()
    ):  # the run's own folder is new: a network's file system may show it later
        return f"{who} does not see {Path(file).parents[1]}: start it where all workers share that"
    return ""


def _differs(who: str, has: Mapping[str, str], needed: Mapping[str, str]) -> str:
    """What a worker has that is not what it needs, and what to do; nothing where there is none."""
    differ = [what for what in needed if has.get(what) != needed[what]]
    if not differ:
        return ""
    what = min(differ, key=lambda what: what == "processor")  # another llvmlite may call the same processor otherwise
    if what == "processor":
        return (
            f"{who} has a processor of type {has.get(what)}, and others have {needed[what]}: the last bits of results would "
            "depend on who works. Start workers on one type, or all of them with NUMBA_CPU_NAME=generic, which is slower"
        )
    return (
        f"{who} has {what} {has.get(what)}, and this process {needed[what]}: results could differ. Install the same on both, "
        "and start the worker again"
    )


def _open_files() -> int:
    """Files that this process may have open, a large number where nothing bounds them."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else int(soft)


def _can_write(file: str) -> bool:
    """Whether a file that another process wrote is seen, and one beside it can be written."""
    mine = Path(f"{file}-{uuid.uuid4().hex}")
    try:
        if not Path(file).is_file():
            return False
        mine.write_bytes(b"")
        mine.unlink()
    except OSError:
        return False
    return True


def _cannot_read(path: str) -> str:
    """Why this process cannot read a store; nothing where it can."""
    try:
        refuse_unreachable(path)
    except XmcStreamError as error:
        return "says: " + error.said
    shared = "put it on a file system that all workers share, under one name"
    return "" if os.access(path, os.R_OK) else f"cannot read {path}: {shared}"


def about_this(name: str, allowed: int, folders: Folders) -> About:
    """What this process says of itself, before memory is planned. name, allowed: see `About`."""
    make_room()
    return About(
        name, environment_here(), socket.gethostname(), available_memory(), resident(), allowed, _open_files(),
        tuple(said for path in folders.reads if (said := _cannot_read(path))),
        tuple(str(Path(path).parent) for path in folders.writes if not _can_write(path)),
        tuple(
            (str(Path(path).parent), room) for path in folders.writes
            if Path(path).is_file() and (room := shutil.disk_usage(Path(path).parent).free) < _LEAST_ROOM
        ),
    )  # fmt: skip


def refuse_unfit(workers: Sequence[About]) -> None:
    """Raise InputError where a worker cannot take part: each has this process's versions, and all one type of processor."""
    needed = common_environment(worker.environment for worker in workers)
    for worker in workers:
        who = f"worker {worker.name} on {worker.host}"
        if differs := _differs(who, worker.environment, needed):
            raise InputError(differs)
        if worker.unread:
            raise InputError(f"{who} " + worker.unread[0])
        if worker.unwritten:
            raise InputError(
                f"{who} does not see what this process writes to {worker.unwritten[0]}, or cannot write there: name a folder "
                "on a file system that all workers share, under one name"
            )
        for folder, room in worker.full:
            raise InputError(
                f"{who} has {format_size(room)} left on the disk of {folder}: make room, {format_size(_LEAST_ROOM)} at least"
            )
        if worker.open_files < _LEAST_FILES:
            raise InputError(
                f"{who} may have {worker.open_files} files open: start it where `ulimit -n` is {_LEAST_FILES} or more"
            )


def common_limit(workers: Sequence[About], size: str | float | None) -> MemoryLimit:
    """The limit of every worker: the one that is given, and never more than the least that a worker may have.

    Without one: what it holds, and three quarters of what is free on its host, shared by the workers there. Raises
    InputError where a worker is allowed less than it holds before it works.
    """
    on_host = Counter(worker.host for worker in workers)
    most = sys.maxsize
    for worker in workers:
        allowed = int(_PAUSED * worker.allowed) if worker.allowed else sys.maxsize
        if MemoryLimit(allowed).budget(worker.resident) <= 0:
            raise InputError(
                f"worker {worker.name} on {worker.host} is paused by dask from {format_size(worker.allowed)} on and holds "
                f"{format_size(worker.resident)} before it works: start it with a larger " + flags.MEMORY_LIMIT
            )
        free = worker.resident + int(_SHARE * worker.free / on_host[worker.host])
        most = min(most, allowed, free if size is None else allowed)
    return MemoryLimit(most if size is None else min(parse_size(size), most))
