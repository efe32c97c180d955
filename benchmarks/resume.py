"""A run killed at a share of its work: how long the rest takes, and whether the model is the same.

    python benchmarks/resume.py DATA.xmc FOLDER --at 0.8

Times a whole run, then kills one at that share of the time and lets the same command finish it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import click
from commands import machine, run


@click.command()
@click.argument("data", type=click.Path(path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--at", default="0.2,0.5,0.8", show_default=True)
@click.option("--memory-limit", default="1GB", show_default=True)
@click.option("--threads", default=1, show_default=True)
def main(data: Path, folder: Path, at: str, memory_limit: str, threads: int) -> None:
    model = folder / "resume.model"
    options = ("train", data, model, "--memory-limit", memory_limit, "--threads", threads)

    def clean() -> None:
        for path in (model, model.with_name(model.name + ".partial")):
            shutil.rmtree(path, ignore_errors=True)

    clean()
    began = time.perf_counter()
    run(*options)
    whole = time.perf_counter() - began
    digest = run("info", model, "--digest")["digest"]
    print(f"{machine()}; whole run {whole:.1f} s")
    for share in map(float, at.split(",")):
        clean()
        command = [sys.executable, "-m", "xmc_stream.cli", *map(str, options)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            time.sleep(share * whole)
            process.kill()
        began = time.perf_counter()
        run(*options)
        rest = time.perf_counter() - began
        same = run("info", model, "--digest")["digest"] == digest
        print(
            f"killed at {share:4.0%}: the rest takes {rest:5.1f} s, {rest / whole:4.0%} of the whole; same model: {same}"
        )
    clean()


if __name__ == "__main__":
    main()
