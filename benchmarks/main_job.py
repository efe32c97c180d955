"""The main job on real data: convert, train with defaults, predict, evaluate, each under a limit.

    XMC_STREAM_DATA=... python benchmarks/main_job.py [NAME ...] --memory-limit 1GB --threads 1

Prints a line a set: seconds and peak memory of each command, passes, metrics, digest.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import click
from commands import machine, run

SETS = ("bibtex", "20news_bydate", "rcv1_topics", "wordnet_hypernyms")


@click.command()
@click.argument("names", nargs=-1)
@click.option("--memory-limit", default="1GB", show_default=True)
@click.option("--threads", default=1, show_default=True)
def main(names: tuple[str, ...], memory_limit: str, threads: int) -> None:
    data = Path(os.environ["XMC_STREAM_DATA"])
    print(f"{machine()}; limit {memory_limit}, {threads} threads; peak MB of convert/train/predict")
    print(
        f"{'set':18} {'convert':>8} {'train':>8} {'predict':>8} {'peak MB':>12} {'passes':>6} {'P@1':>6} {'P@3':>6} {'P@5':>6}"
        f" {'PSP@1':>6} {'gap mean':>9} {'model MB':>8}  digest"
    )
    for name in names or SETS:
        with tempfile.TemporaryDirectory() as folder:
            train, test, model, pred = (Path(folder) / part for part in ("train.xmc", "test.xmc", "model", "pred"))
            limit = ("--memory-limit", memory_limit)
            converted = run("convert", data / name / "train.txt.gz", train, "--normalize", "l2", *limit)
            run("convert", data / name / "test.txt.gz", test, "--like", train, *limit)
            trained = run("train", train, model, *limit, "--threads", threads)
            predicted = run("predict", model, test, pred, *limit, "--threads", threads)
            e = run("evaluate", pred, test, "--train", train)
            peaks = "/".join(f"{job['peak_rss'] / 1e6:.0f}" for job in (converted, trained, predicted))
            digest = run("info", model, "--digest")["digest"][:12]
            print(
                f"{name:18} {converted['seconds']:8.2f} {trained['seconds']:8.2f} {predicted['seconds']:8.2f} {peaks:>12} "
                f"{trained['passes']:6g} {e['P@1']:6.2f} {e['P@3']:6.2f} {e['P@5']:6.2f} {e['PSP@1']:6.2f} "
                f"{trained['duality_gap_mean']:9.1e} {trained['model_bytes'] / 1e6:8.1f}  {digest}",
                flush=True,
            )


if __name__ == "__main__":
    main()
