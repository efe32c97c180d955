"""Training of a dataset from the disk and from an S3 server on this machine: seconds, requests, bytes, the same model.

The server is moto's, behind a proxy (tests/helpers/s3.py) that counts, and that delays and fails answers. Cases: the local
folder; the URL with an empty cache, with a full one, with one of a third of the data, and with an empty one while each
answer takes 200 ms and each twentieth is an error. Needs s3fs and moto[server].

    python benchmarks/remote.py FOLDER DATASET [--memory-limit 1GB] [--set NAME=VALUE ...]
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import click
from commands import machine, run


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("data", type=click.Path(path_type=Path, exists=True))
@click.option("--memory-limit", default="1GB", show_default=True)
@click.option("--set", "settings", multiple=True)
def main(folder: Path, data: Path, memory_limit: str, settings: tuple[str, ...]) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from helpers.s3 import BUCKET, S3, s3_server

    options = ["--memory-limit", memory_limit, *(word for one in settings for word in ("--set", one))]
    sizes = [file.stat().st_size for file in data.rglob("c/*")]

    def show(name: str, figures: dict[str, Any], s3: S3) -> None:
        again = sum(n - 1 for n in s3.chunks().values())
        print(
            f"| {name} | {figures['seconds']:.1f} | {len(s3.chunks()):,} | {again:,} | {s3.bytes / 1e6:.1f} | {s3.failed} | "
            f"{figures['peak_rss'] / 1e6:.0f} | {run('info', folder / 'm', '--digest')['digest'][:8]} |",
            flush=True,
        )

    def case(name: str, source: Path | str, s3: S3, fresh: bool = True) -> None:
        shutil.rmtree(folder / "m", ignore_errors=True)
        if fresh:
            shutil.rmtree(os.environ["XMC_STREAM_CACHE"], ignore_errors=True)
        show(name, run("train", source, folder / "m", *options), s3)
        s3.reset()

    print(f"{machine()}; {len(sizes)} chunk files, {sum(sizes) / 1e6:.1f} MB")
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["XMC_STREAM_CACHE"] = str(folder / "cache")
    with s3_server(folder) as s3:
        url = f"s3://{BUCKET}/data.xmc"
        copied = run("copy", data, url)
        print(f"copied to the server in {copied['seconds']:.1f} s")
        s3.reset()
        print("| data | train s | chunks | fetched again | MB from the server | errors | peak MB | digest |")
        print("|---|---|---|---|---|---|---|---|")
        shutil.rmtree(folder / "m", ignore_errors=True)
        case("local folder", data, s3)
        case("URL, empty cache", url, s3)
        case("URL, full cache", url, s3, fresh=False)
        os.environ["XMC_STREAM_CACHE_SIZE"] = str(sum(sizes) // 3)
        case("URL, a cache of a third of the data", url, s3)
        del os.environ["XMC_STREAM_CACHE_SIZE"]
        s3.delay, s3.fails_every = 0.2, 20
        case("URL, empty cache, 200 ms an answer, 5 % errors", url, s3)


if __name__ == "__main__":
    main()
