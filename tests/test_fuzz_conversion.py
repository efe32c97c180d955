"""Mutated inputs through whole conversions, 1,000 of them: the dataset that a plain reading gives, or one clear line.

benchmarks/hostile.py runs as many as one likes. Texts are read by the twin of the parser (reference/parse.py), objects
by json, matrices by loops over their arrays.
"""

from __future__ import annotations

import bz2
import gzip
import json
import random
import re
import shutil
import signal
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from helpers.damage import damage
from helpers.parser_fuzz import N_FEATURES, N_LABELS, good_line, mutated
from helpers.places import memory_place
from reference import parse as twin
from scipy import sparse

from xmc_stream.convert import convert
from xmc_stream.convert.formats.registry import FORMATS
from xmc_stream.convert.lines import files as text_module
from xmc_stream.convert.lines.parser import UNKNOWN
from xmc_stream.errors import InputError, MemoryLimitError, StoreError, XmcStreamError
from xmc_stream.store.dataset import Dataset

SECONDS = 120  # after which a conversion hangs
COUNTS = ("skipped", "blank_lines", "dropped_features", "dropped_labels", "summed_duplicates")
SMALL_PART = 64  # bytes of a text

Matrix = list[dict[int, float]]  # the entries of each row


@dataclass
class Expected:
    """What a plain reading gives. None for what it does not tell; ordered: values are the same bits."""

    X: Matrix | None = None
    Y: Matrix | None = None
    shape: tuple[int, int] | None = None
    counts: dict[str, int] = field(default_factory=dict)
    exact: bool = True


class RefusedError(Exception):
    """What a plain reading finds wrong."""


@dataclass
class Case:
    """An input: what kind, its paths, options; sound: it was not touched."""

    kind: str
    source: Any
    options: dict[str, Any]
    text: bytes = b""
    labels_text: bytes = b""
    sound: bool = False


# --- plain readings


def header(text: bytes, numbers: int) -> tuple[list[int], bytes]:
    line, _, rest = text.removeprefix(b"\xef\xbb\xbf").partition(b"\n")
    found = re.fullmatch(rb"[ \t]*" + rb"[ \t]+".join([rb"(\d{1,15})"] * numbers) + rb"[ \t]*\r?", line)
    if found is None or len(line) > 900:
        raise RefusedError
    return [int(number) for number in found.groups()], rest


def lines_of(text: bytes, n_features: int, n_labels: int, rules: twin.Rules) -> twin.Read:
    try:
        return twin.read(text, n_features, n_labels, rules)
    except twin.BadLineError as error:
        raise RefusedError from error


def expected(read: twin.Read, shape: tuple[int, int], x_base: int, y_base: int) -> Expected:
    X = [{feature - x_base: float(value) for feature, value in pairs} for _, pairs in read.rows]
    Y = [dict.fromkeys((label - y_base for label in labels), 1.0) for labels, _ in read.rows]
    counts = {name: getattr(read, name) for name in COUNTS if name != "skipped"}
    return Expected(X, Y, shape, {**counts, "skipped": len(read.skipped)})


def rules_of(options: dict[str, Any], libsvm: bool, bases: tuple[int | None, int | None]) -> twin.Rules:
    return twin.Rules(
        libsvm, *bases, options.get("skip", False), options.get("sum_duplicates", False),
        options.get("drop_unseen", False),
    )  # fmt: skip


def read_xmlrepo(case: Case) -> Expected:
    (n, d, k), rest = header(case.text, 3)
    like, base = case.options.get("like"), case.options.get("base")
    bases = (base or 0,) * 2
    if like:
        d, k = like.n_features, like.n_labels
        bases = bases if base is not None else (like.attributes["base"], like.attributes["label_base"])
    read = lines_of(rest, d, k, rules_of(case.options, False, bases))
    if read.lines != n or (read.skipped and not read.rows):
        raise RefusedError
    return expected(read, (d, k), *bases)


