"""verify: nothing that is damaged or untrue passes, whatever it is, and nothing that is whole is complained of."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from helpers.damage import damage
from helpers.forked import forked_command
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import check as twin

import xmc_stream as xs
from xmc_stream.datasets import verify as of_verify
from xmc_stream.datasets.kernels.check import N_STATE, check_entries, sum_of_counts
from xmc_stream.errors import StoreError
from xmc_stream.store import chunks
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.encoding import ArrayWriter, MatrixWriter
from xmc_stream.store.inventory import seal
from xmc_stream.store.new_dataset import new_dataset
from xmc_stream.store.nodes import Group


def make(path: Path, n: int = 60, d: int = 20, k: int = 9, seed: int = 0) -> Path:
    """A dataset with every part it may have."""
    X = sp.random(n, d, 0.3, "csr", np.float32, seed)
    Y = sp.random(n, k, 0.2, "csr", random_state=seed + 1)
    with new_dataset(path, d, k, {"source": "made up"}) as writer:
        writer.append(X.indptr, X.indices, X.data, Y.indptr, Y.indices)
    Dataset(path).X_columns()
    for name, n_names in (("features", d), ("labels", k)):
        words = [b"x" * (i % 3) for i in range(n_names)]
        add_array(path / "names" / name, "ends", np.cumsum([len(word) for word in words]))
        add_array(path / "names" / name, "bytes", np.frombuffer(b"".join(words), np.uint8))
    add_array(path / "vectorizer", "idf", np.ones(d))
    seal(path)
    return path


def add_array(folder: Path, name: str, values: Any) -> None:
    writer = ArrayWriter(Group(folder, {}), name, values.dtype)
    writer.append(values)
    writer.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make(tmp_path_factory.mktemp("whole") / "d.xmc")
    assert damage(path) == []
    return path


def files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_flipped_bit_of_any_file_is_found(whole: Path, data: st.DataObject) -> None:
    file = data.draw(st.sampled_from(files(whole)))
    content = file.read_bytes()
    # most of a chunk is padding, which is checked too: both ends are drawn more often
    at = data.draw(st.one_of(st.integers(0, min(999, len(content) - 1)), st.integers(0, len(content) - 1)))
    bit = data.draw(st.integers(0, 7))
    changed = bytearray(content)
    changed[at] ^= 1 << bit
    try:
        file.write_bytes(changed)
        assert damage(whole), (file, at, bit)
    finally:
        file.write_bytes(content)


def test_every_file_that_is_missing_truncated_or_a_strangers_is_named(whole: Path) -> None:
    for file in files(whole):
        content = file.read_bytes()
        file.unlink()
        found = damage(whole)
        if file.name != "zarr.json":
            assert any(str(file) in line for line in found), file
        assert found, file
        file.write_bytes(content[:-1])
        assert damage(whole), file
        file.write_bytes(content)
    stranger = whole / "Y" / "rows" / "indices" / "c" / "1"
    stranger.write_bytes(b"x")
    assert [str(stranger) in line for line in damage(whole)] == [True]
    stranger.unlink()
    assert damage(whole) == []


def test_all_damage_is_reported_at_once(whole: Path) -> None:
    spoilt = [whole / name for name in ("X/rows/data/c/0", "Y/columns/indptr/c/0", "statistics/row_norms/c/0")]
    contents = [file.read_bytes() for file in spoilt]
    for file, content in zip(spoilt, contents, strict=True):
        file.write_bytes(b"\x55" + content[1:])
    found = damage(whole)
    assert [any(str(file) in line for line in found) for file in spoilt] == [True] * 3
    for file, content in zip(spoilt, contents, strict=True):
        file.write_bytes(content)


class Untrue:
    """A dataset whose files are whole and sealed, and whose content is not true."""

    def __init__(self, whole: Path, folder: Path) -> None:
        self.path = folder / "d.xmc"
        shutil.copytree(whole, self.path)
        shutil.rmtree(self.path / "X" / "columns")

    def matrix(self, name: str, change: Callable[[Any, Any, Any], Any]) -> list[str]:
        """Rewrite a matrix, changed as (lengths, indices, data), and verify."""
        dataset = Dataset(self.path)
        matrix = {"X/rows": dataset.X_rows, "Y/rows": dataset.Y_rows, "Y/columns": dataset.Y_columns}[name]()
        block = matrix.block(0, matrix.n_lines)
        lengths = np.diff(block.indptr)
        changed = change(lengths, block.indices, block.data) or (lengths, block.indices, block.data)
        shutil.rmtree(self.path / name)
        group = Group(self.path).create_group(name)
        dtype = None if block.data is None else np.float32
        writer = MatrixWriter(group, matrix.encoding, matrix.shape, dtype)  # type: ignore[arg-type]
        writer.append(*changed)
        writer.close()
        return self.verified()

    def attributes(self, **values: Any) -> list[str]:
        zarr.open_group(self.path, mode="r+").update_attributes(values)
        return self.verified()

    def array(self, folder: str, name: str, values: Any) -> list[str]:
        add_array(self.path / folder, name, values)
        return self.verified()

    def verified(self) -> list[str]:
        seal(self.path)
        return damage(self.path)


def swap(values: Any, i: int, j: int) -> None:
    values[[i, j]] = values[[j, i]]


def test_what_is_sealed_and_untrue_is_found(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_verify, "_PIECE", 7)  # lines go on in the next piece
    monkeypatch.setattr(chunks, "_ITEMS", 7)
    monkeypatch.setattr(of_verify, "_WINDOW", 5)
    monkeypatch.setattr(of_verify, "_LINES_JOB", 10)
    cases: list[tuple[str, Callable[[Untrue], list[str]]]] = [
        ("do not ascend", lambda u: u.matrix("X/rows", lambda n, i, v: swap(i, 0, 1))),
        ("not below 20", lambda u: u.matrix("X/rows", lambda n, i, v: i.__setitem__(n[0] - 1, 20))),
        ("do not ascend", lambda u: u.matrix("Y/columns", lambda n, i, v: i.__setitem__(0, -1))),
        ("not finite", lambda u: u.matrix("X/rows", lambda n, i, v: v.__setitem__(11, np.nan))),
        ("norm of row", lambda u: u.matrix("X/rows", lambda n, i, v: v.__setitem__(0, 9.0))),
        ("does not ascend", lambda u: u.matrix("X/rows", lambda n, i, v: n.__setitem__(slice(2, 4), (-2, n[2] + n[3] + 2)))),
        ("counts are not those", lambda u: u.matrix("X/rows", lambda n, i, v: move(n, i, 20))),
        ("same entries", lambda u: u.matrix("Y/columns", lambda n, i, v: move(n, i, 60))),
        ("number of entries of column", lambda u: u.matrix("Y/columns", move_line)),
        ("same entries", lambda u: u.matrix("Y/rows", lambda n, i, v: move(n, i, 9))),
        ("size of row_norms is 60, not 61", lambda u: u.attributes(n_samples=61)),
        ("shape", lambda u: u.attributes(n_features=21)),
        ("label_counts", lambda u: u.attributes(n_labels=8)),
        ("nnz_labels", lambda u: u.attributes(nnz_labels=1)),
        ("number of names of labels", lambda u: u.array("names/labels", "ends", np.arange(8))),
        ("last name of labels", lambda u: u.array("names/labels", "bytes", np.zeros(4, np.uint8))),
        ("ends does not ascend", lambda u: u.array("names/features", "ends", np.arange(20)[::-1])),
        ("size of vectorizer/idf", lambda u: u.array("vectorizer", "idf", np.ones(19))),
        ("idf has a value", lambda u: u.array("vectorizer", "idf", np.full(20, np.inf))),
        ("cannot be opened", lambda u: u.attributes(n_labels="many")),
    ]  # fmt: skip
    for number, (words, spoil) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = spoil(Untrue(whole, folder))
        assert any(words in line for line in found), (words, found)
    untouched = tmp_path / "untouched"
    untouched.mkdir()
    assert Untrue(whole, untouched).verified() == []


def move(lengths: Any, indices: Any, bound: int) -> None:
    """Put one entry elsewhere in its line: order and lengths stay as they are."""
    ends = np.cumsum(lengths)
    for line, end in enumerate(ends):
        if lengths[line] and indices[end - 1] < bound - 1:
            indices[end - 1] += 1
            return


def move_line(lengths: Any, indices: Any, data: Any) -> None:
    """An entry goes to the next column."""
    ends = np.cumsum(lengths)
    first, second = indices[: ends[0]], indices[ends[0] : ends[1]]
    row = next(row for row in first if row not in second)
    indices[: ends[1]] = np.concatenate([np.setdiff1d(first, row), np.union1d(second, row)])
    lengths[:2] += (-1, 1)


@pytest.mark.parametrize(("n", "d", "k"), [(0, 3, 2), (4, 0, 0), (5, 3, 0), (5, 0, 3)])
def test_a_set_without_rows_features_or_labels_is_sound(tmp_path: Path, n: int, d: int, k: int) -> None:
    assert damage(make(tmp_path / "d.xmc", n, d, k)) == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sets(st.integers(0, 30), max_size=6), min_size=1, max_size=12), st.integers(0, 2**64 - 1), st.data())
def test_sums_are_those_of_plain_integers_in_any_pieces(rows: list[set[int]], key: int, data: st.DataObject) -> None:
    indices = np.array([j for row in rows for j in sorted(row)], np.int32)
    finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
    values = np.array(data.draw(st.lists(finite, min_size=len(indices), max_size=len(indices))), np.float32)
    ends = np.cumsum([len(row) for row in rows]).astype(np.int64)
    piece = data.draw(st.integers(1, 10))
    none = np.empty(0, np.float32)
    for v in (values, none):
        state, sums, squares = np.full(N_STATE, -1, np.int64), np.zeros(2, np.uint64), np.zeros(len(rows))
        for a in range(0, len(indices), piece):
            part = v[a : a + piece]
            check_entries(
                ends, a, 100, indices[a : a + piece], part, part.view(np.uint32), 31, False, np.uint64(key),
                state, sums, squares,
            )  # fmt: skip
        assert state[2:].tolist() == [-1, -1, -1]
        owners = np.searchsorted(ends, np.arange(len(indices)), side="right")
        bits = v.view(np.uint32).tolist() if len(v) else [None] * len(indices)
        entries = zip((100 + owners).tolist(), indices.tolist(), bits, strict=True)
        assert sums.tolist() == [twin.entry_sum(entries, key), twin.index_sum(indices.tolist(), key)]
        if len(v):
            expected = [np.float64(0)] * len(rows)
            for owner, x in zip(owners, v.astype(np.float64), strict=True):
                expected[owner] += x * x
            assert squares.tolist() == expected
    counts = np.bincount(indices, minlength=31)
    assert int(sum_of_counts(0, counts, np.uint64(key))) == twin.index_sum(indices.tolist(), key)


def test_models_and_predictions_too(small: Path, trained: Path, tmp_path: Path) -> None:
    model, predictions = tmp_path / "m", tmp_path / "p"
    shutil.copytree(trained, model)
    xs.predict(xs.load_model(model), xs.open_dataset(small.with_name("small-test.xmc")), predictions, k=3)
    for path, kind in ((model, "model"), (predictions, "predictions")):
        assert damage(path) == []
        told = xs.verify(path)
        assert (told["kind"], told["sound"], told["damage"]) == (kind, True, [])
        rng = np.random.default_rng(0)
        for file in files(path):
            if file.suffix == ".jsonl":  # logs of the run
                continue
            content = file.read_bytes()
            changed = bytearray(content)
            changed[int(rng.integers(len(content)))] ^= 1 << int(rng.integers(8))
            file.write_bytes(changed)
            assert damage(path), file
            file.unlink()
            assert damage(path), file
            file.write_bytes(content)
    shutil.rmtree(model / "units" / "00001")
    assert damage(model)


@pytest.mark.slow
def test_the_command_ends_in_one_line_and_lists_all_in_json(tmp_path: Path, commands: Callable[..., Any]) -> None:
    path = make(tmp_path / "d.xmc")
    told = commands("verify", path, "--memory-limit", "512MB")
    assert told["sound"]
    assert told["peak_rss"] < 512e6
    for name in ("X/rows/indices/c/0", "X/columns/data/c/0"):
        (path / name).write_bytes((path / name).read_bytes()[:-1])
    with forked_command("verify", path, "--json") as done:
        assert done.wait() == 1
        told = json.loads(done.stdout)
        (line,) = done.stderr.splitlines()
    assert not told["sound"]
    assert told["n_damage"] == len(told["damage"]) == 2
    assert "is damaged" in line
    assert "--json" in line
    with pytest.raises(StoreError, match="not a dataset"):
        xs.verify(tmp_path)
