"""append: what grew is what all rows at once would have given, the older set's files are shared, and nothing else fits."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.damage import damage, flip
from helpers.places import memory_place
from helpers.text_files import write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

import xmc_stream as xs
from xmc_stream.convert.options import TextOptions
from xmc_stream.datasets.append import append_report
from xmc_stream.store import names as stored_names
from xmc_stream.store.encoding import ArrayWriter
from xmc_stream.store.names import open_vectorizer
from xmc_stream.store.remote import link_or_copy

LIMIT = {"memory_limit": "2GB"}
CHUNK = 64


@contextmanager
def small_chunks(chunk_bytes: int = CHUNK) -> Iterator[None]:
    """Arrays have chunks so small that a few rows fill some."""
    before = ArrayWriter.__init__.__defaults__, stored_names.CHUNK_BYTES
    ArrayWriter.__init__.__defaults__, stored_names.CHUNK_BYTES = (chunk_bytes,), chunk_bytes
    try:
        yield
    finally:
        ArrayWriter.__init__.__defaults__, stored_names.CHUNK_BYTES = before


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Number and content of each file below a folder."""
    every = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): (file.stat().st_ino, file.read_bytes()) for file in every}


def converted(
    path: Path, X: Any, Y: Any, labels: Sequence[str] = (), features: Sequence[str] = (), **options: Any
) -> xs.Dataset:
    for name, words in (("label_names", labels), ("feature_names", features)):
        if words:
            options[name] = path.with_suffix(f".{name}")
            options[name].write_text("".join(f"{word}\n" for word in words))
    return xs.convert(sp.csr_matrix(X), path, labels=sp.csr_matrix(Y), **{**LIMIT, **options})


