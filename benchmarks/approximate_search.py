"""Approximate searches: what they save and what they cost in accuracy, against exact ones.

    python benchmarks/approximate_search.py DATA.xmc TEST.xmc --settings delta=2 --settings delta=2,min_value=0.1

Prints a line a setting: seconds of `train` and, of them, of searches between rounds and of the check; multiply-adds of
all searches, as a share of exact ones; P@1, 3, 5. The first line is exact.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import click
from commands import machine, run


@click.command()
@click.argument("data", type=click.Path(path_type=Path))
@click.argument("test", type=click.Path(path_type=Path))
@click.option("--settings", multiple=True, default=("delta=2", "min_value=0.1", "delta=2,min_value=0.1"))
@click.option("--memory-limit", default="1GB", show_default=True)
@click.option("--threads", default=1, show_default=True)
@click.option("--repeat", default=1, show_default=True, help="Seconds are the least of so many runs.")
def main(data: Path, test: Path, settings: tuple[str, ...], memory_limit: str, threads: int, repeat: int) -> None:
    print(f"{machine()}; limit {memory_limit}, {threads} threads")
    heads = (
        ("train s", 8),
        ("search s", 8),
        ("check s", 8),
        ("share", 6),
        ("rounds", 6),
        ("P@1", 6),
        ("P@3", 6),
        ("P@5", 6),
    )
    print(f"{'setting':28} " + " ".join(f"{head:>{width}}" for head, width in heads))
    for setting in ("", *settings):
        options = [word for pair in setting.split(",") if pair for word in ("--set", pair)]
        seconds, searches, checks = [], [], []
        for _ in range(repeat):
            with tempfile.TemporaryDirectory() as folder:
                model = Path(folder) / "model"
                trained = run("train", data, model, "--memory-limit", memory_limit, "--threads", threads, *options)
                events = [json.loads(line) for line in (model / "events.jsonl").read_text().splitlines()]
                figures = run("evaluate", model, test, "--memory-limit", memory_limit)
            seconds.append(trained["seconds"])
            searches.append(sum(event["seconds"] for event in events if ": search" in event["phase"]))
            checks.append(
                sum(event["seconds"] for event in events if event["job"].startswith(f"search/{trained['rounds']}/"))
            )
        share = trained["search_work"] / trained["search_work_exact"] if trained["search_work_exact"] else 1.0
        print(
            f"{setting or 'exact':28} {min(seconds):8.1f} {min(searches):8.1f} {min(checks):8.1f} {share:6.0%} "
            f"{trained['rounds']:6d} {figures['P@1']:6.2f} {figures['P@3']:6.2f} {figures['P@5']:6.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
