"""split: nothing lost, nothing twice, every label keeps its share and none its last positive in training."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers import text_files
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.split import validation_rows

import xmc_stream as xs
from xmc_stream.convert.options import TextOptions
from xmc_stream.datasets.kernels.split import choose_rows
from xmc_stream.datasets.split import split_once
from xmc_stream.errors import InputError
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.new_dataset import new_dataset
from xmc_stream.store.places import LOCK, work_folder

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def both(dataset: Dataset) -> tuple[Any, Any]:
    """X and Y in memory."""
    n, x, y = dataset.n_samples, dataset.X_rows(), dataset.Y_rows()
    a, b = x.block(0, n), y.block(0, n)
    ones = np.ones(len(b.indices), np.float32)
    return sp.csr_matrix((a.values, a.indices, a.indptr), x.shape), sp.csr_matrix((ones, b.indices, b.indptr), y.shape)


def same(a: Any, b: Any) -> bool:
    return all(np.array_equal(getattr(a, part), getattr(b, part)) for part in ("indptr", "indices", "data"))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sets(st.integers(0, 5), max_size=4).map(sorted), max_size=40), st.floats(0.01, 0.99),
    st.integers(0, 99), st.integers(1, 10),
)  # fmt: skip
def test_the_kernel_chooses_what_its_twin_does_in_any_blocks(
    rows: list[list[int]], fraction: float, seed: int, size: int
) -> None:
    labels = np.array([label for row in rows for label in row], np.int32)
    counts = np.bincount(labels, minlength=6)
    left, seen, taken = counts.copy(), np.zeros(7, np.int64), np.zeros(7, np.int64)
    chosen = np.empty(len(rows), np.bool_)
    for a in range(0, len(rows), size):
        block = rows[a : a + size]
        indptr = np.concatenate([[0], np.cumsum([len(row) for row in block])]).astype(np.int64)
        indices = np.array([label for row in block for label in row], np.int32)
        choose_rows(indptr, indices, counts, left, seen, taken, fraction, seed, chosen[a : a + size])
    assert chosen.tolist() == validation_rows(rows, 6, fraction, seed)
    in_training = {label for row, is_chosen in zip(rows, chosen, strict=True) if not is_chosen for label in row}
    assert in_training == set(labels.tolist())


def test_the_parts_are_the_whole_and_labels_keep_their_shares(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    n, k = 20_000, 300
    label_share = 0.3 / np.arange(1, k + 1)
    Y = sp.csr_matrix(rng.random((n, k)) < label_share)
    X = sp.random(n, 50, 0.1, "csr", np.float32, rng)
    with new_dataset(tmp_path / "d.xmc", 50, k, {"source": "made up", "normalize": "l2", "base": 1}) as writer:
        writer.append(X.indptr, X.indices, X.data, Y.indptr, Y.indices)
    dataset = Dataset(tmp_path / "d.xmc")
    figures = xs.split(dataset, tmp_path / "t.xmc", tmp_path / "v.xmc", fraction=0.2, seed=3)
    train, valid = Dataset(tmp_path / "t.xmc"), Dataset(tmp_path / "v.xmc")
    assert figures["n_train"] + figures["n_valid"] == n
    assert abs(figures["n_valid"] / n - 0.2) < 0.01
    counts, taken = dataset.label_counts(), valid.label_counts()
    # of a label's own rows all but one; of those that belong to rarer labels a sample
    assert (np.abs(taken - 0.2 * counts) <= 1 + 4 * np.sqrt(0.16 * counts)).all()
    assert np.abs(taken - 0.2 * counts)[counts > 500].max() < 0.03 * counts.max()
    assert (train.label_counts() > 0).sum() == (counts > 0).sum()
    # the unlabeled are a group of their own
    without = np.diff(Y.indptr) == 0
    (x, y), (tx, ty), (vx, vy) = both(dataset), both(train), both(valid)
    assert abs((np.diff(vy.indptr) == 0).sum() - 0.2 * without.sum()) <= 1
    chosen = np.array(validation_rows([row.tolist() for row in np.split(y.indices, y.indptr[1:-1])], k, 0.2, 3))
    assert same(tx, x[~chosen])
    assert same(ty, y[~chosen])
    assert same(vx, x[chosen])
    assert same(vy, y[chosen])
    for part, name in ((train, "train"), (valid, "valid")):
        about = part.attributes
        assert (about["source"], about["normalize"], about["base"]) == ("made up", "l2", 1)
        told = {"of": "d.xmc", "fingerprint": dataset.fingerprint, "fraction": 0.2, "seed": 3, "part": name}
        assert about["split"] == told
    assert xs.verify(train.path)["damage"] == xs.verify(valid.path)["damage"] == []


def test_the_cut_is_up_to_the_seed_alone(small: Path, tmp_path: Path, commands: Callable[..., Any]) -> None:
    told = commands("split", small, tmp_path / "a-t", tmp_path / "a-v", "--memory-limit", "512MB")
    assert told["n_train"] + told["n_valid"] == 1500
    assert told["peak_rss"] < 512e6
    for name, seed in (("b", 0), ("c", 1)):
        xs.split(small, tmp_path / f"{name}-t", tmp_path / f"{name}-v", seed=seed)
    prints = [[Dataset(tmp_path / f"{name}-{part}").fingerprint for part in "tv"] for name in "abc"]
    assert prints[0] == prints[1]
    assert prints[0][0] != prints[2][0]


def test_what_lies_beside_the_rows_is_in_both_parts(small: Path, tmp_path: Path) -> None:
    import shutil

    from xmc_stream.store.encoding import new_matrix
    from xmc_stream.store.inventory import seal

    data = tmp_path / "d.xmc"
    shutil.copytree(small, data)
    with new_matrix(data / "names", "csr_matrix", (1, 1)) as writer:
        writer.append(np.ones(1, np.int64), np.zeros(1, np.int32), np.ones(1, np.float32))
    seal(data)
    xs.split(data, tmp_path / "t", tmp_path / "v")
    for part in ("t", "v"):
        assert (tmp_path / part / "names" / "data" / "c" / "0").exists()
        assert xs.verify(tmp_path / part)["sound"]


def test_listed_rows_are_the_validation_set(small: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.txt"
    rows.write_text("1499\n0\n\n  700\r\n")
    figures = xs.split(small, tmp_path / "t", tmp_path / "v", rows=rows)
    assert figures["n_valid"] == 3
    x, y = both(Dataset(small))
    vx, vy = both(Dataset(tmp_path / "v"))
    assert same(vx, x[[0, 700, 1499]])
    assert same(vy, y[[0, 700, 1499]])
    for text, words in (("1500\n", "rows.txt:1"), ("1\n2\n1\n", "rows.txt:3: '1' is listed twice"), ("-1", "'-1'"),
                        ("1 2\n", "one a line"), ("9" * 1000, "no row number")):  # fmt: skip
        rows.write_text(text)
        with pytest.raises(InputError, match=words):
            xs.split(small, tmp_path / "t2", tmp_path / "v2", rows=rows)
    with pytest.raises(InputError, match="cannot be read"):
        xs.split(small, tmp_path / "t2", tmp_path / "v2", rows=tmp_path / "none")
    assert not (tmp_path / "t2").exists()


@pytest.mark.slow
def test_what_cannot_be_is_refused(small: Path, tmp_path: Path, commands: Callable[..., Any]) -> None:
    assert "--fraction" in commands("split", small, tmp_path / "t", tmp_path / "v", "--fraction", 1, fails=True)
    (tmp_path / "v").mkdir()
    assert "exists" in commands("split", small, tmp_path / "t", tmp_path / "v", fails=True)
    with pytest.raises(InputError, match="not a dataset"):
        xs.split(small, tmp_path / "t", tmp_path / "v", overwrite=True)
    with pytest.raises(InputError, match="three different"):
        xs.split(small, tmp_path / "t", small, overwrite=True)
    with pytest.raises(InputError, match="fraction"):
        xs.split(small, tmp_path / "t", tmp_path / "w", fraction=0)
    assert [path.name for path in tmp_path.iterdir()] == ["v"]


def test_ids_of_rows_go_with_their_rows(tmp_path: Path) -> None:
    documents = text_files.documents(200)
    source = text_files.write_jsonl(tmp_path / "in.jsonl", documents)
    data = xs.convert(source, tmp_path / "d.xmc", text=TextOptions(id_field="uid"), memory_limit="2GB")
    xs.split(data, tmp_path / "train.xmc", tmp_path / "valid.xmc", fraction=0.2, memory_limit="2GB")
    found = {}
    for part in ("train", "valid"):
        dataset = xs.open_dataset(tmp_path / f"{part}.xmc")
        ids = list(dataset.row_ids() or ())
        names = list(dataset.label_names() or ())
        block = dataset.Y_rows().block(0, dataset.n_samples)
        ends = block.indptr.tolist()
        labels = [[names[j] for j in block.indices[a:b]] for a, b in itertools.pairwise(ends)]
        found |= dict(zip(ids, labels, strict=True))
        assert xs.verify(dataset.path)["sound"]
    assert found == {d["uid"]: sorted(d["labels"]) for d in documents}
    chosen = xs.select_features(data, tmp_path / "few.xmc", [0, 2], memory_limit="2GB")
    assert list(chosen.row_ids() or ()) == list(data.row_ids() or ())
    ends = tmp_path / "few.xmc" / "row_ids" / "ends" / "c" / "0"
    ends.write_bytes(ends.read_bytes()[:-2] + b"xx")
    assert not xs.verify(chosen.path)["sound"]


def test_a_split_that_was_killed_between_its_names_is_done_again(tmp_path: Path) -> None:
    """As the parts of a tuning: with one part alone, whatever is left in the work folders."""
    X = sp.csr_matrix(np.repeat(np.eye(3, dtype=np.float32), 10, axis=0))
    data = xs.convert(X, tmp_path / "d.xmc", labels=X)
    parts = tmp_path / "in" / "train.xmc", tmp_path / "in" / "held.xmc"

    def ask() -> bool:
        """Whether they are split anew."""
        before = [part.stat().st_ino for part in parts if part.exists()]
        made = split_once(data, tmp_path / "in", 0.2, 0, None, True)
        assert tuple(part.path for part in made) == parts
        return [part.stat().st_ino for part in parts] != before

    assert (ask(), ask()) == (True, False)
    whole = [xs.open_dataset(part).fingerprint for part in parts]
    for one in parts:
        shutil.rmtree(one)
        for part in parts:
            (work_folder(part) / "store").mkdir(parents=True)
            (work_folder(part) / LOCK).touch()
        assert ask()
        assert [xs.open_dataset(part).fingerprint for part in parts] == whole
        assert sorted(path.name for path in parts[0].parent.iterdir()) == ["held.xmc", "train.xmc"]
