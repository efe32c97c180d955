"""What a run has done: one durable line a finished job, so that a killed run goes on where it was.

A line is the JSON of a key and a receipt, a tab and its crc32; the receipt of a job that was undone since is null. The
first names the run's identity. A line cut short by
a kill can only be the last one and is dropped; any other damage ends in a StoreError.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from xmc_stream import flags
from xmc_stream.errors import ResumeError, StoreError
from xmc_stream.kernels.cache import processor_type, versions
from xmc_stream.store.places import hold, refuse_foreign, try_lock
from xmc_stream.system.files import outlives_process, regular
from xmc_stream.version import __version__

Receipt = dict[str, Any]
IDENTITY = "identity"
_ADVICE = {
    "environment": "resume on the same processor type and package versions, or " + flags.FORCE,
    "format": "another version of xmc_stream began it, and it cannot go on here; begin anew by " + flags.OVERWRITE,
}


class Ledger:
    """The ledger of one run, in its work folder, which is made; held by one process at a time.

    identity: what must be the same for the run to go on; `environment` in it may differ when forced. resumed: whether
    there was something to go on from. renew: begin anew where the identity is another; renewed tells so.
    Raises ResumeError for another identity, if not renewed, or a run in progress, and InputError where the folder is
    somebody else's.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any], force: bool = False, renew: bool = False) -> None:
        self.path = path
        refuse_foreign(path.parent, path.name)
        self._file = open(hold(path), "a+b", buffering=0)  # noqa: SIM115 - closed by __exit__
        try:
            self._file.seek(0)
            self._receipts, self._size = _parse(path, self._file.read())
            self._file.truncate(self._size)
            before = self._receipts.get(IDENTITY)
            self.renewed = renew and before is not None and before != json.loads(json.dumps(identity))
            if self.renewed:
                self._file.truncate(0)
                self._receipts, self._size = {}, 0
            self.resumed = len(self._receipts) > 1
            if IDENTITY in self._receipts:
                check_identity(path, self._receipts[IDENTITY], identity, force)
            else:
                self.add(IDENTITY, dict(identity))
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def get(self, key: str) -> Receipt | None:
        """The receipt of a finished job, or a note."""
        return self._receipts.get(key)

    def add(self, key: str, receipt: Receipt) -> None:
        """Note a finished job; durable when this returns."""
        self._write(key, receipt)
        self._receipts[key] = receipt

    def _write(self, key: str, receipt: Receipt | None) -> None:
        text = json.dumps({"key": key, "receipt": receipt}, separators=(",", ":")).encode()
        line = memoryview(text + b"\t%08x\n" % zlib.crc32(text))
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:])
            if outlives_process(self.path):
                os.fsync(self._file.fileno())
        except OSError:
            with suppress(OSError):
                self._file.truncate(self._size)
            raise
        self._size += len(line)

    def undo(self, keys: Iterable[str]) -> None:
        """Have jobs done again, in any session: what they left is of no use. Durable when this returns."""
        for key in keys:
            self._write(key, None)
            self._receipts.pop(key, None)

    def hold(self) -> Callable[[], None]:
        """Hold the run beyond the end of the block, for jobs that have not ended; returns what lets it go."""
        fd = os.dup(self._file.fileno())
        return lambda: os.close(fd)

    def items(self) -> Iterator[tuple[str, Receipt]]:
        """Keys and receipts, the identity apart, in the order of their lines."""
        return ((key, receipt) for key, receipt in self._receipts.items() if key != IDENTITY)


def _parse(path: Path, content: bytes) -> tuple[dict[str, Receipt], int]:
    """Receipts by key, and the bytes of the lines that are whole."""
    receipts: dict[str, Receipt] = {}
    good = 0
    lines = content.splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        text, _, crc = line.rstrip(b"\n").rpartition(b"\t")
        if not line.endswith(b"\n") or crc != b"%08x" % zlib.crc32(text):
            if number == len(lines):
                break  # the kill came while it was written: its job is done again
            raise StoreError(f"{path}:{number}: the line fails its checksum: remove {path.parent} and begin anew")
        entry = json.loads(text)
        key, receipt = entry["key"], entry["receipt"]
        if receipt is None:
            receipts.pop(key, None)
        else:
            receipts[key] = receipt
        good += len(line)
    return receipts, good


def read_ledger(path: Path) -> tuple[dict[str, Receipt], bool]:
    """Receipts by key, the identity among them, of a ledger that may be in use, and whether it is."""
    with open(path, "rb", opener=regular) as file:
        free = try_lock(file.fileno(), fcntl.LOCK_SH)
        fcntl.flock(file, fcntl.LOCK_UN)
        return _parse(path, file.read())[0], not free


def unfinished_run(path: Path) -> Path | None:
    """The folder of the run that is making, or was making, a model at `path`, if there is one."""
    for work in (path, path.with_name(path.name + ".partial")):
        if work.name.endswith(".partial") and (work / "ledger.jsonl").is_file():
            return work
    return None


def check_identity(path: Path, before: Mapping[str, Any], now: Mapping[str, Any], force: bool) -> None:
    """Raise ResumeError where a run would go on as another one, naming what differs."""
    now = json.loads(json.dumps(now))
    differ = [
        name
        for name in {**now, **before}
        if before.get(name) != now.get(name) and not (force and name == "environment")
    ]
    if differ:
        name = min(differ, key=lambda name: name == "environment")  # what --force does not help against comes first
        hint = _ADVICE.get(name, "give the same, name another model, or " + flags.OVERWRITE)
        what, old, new = name, before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            part = next(part for part in {**old, **new} if old.get(part) != new.get(part))
            what, old, new = f"{name} {part}", old.get(part), new.get(part)
        raise ResumeError(f"{path.parent} holds a run with {what} {old}, not {new}: " + hint)


def environment() -> dict[str, str]:
    """What the last bits of a run depend on beside data, parameters and seed: type of processor and package versions."""
    packages = {"xmc-stream": __version__, "numpy": np.__version__, **versions()}
    return {"processor": _processor(), "python": platform.python_version(), **packages}


@cache
def _processor() -> str:
    """The processor's type, or the one that numba is told to compile for: kernels round the same on the same type."""
    if told := os.environ.get("NUMBA_CPU_NAME"):
        return f"{platform.machine()} {told}"
    name = ""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as cpuinfo:
        name = next((line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")), "")
    name = name or platform.processor()  # asked only where it must be, as it starts a process
    known_as = f"{platform.machine()} {name}".strip()  # two machines of a cloud may have one name and other features
    return f"{known_as} ({processor_type()})"
