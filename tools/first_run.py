"""The main job on a small set that this script makes: each step as the command that a user types.

    python tools/first_run.py [FOLDER]

Leaves its files in FOLDER (default: xmc_stream_first_run in the present folder).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

GENERATOR = Path(__file__).resolve().parent / "make_synthetic.py"
SIZES = "--samples 5000 --features 2000 --labels 300 --features-per-sample 40 --test-samples 1000 --seed 1"


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), default=Path("xmc_stream_first_run"))
def main(folder: Path) -> None:
    """Convert, train, predict and evaluate a made-up set."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, GENERATOR, folder / "train.txt.gz", *SIZES.split(), "--overwrite"], check=True)
    steps = [
        "convert {0}/train.txt.gz {0}/train.xmc --normalize l2 --memory-limit 512MB --overwrite",
        "convert {0}/train-test.txt.gz {0}/test.xmc --like {0}/train.xmc --memory-limit 512MB --overwrite",
        "train {0}/train.xmc {0}/first.model --memory-limit 512MB --overwrite",
        "predict {0}/first.model {0}/test.xmc {0}/predictions.zarr -k 5 --memory-limit 512MB --overwrite",
        "evaluate {0}/predictions.zarr {0}/test.xmc --train {0}/train.xmc",
    ]
    for step in steps:
        arguments = step.format(folder).split()
        print(f"\n$ xmc-stream {' '.join(arguments)}", flush=True)
        subprocess.run([sys.executable, "-m", "xmc_stream.cli", *arguments], check=True)
    print(f"\nThe files are in {folder}.")


if __name__ == "__main__":
    main()
