"""tools/make_synthetic.py: what it promises about its rows, its seeds, its memory and what can be learnt from it."""

from __future__ import annotations

import filecmp
import gzip
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from sklearn.datasets import load_svmlight_file
from sklearn.svm import LinearSVC

from xmc_stream.errors import InputError
from xmc_stream.runtime.check import check_jobs
from xmc_stream.store.dataset import Dataset, open_dataset
from xmc_stream.store.encoding import folder_bytes
from xmc_stream.store.new_dataset import new_dataset

ROOT = Path(__file__).parent.parent
TOOL = ROOT / "tools" / "make_synthetic.py"
SMALL: dict[str, Any] = {"n_features": 2000, "n_labels": 50, "features_per_sample": 40, "labels_per_sample": 2}
TREE: dict[str, Any] = {"n_features": 5000, "n_labels": 500, "features_per_sample": 40, "tree": 3}


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_synthetic", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load()


def dense(data: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """X (N, D) float32 and Y (N, K) bool."""
    x, y = data.X_rows().block(0, data.n_samples), data.Y_rows().block(0, data.n_samples)
    X = np.zeros((data.n_samples, data.n_features), np.float32)
    Y = np.zeros((data.n_samples, data.n_labels), bool)
    X[np.repeat(np.arange(data.n_samples), np.diff(x.indptr)), x.indices] = x.values
    Y[np.repeat(np.arange(data.n_samples), np.diff(y.indptr)), y.indices] = True
    return X, Y


def parse(path: Path) -> tuple[list[int], list[list[int]], list[dict[int, np.float32]]]:
    """Header, labels of each row, features of each row of an XMLRepo file."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="ascii") as file:
        header = [int(size) for size in next(file).split()]
        labels, features = [], []
        for line in file:
            first, *pairs = line.split()
            labels.append([int(label) for label in first.split(",")])
            features.append({int(j): np.float32(v) for j, v in (pair.split(":") for pair in pairs)})
            assert len(features[-1]) == len(pairs)
    return header, labels, features


def family(data: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the parent and of the grandparent of each label of a set made with TREE and seed 0."""
    generator = tree_generator()
    rank = np.argsort(generator._label_ids)
    assert data.n_labels == len(rank)
    return rank % generator._nodes[2], rank % generator._nodes[1]


def tree_generator() -> Any:
    return tool._TreeGenerator(5000, 500, 40, 3, 0, True, 3)


@pytest.mark.parametrize("tree", [None, 3])
def test_seed_decides(tmp_path: Path, tree: int | None) -> None:
    def fingerprint(name: str, seed: int) -> str:
        sizes = {**SMALL, "n_samples": 500, "tree": tree}
        return open_dataset(tool.make_synthetic(tmp_path / name, seed=seed, **sizes)).fingerprint

    assert fingerprint("a.xmc", 0) == fingerprint("b.xmc", 0) != fingerprint("c.xmc", 1)


def test_rows_do_not_depend_on_how_many(tmp_path: Path) -> None:
    n = tool._Generator(2000, 50, 40, 2, 0).block_rows + 7  # ends within the second block
    few = open_dataset(tool.make_synthetic(tmp_path / "few.xmc", n_samples=n, **SMALL))
    many = open_dataset(tool.make_synthetic(tmp_path / "many.xmc", n_samples=3 * n, n_test_samples=n, **SMALL))
    for name in ("X_rows", "Y_rows"):
        a, b = getattr(few, name)().block(0, n), getattr(many, name)().block(0, n)
        assert np.array_equal(a.indptr, b.indptr)
        assert np.array_equal(a.indices, b.indices)
        assert a.data is None or np.array_equal(a.data, b.data)
    test = open_dataset(tmp_path / "many-test.xmc")
    assert (test.n_samples, test.n_features, test.n_labels) == (n, 2000, 50)
    assert test.fingerprint != few.fingerprint


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
def test_text_and_store_agree(tmp_path: Path, suffix: str) -> None:
    sizes = {**SMALL, "n_samples": 700, "n_test_samples": 30}
    data = open_dataset(tool.make_synthetic(tmp_path / "a.xmc", **sizes))
    header, labels, features = parse(tool.make_synthetic(tmp_path / f"a{suffix}", **sizes))
    X, Y = dense(data)
    assert header == [700, 2000, 50]
    assert [list(np.flatnonzero(row)) for row in Y] == labels
    for row, values in zip(X, features, strict=True):
        assert {int(j): row[j] for j in np.flatnonzero(row)} == values
    assert parse(tmp_path / f"a-test{suffix}")[0] == [30, 2000, 50]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        ["a.xmc", "a-test.xmc", f"a{suffix}", f"a-test{suffix}"]
    )


