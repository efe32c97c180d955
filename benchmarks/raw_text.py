"""Raw text to a dataset: by one thread and two, and by one worker process of one thread and two, in turns, in one run.

    python benchmarks/raw_text.py FOLDER --megabytes 1000

Texts of words whose frequencies fall as 1 / rank, one word in 23 with letters beyond ASCII, as lines of JSON (a third of
them with escapes) or as CSV. MB/s are of the seconds that the command says; the best of the repeats. Ends with exit code 1
where the datasets differ.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import click
import numpy as np
from cluster import Workers, standing_still
from commands import machine, run

_WORDS, _LABELS, _ROWS = 400_000, 20_000, 2000


def write_text(path: Path, megabytes: int, seed: int = 0) -> None:
    """Lines of JSON, or CSV by the name of the file."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 11, _WORDS)
    letters = "".join(rng.choice(list("etaoinshrdlucmfwypvbgkjqxz"), int(lengths.sum())))
    words = [letters[end - n : end] for n, end in zip(lengths.tolist(), np.cumsum(lengths).tolist(), strict=True)]
    for i in range(50, _WORDS, 23):
        words[i] += "éüßжд日本łőñ"[i % 10]
    shares = np.cumsum(1 / np.arange(1, _WORDS + 1))
    with path.open("w", encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            file.write("title,content,labels\n")
        while file.tell() < megabytes * 1e6:
            _write_rows(file, path.suffix == ".csv", words, shares / shares[-1], rng)


def _write_rows(file: TextIO, as_csv: bool, words: list[str], shares: Any, rng: np.random.Generator) -> None:
    sizes = np.minimum(rng.lognormal(4.2, 1.0, _ROWS).astype(int) + 3, 20_000)
    drawn = [words[i] for i in np.searchsorted(shares, rng.random(int(sizes.sum()))).tolist()]
    labels = np.unique((rng.random((_ROWS, 3)) ** 3 * _LABELS).astype(int) * 3 + np.arange(3), axis=1)
    for size, end, own in zip(sizes.tolist(), np.cumsum(sizes).tolist(), labels.tolist(), strict=True):
        text = drawn[end - size : end]
        title, content = " ".join(text[:6]).title(), ", ".join(text).replace(", ", " ", size - size // 6)
        if as_csv:
            file.write(f'"{title}","{content}",{";".join(f"label {label}" for label in own)}\n')
        else:
            row = {"title": title, "content": content, "target_ind": own}
            file.write(json.dumps(row, ensure_ascii=size % 3 == 0) + "\n")


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, resolve_path=True))  # workers run in folders of their own
@click.option("--megabytes", default=500, show_default=True)
@click.option("--csv", "as_csv", is_flag=True, help="CSV in the place of JSON.")
@click.option("--limit", default="2GB", show_default=True, help="Of a run, or of each worker.")
@click.option("--repeats", default=3, show_default=True)
def main(folder: Path, megabytes: int, as_csv: bool, limit: str, repeats: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / f"text-{megabytes}.{'csv' if as_csv else 'jsonl'}"
    if not text.exists():
        write_text(text, megabytes)
    size, out = text.stat().st_size / 1e6, folder / "text.xmc"
    options = ("--memory-limit", limit, "--overwrite", *(("--label-delimiter", ";") if as_csv else ()))
    took: dict[str, list[float]] = {}
    digests = set()
    with ExitStack() as stack:
        ways: dict[str, tuple[Any, ...]] = {f"{n} thread(s)": ("--threads", n) for n in (1, 2)}
        clusters = {}
        for n in (1, 2):
            place = folder / f"cluster-{n}"
            place.mkdir(exist_ok=True)
            clusters[f"{n} worker(s)"] = workers = stack.enter_context(Workers(place, n, limit))
            ways[f"{n} worker(s)"] = ("--scheduler", workers.address)
        for turn in range(repeats + 1):  # the first loads kernels
            for name, how in ways.items():
                with standing_still(*(workers for of, workers in clusters.items() if of != name)):
                    seconds = run("convert", text, out, *options, *how)["seconds"]
                if turn:
                    took.setdefault(name, []).append(seconds)
                else:
                    digests.add(run("info", out, "--digest")["digest"])
    best = {name: min(seconds) for name, seconds in took.items()}
    print(f"{machine()}; {size:.0f} MB of {text.suffix[1:]}; limit {limit}; best of {repeats}")
    print("| | s | MB/s |\n|---|---|---|")
    for name, seconds in best.items():
        print(f"| {name} | {seconds:.1f} | {size / seconds:.0f} |")
    for kind in ("thread(s)", "worker(s)"):
        print(f"two {kind} against one: {best[f'1 {kind}'] / best[f'2 {kind}']:.2f}")
    sys.exit(len(digests) > 1)


if __name__ == "__main__":
    main()
