"""What is done to stores: by chance, and as someone would who means harm."""

from __future__ import annotations

import json
import random
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import scipy.sparse as sp

N, D, K = 240, 60, 40  # of the dataset that the others are made from
_ABSURD: list[Any] = [
    None, True, -1, 0, 1, 2, 7, 2**31, 2**40, 2**62, 2**63, 10**30, 0.5, -1e300, float("nan"), float("inf"), "", "x", "int64",
    "float64", "<f4", "0" * 64, [], {}, [0], [[]], [1, 2, 3], [-1, 5], [2**62, 2**62], {"x": []}, ["a", "b"],
]  # fmt: skip


def write_chunk(file: Path, values: np.ndarray[Any, Any]) -> None:
    """A chunk file with the checksum of these values, noted in the array's zarr.json as whoever wrote it would."""
    content = values.tobytes()
    crc = google_crc32c.value(content)
    file.write_bytes(content + crc.to_bytes(4, "little"))
    about_file = file.parent
    while not (about_file / "zarr.json").exists():
        about_file = about_file.parent
    note_crcs(about_file)


def note_crcs(array: Path) -> None:
    """Put the checksums that the chunk files end with into the zarr.json, as if nothing had happened."""
    file = array / "zarr.json"
    try:
        about = json.loads(file.read_bytes())
        if "chunks_crc32c" in about["attributes"]:
            chunks = sorted(
                (c for c in (array / "c").rglob("*") if c.is_file()), key=lambda c: [int(p) for p in c.parts[-1:]]
            )
            about["attributes"]["chunks_crc32c"] = "".join(
                f"{int.from_bytes(chunk.read_bytes()[-4:], 'little'):08x}" for chunk in chunks
            )
            file.write_text(json.dumps(about))
    except (OSError, ValueError, KeyError, TypeError):
        pass


def seal_again(store: Path) -> None:
    from xmc_stream.store.inventory import SEAL, seal

    for file in [store / "zarr.json", *store.rglob("zarr.json")][::-1]:
        try:
            if SEAL in json.loads(file.read_bytes())["attributes"]:
                seal(file.parent)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass


def values_of(file: Path) -> np.ndarray[Any, Any]:
    array = file.parent
    while not (array / "zarr.json").exists():
        array = array.parent
    kind = json.loads((array / "zarr.json").read_bytes())["data_type"]
    return np.frombuffer(file.read_bytes()[:-4], np.dtype(kind)).copy()