def test_libsvm_text_is_read_by_others(tmp_path: Path) -> None:
    X, Y = dense(open_dataset(tool.make_synthetic(tmp_path / "a.xmc", n_samples=700, **SMALL)))
    text = tool.make_synthetic(tmp_path / "a.svm.gz", n_samples=700, **SMALL)
    got, labels = load_svmlight_file(str(text), n_features=2000, multilabel=True, zero_based=False, dtype=np.float32)
    np.testing.assert_array_equal(got.toarray(), X)
    assert [[int(label) - 1 for label in row] for row in labels] == [list(np.flatnonzero(row)) for row in Y]


def test_words_of_json_lines_are_the_features(tmp_path: Path) -> None:
    X, Y = dense(open_dataset(tool.make_synthetic(tmp_path / "a.xmc", n_samples=300, **SMALL)))
    text = tool.make_synthetic(tmp_path / "a.jsonl", n_samples=300, **SMALL)
    rows = [json.loads(line) for line in text.read_text().splitlines()]
    assert [row["target_ind"] for row in rows] == [list(np.flatnonzero(y)) for y in Y]
    words = [[int(word[1:]) for word in row["content"].split()] for row in rows]
    assert [sorted(set(row)) for row in words] == [list(np.flatnonzero(x)) for x in X]
    assert sum(map(len, words)) > 1.02 * np.count_nonzero(X)  # some stand more than once


