"""The demo: a text set made of the docstrings of the Python packages at hand, and the main job on it.

A docstring is a sample; the packages, modules and classes around it are its labels. Source files are parsed, never
imported or run. Each step runs in a process of its own, as if typed. Learning and metrics are not here: the
commands do that.
"""

from __future__ import annotations

import ast
import gzip
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import textwrap
import time
import warnings
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TextIO

from xmc_stream import flags
from xmc_stream.errors import InputError, XmcStreamError

_MAX_FILE_BYTES = 2**20  # longer files are tables or made by programs
_MAX_BYTES = 10**8  # of all files: some 20 seconds of parsing
_MIN_WORDS = 5  # of a docstring, the words of its name apart
_MIN_POSITIVES = 3  # of a label in the training set
_MIN_SAMPLES, _MIN_LABELS = 100, 10
_TEST_SHARE = 10  # one sample in so many is held out
_BEGINNING = 80  # characters of a docstring that are shown
_WIDTH = 100  # of what is told

_LEFT_OUT = re.compile(r"(site|dist)-packages|tests?|test_.*|.*_tests?|conftest")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # HTTPServer.get_file: HTTP, Server, get, file
_MARK = "Made by `xmc-stream demo`"
_README = f"""{_MARK}, which replaces its files when it is run on this folder again; other files stay.

train.jsonl.gz  test.jsonl.gz  docstrings, each a line of JSON: words and labels
samples.txt                   the test samples: name, and beginning of the docstring, its name's words in brackets
train.xmc     test.xmc        the same two sets, converted: TF-IDF weighted words, and what they and the labels are
docs.model                    the model
predictions.zarr              the five best labels of each test sample
"""
_FILES = "train.jsonl.gz test.jsonl.gz samples.txt train.xmc test.xmc docs.model predictions.zarr"

_STEPS = (
    (
        "Convert the text once into a dataset on disk, from which all else reads what it needs, a piece at a time: no "
        "step exceeds its memory limit, however large the data. Words in two or more docstrings become features, weighted "
        "by TF-IDF.",
        "convert train.jsonl.gz train.xmc --min-df 2 --memory-limit 512MB",
    ),
    (
        "The test set takes words, weights and labels from the training set.",
        "convert test.jsonl.gz test.xmc --like train.xmc --memory-limit 512MB",
    ),
    (
        "Ask what training will cost before it begins: how often the data are read, how much memory, how long. The first "
        "time on a machine, this compiles the inner loops, which takes up to half a minute.",
        "plan train.xmc --memory-limit 512MB",
    ),
    (
        "Learn a linear classifier for each of the {n_labels:,} labels.",
        "train train.xmc docs.model --memory-limit 512MB",
    ),
    (
        "Name the five best labels of each held-out docstring.",
        "predict docs.model test.xmc predictions.zarr -k 5 --memory-limit 512MB",
    ),
    (
        "Compare them with the true labels. P@k is how many of the first k are right, in per cent; nDCG@k counts the "
        "earlier more, R@k asks how many of the true ones are found, and PS... counts rare labels more.",
        "evaluate predictions.zarr test.xmc --train train.xmc",
    ),
    ("The model is a folder that knows how it was made.", "info docs.model"),
)
_NEXT = (
    ("predict docs.model test.jsonl.gz named.jsonl -k 3", "raw text in, names of labels out: try texts of your own"),
    ("train train.xmc small.model --set lam=0.1", "fewer weights"),
    ("evaluate small.model test.xmc --train train.xmc", "and what that costs"),
    ("train --help", "settings; convert --help for your own data"),
)


