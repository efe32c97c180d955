"""The limit that holds: a generated set larger than memory, trained and predicted under several limits.

    python benchmarks/memory_limit.py FOLDER --size 2GB --limits 512MB,4GB

For each limit with a cold page cache, and for the first one with a warm one too: VmHWM of train and predict, cuts,
passes, seconds, digest. Ends with exit code 1 if a limit did not hold, digests differ, or the smallest limit cut the
work into fewer than 4 class blocks or 8 row blocks.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import click
from commands import drop_cache, machine, run

GENERATOR = Path(__file__).resolve().parent.parent / "tools" / "make_synthetic.py"
SHAPE = "--features 50000 --labels 1300 --features-per-sample 250 --labels-per-sample 1 --test-samples 20000".split()


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--size", default="2GB", show_default=True, help="Bytes of X.")
@click.option("--limits", default="512MB,4GB", show_default=True)
@click.option("--threads", default=2, show_default=True)
def main(folder: Path, size: str, limits: str, threads: int) -> None:
    data, test = folder / "limit.xmc", folder / "limit-test.xmc"
    if not test.exists():
        subprocess.run([sys.executable, GENERATOR, data, "--size", size, *SHAPE, "--overwrite"], check=True)
    print(f"{machine()}; X of {size}, {threads} threads")
    print(
        f"{'limit':>6} {'cache':5} {'train s':>8} {'VmHWM MB':>9} {'class blocks':>12} {'row blocks':>10} {'passes':>7} "
        f"{'GB read':>8} {'predict s':>9} {'VmHWM MB':>9} {'P@1':>6}  digest"
    )
    cases = [(limit, "cold") for limit in limits.split(",")] + [(limits.split(",")[0], "warm")]
    digests, kept, cuts = set(), True, []
    for limit, cache in cases:
        model, pred = folder / "limit.model", folder / "limit.pred"
        for old in (model, pred):
            shutil.rmtree(old, ignore_errors=True)
        options = ("--memory-limit", limit, "--threads", threads)
        if cache == "cold":
            drop_cache(folder)
        else:
            for file in data.rglob("c/*"):
                file.read_bytes()
        t = run("train", data, model, *options)
        if cache == "cold":
            drop_cache(folder)
        p = run("predict", model, test, pred, *options)
        digests.add(run("info", model, "--digest")["digest"])
        kept = kept and max(t["peak_rss"], p["peak_rss"]) <= t["memory_limit"]
        cuts.append((t["class_blocks"], t["row_blocks"]))
        accuracy = run("evaluate", pred, test)["P@1"]
        print(
            f"{limit:>6} {cache:5} {t['seconds']:8.1f} {t['peak_rss'] / 1e6:9.0f} {t['class_blocks']:12} {t['row_blocks']:10} "
            f"{t['passes']:7g} {t['bytes_read'] / 1e9:8.1f} {p['seconds']:9.1f} {p['peak_rss'] / 1e6:9.0f} {accuracy:6.2f}  "
            f"{sorted(digests)[0][:12] if len(digests) == 1 else 'DIFFERS'}",
            flush=True,
        )
    if not kept or len(digests) > 1 or cuts[0][0] < 4 or cuts[0][1] < 8:
        sys.exit("a limit did not hold, digests differ, or the work was not cut enough")


if __name__ == "__main__":
    main()