def read_two_files(case: Case) -> Expected:
    (n, d), x_rest = header(case.text, 2)
    (m, k), y_rest = header(case.labels_text, 2)
    like, base = case.options.get("like"), case.options.get("base")
    bases = (base or 0,) * 2
    if like:
        d, k = like.n_features, like.n_labels
        bases = bases if base is not None else (like.attributes["base"], like.attributes["label_base"])
    if n != m or case.options.get("skip"):
        raise RefusedError
    sides = []
    for rest, size, at in ((x_rest, d, bases[0]), (y_rest, k, bases[1])):
        sides.append(lines_of(rest, size, 10**30, rules_of(case.options, False, (at, 0))))
        if sides[-1].lines != n or any(labels for labels, _ in sides[-1].rows):
            raise RefusedError
    x, y = sides
    X = [{feature - bases[0]: float(value) for feature, value in pairs} for _, pairs in x.rows]
    Y = [{label - bases[1]: 1.0 for label, value in pairs if value != 0} for _, pairs in y.rows]
    return Expected(X, Y, (d, k))


def read_libsvm(case: Case) -> Expected:
    options, like = case.options, case.options.get("like")
    d, k = (options.get(name) for name in ("n_features", "n_labels"))
    x_base, y_base = options.get("base"), None
    if like:
        if d not in (None, like.n_features) or k not in (None, like.n_labels):
            raise RefusedError
        d, k = like.n_features, like.n_labels
        x_base, y_base = like.attributes["base"] if x_base is None else x_base, like.attributes["label_base"]
    sizes = (UNKNOWN if d is None else d, UNKNOWN if k is None else k)
    text = case.text.removeprefix(b"\xef\xbb\xbf")
    read = lines_of(text, *sizes, rules_of(options, True, (x_base, y_base)))
    if not read.rows:  # also if they were all left out
        raise RefusedError
    decided = []
    for ids, base, size in (
        ([feature for _, pairs in read.rows for feature, _ in pairs], x_base, d),
        ([label for labels, _ in read.rows for label in labels], y_base, k),
    ):
        if not ids and size is None:
            raise RefusedError
        base = (int(min(ids) > 0) if ids else 0) if base is None else base
        if size is not None and ids and max(ids) - base >= size:
            raise RefusedError
        decided.append((base, max(ids) + 1 - base if size is None else size))
    (x_base, d), (y_base, k) = decided
    return expected(read, (d, k), x_base, y_base)


def read_jsonl(case: Case) -> Expected:
    """How many rows there are, and their labels where those are ids; that a line is bad only where json says so."""
    Y: Matrix = []
    blank = 0
    lines = case.text.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    for line in lines[:-1] if lines[-1] == b"" else lines:
        if not line.strip():
            blank += 1
            continue
        try:
            record = json.loads(line.decode())
            bad = not isinstance(record, dict) or not isinstance(record["text"], str) or b"\0" in line
            labels = record["labels"] if not bad else []
        except (ValueError, KeyError, RecursionError):
            bad = True
        if bad and not case.options.get("skip"):
            raise RefusedError
        if bad or not isinstance(labels, list) or not all(type(label) is int for label in labels):
            return Expected()
        row = {label - (case.options.get("base") or 0): 1.0 for label in labels}
        if len(row) < len(labels) or (row and not 0 <= min(row) <= max(row) < case.options.get("n_labels", 99)):
            return Expected()  # a bad row, or one that is mended
        Y.append(row)
    return Expected(None, Y, None, {"blank_lines": blank})


def rows_of(matrix: Any) -> Matrix:
    """Entries added up, by loops over the arrays."""
    rows: Matrix = [{} for _ in range(matrix.shape[0])]
    if matrix.format == "coo":
        triples = zip(matrix.row.tolist(), matrix.col.tolist(), matrix.data.tolist(), strict=True)
    else:
        lines = [(line, at) for line in range(len(matrix.indptr) - 1)
                 for at in range(matrix.indptr[line], matrix.indptr[line + 1])]  # fmt: skip
        triples = ((line, int(matrix.indices[at]), float(matrix.data[at])) for line, at in lines)
        triples = triples if matrix.format == "csr" else ((row, line, value) for line, row, value in triples)
    for row, column, value in triples:
        assert column >= 0
        rows[row][column] = rows[row].get(column, 0.0) + value
    return rows


def read_matrices(case: Case) -> Expected:
    """What the arrays hold; only asked of what was converted."""
    X, Y = (load(path) for path in (case.source, case.options["labels"]))
    like, summed = case.options.get("like"), case.options.get("sum_duplicates", False)
    shape = (like.n_features, like.n_labels) if like else None
    x, y = (rows_of(matrix) for matrix in (X, Y))
    if case.options.get("drop_unseen"):
        sizes = shape or (case.options.get("n_features"), case.options.get("n_labels"))
        x, y = (
            [{j: v for j, v in row.items() if size is None or j < size} for row in side]
            for side, size in zip((x, y), sizes, strict=True)
        )
    y = [{label: 1.0 for label, value in row.items() if value != 0} for row in y] if not summed else None
    return Expected(x, y, shape, exact=False)


