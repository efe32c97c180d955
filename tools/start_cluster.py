"""A dask cluster on this machine: a scheduler and workers, each a process with a memory limit of its own.

    python tools/start_cluster.py --workers 2 --memory-limit 1GB
    xmc-stream train data.xmc model --scheduler tcp://127.0.0.1:8786

It runs until Ctrl-C, or until the scheduler ends. To run over several machines see docs/cluster.md.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click
import distributed

_SECONDS = 60  # that the processes have to find each other
# what dask is told, where the environment does not say it: after how long without a word a worker is dropped (by itself
# five minutes); no samples of the stacks of threads, which take time and can crash Python 3.11; fewer looks at the clock
SETTINGS = {
    "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "60s",
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
    "DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL": "500ms",
}


@click.command(context_settings={"show_default": True})
@click.option("--workers", type=click.IntRange(1), default=2, help="Processes that work.")
@click.option("--threads", type=click.IntRange(1), default=1, help="Jobs that a worker runs at a time.")
@click.option(
    "--memory-limit", default="auto", help="Of each worker: dask pauses it near there. auto: its share of the machine."
)
@click.option("--port", type=int, default=8786, help="Of the scheduler; 0 takes a free one.")
@click.option("--dashboard", default=":8787", help="Address of the scheduler's dashboard; none: no dashboard.")
def main(workers: int, threads: int, memory_limit: str, port: int, dashboard: str) -> None:
    """Start a scheduler and workers on this machine, and stay until Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="xmc_stream-cluster-", ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "scheduler.json"
        common = ["--scheduler-file", str(file), "--host", "127.0.0.1"]
        shown = ["--no-dashboard"] if dashboard == "none" else ["--dashboard-address", dashboard]
        # a session of their own: Ctrl-C is for this process, which ends them in order
        words = [sys.executable, "-m"]
        worker = [
            *words, "distributed.cli.dask_worker", *common, "--no-dashboard", "--nthreads", str(threads),
            "--memory-limit", memory_limit, "--local-directory", folder,
        ]  # fmt: skip
        running: list[subprocess.Popen[bytes]] = []

        def start(*command: str) -> subprocess.Popen[bytes]:
            running.append(
                subprocess.Popen(
                    command,
                    cwd=folder,
                    env={**SETTINGS, **os.environ},
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )
            return running[-1]

        try:
            scheduler = start(*words, "distributed.cli.dask_scheduler", *common, *shown, "--port", str(port))
            working = [start(*worker, "--name", f"worker-{number}") for number in range(1, workers + 1)]
            address = _met(file, scheduler, working)
            click.echo(f"{workers} workers at {address}. Give --scheduler {address} to a command. Ctrl-C ends them.")
            scheduler.wait()
            raise click.ClickException("the scheduler has ended")
        except KeyboardInterrupt:
            pass
        finally:
            for process in reversed(running):
                process.terminate()
            for process in reversed(running):
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _met(file: Path, scheduler: subprocess.Popen[bytes], workers: Sequence[subprocess.Popen[bytes]]) -> str:
    """The scheduler's address, of the file that it writes, once it has all workers."""
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        if scheduler.poll() is not None:
            raise click.ClickException("the scheduler did not start: is its port taken? --port 0 takes a free one")
        if any(worker.poll() is not None for worker in workers):
            raise click.ClickException("a worker did not start: is its --memory-limit understood?")
        if file.exists() and file.read_text().strip():
            address = json.loads(file.read_text())["address"]
            with distributed.Client(address) as client:
                client.wait_for_workers(len(workers), timeout=max(end - time.monotonic(), 1))
            return str(address)
        time.sleep(0.1)
    raise click.ClickException(f"the workers did not come within {_SECONDS} seconds")


if __name__ == "__main__":
    main()
