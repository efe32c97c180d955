"""What is in memory already (arrays, frames, texts) becomes the dataset that it would become from a file."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import sparse

import xmc_stream as xs

pd = pytest.importorskip("pandas")
pl = pytest.importorskip("polars")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

LIMIT: dict[str, Any] = {"memory_limit": "2GB"}
FRAMES: dict[str, Callable[[Any], Any]] = {
    "pandas": pa.Table.to_pandas,
    "pandas of arrow": lambda table: table.to_pandas(types_mapper=pd.ArrowDtype),
    "polars": pl.from_arrow,
    "pyarrow": lambda table: table,
}
TEXTS = [f"word{i % 7} common thing{i % 3} {'über' if i % 2 else 'x y zz'}" for i in range(60)]
TAGS = [[f"t{i % 4}", f"ü{i % 3}"] if i % 5 else [] for i in range(60)]


@pytest.fixture
def new(tmp_path: Path) -> Callable[..., xs.Dataset]:
    """`convert` to a new place."""
    made: list[Path] = []

    def convert(source: Any, **options: Any) -> xs.Dataset:
        made.append(tmp_path / f"made-{len(made)}.xmc")
        return xs.convert(source, made[-1], **{**LIMIT, **options})

    return convert


def matrices(n: int = 50, d: int = 6, k: int = 5) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    X = np.random.default_rng(0).normal(size=(n, d)).astype(np.float32)
    return np.where(X < 0, np.float32(0), X), np.arange(n) % k


def one_hot(y: NDArray[np.int64]) -> sparse.csr_matrix:
    return sparse.csr_matrix((np.ones(len(y), np.float32), (np.arange(len(y)), y)))


# Dense arrays


@pytest.mark.parametrize(
    ("dtype", "order"),
    [*((dtype, "C") for dtype in ("f4", "f8", "f2", "i4", "u1", "bool", ">f4")),
     *itertools.product(("f4", ">f4", "u1"), ("F", "steps"))],
)  # fmt: skip
def test_an_array_is_the_sparse_matrix_of_it(dtype: str, order: str, new: Callable[..., xs.Dataset]) -> None:
    X, y = matrices()
    X = (8 * X).astype(dtype)
    rows: Any = np.repeat(X, 2, axis=0)[::2] if order == "steps" else np.array(X, order=order)  # type: ignore[call-overload]
    expected = new(sparse.csr_matrix(X.astype(np.float32)), labels=one_hot(y))
    assert new(rows, labels=y).arrays_digest() == expected.arrays_digest()


def test_an_array_is_the_npy_file_of_it(tmp_path: Path, new: Callable[..., xs.Dataset]) -> None:
    X, y = matrices()
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", y)
    expected = new(tmp_path / "x.npy", labels=tmp_path / "y.npy", normalize="l2")
    assert new(X, labels=y, normalize="l2").arrays_digest() == expected.arrays_digest()
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert new(mapped, labels=y, normalize="l2").arrays_digest() == expected.arrays_digest()
    assert new(np.asarray(mapped)[5:], labels=y[5:]).n_samples == 45
    kept = np.load(tmp_path / "x.npy", mmap_mode="c")  # changes of which are in memory alone
    kept[0] = 7
    assert new(kept, labels=y).X_rows().block(0, 1).values.tolist() == [7] * 6
    assert kept[0].tolist() == [7] * 6


def test_labels_of_every_form_are_the_same(new: Callable[..., xs.Dataset]) -> None:
    X, y = matrices()
    ids = [
        one_hot(y),
        one_hot(y).toarray(),
        y,
        y[:, None],
        y.tolist(),
        pd.Series(y),
        [[int(i)] for i in y],
        pl.Series(y),
    ]
    assert len({new(X, labels=Y).arrays_digest() for Y in ids}) == 1
    names = np.array(["b", "é", "a", "d", "c"])[y]
    forms = [names, pd.Series(names), pl.Series(names.tolist()), [[name] for name in names.tolist()]]
    made = [new(X, labels=Y) for Y in forms]
    assert len({one.arrays_digest() for one in made}) == 1
    assert list(made[0].label_names() or ()) == ["a", "b", "c", "d", "é"]
    like = new(X[:9], labels=[["é", "d"]] * 9, like=made[0])
    assert (like.n_labels, int(like.attributes["nnz_labels"])) == (5, 18)
    assert new(X, labels=["a|c"] * 50, text=xs.TextOptions(label_delimiter="|")).label_counts().tolist() == [50, 50]


@pytest.mark.parametrize(
    ("X", "labels", "said"),
    [
        (np.full((3, 2), np.nan), [0, 1, 2], "X: value nan in row 0 .* is not finite"),
        (np.full((3, 2), 1e300), [0, 1, 2], "X: value 1e.300 in row 0 .* is not finite in float32"),
        (np.ones(3), [0, 1, 2], r"X must be .* got ndarray of the shape \(3,\)"),
        (np.ones((3, 2), complex), [0, 1, 2], "real numbers"),
        (np.ones((3, 2), object), [0, 1, 2], "real numbers"),
        (np.ones((3, 0)), [0, 1, 2], "without columns"),
        (np.ones((3, 2)), [0, 1], "X has 3 rows and labels has 2"),
        (np.ones((3, 2)), None, "give Y as labels="),
        (np.ones((3, 2)), [0.5, 1.0, 2.0], "row 0 .* is a number, not a list of labels"),
        (np.ones((3, 2)), [["a"], [1], []], "row 1 .* names in some rows and ids in others"),
        (np.ones((3, 2)), [["a"], None, []], "row 1 .* is null"),
        (np.ones((3, 2)), [[-1], [0], []], "count from 0"),
        (np.ones((3, 2)), -np.ones((3, 2)), "-1"),
        (np.ones((3, 2)), "labels.npy", "labels must be .* not str"),
        (np.ma.masked_array(np.ones((3, 2)), np.eye(3, 2)), [0, 1, 2], "masked"),
        ([[1.0, 2.0]], [0], "numpy.array of it"),
        ({"a": 1}, [0], "got dict"),
    ],
)
def test_what_is_no_matrix_or_labels_is_refused(X: Any, labels: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(xs.InputError, match=said):
        xs.convert(X, tmp_path / "d.xmc", labels=labels, **LIMIT)
    assert not (tmp_path / "d.xmc").exists()


def test_rows_to_predict_for_need_no_labels(new: Callable[..., xs.Dataset]) -> None:
    X, y = matrices()
    train = new(X, labels=y)
    test = new(X[:7], like=train, unlabelled=True)
    assert (test.n_samples, test.n_labels, int(test.attributes["nnz_labels"])) == (7, 5, 0)


CHILD = """
import sys
import numpy as np
import xmc_stream as xs
X = np.load(sys.argv[1], mmap_mode="r")
xs.convert(X, sys.argv[2], labels=np.arange(len(X)) % 9, memory_limit="340MB", threads=2)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from /proc")
def test_a_mapped_array_larger_than_the_limit_keeps_it(tmp_path: Path) -> None:
    n, d = 110_000, 400  # 352 MB
    X = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float64, (n, d))
    X[:, 7] = np.arange(n) + 1
    del X
    done = subprocess.run(
        [sys.executable, "-c", CHILD, tmp_path / "x.npy", tmp_path / "d.xmc"],
        env={**os.environ, "PYTHONPATH": str(Path(xs.__file__).parents[1])}, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    assert int(done.stdout) * 1024 < 340 * 10**6 < 8 * n * d
    made = xs.open_dataset(tmp_path / "d.xmc")
    assert (made.n_samples, made.n_features) == (n, d)
    assert made.X_rows().block(n - 1, n).values.tolist() == [n]


# Frames


@pytest.mark.parametrize("kind", FRAMES)
def test_a_frame_of_texts_is_the_file_of_it(kind: str, tmp_path: Path, new: Callable[..., xs.Dataset]) -> None:
    table = pa.table({"description": TEXTS, "tags": TAGS, "n": range(60), "own": [f"id {i}" for i in range(60)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=20)
    for options in (
        {"text": "description", "label": "tags"},
        {"text": xs.TextOptions(text_fields=("description", "own"), id_field="own", ngrams=(1, 2)), "label": "tags"},
        {"text": xs.TextOptions(hash_features=64, label_ids=False), "label": "tags"},
        {"label": "n"},
    ):
        expected = new(tmp_path / "a.parquet", **options)
        made = new(FRAMES[kind](table), **options)
        assert made.arrays_digest() == expected.arrays_digest()
        differ = {"source", "source_format", "metadata_sha256", "conversion"}
        for name in (made.attributes.keys() | expected.attributes.keys()) - differ:
            assert made.attributes.get(name) == expected.attributes.get(name), name


@pytest.mark.parametrize("kind", FRAMES)
def test_labels_in_a_string_are_cut_as_in_a_file(kind: str, tmp_path: Path, new: Callable[..., xs.Dataset]) -> None:
    joined = [";".join(tags) for tags in TAGS]
    (tmp_path / "a.csv").write_text("text|tags\n" + "".join(f"{a}|{b}\n" for a, b in zip(TEXTS, joined, strict=True)))
    text = xs.TextOptions(label_delimiter=";")
    expected = new(tmp_path / "a.csv", text=text, label="tags", delimiter="|")
    frame = FRAMES[kind](pa.table({"text": TEXTS, "tags": joined}))
    assert new(frame, text=text, label="tags").arrays_digest() == expected.arrays_digest()


@pytest.mark.parametrize("kind", FRAMES)
def test_a_frame_of_numbers_is_the_array_of_it(kind: str, new: Callable[..., xs.Dataset]) -> None:
    X, y = matrices()
    table = pa.table({f"c{i}": X[:, i] for i in range(X.shape[1])})
    expected = new(X, labels=y).arrays_digest()
    frame = FRAMES[kind](table)
    assert new(frame, labels=y).arrays_digest() == expected
    for name, options in (("label", {}), ("kind", {"label": "kind"})):
        with_labels = FRAMES[kind](table.append_column(name, pa.array(y)))
        assert new(with_labels, **options).arrays_digest() == expected
        test = new(with_labels, unlabelled=True, **options)
        assert (test.n_features, test.n_labels) == (X.shape[1], 0)
    named = FRAMES[kind](table.append_column("tags", pa.array([[f"n{i}"] for i in y])))
    assert new(named, label="tags").arrays_digest() == new(X, labels=[[f"n{i}"] for i in y]).arrays_digest()
    missing = FRAMES[kind](pa.table({"a": [1.0, None], "b": [1, 2]}))
    with pytest.raises(xs.InputError, match="value nan in row 1"):
        new(missing, labels=[0, 1])


def test_a_frame_is_skipped_and_named_by_rows(new: Callable[..., xs.Dataset]) -> None:
    frame = pd.DataFrame({"text": ["a word", None, "some words"], "tags": [["a"], ["b"], None]})
    with pytest.raises(xs.InputError, match=r"^frame\[1\]: field 'text' is null, not a text"):
        new(frame, label="tags")
    made = new(frame, label="tags", skip=True)
    assert [row[:2] for row in made.attributes["skipped_rows"]] == [["frame", 1], ["frame", 2]]


@pytest.mark.parametrize(
    ("frame", "options", "said"),
    [
        (pd.DataFrame({"a": ["x y"], "b": [["t"]]}), {}, r"frame:1: no text field of a common name"),
        (pd.DataFrame({"text": ["x y"], "b": [["t"]]}), {"label": "c"}, "no label field 'c'"),
        (pd.DataFrame({"text": ["x y"], "b": [["t"]]}), {"text": "txt", "label": "b"}, r"'txt' \(is 'text' meant\?\)"),
        (pd.DataFrame({"text": ["x y"], "b": [["t"]]}), {"label": "b", "labels": [["t"]]}, "leave out one of them"),
        (pd.DataFrame({"a": [1.0]}), {}, "no column of labels|'of labels'"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), {"labels": [0]}, "two columns 'a'"),
        (pd.DataFrame(), {"labels": [0]}, "no columns"),
        (pd.DataFrame({"a": []}), {"labels": [0]}, "no rows"),
        (pl.DataFrame({"a": [1]}).lazy(), {"labels": [0]}, r"LazyFrame .* X\.collect\(\)"),
    ],
)
def test_a_frame_without_what_is_asked_for_is_refused(
    frame: Any, options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(xs.InputError, match=said):
        xs.convert(frame, tmp_path / "d.xmc", **options, **LIMIT)


# Texts


def forms(texts: list[str]) -> list[Any]:
    return [
        texts,
        tuple(texts),
        pd.Series(texts),
        pl.Series(texts),
        pa.array(texts),
        np.array(texts),
        np.array(texts, object),
    ]


def test_texts_are_the_file_of_them(tmp_path: Path, new: Callable[..., xs.Dataset]) -> None:
    pq.write_table(pa.table({"text": TEXTS, "tags": TAGS}), tmp_path / "a.parquet")
    expected = new(tmp_path / "a.parquet", label="tags").arrays_digest()
    for texts in forms(TEXTS):
        assert new(texts, labels=TAGS).arrays_digest() == expected
    names = sorted({tag for tags in TAGS for tag in tags})
    Y = np.array([[name in tags for name in names] for tags in TAGS])
    ids = [[names.index(tag) for tag in tags] for tags in TAGS]
    made = [new(TEXTS, labels=labels) for labels in (Y, sparse.csr_matrix(Y), ids, pd.Series(ids))]
    assert len({one.arrays_digest() for one in made}) == 1
    assert np.array_equal(made[0].label_counts(), Y.sum(axis=0))


def test_texts_to_predict_for(tmp_path: Path, new: Callable[..., xs.Dataset]) -> None:
    train = new(pd.DataFrame({"description": TEXTS, "tags": TAGS}), text="description", label="tags")
    test = new(np.array(TEXTS), like=train, unlabelled=True)
    assert (test.n_features, test.n_labels) == (train.n_features, train.n_labels)
    assert np.array_equal(test.X_rows().block(0, 60).values, train.X_rows().block(0, 60).values)


def test_strings_with_labels_of_strings_are_paths(tmp_path: Path) -> None:
    with pytest.raises(xs.InputError, match="a blue hat cannot be read"):
        xs.convert(["a blue hat"], tmp_path / "d.xmc", labels=["hats"], **LIMIT)
    with pytest.raises(xs.InputError, match="there are 2 texts and labels of 1"):
        xs.convert(["a blue hat", "x" * 5000], tmp_path / "d.xmc", labels=[["hats"]], **LIMIT)
    with pytest.raises(xs.InputError, match=r"texts\[1\]: field 'text' is null"):
        xs.convert(pd.Series(["a blue hat", None]), tmp_path / "d.xmc", labels=[["hats"], []], **LIMIT)


WORDS = st.text("ab é\n", max_size=9).map(lambda text: f"word {text}")


@settings(max_examples=7, deadline=None)
@given(st.lists(st.tuples(WORDS, st.lists(st.sampled_from("xyzü"), unique=True)), min_size=1, max_size=16))
def test_any_texts_are_those_of_a_file(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, list[str]]]
) -> None:
    folder = tmp_path_factory.mktemp("texts")
    texts, tags = [text for text, _ in rows], [tags for _, tags in rows]
    table = pa.table({"text": texts, "tags": pa.array(tags, pa.list_(pa.string()))})
    pq.write_table(table, folder / "a.parquet")
    expected = xs.convert(folder / "a.parquet", folder / "a.xmc", label="tags", **LIMIT).arrays_digest()
    for i, source in enumerate((table.to_pandas(), pl.from_arrow(table), table)):
        assert xs.convert(source, folder / f"{i}.xmc", label="tags", **LIMIT).arrays_digest() == expected
    assert xs.convert(np.array(texts, object), folder / "t.xmc", labels=tags, **LIMIT).arrays_digest() == expected


def test_no_library_of_frames_is_loaded_for_an_array(tmp_path: Path) -> None:
    code = (
        "import sys, numpy as np, xmc_stream as xs\n"
        f"xs.convert(np.eye(3), {str(tmp_path / 'd.xmc')!r}, labels=[0, 1, 2], memory_limit='2GB')\n"
        "assert not {'pandas', 'polars', 'pyarrow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