@dataclass(frozen=True)
class Sample:
    """A docstring. name: scipy.fft.dct; words: lower-cased, the name's own left out; text: as it stands, cut off."""

    name: str
    words: str
    text: str

    @property
    def labels(self) -> list[str]:
        """scipy, scipy.fft, scipy.fft.dct: what is too rare to be learned is sorted out later."""
        return list(accumulate(self.name.split("."), "{}.{}".format))

    @property
    def held_out(self) -> bool:
        """Whether it is a test sample; decided by its name alone."""
        return zlib.crc32(self.name.encode()) % _TEST_SHARE == 0

    @property
    def beginning(self) -> str:
        """A line of the text to show to people, words of the name in brackets, no control characters."""
        own = _own_words(self.name)
        printable = "".join(c if c.isprintable() else " " for c in self.text)
        line = textwrap.shorten(printable, _BEGINNING, placeholder=" ...")
        return _WORD.sub(lambda match: f"[{match[0]}]" if match[0].lower() in own else match[0], line)


def source_folders() -> list[Path]:
    """Where this interpreter's standard library and installed packages lie."""
    installed = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    return [Path(path) for path in dict.fromkeys([sysconfig.get_path("stdlib"), *installed])]


def source_files(folder: Path) -> Iterator[tuple[Path, str, bool]]:
    """Files below a folder of packages, in order: path, module, and whether the module is private.

    A private module's public content counts as its package's (scipy/fft/_basic.py: scipy.fft). Private packages, tests,
    linked folders, and what is no regular file or too long are left out.
    """
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name.isidentifier() and _is_public(name))
        package = Path(parent).relative_to(folder).parts
        for name in sorted(names):
            stem, suffix = os.path.splitext(name)
            private = stem.startswith("_")
            if suffix != ".py" or not stem.isidentifier() or _LEFT_OUT.fullmatch(stem) or (private and not package):
                continue
            path = Path(parent, name)
            if path.is_file() and path.stat().st_size <= _MAX_FILE_BYTES:
                yield path, ".".join(package if private else (*package, stem)), private and stem != "__init__"


def _is_public(name: str) -> bool:
    return not name.startswith("_") and not _LEFT_OUT.fullmatch(name)


