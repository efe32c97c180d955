"""What `plan` says against what `train`, `predict` and `convert` then do.

    XMC_STREAM_DATA=... python benchmarks/plan.py FOLDER [NAME ...] --limits 512MB,1GB,4GB --threads 2

For each set and limit: peak memory foreseen and VmHWM, passes, bytes streamed and gathered, seconds. A set `synthetic` is
made by tools/make_synthetic.py (--size). Ends with exit code 1 if a peak foreseen is below VmHWM or more than 30 % above
it, or passes or streamed bytes are not exact.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
from commands import converted, machine, run

GENERATOR = Path(__file__).resolve().parent.parent / "tools" / "make_synthetic.py"
SHAPE = "--features 100000 --labels 2000 --features-per-sample 80 --labels-per-sample 2 --test-samples 20000".split()


def prepared(folder: Path, name: str, size: str) -> tuple[Path, Path]:
    """Train and test set of a name, made once."""
    if name != "synthetic":
        return converted(folder, name)
    train, test = folder / f"{name}.xmc", folder / f"{name}-test.xmc"
    if not test.exists():
        subprocess.run([sys.executable, GENERATOR, train, "--size", size, *SHAPE, "--overwrite"], check=True)
    return train, test


def compare(what: str, limit: str, plan: dict[str, Any], done: dict[str, Any]) -> bool:
    """Print a row; returns whether the plan held."""
    ratio: float = plan["peak_rss"] / done["peak_rss"]
    passes = done.get("passes", 1)
    streamed = done.get("bytes_streamed", done.get("bytes_read", plan["bytes_read"]))
    exact: bool = plan["passes"] == passes and plan.get("bytes_streamed", plan["bytes_read"]) == streamed
    gathered = done.get("bytes_gathered", 0)
    share = f"{plan['bytes_gathered'] / gathered:6.2f}" if gathered else "     -"
    print(
        f"{what:28} {limit:>6} {plan['peak_rss'] / 1e6:8.0f} {done['peak_rss'] / 1e6:8.0f} {ratio:6.2f} {plan['passes']:6} "
        f"{passes:6g} {streamed / 1e6:9.1f} {'yes' if exact else 'NO':>6} {gathered / 1e6:9.1f} {share} "
        f"{plan['seconds']:7.1f} {done['seconds']:7.1f}",
        flush=True,
    )
    return exact and 1.0 <= ratio <= 1.3


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("names", nargs=-1)
@click.option("--limits", default="512MB,1GB,4GB", show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--size", default="100MB", show_default=True, help="Bytes of X of the synthetic set.")
def main(folder: Path, names: tuple[str, ...], limits: str, threads: int, size: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{machine()}; {threads} threads; MB foreseen and reached; bytes in MB, gathered ones as foreseen / done")
    print(
        f"{'command':28} {'limit':>6} {'foreseen':>8} {'VmHWM':>8} {'ratio':>6} {'passes':>6} {'done':>6} {'streamed':>9} "
        f"{'exact':>6} {'gathered':>9} {'ratio':>6} {'about s':>7} {'took s':>7}"
    )
    held = True
    for name in names or ("bibtex", "wordnet_hypernyms", "synthetic"):
        train, test = prepared(folder, name, size)
        for limit in limits.split(","):
            options = ("--memory-limit", limit, "--threads", threads)
            model, out = folder / "plan.model", folder / "plan.predictions"
            for old in (model, out):
                shutil.rmtree(old, ignore_errors=True)
            plan = run("plan", "train", train, model, *options)
            held &= compare(f"train {name}", limit, plan, run("train", train, model, *options))
            plan = run("plan", "predict", model, test, out, *options)
            held &= compare(f"predict {name}", limit, plan, run("predict", model, test, out, *options))
    if not held:
        sys.exit("a peak was not foreseen within -0/+30 %, or passes or bytes were not exact")


if __name__ == "__main__":
    main()