def some(n: int = 30, d: int = 6, k: int = 4, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    X = sp.random(n, d, 0.5, "csr", np.float32, rng)
    return X, sp.csr_matrix((rng.random((n, k)) < 0.4).astype(np.float32))


# ---- what comes out

Rows = tuple[Any, Any, list[str]]


@st.composite
def several(draw: st.DrawFn) -> tuple[list[Rows], bool]:
    """Sets of the same features, sparse ones and dense ones, with names of their labels; whether these are used."""
    d, named, rng = draw(st.integers(1, 12)), draw(st.booleans()), np.random.default_rng(draw(st.integers(0, 99)))
    sets = []
    for number in range(draw(st.integers(2, 4))):
        n, share = draw(st.integers(0 if number else 1, 20)), draw(st.sampled_from([0.0, 0.2, 1.0]))
        names = draw(st.lists(st.sampled_from("abcdefghij"), min_size=1, max_size=8, unique=True))
        X = np.where(rng.random((n, d)) < share, rng.normal(size=(n, d)), 0).astype(np.float32)
        sets.append((X, (rng.random((n, len(names))) < 0.3).astype(np.float32), names))
    return sets, named


def at_once(sets: list[Rows], named: bool) -> Rows:
    """X, Y and the names of the labels of all rows, labels numbered as they come."""
    names: list[str] = []
    for _, _, own in sets:
        names += [name for name in own if name not in names]
    k = len(names) if named else max(Y.shape[1] for _, Y, _ in sets)
    Y = np.zeros((sum(len(X) for X, _, _ in sets), k), np.float32)
    row = 0
    for _, labels, own in sets:
        place = [names.index(name) for name in own] if named else list(range(len(own)))
        Y[row : row + len(labels), place] = labels
        row += len(labels)
    return np.concatenate([X for X, _, _ in sets]), Y, names


@settings(max_examples=15, deadline=None)
@given(several(), st.booleans())
def test_what_grew_is_what_a_conversion_of_all_rows_gives(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[list[Rows], bool], columns: bool
) -> None:
    sets, named = drawn
    folder = tmp_path_factory.mktemp("append")
    X, Y, names = at_once(sets, named)
    with small_chunks():
        parts = [
            converted(folder / f"{i}.xmc", x, y, own if named else (), columns=columns)
            for i, (x, y, own) in enumerate(sets)
        ]
        before = files(folder)
        whole = converted(folder / "whole.xmc", X, Y, names if named else (), columns=columns)
        grown, report = append_report(parts[0], parts[1:], folder / "grown.xmc", columns=columns, **LIMIT)
    assert grown.fingerprint == whole.fingerprint
    assert damage(grown.path) == []
    for name in ("n_samples", "n_features", "n_labels", "nnz_features", "nnz_labels", "normalize"):
        assert grown.attributes[name] == whole.attributes[name]
    assert (grown.path / "X/columns").exists() == columns
    if columns:
        assert grown.X_columns().fingerprint == whole.X_columns().fingerprint
    assert (list(grown.label_names() or ()), list(whole.label_names() or ())) == ((names, names) if named else ([], []))
    theirs, mine = files(whole.path), files(grown.path)
    for name in theirs:  # every chunk, and how arrays are cut
        if name != "zarr.json":
            assert mine[name][1] == theirs[name][1], name
    assert set(mine) == set(theirs)
    now = files(folder)
    assert {name: now[name] for name in before} == before
    linked = 0
    for array in (
        "X/rows/data",
        "X/rows/indices",
        "X/rows/indptr",
        "statistics/row_norms",
        "Y/rows/indices",
        "Y/rows/indptr",
    ):
        about = json.loads((parts[0].path / array / "zarr.json").read_bytes())
        n_bytes = about["shape"][0] * np.dtype(about["data_type"]).itemsize
        for k in range(n_bytes // CHUNK):
            linked += CHUNK
            assert mine[f"{array}/c/{k}"][0] == before[f"0.xmc/{array}/c/{k}"][0]
    assert report["bytes_linked"] >= linked
    assert report["bytes_copied"] == 0
    shutil.rmtree(parts[0].path)
    assert damage(grown.path) == []


def test_a_grown_set_grows_again(tmp_path: Path) -> None:
    X, Y = some(60)
    parts = [converted(tmp_path / f"{i}.xmc", X[20 * i : 20 * i + 20], Y[20 * i : 20 * i + 20]) for i in range(3)]
    once = xs.append(parts[0], parts[1], tmp_path / "once.xmc", **LIMIT)
    twice = xs.append(once.path, str(parts[2].path), tmp_path / "twice.xmc", **LIMIT)
    assert twice.fingerprint == converted(tmp_path / "whole.xmc", X, Y).fingerprint
    assert [entry["of"] for entry in twice.attributes["appended"]] == ["0.xmc", "1.xmc", "2.xmc"]
    assert [entry["n_samples"] for entry in twice.attributes["appended"]] == [20, 20, 20]


def test_what_was_left_out_is_counted_for_all_rows(tmp_path: Path) -> None:
    sets = []
    for name, text in (("a", "2 3 2\n0 0:1\n1 7:1\n1 2:3\n"), ("b", "3 3 2\n0 0:1 0:2\n1 x:1\n0 9:9\n0 1:1\n0 1:2\n")):
        (tmp_path / name).write_text(text.replace("2 3 2", "3 3 2").replace("3 3 2\n0 0:1 0", "5 3 2\n0 0:1 0"))
        sets.append(xs.convert(tmp_path / name, tmp_path / f"{name}.xmc", skip=True, **LIMIT))
    grown = xs.append(sets[0], sets[1], tmp_path / "grown.xmc", **LIMIT)
    assert [one.attributes["skipped"] for one in (*sets, grown)] == [1, 3, 4]
    assert [Path(file).name for file, _, _ in grown.attributes["skipped_rows"]] == ["a", "b", "b", "b"]
    assert grown.attributes["source"] == ["a", "b"]
    assert grown.attributes["source_format"] == "XMLRepo text"


def rows_of_text(n: int, labels: str, seed: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [
        {
            "text": " ".join(f"word{j}" for j in rng.integers(0, 40, 6)), "id": f"{seed}-{i}",
            "labels": [labels[j] for j in sorted(set(rng.integers(0, len(labels), 2)))],
        }
        for i in range(n)
    ]  # fmt: skip


def test_text_keeps_the_older_idf_and_new_labels_come_behind(tmp_path: Path) -> None:
    first, second, third = rows_of_text(50, "dbf", 0), rows_of_text(20, "abz", 1), rows_of_text(5, "z", 2)
    text = TextOptions(id_field="id")
    for name, rows in (("1", first), ("2", second), ("3", third), ("all", first + second + third)):
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    old = xs.convert(tmp_path / "1.jsonl", tmp_path / "1.xmc", text=text, **LIMIT)
    like = {"like": old, "new_labels": True, **LIMIT}
    new = [xs.convert(tmp_path / f"{name}.jsonl", tmp_path / f"{name}.xmc", **like) for name in "23"]
    whole = xs.convert(tmp_path / "all.jsonl", tmp_path / "all.xmc", **like)
    grown, report = append_report(old, new, tmp_path / "grown.xmc", **LIMIT)
    assert report["said"] == "25 rows and 2 labels are new, labels matched by name, words weighed by the idf of 1.xmc"
    assert damage(grown.path) == []
    assert grown.X_rows().fingerprint == whole.X_rows().fingerprint
    assert list(grown.label_names() or ()) == ["b", "d", "f", "a", "z"]
    assert list(grown.row_ids() or ()) == [row["id"] for row in first + second + third]
    assert list(grown.feature_names() or ()) == list(old.feature_names() or ())
    names, rows = list(grown.label_names() or ()), grown.Y_rows().block(0, grown.n_samples)
    labels = [sorted(names[j] for j in row) for row in np.split(rows.indices, rows.indptr[1:-1])]
    assert labels == [sorted(row["labels"]) for row in first + second + third]
    of_old, of_grown = open_vectorizer(old.path), open_vectorizer(grown.path)
    assert of_old is not None
    assert of_grown is not None
    assert of_old[0] == of_grown[0]
    assert (of_old[1].read(0, of_old[1].size) == of_grown[1].read(0, of_grown[1].size)).all()
    # the grown set is as good a training set for further text as the older one
    again = xs.convert(tmp_path / "2.jsonl", tmp_path / "again.xmc", like=grown, **LIMIT)
    assert again.n_labels == 5
    assert again.X_rows().fingerprint == new[0].X_rows().fingerprint


def test_rows_without_labels_need_no_names(tmp_path: Path) -> None:
    X, Y = some()
    old = converted(tmp_path / "a.xmc", X, Y, "pqrs")
    grown = xs.append(old, converted(tmp_path / "b.xmc", X[:5], 0 * Y[:5, :2]), tmp_path / "g.xmc", **LIMIT)
    assert (grown.n_samples, grown.n_labels, list(grown.label_names() or ())) == (35, 4, list("pqrs"))
    assert damage(grown.path) == []


def test_masks_of_known_pairs_are_joined(tmp_path: Path) -> None:
    X, Y = some(40)
    known = sp.csr_matrix(np.random.default_rng(1).random((40, 4)) < 0.5)
    parts = []
    for name, rows, names, order in (("a", slice(0, 25), "pqrs", [0, 1, 2, 3]), ("b", slice(25, 40), "rtp", [2, 3, 0])):
        part = converted(tmp_path / f"{name}.xmc", X[rows], Y[rows][:, order], names)
        parts.append(part.with_observed(known[rows][:, order]))
    grown = xs.append(*parts, tmp_path / "g.xmc", **LIMIT)
    assert damage(grown.path) == []
    rows = grown.observed_rows().block(0, 40)
    dense = sp.csr_matrix((np.ones(len(rows.indices)), rows.indices, rows.indptr), (40, 5)).toarray()
    expected = np.zeros((40, 5))
    expected[:25, :4] = known[:25].toarray()
    expected[25:, [2, 4, 0]] = known[25:].toarray()[:, [2, 3, 0]]
    assert (dense == expected).all()
    assert grown.observed_columns().nnz == grown.observed_rows().nnz


def test_selected_features_stay_selected(tmp_path: Path) -> None:
    X, Y = some(40)
    parts = [
        xs.select_features(converted(tmp_path / f"{i}.xmc", x, y), tmp_path / f"{i}-some.xmc", [1, 4], **LIMIT)
        for i, (x, y) in enumerate([(X[:30], Y[:30]), (X[30:], Y[30:])])
    ]
    grown = xs.append(*parts, tmp_path / "g.xmc", **LIMIT)
    whole = xs.select_features(converted(tmp_path / "w.xmc", X, Y), tmp_path / "w-some.xmc", [1, 4], **LIMIT)
    assert grown.fingerprint == whole.fingerprint
    assert grown.attributes["selected_features"] == whole.attributes["selected_features"]
    assert damage(grown.path) == []


# ---- where files cannot be shared


@pytest.mark.slow
def test_a_set_behind_a_url_is_copied_and_the_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from xmc_stream.cli import main

    monkeypatch.setenv("XMC_STREAM_CACHE", str(tmp_path / "cache"))
    X, Y = some(60)
    with small_chunks(), pytest.MonkeyPatch.context() as context:
        parts = [converted(tmp_path / "a.xmc", X[:50], Y[:50]), converted(tmp_path / "b.xmc", X[50:], Y[50:])]
        xs.copy(parts[0].path, "memory://grows/a.xmc")
        context.setattr("sys.argv", ["xmc-stream"])
        main(["append", "memory://grows/a.xmc", str(parts[1].path), str(tmp_path / "g.xmc"), "--memory-limit", "2GB"])
    said = capsys.readouterr().out
    assert "of full chunks were copied: there are no hard links to memory://grows/a.xmc here" in said
    assert "10 rows and 0 labels are new" in said
    grown = xs.open_dataset(tmp_path / "g.xmc")
    assert grown.fingerprint == converted(tmp_path / "w.xmc", X, Y).fingerprint
    shutil.rmtree(tmp_path / "cache")
    assert damage(grown.path) == []


def test_a_set_on_another_disk_is_copied(tmp_path: Path, disk_path: Path) -> None:
    memory = Path(memory_place() or "/dev/shm") / f"append-{os.getpid()}"
    if not memory.parent.is_dir() or memory.parent.stat().st_dev == disk_path.stat().st_dev:
        pytest.skip("there is one file system only")
    X, Y = some(60)
    memory.mkdir()
    try:
        with small_chunks():
            parts = [converted(memory / "a.xmc", X[:50], Y[:50]), converted(disk_path / "b.xmc", X[50:], Y[50:])]
            grown, report = append_report(*parts, disk_path / "g.xmc", **LIMIT)
            whole = converted(disk_path / "w.xmc", X, Y)
    finally:
        shutil.rmtree(memory)
    assert grown.fingerprint == whole.fingerprint
    assert damage(grown.path) == []
    assert report["bytes_linked"] == 0
    assert report["bytes_copied"] > 0


# ---- what does not fit


def refused(old: xs.Dataset, new: xs.Dataset | list[xs.Dataset], out: Path, *words: str) -> None:
    with pytest.raises(xs.InputError) as caught:
        xs.append(old, new, out, **LIMIT)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    assert not out.exists()
    assert not out.with_name(out.name + ".partial").exists()


def test_sets_of_other_features_are_refused_by_name(tmp_path: Path) -> None:
    X, Y = some()
    out, made = tmp_path / "g.xmc", iter(range(99))

    def make(x: Any = X, y: Any = Y, *names: Sequence[str], **options: Any) -> xs.Dataset:
        return converted(tmp_path / f"{next(made)}.xmc", x, y, *names, **options)

    plain, again = make(), "again with like"
    named = make(X, Y, (), "uvwxyz")
    refused(plain, make(X[:, :5]), out, "the number of features is 6 in", "and 5 in", again)
    refused(named, make(X, Y, (), "uvWxyz"), out, "feature 2 is 'w'", "'W'", again)
    refused(named, plain, out, "names of features are known in", again)
    refused(plain, named, out, "names of features are missing in", again)
    refused(plain, make(normalize="l2"), out, "are normalised by none", "l2", again)
    some_features = [
        xs.select_features(plain, tmp_path / f"s{i}.xmc", ids, **LIMIT) for i, ids in enumerate([[1], [2]])
    ]
    refused(*some_features, out, "has selected features of 6", "select-features")
    refused(plain, some_features[0], out, "has all", "select-features")
    known = sp.csr_matrix(np.ones(Y.shape))
    refused(plain, make().with_observed(known), out, "has a mask of known pairs and", "convert one of them again")
    refused(make().with_observed(known), plain, out, "has a mask of known pairs and")
    refused(plain, [make(), make(X[:, :5])], out, "the number of features is 6")


def test_labels_that_cannot_be_matched_are_refused(tmp_path: Path) -> None:
    X, Y = some()
    named, plain = converted(tmp_path / "n.xmc", X, Y, "pqrs"), converted(tmp_path / "p.xmc", X, Y)
    out = tmp_path / "g.xmc"
    refused(named, plain, out, "n.xmc has names of labels and", "label_names")
    refused(plain, named, out, "n.xmc has names of labels and")
    twice = converted(tmp_path / "t.xmc", X, Y, "pqrq")
    refused(named, twice, out, "labels 1 and 3 of", "t.xmc have one name, 'q'")
    refused(twice, named, out, "labels 1 and 3 of")
    new_twice = converted(tmp_path / "u.xmc", X, Y, "pzzq")
    refused(named, new_twice, out, "labels 1 and 2 of")
    # known pairs are of labels too, and these have no names
    known = named.with_observed(sp.csr_matrix(Y.astype(np.bool_)))
    nothing = converted(tmp_path / "z.xmc", X, 0 * Y).with_observed(sp.csr_matrix(np.ones(Y.shape, np.bool_)))
    refused(known, nothing, out, "n.xmc has names of labels and")


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    old, twin = tmp_path / "old", tmp_path / "twin"
    old.write_bytes(b"what is finished")
    assert link_or_copy(old, twin)
    with pytest.raises(FileExistsError):  # another copy of the job was first
        link_or_copy(old, twin)
    assert old.read_bytes() == twin.read_bytes() == b"what is finished"


def test_text_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    rows = rows_of_text(50, "abc", 0)
    write_jsonl(tmp_path / "a.jsonl", rows)
    write_jsonl(tmp_path / "b.jsonl", [{**row, "text": row["text"] + " word1"} for row in rows])
    old = xs.convert(tmp_path / "a.jsonl", tmp_path / "a.xmc", **LIMIT)
    out = tmp_path / "g.xmc"
    refused(old, xs.convert(tmp_path / "b.jsonl", tmp_path / "b.xmc", **LIMIT), out, "weigh words by other idf")
    linear = xs.convert(tmp_path / "a.jsonl", tmp_path / "c.xmc", text=TextOptions(sublinear_tf=False), **LIMIT)
    refused(old, linear, out, "sublinear_tf of raw text is True in", "False in")
    ids = xs.convert(tmp_path / "a.jsonl", tmp_path / "d.xmc", text=TextOptions(id_field="id"), **LIMIT)
    refused(old, ids, out, "d.xmc has ids of rows and")
    matrix = converted(tmp_path / "m.xmc", sp.csr_matrix((3, old.n_features), dtype=np.float32), np.ones((3, 1)))
    refused(old, matrix, out, "names of features are known in")


def test_texts_whose_ids_count_from_another_number_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("0 0:1 2:1\n1 1:1\n")
    (tmp_path / "b").write_text("1 1:1 3:1\n2 2:1\n")
    old, new = (xs.convert(tmp_path / name, tmp_path / f"{name}.xmc", **LIMIT) for name in "ab")
    assert (old.n_features, new.n_features) == (3, 3)
    refused(old, new, tmp_path / "g.xmc", "ids of features count from 0 in", "and 1 in", "again with like")
    right = xs.convert(tmp_path / "b", tmp_path / "c.xmc", like=old, new_labels=True, drop_unseen=True, **LIMIT)
    grown = xs.append(old, right, tmp_path / "g.xmc", **LIMIT)
    assert (grown.n_features, grown.n_labels) == (3, 3)


def test_names_that_are_taken_are_refused(tmp_path: Path) -> None:
    X, Y = some()
    a, b = (converted(tmp_path / f"{name}.xmc", X, Y) for name in "ab")
    for out in (a.path, b.path):
        link = tmp_path / f"link-{out.name}"
        link.symlink_to(out)
        for name in (out, link):
            with pytest.raises(xs.InputError, match="is one of the sets that are joined"):
                xs.append(a, b, name, overwrite=True, **LIMIT)
        link.unlink()
    other = converted(tmp_path / "c.xmc", X, Y)
    with pytest.raises(xs.InputError, match="exists: give another name, or overwrite=True"):
        xs.append(a, b, other.path, **LIMIT)
    assert xs.append(a, b, other.path, overwrite=True, **LIMIT).n_samples == 60
    with pytest.raises(xs.InputError, match="nothing is to be appended"):
        xs.append(a, [], tmp_path / "d.xmc", **LIMIT)
    with pytest.raises(xs.InputError, match="threads must be 1 or more"):
        xs.append(a, b, tmp_path / "d.xmc", threads=0, **LIMIT)
    with pytest.raises(xs.InputError, match="is a URL"):
        xs.append(a, b, "memory://somewhere/d.xmc", **LIMIT)
    with pytest.raises(xs.MemoryLimitError):
        xs.append(a, b, tmp_path / "d.xmc", memory_limit="60MB")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.xmc", "b.xmc", "c.xmc"]


@pytest.mark.parametrize("of", ["a", "b"])
@pytest.mark.parametrize(
    "name", ["X/rows/data/c/0", "X/rows/indptr/c/0", "Y/rows/indices/c/0", "names/labels/ends/c/0"]
)
def test_damage_is_found_and_not_handed_on(tmp_path: Path, of: str, name: str) -> None:
    X, Y = some()
    with small_chunks(1024 if of == "a" else CHUNK):
        sets = {key: converted(tmp_path / f"{key}.xmc", X, Y, names) for key, names in (("a", "pqrs"), ("b", "sxyp"))}
        flip(sets[of].path / name, 3)
        with pytest.raises(xs.StoreError, match=f"{of}.xmc/{name} (fails its checksum|.*damaged)"):
            xs.append(sets["a"], sets["b"], tmp_path / "g.xmc", **LIMIT)
    assert not (tmp_path / "g.xmc").exists()


# ---- convert --new-labels


@pytest.mark.parametrize("kind", ["xmlrepo", "libsvm", "jsonl", "csv", "npz", "scipy"])
def test_new_labels_take_the_features_of_the_training_set_alone(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(0)
    X = sp.random(6, 5, 0.6, "csr", np.float32, rng)

    def source(name: str, classes: list[int]) -> tuple[Any, dict[str, Any]]:
        Y = sp.csr_matrix((np.ones(6), (np.arange(6), classes)), (6, max(classes) + 1))
        data = converted(tmp_path / f"{name}-{kind}.plain", X, Y)
        file = tmp_path / f"{name}.{kind}"
        if kind == "scipy":
            return X, {"labels": Y}
        if kind == "npz":
            np.savez(file, X=X.toarray(), y=np.array([f"class {j}" for j in classes]))
        elif kind == "jsonl":
            write_jsonl(file, [{"text": "a few words", "labels": [f"class {j}"]} for j in classes])
        elif kind == "csv":
            file.write_text("text,label\n" + "".join(f"a few words,class {j}\n" for j in classes))
        else:
            xs.export(data, file, format=kind, base=0 if kind == "libsvm" else None)
        return file, {"format": kind}

    old, options = source("old", [0, 1, 1, 0, 1, 0])
    new, more = source("new", [1, 2, 4, 4, 2, 1])
    train = xs.convert(old, tmp_path / "old.xmc", **LIMIT, **options)
    with pytest.raises(xs.InputError):
        xs.convert(new, tmp_path / "no.xmc", like=train, **LIMIT, **more)
    rows = xs.convert(new, tmp_path / "new.xmc", like=train, new_labels=True, **LIMIT, **more)
    assert rows.n_features == train.n_features
    named = kind in ("jsonl", "csv", "npz")
    assert rows.n_labels == (3 if named else 5)
    grown = xs.append(train, rows, tmp_path / "grown.xmc", **LIMIT)
    assert grown.n_labels == (4 if named else 5)
    classes = [0, 1, 1, 0, 1, 0, *([1, 2, 3, 3, 2, 1] if named else [1, 2, 4, 4, 2, 1])]
    assert grown.Y_rows().block(0, grown.n_samples).indices.tolist() == classes
    assert damage(grown.path) == []


def test_new_labels_need_a_training_set_and_labels(tmp_path: Path) -> None:
    X, Y = some()
    data = converted(tmp_path / "a.xmc", X, Y)
    with pytest.raises(xs.InputError, match="new_labels says that labels are not those of like: name it"):
        xs.convert(X, tmp_path / "b.xmc", labels=Y, new_labels=True)
    with pytest.raises(xs.InputError, match="rows without labels have none"):
        xs.convert(X, tmp_path / "b.xmc", labels=Y, like=data, new_labels=True, unlabelled=True)


# ---- commands


def test_info_knows_a_grown_set_and_one_that_is_not_finished(tmp_path: Path, commands: Callable[..., Any]) -> None:
    from xmc_stream.runtime.ledger import Ledger
    from xmc_stream.runtime.making import COMMAND

    X, Y = some()
    a, b = (converted(tmp_path / f"{name}.xmc", X, Y) for name in "ab")
    told = commands("append", a.path, b.path, b.path, tmp_path / "g.xmc", "--memory-limit", "2GB")
    assert (told["n_samples"], told["new_samples"], told["new_labels"], told["resumed"]) == (90, 60, 0, False)
    assert [entry["of"] for entry in commands("info", tmp_path / "g.xmc")["appended"]] == ["a.xmc", "b.xmc", "b.xmc"]
    assert commands("verify", tmp_path / "g.xmc", "--memory-limit", "2GB")["sound"]
    again = commands("append", a.path, b.path, b.path, tmp_path / "g.xmc", "--memory-limit", "2GB")
    assert again["resumed"]
    assert "exists" in commands("append", a.path, b.path, tmp_path / "g.xmc", "--memory-limit", "2GB", fails=True)
    work = tmp_path / "h.xmc.partial"
    work.mkdir()
    with Ledger(work / "ledger", {COMMAND: "append"}):
        pass
    assert commands("info", tmp_path / "h.xmc")["next"] == "give the same append command again: it goes on"