def docstrings(source: str, module: str) -> Iterator[tuple[str, str]]:
    """Qualified name and docstring of a module and of its public classes, functions and methods; outer ones first.

    Nothing comes of source that cannot be parsed.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # of the source's escapes and the like
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: nested too deeply
        return
    waiting: deque[tuple[str, ast.AST]] = deque([(module, tree)])
    while waiting:
        name, node = waiting.popleft()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield name, text
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                if not child.name.startswith("_"):
                    waiting.append((f"{name}.{child.name}", child))
            elif isinstance(child, ast.stmt | ast.excepthandler):  # definitions under if, try, with
                waiting.append((name, child))


def as_sample(name: str, text: str) -> Sample:
    """The sample of a docstring: words are split at all that is no letter and within CamelCase, then lower-cased."""
    own = _own_words(name)
    words = [word.lower() for word in _WORD.findall(text)]
    return Sample(name, " ".join(word for word in words if word not in own), text[: 10 * _BEGINNING])


def _own_words(name: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(name) + _WORD.findall(name.lower())}


def read_samples(folders: Iterable[Path]) -> list[Sample]:
    """All samples of folders of packages, by name. Copies, by their words with or without those of the name, count once.

    Raises InputError where a folder is none.
    """
    from tqdm import tqdm

    files = []
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder} is not a folder: give one that holds Python packages as " + flags.SOURCE)
        files += list(source_files(folder))
    samples: dict[str, Sample] = {}
    seen: set[str] = set()
    n_bytes = 0
    for path, module, private in tqdm(files, "read source", unit="file", file=sys.stderr, delay=2, disable=None):
        try:
            source = path.read_text("utf-8-sig")
        except (OSError, UnicodeDecodeError):
            continue
        n_bytes += len(source)
        if n_bytes > _MAX_BYTES:
            break
        for name, text in docstrings(source, module):
            sample = as_sample(name, text)
            if name in samples or (private and name == module) or sample.words.count(" ") + 1 < _MIN_WORDS:
                continue
            copies = {" ".join(text.split()), sample.words}
            if seen.isdisjoint(copies):
                samples[name] = sample
            seen |= copies
    return [samples[name] for name in sorted(samples)]


def write_text_set(samples: Sequence[Sample], folder: Path) -> dict[str, Any]:
    """Write train.jsonl.gz, test.jsonl.gz and samples.txt; returns sizes.

    Labels with fewer than three samples in the training set are left out, and samples with no label left. Also returned,
    of the test set: what is P@1 if the most frequent label is always named, and what P@5 at best, in per cent. Raises
    InputError where too little is left to learn from.
    """
    counts = Counter(label for sample in samples if not sample.held_out for label in sample.labels)
    known = {label for label, count in counts.items() if count >= _MIN_POSITIVES}
    kept = [sample for sample in samples if not known.isdisjoint(sample.labels)]
    train = [sample for sample in kept if not sample.held_out]
    test = [sample for sample in kept if sample.held_out]
    if len(kept) < _MIN_SAMPLES or len(known) < _MIN_LABELS or not test:
        raise InputError(
            f"{len(samples):,} docstrings were found, {len(kept):,} of them with one of {len(known):,} labels that "
            f"{_MIN_POSITIVES} or more share: the demo needs {_MIN_SAMPLES} with {_MIN_LABELS}; give a folder with more "
            "Python source as " + flags.SOURCE
        )
    for name, part in (("train", train), ("test", test)):
        # no name or time inside: equal data make equal files
        with open(folder / f"{name}.jsonl.gz", "wb") as raw, gzip.GzipFile("", "wb", 4, raw, mtime=0) as file:
            for sample in part:
                labels = [label for label in sample.labels if label in known]
                file.write(json.dumps({"text": sample.words, "labels": labels}).encode() + b"\n")
    lines = (f"{sample.name}\t{sample.beginning}\n" for sample in test)
    (folder / "samples.txt").write_text("".join(lines), encoding="utf-8")
    frequent = max(sorted(known), key=lambda label: counts[label])
    return {
        "n_train": len(train),
        "n_test": len(test),
        "n_labels": len(known),
        "P@1_most_frequent": 100 * sum(frequent in sample.labels for sample in test) / len(test),
        "P@5_at_best": 100 * sum(min(5, len(known.intersection(sample.labels))) for sample in test) / (5 * len(test)),
    }


def prepare_folder(folder: Path) -> None:
    """Make the folder, or remove what an earlier demo left in it. Raises InputError where it holds something else."""
    from xmc_stream.store.places import refuse_inside_store, remove_tree

    refuse_inside_store(folder.absolute())
    readme = folder / "README.txt"
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file: give the demo another folder")
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        if not readme.is_file() or not readme.read_bytes().startswith(_MARK.encode()):
            raise InputError(f"{folder} exists and is not from an earlier demo: give another folder, or an empty one")
        for name in _FILES.split():
            remove_tree(folder / name)
            remove_tree(folder / f"{name}.partial")
    readme.write_text(_README, encoding="utf-8")


def run_demo(folder: Path, sources: Sequence[Path], out: TextIO) -> dict[str, Any]:
    """Make the text set in `folder` and run the main job on it, told step by step on `out`; returns the metrics.

    sources: folders of packages to read; none for the interpreter's own. Raises InputError where the folder holds
    something else or there is too little source, and XmcStreamError where a step fails.
    """
    from xmc_stream.evaluation.evaluate import evaluate
    from xmc_stream.store.dataset import open_dataset

    def say(text: str, indent: str = "") -> None:
        text = textwrap.fill(
            text, _WIDTH, initial_indent=indent, subsequent_indent=" " * len(indent), break_long_words=False,
            break_on_hyphens=False,
        )  # fmt: skip
        encoding = out.encoding or "utf-8"
        print(text.encode(encoding, "replace").decode(encoding), file=out, flush=True)

    def tell(text: str) -> None:  # behind an empty line
        print(file=out)
        say(text)

    began = time.perf_counter()
    prepare_folder(folder)
    say("The task: tell from the words of a docstring to which package, module and class of Python it belongs.")
    where = ", ".join(map(str, sources)) or "the standard library and the packages installed beside it"
    tell(f"Reading the docstrings in the source of {where}; nothing is imported or run.")
    sizes = write_text_set(read_samples(sources or source_folders()), folder)
    say(
        f"Found {sizes['n_train'] + sizes['n_test']:,} docstrings. Their labels are the names around them: scipy.fft.dct "
        "has the labels scipy and scipy.fft. The words of its own name (scipy, fft, dct) are taken out of its text, or it "
        f"would be too easy. {sizes['n_test']:,} are held out for the test, the other {sizes['n_train']:,} are to learn "
        f"{sizes['n_labels']:,} labels from."
    )
    tell(f"$ cd {shlex.quote(str(folder))}")
    for text, command in _STEPS:
        tell(text.format(**sizes))
        say(f"$ xmc-stream {command}")
        run_step(command, folder, out)
    test = open_dataset(folder / "test.xmc")
    metrics = evaluate(folder / "predictions.zarr", test, open_dataset(folder / "train.xmc"))
    tell(
        f"So {metrics['P@1']:.0f} % of the labels named first are right (P@1); to name the most frequent label always "
        f"would make {sizes['P@1_most_frequent']:.0f} %. Few docstrings have five labels: P@5 is "
        f"{metrics['P@5']:.0f} %, and a perfect model's would be {sizes['P@5_at_best']:.0f} %."
    )
    tell(
        "Some of the held-out docstrings, evenly spaced, with the words in [brackets] hidden from the model. A score "
        "above zero is a yes; * marks what is right."
    )
    for name, beginning, truth, predicted in _shown(folder, test.n_samples):
        tell(name)
        say(beginning, "  text       ")
        say(truth, "  labels     ")
        say(predicted, "  predicted  ")
    tell(f"The files are in {folder}; README.txt there says what is what. To try next:")
    print(file=out)
    say(f"$ cd {shlex.quote(str(folder))}")
    for command, text in _NEXT:
        print(f"$ xmc-stream {command:50}# {text}", file=out, flush=True)
    sizes["n_features"] = test.n_features
    return {"folder": str(folder), **sizes, **metrics, "seconds": round(time.perf_counter() - began, 3)}


def run_step(command: str, folder: Path, out: TextIO) -> None:
    """Run a command of xmc-stream in a child process that finds its modules where this one does."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from xmc_stream.cli import main; main(prog_name='xmc-stream')"
    done = subprocess.run([sys.executable, "-c", code, *shlex.split(command)], cwd=folder, stdout=out, check=False)
    if done.returncode:
        raise XmcStreamError(
            f"`xmc-stream {command}` in {folder} ended with exit code {done.returncode}: put right what it says, then run "
            "the demo again"
        )


def _shown(folder: Path, n_samples: int, n_shown: int = 5) -> Iterator[tuple[str, str, str, str]]:
    """Of some test samples: name, beginning, true labels, predicted labels with scores."""
    from xmc_stream.store.dataset import open_dataset
    from xmc_stream.store.predictions import Predictions

    test = open_dataset(folder / "test.xmc")
    stored = test.label_names()
    names = [] if stored is None else stored.read(0, len(stored))
    samples = (folder / "samples.txt").read_text(encoding="utf-8").splitlines()
    predictions, Y = Predictions(folder / "predictions.zarr"), test.Y_rows()
    for part in range(n_shown):
        row = (2 * part + 1) * n_samples // (2 * n_shown)
        name, _, beginning = samples[row].partition("\t")
        truth = [names[label] for label in Y.block(row, row + 1).indices]
        labels, scores = predictions.rows(row, row + 1)
        found = [
            f"{'*' if names[label] in truth else ''}{names[label]}:{score:.2f}"
            for label, score in zip(labels[0], scores[0], strict=True)
        ]
        yield name, beginning, ", ".join(truth), ", ".join(found)