def spoil_values(store: Path, r: random.Random) -> str:
    """Change values of an array; most often near its beginning, as the rest is padding."""
    file = r.choice(chunks(store))
    values = values_of(file)
    at = r.randrange(min(len(values), r.choice([4, 50, 400, len(values)])))
    if values.dtype.kind == "f":
        new: list[Any] = [np.nan, np.inf, -np.inf, 0.0, -1.0, 1e300, 3e38, 1e-40]
    else:
        top = int(np.iinfo(values.dtype).max)
        flipped = int(values[at]) ^ 1 << r.randrange(8 * values.itemsize - 1)
        new = [-1, 0, 1, 2, K, D, N, N * D, top, top - 1, -top, top // 2, flipped]
    value = r.choice(new)
    how = r.choice(["one", "one", "one", "all", "from", "swap", "reverse", "repeat", "noise", "shift"])
    with np.errstate(all="ignore"):
        if values.dtype == np.float32 and abs(value) > 3e38:
            value = np.inf
        if values.dtype.kind == "u":
            value = abs(value) & int(np.iinfo(values.dtype).max)
        if how == "one":
            values[at] = value
        elif how == "all":
            values[:] = value
        elif how == "from":
            values[at:] = value
        elif how == "swap":
            values[[0, at]] = values[[at, 0]]
        elif how == "reverse":
            values[: at + 1] = values[: at + 1][::-1]
        elif how == "repeat":
            values[at] = values[at - 1]
        elif how == "noise":
            values[: at + 1] = np.frombuffer(r.randbytes((at + 1) * values.itemsize), values.dtype)
        elif how == "shift":
            values[:] = (
                values + value if values.dtype.kind == "f" else values + np.array(r.choice([1, -1, 5]), values.dtype)
            )
    write_chunk(file, values)
    return f"values ({how} {at} {value}) of {file.relative_to(store)}"


def spoil_array(store: Path, r: random.Random) -> str:
    """Another array in its place, of another length or type, whole in itself."""
    from xmc_stream.store.encoding import ArrayWriter
    from xmc_stream.store.nodes import Group

    file = r.choice([f for f in chunks(store) if f.name == "0" and f.parent.name == "c"])
    values = values_of(file)
    n = r.choice([0, 1, 2, K, K + 1, D, N, N + 1, 5000, len(values)])
    kind = np.dtype(r.choice([values.dtype.str] * 2 + ["i4", "i8", "f4", "f8", "u1"]))
    with np.errstate(all="ignore"):
        values = np.resize(values, n).astype(kind)
    array = file.parent.parent
    writer = ArrayWriter(Group(array.parent), array.name, kind)
    writer.append(values)
    writer.close()
    return f"{n} of {kind} in {array.relative_to(store)}"


def spoil_json(store: Path, r: random.Random) -> str:
    """Something else in a zarr.json, or nothing, or by another name."""
    files = sorted(store.rglob("zarr.json"))
    file = r.choice([*files, *([store / "zarr.json"] * 5 if (store / "zarr.json").exists() else [])])
    about = json.loads(file.read_bytes())
    places = list(walk(about))
    for _ in range(r.choice([1, 1, 1, 2])):
        holder, key = r.choice(places)
        how = r.choice(["absurd", "absurd", "near", "gone", "named"])
        try:
            if how == "absurd":
                holder[key] = r.choice(_ABSURD)
            elif how == "near" and isinstance(holder[key], int):
                holder[key] += r.choice([-1, 1, 2, 1000])
            elif how == "near" and isinstance(holder[key], str):
                holder[key] = holder[key][::-1]
            elif how == "gone":
                del holder[key]
            elif how == "named" and isinstance(holder, dict):
                holder["x" + key[1:]] = holder.pop(key)
        except (KeyError, IndexError):
            continue
        said = f"{file.relative_to(store)}: {how} {key}"
    file.write_text(json.dumps(about))
    return said if places else "nothing"


def walk(about: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(about) if isinstance(about, dict) else range(len(about)) if isinstance(about, list) else ():
        yield about, key
        yield from walk(about[key])


def flip(store: Path, r: random.Random) -> str:
    file = r.choice(files(store))
    content = bytearray(file.read_bytes())
    if not content:
        return "nothing"
    at = r.randrange(min(len(content), r.choice([8, 200, 4000, len(content)])))
    content[at] ^= 1 << r.randrange(8)
    file.write_bytes(content)
    return f"a bit at {at} of {file.relative_to(store)}"


def resize(store: Path, r: random.Random) -> str:
    """Another number of samples, features or labels, wherever it stands."""
    old = r.choice([N, D, K])
    new = r.choice([0, 1, old - 1, old + 1, 500, 8000, 10**6, 2**31, 2**40])
    numbers = {old: new, old + 1: new + 1}
    for file in sorted(store.rglob("zarr.json")):
        about = json.loads(file.read_bytes())
        for holder, key in list(walk(about)):
            if type(holder[key]) is int and key != "chunk_shape" and holder[key] in numbers:
                holder[key] = numbers[holder[key]]
        file.write_text(json.dumps(about))
    return f"{new} for {old}"


def other_matrix(store: Path, r: random.Random) -> str:
    """Another matrix of the same shape and kind, sound in itself."""
    from xmc_stream.store.encoding import MatrixWriter
    from xmc_stream.store.matrix import SparseMatrix
    from xmc_stream.store.nodes import Group

    folder = r.choice([file.parent.parent.parent for file in chunks(store) if file.parts[-3:] == ("indptr", "c", "0")])
    matrix = SparseMatrix(folder, ordered=False)
    dtype = None if matrix.data is None else matrix.data.dtype
    new = sp.random(matrix.n_lines, matrix.bound, r.choice([0.0, 0.01, 0.3, 1.0]), "csr", random_state=r.randrange(100))
    shutil.rmtree(folder)
    writer = MatrixWriter(Group(folder, {}), matrix.encoding, matrix.shape, dtype)  # type: ignore[arg-type]
    writer.append(np.diff(new.indptr), new.indices, new.data)
    writer.close()
    if folder == store / "Y" / "columns" and r.random() < 0.7:
        counts = store / "statistics" / "label_counts" / "c" / "0"
        values = values_of(counts)
        values[: matrix.n_lines] = np.diff(new.indptr)
        write_chunk(counts, values)
    return f"{new.nnz} others in {folder.relative_to(store)}"


def cut(store: Path, r: random.Random) -> str:
    file = r.choice(files(store))
    content = file.read_bytes()
    how = r.choice(["lost", "cut", "longer", "empty", "json", "deep"])
    if how == "lost":
        file.unlink()
    else:
        file.write_bytes(
            {
                "cut": content[: r.randrange(len(content) + 1)], "longer": content + b"x", "empty": b"",
                "json": b'{"a": 1}', "deep": b"[" * 100_000,
            }[how]
        )  # fmt: skip
    return f"{how} {file.relative_to(store)}"


def exchange(store: Path, r: random.Random) -> str:
    some, other = r.choice(chunks(store)), r.choice(chunks(store))
    content = some.read_bytes()
    some.write_bytes(other.read_bytes())
    other.write_bytes(content)
    return f"{some.relative_to(store)} and {other.relative_to(store)} exchanged"


def ledger(store: Path, r: random.Random) -> str:
    """Another value in a line of a ledger or log, with a checksum of its own."""
    logs = [f for f in files(store) if f.suffix == ".jsonl"]
    if not logs:
        return spoil_values(store, r)
    file = r.choice(logs)
    lines = file.read_bytes().splitlines()
    at = r.randrange(len(lines))
    text, tab, _ = lines[at].rpartition(b"\t")
    about = json.loads(text if tab else lines[at])
    places = list(walk(about))
    holder, key = r.choice(places)
    value = r.choice(_ABSURD)
    holder[key] = value
    text = json.dumps(about, separators=(",", ":")).encode()
    lines[at] = text + b"\t%08x" % zlib.crc32(text) if tab else text
    file.write_bytes(b"".join(line + b"\n" for line in lines))
    return f"{file.name}:{at + 1}: {key} is {value!r}"


def files(store: Path) -> list[Path]:
    return sorted(file for file in store.rglob("*") if file.is_file())


def chunks(store: Path) -> list[Path]:
    return [file for file in files(store) if "c" in file.relative_to(store).parts[:-1] and file.name.isdigit()]


SPOILERS: list[tuple[Callable[[Path, random.Random], str], int]] = [
    (spoil_values, 10), (spoil_array, 4), (spoil_json, 10), (resize, 2), (other_matrix, 4), (flip, 3), (cut, 2), (exchange, 1),
    (ledger, 2),
]  # fmt: skip


def spoil(store: Path, r: random.Random) -> str:
    """Spoil a store; mostly so that checksums and seal do not tell."""
    said = []
    for _ in range(r.choice([1, 1, 1, 2])):
        spoiler = r.choices([each for each, _ in SPOILERS], [weight for _, weight in SPOILERS])[0]
        try:
            said.append(spoiler(store, r))
        except (OSError, ValueError, LookupError, RecursionError):  # there is no such thing, or it is spoilt already
            said.append(flip(store, r))
    if r.random() < 0.85:
        seal_again(store)
        said.append("sealed")
    return ", ".join(said)