@pytest.mark.parametrize(("name", "tree"), [("a.txt", None), ("a.jsonl", None), ("a.txt", 3)])
def test_threads_do_not_show(tmp_path: Path, name: str, tree: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(tool, "THREADS", threads)
        sizes = {**SMALL, "n_samples": 5000, "tree": tree, "overwrite": True}
        contents.append(tool.make_synthetic(tmp_path / name, **sizes).read_bytes())
    assert contents[0] == contents[1] == contents[2]


@pytest.mark.slow
def test_a_logical_store_is_its_rows_repeated_on_the_disk_of_one(tmp_path: Path) -> None:
    sizes = {"n_features": 3000, "n_labels": 50, "features_per_sample": 300}
    done: dict[str, Any] = {}
    path = tool.make_synthetic(
        tmp_path / "a.xmc", size="60MB", logical="180MB", n_test_samples=9, summary=done, **sizes
    )
    data = open_dataset(path)
    n = data.n_samples // 3
    x, y = data.X_rows().block(0, n), data.Y_rows().block(0, n)
    assert (data.X_rows().nnz, len(x.indices)) == (3 * 2**23, 2**23)
    assert (done["n_samples"], done["nnz_features"], done["nnz_labels"]) == (3 * n, 3 * 2**23, 3 * len(y.indices))
    # the bytes are those of a store that was written without links
    attributes = {key: data.attributes[key] for key in ("source", "normalize")}
    with new_dataset(tmp_path / "b.xmc", 3000, 50, attributes) as writer:
        for _ in range(3):
            writer.append(x.indptr, x.indices, x.values, y.indptr, y.indices)
    names = sorted(file.relative_to(path) for file in path.rglob("*") if file.is_file())
    assert names == sorted(f.relative_to(tmp_path / "b.xmc") for f in (tmp_path / "b.xmc").rglob("*") if f.is_file())
    assert filecmp.cmpfiles(path, tmp_path / "b.xmc", map(str, names), shallow=False)[0] == list(map(str, names))
    for job in check_jobs(data):
        job.run()
    assert sum(block.n for block in data.X_rows().blocks(2**24)) == 3 * n
    on_disk = {s.st_ino: s.st_size for s in (file.stat() for file in path.rglob("*"))}
    assert sum(on_disk.values()) < 1.1 * 8 * 2**23 < 0.4 * folder_bytes(path)
    # and its rows are the beginning of those of any other set, the last one cut and of length one again
    shutil.rmtree(tmp_path / "b.xmc")
    few = open_dataset(tool.make_synthetic(tmp_path / "few.xmc", n_samples=n, **sizes)).X_rows()
    last = int(x.indptr[-2])
    np.testing.assert_array_equal(few.block(0, n - 1).values, x.values[:last])
    np.testing.assert_array_equal(few.block(0, n).indices[: 2**23], x.indices)
    assert np.linalg.norm(x.values[last:]) == pytest.approx(1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a-test.xmc", "a.xmc", "few.xmc"]


@pytest.mark.parametrize("tree", [None, 1, 2, 5])
def test_rows_are_sorted_unique_and_normalised(tmp_path: Path, tree: int | None) -> None:
    data = open_dataset(tool.make_synthetic(tmp_path / "a.xmc", n_samples=3000, tree=tree, **SMALL))
    for matrix in (data.X_rows(), data.Y_rows()):
        block = matrix.block(0, 3000)
        rows = np.repeat(np.arange(3000), np.diff(block.indptr))
        assert (np.diff(rows * np.int64(matrix.shape[1]) + block.indices) > 0).all()
        assert (np.diff(block.indptr) > 0).all()
        assert 0 <= block.indices.min() <= block.indices.max() < matrix.shape[1]
    X = data.X_rows().block(0, 3000)
    assert (X.values > 0).all()
    assert np.allclose(np.add.reduceat(X.values.astype(float) ** 2, X.indptr[:-1]), 1, atol=1e-5)
    assert X.values.dtype == np.float32
    assert data.X_rows().nnz == pytest.approx(3000 * 40, rel=0.03)
    assert data.Y_rows().nnz == pytest.approx(3000 * 2, rel=0.05)


def test_frequencies_follow_power_laws(tmp_path: Path) -> None:
    path = tool.make_synthetic(
        tmp_path / "a.xmc", n_samples=40_000, n_features=20_000, n_labels=3000, features_per_sample=20
    )
    labels, features = open_dataset(path).label_counts(), open_dataset(path).feature_counts()
    assert 0.03 < labels.max() / 40_000 < 0.05
    assert features.max() / 40_000 < 0.5
    ranked = np.sort(labels)[::-1]
    tail = np.arange(100, 2000)
    slope, _ = np.polyfit(np.log(tail), np.log(ranked[tail] + 0.5), 1)
    assert -1.2 < slope < -0.8
    assert abs(np.corrcoef(np.arange(3000), labels)[0, 1]) < 0.1  # ids tell nothing
    assert abs(np.corrcoef(np.arange(20_000), features)[0, 1]) < 0.05


def test_size_gives_the_bytes_of_x(tmp_path: Path) -> None:
    data = open_dataset(tool.make_synthetic(tmp_path / "a.xmc", size="4MB", **SMALL))
    assert data.X_rows().nnz * 8 == pytest.approx(4e6, rel=0.03)


@pytest.mark.parametrize("tree", [None, 1])
@pytest.mark.parametrize(("per_sample", "n_features"), [(1, 4), (3, 20_000), (3000, 20_000)])
def test_extreme_lengths(tmp_path: Path, per_sample: int, n_features: int, tree: int | None) -> None:
    sizes = {"n_features": n_features, "n_labels": 1, "features_per_sample": per_sample, "labels_per_sample": 1}
    sizes |= {"tree": tree} if tree else {}
    data = open_dataset(tool.make_synthetic(tmp_path / "a.xmc", n_samples=200, **sizes))
    assert data.X_rows().nnz == pytest.approx(200 * per_sample, rel=0.3 if per_sample < 3 else 0.1)
    assert (data.label_counts() == 200).all()


@pytest.mark.slow
def test_a_linear_model_learns(tmp_path: Path) -> None:
    path = tool.make_synthetic(tmp_path / "a.xmc", n_samples=3000, n_test_samples=1000, **SMALL)
    X, Y = dense(open_dataset(path))
    X_test, Y_test = dense(open_dataset(tmp_path / "a-test.xmc"))
    models = [LinearSVC(C=1.0, dual=False, tol=0.1, random_state=0).fit(X, y) for y in Y.T]
    best = np.argmax([model.decision_function(X_test) for model in models], axis=0)
    assert 0.5 < Y_test[np.arange(1000), best].mean() < 0.95


def test_a_row_of_a_tree_depends_on_its_number_alone() -> None:
    def rows(step: int, n: int, split: int = 0) -> list[np.ndarray]:
        generator = tree_generator()
        generator.block_rows = step
        blocks = list(generator.blocks(split, n))
        lengths = [[np.diff(block[i]) for block in blocks] for i in (0, 3)]
        return [np.concatenate(parts) for parts in (*lengths, *([block[i] for block in blocks] for i in (1, 2, 4)))]

    few, many = rows(97, 1000), rows(640, 2000)
    for a, b in zip(few, many, strict=True):
        np.testing.assert_array_equal(a, b[: len(a)])
    assert len(many[2]) > len(few[2])
    assert not np.array_equal(few[0], rows(97, 1000, split=1)[0])


@pytest.mark.parametrize(("n_labels", "tree"), [(500, 3), (50, 1), (64, 6), (1, 1)])
def test_each_label_of_a_tree_has_a_row(tmp_path: Path, n_labels: int, tree: int) -> None:
    sizes = {**TREE, "n_labels": n_labels, "tree": tree, "labels_per_sample": 1}
    data = open_dataset(tool.make_synthetic(tmp_path / "a.xmc", n_samples=n_labels, **sizes))
    assert data.label_counts().min() >= 1
    assert data.Y_rows().nnz == pytest.approx(n_labels, rel=0.05)
    assert data.attributes["source"] == {"generator": "make_synthetic", "seed": 0, "tree": tree}


@pytest.mark.parametrize(
    ("n_labels", "depth"), [(1, 1), (2, 1), (500, 3), (4096, 3), (4096, 12), (9924, 12), (10**6, 4)]
)
def test_trees_are_balanced(n_labels: int, depth: int) -> None:
    nodes = tool._TreeGenerator(1000, n_labels, 4, 1, 0, True, depth)._nodes
    assert (nodes[0], nodes[-1], len(nodes)) == (1, n_labels, depth + 1)
    assert not (nodes[1:-1] % nodes[:-2]).any()
    branches = nodes[1:] / nodes[:-1]
    if n_labels > 1:
        assert 2 <= branches.min() <= branches.max() < 2 * branches.min()


def test_siblings_occur_together(tmp_path: Path) -> None:
    data = open_dataset(tool.make_synthetic(tmp_path / "a.xmc", n_samples=4000, **TREE))
    Y = dense(data)[1].astype(np.float32)
    pairs = Y.T @ Y
    np.fill_diagonal(pairs, 0)
    by_chance = np.outer(Y.sum(axis=0), Y.sum(axis=0))
    np.fill_diagonal(by_chance, 0)
    parent, above = family(data)
    siblings, cousins = parent[:, None] == parent, above[:, None] == above
    shares = [pairs[which].sum() / pairs.sum() for which in (siblings, cousins)]
    chances = [by_chance[which].sum() / by_chance.sum() for which in (siblings, cousins)]
    assert shares[0] > 0.4 > 20 * chances[0]
    assert shares[1] > 0.7 > 3 * chances[1]
    assert (parent[1:] == parent[:-1]).mean() < 0.05  # ids tell nothing


def test_rows_of_siblings_share_features(tmp_path: Path) -> None:
    data = open_dataset(tool.make_synthetic(tmp_path / "a.xmc", n_samples=1500, **TREE))
    X, Y = dense(data)
    parent, above = family(data)
    relatives = [Y, Y @ np.eye(64, dtype=bool)[parent], Y @ np.eye(8, dtype=bool)[above]]
    one = relatives[1].sum(axis=1) == 1  # rows whose labels are of one parent
    same_label, same_parent, same_grandparent = (of[one] @ of[one].T for of in relatives)
    alike = X[one] @ X[one].T
    siblings, cousins = alike[same_parent & ~same_label].mean(), alike[same_grandparent & ~same_parent].mean()
    assert siblings > 1.5 * cousins > 1.5**2 * alike[~same_grandparent].mean()


def test_weights_of_a_tree_are_those_of_its_words(tmp_path: Path) -> None:
    data = open_dataset(tool.make_synthetic(tmp_path / "a.xmc", n_samples=20_000, **TREE))
    often = data.feature_counts() / 20_000
    idf = tree_generator()._idf
    assert np.abs(idf - np.log1p(1 / often))[often > 0.01].mean() < 0.1
    ranked = np.sort(often)[::-1]
    slope, _ = np.polyfit(np.log(np.arange(30, 3000)), np.log(ranked[30:3000]), 1)
    assert -1.5 < slope < -0.5  # a power law
    assert 0.25 < ranked[0] < 0.6


def test_labels_of_a_tree_are_learnt(tmp_path: Path) -> None:
    path = tool.make_synthetic(tmp_path / "a.xmc", n_samples=4000, n_test_samples=500, **TREE)
    X, Y = dense(open_dataset(path))
    X_test, Y_test = dense(open_dataset(tmp_path / "a-test.xmc"))
    centres = Y.T.astype(np.float32) @ X
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    best = (X_test @ centres.T).argmax(axis=1)
    assert 0.6 < Y_test[np.arange(500), best].mean() < 0.97


def test_help_tells_of_the_tree() -> None:
    said = CliRunner().invoke(tool.main, ["--help"]).output
    assert "--tree DEPTH" in said
    assert "each has a training row" in " ".join(said.split())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_samples": 0}, "samples 0 is not"),
        ({"n_samples": None}, "either --samples or --size"),
        ({"size": "1MB"}, "either --samples or --size"),
        ({"features_per_sample": 1000}, "--features-per-sample 1000 is not"),
        ({"labels_per_sample": 0.5}, "--labels-per-sample 0.5 is not"),
        ({"n_features": 10**6, "features_per_sample": 2 * 10**5}, "lower --features-per-sample"),
        ({"seed": -1}, "seed -1 is not"),
        ({"format": "libsvm"}, "format libsvm does not go"),
        ({"format": "csv"}, "format csv does not go"),
        ({"logical": "3"}, "needs --size"),
        ({"logical": "0", "size": "1MB", "n_samples": None}, "logical 0 is 0 times"),
        ({"logical": "9000TB", "size": "1MB", "n_samples": None}, "not 1 to"),
        ({"logical": "many", "size": "1MB", "n_samples": None}, "many"),
        ({"tree": 0}, "--tree 0 is not between 1 and 5"),
        ({"tree": 6, "n_samples": 50}, "--tree 6 is not between 1 and 5"),
        ({"tree": 2, "n_samples": 49}, "49 rows are fewer than 50 labels"),
        ({"tree": 2, "n_labels": 10**6, "logical": "2", "size": "1MB", "n_samples": None}, "fewer than 1000000 labels"),
    ],
)
def test_refusals(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tool.make_synthetic(tmp_path / "a.xmc", **{**SMALL, "n_samples": 10, **changes})
    assert not list(tmp_path.iterdir())


def test_what_exists_stays_unless_told(tmp_path: Path) -> None:
    for name in ("a.txt", "a.xmc"):
        path = tool.make_synthetic(tmp_path / name, n_samples=10, **SMALL)
        with pytest.raises(InputError, match="--overwrite"):
            tool.make_synthetic(path, n_samples=20, **SMALL)
        tool.make_synthetic(path, n_samples=20, overwrite=True, **SMALL)
    assert parse(tmp_path / "a.txt")[0][0] == open_dataset(tmp_path / "a.xmc").n_samples == 20
    with pytest.raises(InputError, match="same kind"):
        tool.make_synthetic((tmp_path / "a.xmc").rename(tmp_path / "b.txt"), n_samples=20, overwrite=True, **SMALL)


@pytest.mark.slow
def test_command_line(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(TOOL), *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    target = tmp_path / "a.xmc"
    options = ["--samples", "100", "--features", "2000", "--labels", "50", "--test-samples", "5", "--json"]
    done = run(str(target), *options)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    summary = json.loads(done.stdout)
    assert summary["nnz_features"] == open_dataset(target).X_rows().nnz
    assert 2**26 < summary["peak_rss"] < 512e6
    again = run(str(target), *options)
    assert (again.returncode, again.stdout, again.stderr.count("\n")) == (1, "", 1)
    assert "--overwrite" in again.stderr


def test_the_best_that_a_tree_allows(tmp_path: Path) -> None:
    """Nobody is better who does not know which label is left out; who knows all that are given is."""
    told: dict[str, Any] = {}
    sizes = {**SMALL, **TREE, "n_samples": 3000, "n_test_samples": 2000}
    tool.make_synthetic(tmp_path / "a.xmc", **sizes, summary=told)
    best, lengths = told["best"], np.diff(open_dataset(tmp_path / "a-test.xmc").Y_rows().block(0, 2000).indptr)
    assert list(best) == ["P@1", "P@3", "P@5"]
    for name, k in (("P@1", 1), ("P@3", 3), ("P@5", 5)):
        assert (
            0.7 * 100 * np.minimum(lengths, k).mean() / k < best[name] <= 100 * np.minimum(lengths, k).mean() / k + 0.01
        )
    assert best["P@1"] > best["P@3"] > best["P@5"]
