"""What the benchmarks share: running a command of the library in a process of its own, and dropping the page cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run(*arguments: Any, timeout: float | None = None) -> dict[str, Any]:
    """`xmc-stream ARGUMENTS --json`: the object it prints. Raises what subprocess.run does, after `timeout` seconds too."""
    command = [sys.executable, "-m", "xmc_stream.cli", *map(str, arguments), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=timeout)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def drop_cache(folder: Path) -> None:
    """Make the page cache forget a folder's files."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def converted(folder: Path, name: str) -> tuple[Path, Path]:
    """Both parts of a set of XMC_STREAM_DATA, rows l2-normalised, made if they are not there."""
    source, train, test = (
        Path(os.environ["XMC_STREAM_DATA"]) / name,
        folder / f"{name}.xmc",
        folder / f"{name}-test.xmc",
    )
    if not train.exists():
        run("convert", source / "train.txt.gz", train, "--normalize", "l2")
    if not test.exists():
        run("convert", source / "test.txt.gz", test, "--like", train)
    return train, test


def machine() -> str:
    """Processor and load, for the head of a table."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "?")
    return f"{len(os.sched_getaffinity(0))} cores of {model}, load {os.getloadavg()[0]:.1f}"
