"""A dask cluster on this machine: a scheduler and workers, each a process with a memory limit of its own.

    python tools/start_cluster.py --workers 2 --memory-limit 1GB
    xmc-stream train data.xmc model --scheduler tcp://127.0.0.1:8786

It runs until Ctrl-C, or until the scheduler ends. Logs of all processes stay in a folder that it prints. To run over
several machines see docs/cluster.md.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import click
import distributed
from distributed.worker_memory import parse_memory_limit

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
@click.option(
    "--logs", type=click.Path(path_type=Path), show_default="a new one among the temporary folders",
    help="Folder for a log of the scheduler and of each worker; they stay, and what is there is added to.",
)  # fmt: skip
def main(workers: int, threads: int, memory_limit: str, port: int, dashboard: str, logs: Path | None) -> None:
    """Start a scheduler and workers on this machine, and stay until Ctrl-C."""
    _refuse_unless_understood(memory_limit, threads)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    logs = _made(logs)
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
        running: dict[str, subprocess.Popen[bytes]] = {}

        def start(name: str, *command: str) -> None:
            with (logs / f"{name}.log").open("ab") as log:
                running[name] = subprocess.Popen(
                    command, cwd=folder, env={**SETTINGS, **os.environ}, stdout=log, stderr=log, start_new_session=True
                )

        try:
            start("scheduler", *words, "distributed.cli.dask_scheduler", *common, *shown, "--port", str(port))
            for number in range(1, workers + 1):
                start(f"worker-{number}", *worker, "--name", f"worker-{number}")
            address, shown_at = _met(file, running, logs)
            click.echo(f"{workers} workers at {address}. Give --scheduler {address} to a command. Ctrl-C ends them.")
            click.echo(f"Their logs: {logs}")
            if dashboard != "none":
                installed = find_spec("bokeh") is not None
                click.echo(f"The dashboard: {shown_at}" if installed else "No dashboard: pip install bokeh for one")
            running["scheduler"].wait()
            raise click.ClickException(f"the scheduler has ended: see {logs / 'scheduler.log'}")
        except KeyboardInterrupt:
            pass
        finally:
            for process in reversed(running.values()):
                process.terminate()
            for process in reversed(running.values()):
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _refuse_unless_understood(memory_limit: str, threads: int) -> None:
    """End with a line where workers of dask would not take a memory limit."""
    with suppress(ValueError, OverflowError):
        if (parse_memory_limit(memory_limit, threads, logger=logging.getLogger("distributed.worker")) or 0) >= 0:
            return
    raise click.ClickException(f"--memory-limit {memory_limit} is not understood: write it as 512MB, 4GB or 4GiB")


def _made(logs: Path | None) -> Path:
    """The folder for logs."""
    try:
        if logs is None:
            return Path(tempfile.mkdtemp(prefix="xmc_stream-cluster-logs-"))
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.ClickException(f"no folder for logs ({error}): name one by --logs") from None
    return logs.absolute()


def _met(file: Path, running: dict[str, subprocess.Popen[bytes]], logs: Path) -> tuple[str, str]:
    """The scheduler's address, of the file that it writes, and its dashboard's, once it has all workers."""
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        for name, process in running.items():
            if process.poll() is not None:
                port = "is its port taken? --port 0 takes a free one, or " if name == "scheduler" else ""
                raise click.ClickException(f"{name} did not start: {port}see {logs / name}.log")
        with suppress(OSError, ValueError):  # the scheduler ends, or is still writing the file
            if file.exists() and (told := file.read_text().strip()):
                address = str(json.loads(told)["address"])
                with distributed.Client(address, timeout=5, set_as_default=False) as client:
                    if len(client.nthreads()) >= len(running) - 1:
                        return address, client.dashboard_link
        time.sleep(0.1)
    raise click.ClickException(f"the workers did not come within {_SECONDS} seconds: see their logs in {logs}")


if __name__ == "__main__":
    main()
