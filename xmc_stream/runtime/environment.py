"""What the last bits of a run depend on beside data, parameters and seed: type of processor and package versions."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from functools import cache

import numpy as np

from xmc_stream.kernels.cache import processor_type, versions
from xmc_stream.version import __version__


def environment() -> dict[str, str]:
    """Of this process."""
    packages = {"xmc-stream": __version__, "numpy": np.__version__, **versions()}
    return {"processor": _processor(), "python": platform.python_version(), **packages}


@cache
def _processor() -> str:
    """The processor's type, or the one that numba is told to compile for: kernels round the same on the same type."""
    if told := os.environ.get("NUMBA_CPU_NAME"):
        return f"{platform.machine()} {told}"
    return f"{_model()} ({processor_type()})"  # two machines of a cloud may have one name and other features


def _model() -> str:
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as cpuinfo:
        for line in cpuinfo:
            if line.startswith("model name"):
                return f"{platform.machine()} {line.partition(':')[2].strip()}"
    return f"{platform.machine()} {platform.processor()}".strip()