def load(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of headers that look like those of Python 2
        return loaded(path)


def loaded(path: Path) -> Any:
    if path.suffix == ".npz":
        return sparse.load_npz(path)
    if path.is_dir():
        indptr, indices = (np.load(path / f"{name}.npy") for name in ("indptr", "indices"))
        data = np.load(path / "data.npy") if (path / "data.npy").exists() else np.ones(len(indices))
        columns = int(indices.max()) + 1 if len(indices) else 0
        made = sparse.csr_matrix((len(indptr) - 1, columns))
        made.indptr, made.indices, made.data = indptr, indices, data
        return made
    dense = np.load(path)
    if dense.ndim == 1 and dense.dtype.kind in "SU":
        texts = [text.decode() if isinstance(text, bytes) else text for text in dense.tolist()]
        names = sorted(set(texts) - {""})
        entries = [(row, names.index(text)) for row, text in enumerate(texts) if text]
        rows, columns = zip(*entries, strict=True) if entries else ((), ())
        return sparse.coo_matrix((np.ones(len(rows)), (rows, columns)), shape=(len(texts), len(names)))
    if dense.ndim == 1:
        return sparse.coo_matrix((np.ones(len(dense)), (np.arange(len(dense)), dense)))
    with np.errstate(over="ignore"):
        return sparse.coo_matrix(np.where(dense.astype(np.float32) != 0, dense, 0))


# --- inputs


def any_options(rng: random.Random, likes: list[Dataset]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, chance in (("skip", 0.3), ("sum_duplicates", 0.3), ("drop_unseen", 0.3), ("columns", 0.1)):
        if rng.random() < chance:
            options[name] = True
    if rng.random() < 0.15:
        options["base"] = rng.choice([0, 0, 1])
    if rng.random() < 0.25:
        options["like"] = rng.choice(likes)
    if rng.random() < 0.15:
        options["n_features"] = rng.choice([N_FEATURES] * 4 + [10, 0])
    if rng.random() < 0.15:
        options["n_labels"] = rng.choice([N_LABELS] * 4 + [10, 0])
    if rng.random() < 0.2:
        options["normalize"] = rng.choice(["l2", "none"])
    if rng.random() < 0.1:
        options["memory_limit"] = rng.choice(["60MB", "512MB", "800MB"])
    return options


def changed(rng: random.Random, text: bytes, tokens: tuple[bytes, ...] = ()) -> bytes:
    content = bytearray(text)
    for _ in range(rng.choice([1, 1, 1, 1, 1, 3])):
        if tokens and rng.random() < 0.7:
            place = rng.randrange(len(content) + 1)
            content[place : place + rng.choice([0, 0, 1, 8])] = rng.choice(tokens)
        else:
            mutated(rng, content)
    return bytes(content)


def packed(rng: random.Random, text: bytes, sound: bool) -> tuple[bytes, bool]:
    """The text as it is or compressed, and perhaps damaged then; and whether it was."""
    pack = rng.choice([bytes, bytes, bytes, gzip.compress, bz2.compress])
    content = pack(text)
    if pack is bytes or sound or rng.random() < 0.7:
        return content, False
    return changed(rng, content), True


def text_case(rng: random.Random, folder: Path, options: dict[str, Any], sound: bool) -> Case:
    kind = rng.choice(["xmlrepo", "xmlrepo", "xmlrepo", "libsvm", "libsvm", "two files", "jsonl"])
    n = rng.choice([1, 3, 10, 40])
    if kind == "jsonl":
        names = rng.random() < 0.5
        records = [
            {"text": " ".join(rng.choices(["red", "green", "blue", "ärger", "日本"], k=rng.randint(0, 6))),
             "labels": [f"L{i}" if names else i for i in rng.sample(range(9), rng.randint(0, 3))]} for _ in range(n)
        ]  # fmt: skip
        text = "".join(json.dumps(record, ensure_ascii=rng.random() < 0.5) + "\n" for record in records).encode()
        tokens = (b'"labels":', b"null", b"NaN", b'{"', b"\\ud800", b"[" * 3000, b"1e999", b'"a"', b"}\n{", b"\\u0000",
                  b",", b"\n\n", b'"text": 3,', b"-1", b"99", b'""', b"\xff", b"{}")  # fmt: skip
        for name in ("n_features", "like"):
            options.pop(name, None)
    else:
        lines = [good_line(rng) for _ in range(n)]
        if kind != "libsvm" or rng.random() < 0.8:
            lines = [re.sub(rb" *#.*", b"", line) for line in lines]
        if kind == "two files":
            parted = [line.rstrip().partition(b" ") for line in lines]
            parted = [(b"", b" ", labels) if b":" in labels else (labels, b" ", rest) for labels, _, rest in parted]
        text = b"".join(lines)
        tokens = ()
    labels_text = b""
    if kind == "xmlrepo":
        text = b"%d %d %d\n" % (n, N_FEATURES, N_LABELS) + text
    elif kind == "two files":
        text = b"%d %d\n" % (n, N_FEATURES) + b"".join(rest + b"\n" for _, _, rest in parted)
        rows = (b" ".join(label + rng.choice([b":1", b":0", b":1.5"]) for label in labels.split(b",") if label)
                for labels, _, _ in parted)  # fmt: skip
        labels_text = b"%d %d\n" % (n, N_LABELS) + b"".join(row + b"\n" for row in rows)
    if not sound and (not labels_text or rng.random() < 0.6):
        text = changed(rng, text, tokens)
    elif not sound:
        labels_text = changed(rng, labels_text)
    source = folder / rng.choice(["a.txt", "a.json", "a.npz", "a b.gz", "ä"])
    content, spoilt = packed(rng, text, sound)
    source.write_bytes(content)
    if labels_text:
        (folder / "labels.txt").write_bytes(labels_text)
        options["labels"] = folder / "labels.txt"
    case = Case("spoilt" if spoilt else "text", source, options, text, labels_text)
    plain = not {"like", "base", "n_features", "n_labels", "memory_limit"} & set(options)
    plain = plain and not (labels_text and options.get("skip"))
    case.sound = sound and plain and n > 3  # fewer rows of libsvm text may be without labels or features
    return case


def csr_arrays(rng: random.Random, n: int, width: int) -> dict[str, Any]:
    rows = [rng.sample(range(width), rng.choice([0, 1, 3, 8])) for _ in range(n)]
    rows = [row if rng.random() < 0.1 else sorted(row) for row in rows]
    indptr = np.cumsum([0, *map(len, rows)]).astype(rng.choice([np.int32, np.int64]))
    indices = np.array([j for row in rows for j in row], rng.choice([np.int32, np.int64, np.uint8, ">i4"]))
    data = np.array(
        [rng.gauss(0, 1) for _ in indices], rng.choice([np.float32, np.float64, np.int8, ">f8", np.float16])
    )
    return {"indptr": indptr, "indices": indices, "data": data, "shape": np.array([n, width])}


def spoil(rng: random.Random, arrays: dict[str, Any]) -> None:
    """Change one of the arrays, so that it is still an array."""
    name = rng.choice(sorted(arrays))
    array = arrays[name]
    kind = 1 if array.dtype.kind == "c" else rng.randrange(6)
    if kind == 0 and array.size:
        array = array.copy()
        values = [-1, 0, 1, 39, 40, 2**31 - 1, -(2**31), 100]
        with np.errstate(over="ignore"):
            value = np.array(rng.choice([np.nan, np.inf, 1e39] if array.dtype.kind == "f" else values))
            array.flat[rng.randrange(array.size)] = value.astype(array.dtype)
    elif kind == 1:
        array = array[: rng.randrange(array.size + 1)]
    elif kind == 2:
        array = np.concatenate([array, array[-1:]])
    elif kind == 3:
        array = array.astype(rng.choice([np.float32, np.complex64, bool, "S3", np.uint64, ">i2"]))
    elif kind == 4:
        array = array.reshape(rng.choice([(1, -1), (-1, 1), (1, 1, -1)])) if array.size else array
    elif array.size:
        array = array.copy()
        i, j = rng.randrange(array.size), rng.randrange(array.size)
        array.flat[i], array.flat[j] = array.flat[j], array.flat[i]
    arrays[name] = array


def write_matrix(rng: random.Random, path: Path, arrays: dict[str, Any], how: str, compressed: bool) -> Path:
    if how == "triple":
        path.mkdir()
        for name, array in arrays.items():
            np.save(path / f"{name}.npy", array)
        return path
    if how == "npy":
        np.save(path.with_suffix(".npy"), arrays["dense"])
        return path.with_suffix(".npy")
    save = np.savez_compressed if compressed else np.savez
    save(path.with_suffix(".npz"), format=np.array(arrays.pop("format", how).encode()), **arrays)
    return path.with_suffix(".npz")


def matrix_case(rng: random.Random, folder: Path, options: dict[str, Any], sound: bool) -> Case:
    n = rng.choice([1, 3, 20])
    paths = {}
    spoilt = None if sound else rng.choice(["x", "y"])
    for side, width in (("x", N_FEATURES), ("y", N_LABELS)):
        how = rng.choice(["csr", "csr", "csc", "coo", "triple", "npy"])
        arrays = csr_arrays(rng, n, width)
        if side == "y":  # -1 is no label
            arrays["data"] = np.abs(arrays["data"])
        if how in ("csc", "coo"):
            plain = {name: array.astype(array.dtype.newbyteorder("=")) for name, array in arrays.items()}
            data = plain["data"].astype(np.float64)
            made = sparse.csr_matrix((data, plain["indices"].astype(np.int32), plain["indptr"]), (n, width)).asformat(
                how
            )
            keys = ("row", "col") if how == "coo" else ("indices", "indptr")
            arrays = {"data": made.data, "shape": arrays["shape"], **{key: getattr(made, key) for key in keys}}
        elif how == "npy":
            values = np.array([[rng.choice([0, 0, rng.gauss(0, 1)]) for _ in range(width)] for _ in range(n)])
            one_a_row = side == "y" and rng.random() < 0.5
            arrays = {"dense": np.array([rng.randrange(width) for _ in range(n)]) if one_a_row else values}
        if spoilt == side and rng.random() < 0.6:
            for _ in range(rng.choice([1, 1, 2])):
                spoil(rng, arrays)
            spoilt = "done"
        path = write_matrix(rng, folder / side, arrays, how, rng.random() < 0.5)
        if spoilt == side:
            file = rng.choice(sorted(path.iterdir())) if path.is_dir() else path
            file.write_bytes(changed(rng, file.read_bytes()))
        paths[side] = path
    options["labels"] = paths["y"]
    for name in ("n_features", "n_labels", "base", "skip"):
        if rng.random() < 0.8:
            options.pop(name, None)
    easy = not {"like", "base", "n_features", "n_labels", "memory_limit", "skip"} & set(options)
    return Case("matrices", paths["x"], options, sound=sound and easy)


# --- one conversion


def format_of(case: Case) -> str:
    """The format that the content is recognised as, "" for none."""
    head = case.text.removeprefix(b"\xef\xbb\xbf")[: 2**16]
    return next((name for name, module in FORMATS.items() if module.recognises(case.source, head)), "")


def readable(case: Case) -> Any:
    """The plain reading of a text, None where there is none."""
    if case.text.startswith((b"\xff\xfe", b"\xfe\xff")) or case.text.startswith((b"\x1f\x8b", b"BZh", b"PK")):
        return None
    format = format_of(case)
    if format == "xmlrepo":
        two = bool(
            re.fullmatch(rb"[ \t]*\d+[ \t]+\d+[ \t]*\r?", case.text.removeprefix(b"\xef\xbb\xbf").split(b"\n")[0])
        )
        if two != bool(case.labels_text):
            return None
        return read_two_files if two else read_xmlrepo
    return {"libsvm": None if case.labels_text else read_libsvm, "jsonl": read_jsonl}.get(format)


def held(matrix: Any) -> Matrix:
    block = matrix.block(0, matrix.shape[0])
    values = np.ones(len(block.indices)) if block.data is None else block.values
    return [
        dict(zip(block.indices[a:b].tolist(), values[a:b].tolist(), strict=True))
        for a, b in zip(block.indptr[:-1].tolist(), block.indptr[1:].tolist(), strict=True)
    ]


def same(got: Matrix, wanted: Matrix, exact: bool, length_one: bool) -> None:
    assert len(got) == len(wanted)
    for mine, theirs in zip(got, wanted, strict=True):
        if exact and not length_one:
            assert mine == theirs
            continue
        norm = np.sqrt(sum(np.float32(v).astype(float) ** 2 for v in theirs.values())) if length_one else 1.0
        assert {j for j, v in mine.items() if v} <= set(theirs)
        for j, value in theirs.items():
            np.testing.assert_allclose(mine.get(j, 0.0), value / (norm or 1), rtol=1e-3, atol=1e-30)


def compare(case: Case, dataset: Dataset) -> None:
    """What was converted is what a plain reading gives."""
    reading = read_matrices if case.kind == "matrices" else readable(case)
    if case.kind == "spoilt" or reading is None:
        return
    try:
        wanted = reading(case)
    except RefusedError:
        raise AssertionError("this was to be refused") from None
    length_one = dataset.attributes["normalize"] == "l2"
    if wanted.X is not None:
        same(held(dataset.X_rows()), wanted.X, wanted.exact, length_one)
    if wanted.Y is not None:
        same(held(dataset.Y_rows()), wanted.Y, True, False)
    if wanted.shape is not None:
        assert (dataset.n_features, dataset.n_labels) == wanted.shape
    for name, count in wanted.counts.items():
        assert dataset.attributes.get(name, 0) == count, name


def check_refusal(case: Case, error: XmcStreamError) -> None:
    """One line that is not too long, and there was a reason."""
    message = str(error)
    assert message.isprintable(), "more than one line"
    assert len(message) < 1000
    assert not case.sound, message
    if isinstance(error, MemoryLimitError) or case.kind != "text" or "memory_limit" in case.options:
        return
    reading = readable(case)
    if reading in (read_xmlrepo, read_two_files, read_libsvm):
        try:
            reading(case)
        except RefusedError:
            return
        if not any(name in case.options for name in ("n_features", "n_labels")) or reading is read_libsvm:
            raise AssertionError(f"this was to be converted, and ended in: {message}")


@contextmanager
def time_limit() -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise TimeoutError("the conversion hangs")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def one(rng: random.Random, folder: Path, likes: list[Dataset], verified: bool) -> bool:
    """Make an input, convert it and check what comes of it; returns whether a dataset did."""
    sound = rng.random() < 0.2
    options = any_options(rng, likes)
    case = (text_case if rng.random() < 0.65 else matrix_case)(rng, folder, options, sound)
    target = folder / "d.xmc"
    standing = rng.random() < 0.05
    if standing:
        shutil.copytree(likes[0].path, target)
        options["overwrite"] = True
    before = tree(folder)
    options = {"memory_limit": "4GB", **options}
    part = SMALL_PART if rng.random() < 0.3 else text_module._PART
    try:
        with time_limit(), mock.patch.object(text_module, "_PART", part):
            dataset = convert(case.source, target, **options)
    except (InputError, MemoryLimitError, StoreError) as error:
        # what a larger limit would let go on is kept beside the target
        kept = isinstance(error, MemoryLimitError) and "it goes on" in str(error)
        assert [path for path in tree(folder) if not (kept and ".partial" in path)] == before, "something was left"
        check_refusal(case, error)
        return False
    after = [path for path in tree(folder) if path.partition("/")[0] != "d.xmc"]
    assert after == [path for path in before if path.partition("/")[0] != "d.xmc"], "something was left"
    compare(case, dataset)
    if verified:
        assert damage(target) == []
    return True


def fuzz(n: int, seed: int) -> int:
    """Convert n inputs, every tenth of which is verified; returns how many became datasets.

    Raises AssertionError with the seed of the input and the folder where it is kept.
    """
    root = Path(tempfile.mkdtemp(dir=memory_place()))
    likes = []
    for base in (0, 1):
        lines = b"".join(b"%d %d:1\n" % (i % N_LABELS + base, i + base) for i in range(N_FEATURES))
        (root / "like.txt").write_bytes(lines)
        likes.append(convert(root / "like.txt", root / f"like{base}.xmc"))
    n_good = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(n):
            folder = root / "case"
            folder.mkdir()
            try:
                n_good += one(random.Random(f"{seed} {i}"), folder, likes, i % 10 == 0)
            except Exception as error:
                raise AssertionError(f"input {i} of seed {seed}, kept in {folder}: {error!r}") from error
            shutil.rmtree(folder)
    shutil.rmtree(root)
    return n_good


@pytest.mark.slow
def test_mutated_inputs() -> None:
    assert fuzz(300, seed=1) > 90
