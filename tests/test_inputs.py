"""What is wrong with columns, and with files that change, is said of every format alike; and how labels were understood."""

from __future__ import annotations

import bz2
import gzip
import importlib
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.inputs import TEXTS, D, K, N, an_input, matrices, rows_of_text
from scipy import sparse

import xmc_stream as xs
from xmc_stream.convert.conversion import PartJob
from xmc_stream.convert.formats import pairs as pairs_module
from xmc_stream.convert.formats.predicted import open_predictions
from xmc_stream.convert.formats.registry import FORMATS
from xmc_stream.convert.options import TextOptions
from xmc_stream.errors import InputError

pytestmark = [
    pytest.mark.filterwarnings("ignore::Warning:anndata"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def replaced(path: Path) -> None:
    """By another file of its size and time."""
    other, status = path.with_name("other"), path.stat()
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


FIELDS = {
    "text_fields": ("--text-field", "texts", "text"),
    "label_field": ("--label-field", "tagz", "tags"),
    "id_field": ("--id-field", "NRs", "nr"),
}


def options(field: str, name: str) -> TextOptions:
    given: dict[str, Any] = {"label_field": "tags", field: (name,) if field == "text_fields" else name}
    return TextOptions(**given)


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_is_tried_here(form: str, tmp_path: Path) -> None:
    """Those that `TEXTS` does not have take no fields of text."""
    source, given, _ = an_input(form, tmp_path)
    if form not in TEXTS:
        with pytest.raises(InputError, match="options of raw text"):
            xs.convert(source, tmp_path / "d.xmc", memory_limit="2GB", **given, text=TextOptions(label_field="tags"))
    assert xs.convert(source, tmp_path / "d.xmc", memory_limit="2GB", **given).n_samples == N


@pytest.mark.parametrize("form", TEXTS)
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_columns_that_are_not_there_are_named_with_those_that_are(
    form: str, field: str, skip: bool, ending: str, tmp_path: Path
) -> None:
    flag, asked, nearest = FIELDS[field]
    path, work = tmp_path / f"in{ending}", tmp_path / "plain"
    TEXTS[form](work, rows_of_text())
    if ending and form != "parquet":
        path.write_bytes(gzip.compress(work.read_bytes()))
    else:
        work.rename(path)
    with pytest.raises(InputError, match=rf"^{path}:1: ") as caught:
        xs.convert(path, tmp_path / "d.xmc", memory_limit="2GB", text=options(field, asked), skip=skip)
    said = caught.value.in_shell
    assert "\n" not in said
    assert f"{asked!r} (is {nearest!r} meant?)" in said
    assert all(part in said for part in (flag, "'nr', 'text', 'tags'"))
    assert not (tmp_path / "d.xmc").exists()


@pytest.fixture(scope="module")
def of_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train.xmc, of rows with ids, and m, a model of it."""
    folder = tmp_path_factory.mktemp("of text")
    source, given, _ = an_input("jsonl", folder)
    text = TextOptions(label_field="tags", id_field="nr")
    train = xs.convert(source, folder / "train.xmc", memory_limit="2GB", **{**given, "text": text})
    xs.PPDSparse(memory_limit="2GB", threads=1).fit(train, model=folder / "m")
    return folder


@pytest.mark.parametrize("form", TEXTS)
@pytest.mark.parametrize("field", FIELDS)
def test_a_test_set_has_the_columns_that_were_asked_for(form: str, field: str, of_text: Path, tmp_path: Path) -> None:
    """Though what its training set had may lack: then it has no ids, or no labels."""
    _, asked, nearest = FIELDS[field]
    TEXTS[form](tmp_path / "in", rows_of_text())
    with pytest.raises(InputError, match=rf"in:1: no .*{asked!r} \(is {nearest!r} meant"):
        xs.convert(
            tmp_path / "in", tmp_path / "d.xmc", like=of_text / "m", memory_limit="2GB", text=options(field, asked)
        )
    rows = [{"nr": row["nr"], "body": row["text"]} for row in rows_of_text()]
    TEXTS[form](tmp_path / "in", rows)
    with pytest.raises(InputError, match="in:1: no text field 'text': it has 'nr', 'body'"):
        xs.convert(tmp_path / "in", tmp_path / "d.xmc", like=of_text / "m", memory_limit="2GB")
    TEXTS[form](tmp_path / "in", [{"text": row["text"]} for row in rows_of_text()])
    dataset = xs.convert(tmp_path / "in", tmp_path / "d.xmc", like=of_text / "m", memory_limit="2GB")
    assert dataset.row_ids() is None
    assert dataset.attributes["nnz_labels"] == 0


@pytest.mark.parametrize("form", TEXTS)
@pytest.mark.parametrize("field", ["text_fields", "id_field"])
def test_predict_refuses_columns_that_are_not_there(
    form: str, field: str, of_text: Path, tmp_path: Path, commands: Callable[..., Any]
) -> None:
    flag, asked, nearest = FIELDS[field]
    TEXTS[form](tmp_path / "in", rows_of_text())
    said = commands("predict", of_text / "m", tmp_path / "in", tmp_path / "p.txt", flag, asked, "-k", 1, fails=True)
    assert f"{tmp_path / 'in'}:1: " in said
    assert all(repr(part) in said for part in (asked, nearest, "tags"))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    commands("predict", of_text / "m", tmp_path / "in", tmp_path / "p.txt", flag, nearest, "-k", 1)


def test_rows_without_a_field_may_be_left_out(tmp_path: Path) -> None:
    """Then a field is there if any row has it, as far as one looks."""
    rows = rows_of_text()
    for row in rows[:5]:
        del row["nr"]
    TEXTS["jsonl"](tmp_path / "in", rows)
    text = TextOptions(label_field="tags", id_field="nr")
    with pytest.raises(InputError, match="in:1: no id field 'nr'"):
        xs.convert(tmp_path / "in", tmp_path / "d.xmc", memory_limit="2GB", text=text)
    dataset = xs.convert(tmp_path / "in", tmp_path / "d.xmc", memory_limit="2GB", text=text, skip=True)
    assert (dataset.n_samples, dataset.attributes["skipped"]) == (N - 5, 5)
    assert list(dataset.row_ids() or ()) == [row["nr"] for row in rows[5:]]


CHANGES: dict[str, Callable[[Path], Any]] = {
    "shrinks": lambda path: os.truncate(path, path.stat().st_size * 2 // 3),
    "grows": lambda path: path.write_bytes(path.read_bytes() + path.read_bytes()[-40:]),
    "is written again": lambda path: os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 1)),
    "is replaced": replaced,
    "goes": lambda path: path.unlink(),
}


def changing(monkeypatch: pytest.MonkeyPatch, path: Path, change: Callable[[Path], Any], when: str) -> None:
    """The file changes before its first part is read, or behind that."""
    done, run = list[str](), PartJob.run

    def changed(self: PartJob) -> Any:
        if when == "before" and not done:
            done.append(change(path) or "")
        receipt = run(self)
        if not done:
            done.append(change(path) or "")
        return receipt

    monkeypatch.setattr(PartJob, "run", changed)


@pytest.mark.parametrize("form", {**FORMATS, **TEXTS})
@pytest.mark.parametrize("when", ["before", "behind"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_while_it_is_read_makes_no_dataset(
    form: str, when: str, change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(2):
        folder = tmp_path / str(i)
        folder.mkdir()
        source, given, files = an_input(form, folder)
        if i >= len(files):
            break
        with monkeypatch.context() as patch:
            changing(patch, files[i], CHANGES[change], when)
            with pytest.raises(InputError, match=f"^{files[i]} was changed while") as caught:
                xs.convert(source, folder / "d.xmc", memory_limit="2GB", threads=1, **given)
        assert "\n" not in str(caught.value)
        assert not list(folder.glob("d.xmc*"))


@pytest.mark.parametrize("opener", [gzip.open, bz2.open, lzma.open])
@pytest.mark.parametrize("form", ["csv", "jsonl", "xmlrepo", "libsvm"])
def test_compressed_files_that_change(form: str, opener: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, given, _ = an_input(form, tmp_path)
    path = tmp_path / "small"
    with opener(path, "wb") as file:
        file.write(source.read_bytes())
    changing(monkeypatch, path, CHANGES["grows"], "behind")
    with pytest.raises(InputError, match=f"^{path} was changed while"):
        xs.convert(path, tmp_path / "d.xmc", memory_limit="2GB", threads=1, **given)
    assert not list(tmp_path.glob("d.xmc*"))


@pytest.mark.parametrize("beside", ["beside", "label_names", "labels", "found labels", "folder"])
def test_files_beside_that_change(beside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    X, y = matrices()
    source, given, _ = an_input("npy" if beside == "labels" else "libsvm", tmp_path)
    path = tmp_path / "beside.npy"
    if beside == "beside":
        np.save(path, X)
        given["beside"] = path
    elif beside == "label_names":
        path.write_text("".join(f"name {i}\n" for i in range(K)))
        given["label_names"] = path
    elif beside == "labels":
        path.write_text(f"{N} {K}\n" + "".join(f"{label}:1\n" for label in y))
        given["labels"] = path
    elif beside == "found labels":
        source, path = tmp_path / "t_X_Xf.txt", tmp_path / "t_X_Y.txt"
        source.write_text(f"{N} {D}\n" + "0:1\n" * N)
        path.write_text(f"{N} {K}\n" + "".join(f"{label}:1\n" for label in y))
    else:
        source = tmp_path / "x"
        source.mkdir()
        for name in ("indptr", "indices", "data"):
            np.save(source / f"{name}.npy", getattr(sparse.csr_matrix(X), name))
        np.save(path, y)
        given, path = {"labels": path, "n_features": D}, source / "data.npy"
    changing(monkeypatch, path, CHANGES["is written again"], "behind")
    with pytest.raises(InputError, match=f"^{path} was changed while"):
        xs.convert(source, tmp_path / "d.xmc", memory_limit="2GB", threads=1, **given)
    assert not list(tmp_path.glob("d.xmc*"))


def test_rows_to_predict_for_that_change(of_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TEXTS["csv"](tmp_path / "in.csv", rows_of_text())
    changing(monkeypatch, tmp_path / "in.csv", CHANGES["shrinks"], "before")
    with pytest.raises(InputError, match=r"in\.csv was changed while"):
        xs.predict(of_text / "m", tmp_path / "in.csv", tmp_path / "p.txt", 1, memory_limit="2GB", threads=1)
    assert [path.name for path in tmp_path.iterdir()] == ["in.csv"]


def test_filters_and_predictions_that_change(of_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = xs.open_dataset(of_text / "train.xmc")
    pairs = tmp_path / "pairs"
    pairs.write_text("0 1\n1 2\n")

    def keys(source: Path, *of: Any, read: Any = pairs_module._keys) -> Any:
        result = read(source, *of)
        CHANGES["grows"](source)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(pairs_module, "_keys", keys)
        source, given, _ = an_input("libsvm", tmp_path)
        with pytest.raises(InputError, match=f"^{pairs} was changed while"):
            xs.convert(source, tmp_path / "d.xmc", observed=pairs, memory_limit="2GB", **given)
        assert not list(tmp_path.glob("d.xmc*"))
        source.unlink()
        pairs.write_text("0 1\n1 2\n")
        with pytest.raises(InputError, match=f"^{pairs} was changed while"):
            xs.predict(of_text / "m", train, tmp_path / "p.txt", 1, filter=pairs, memory_limit="2GB", threads=1)
    assert [path.name for path in tmp_path.iterdir()] == ["pairs"]
    for form in (".npz", ".txt", ".jsonl"):
        for change in CHANGES.values():
            found = tmp_path / f"p{form}"
            xs.predict(of_text / "m", train, found, 1, memory_limit="2GB", threads=1, overwrite=True)
            opened = open_predictions(found, K, train.label_names())
            change(found)
            with pytest.raises(InputError, match=f"^{found} was changed while"):
                list(opened.blocks())


def test_a_bad_file_of_known_pairs_makes_no_dataset(tmp_path: Path) -> None:
    source, given, _ = an_input("libsvm", tmp_path)
    pairs = tmp_path / "pairs"
    pairs.write_text(f"0 1\n{N} 2\n")
    with pytest.raises(InputError, match=rf"^{pairs}:2: row {N} is not below {N}"):
        xs.convert(source, tmp_path / "d.xmc", observed=pairs, memory_limit="2GB", **given)
    assert not list(tmp_path.glob("d.xmc*"))
    pairs.write_text(f"0 1\n{N - 1} 2\n")
    dataset = xs.convert(source, tmp_path / "d.xmc", observed=pairs, memory_limit="2GB", **given)
    assert dataset.observed_rows().nnz == 2
    assert xs.verify(dataset.path)["sound"]
    assert {path.name for path in tmp_path.iterdir()} == {"d.xmc", "pairs", source.name}


def test_a_dataset_may_be_made_in_the_folder_of_its_arrays(tmp_path: Path) -> None:
    X, y = matrices()
    for name in ("indptr", "indices", "data"):
        np.save(tmp_path / f"{name}.npy", getattr(sparse.csr_matrix(X), name))
    np.save(tmp_path / "labels.npy", y)
    xs.convert(tmp_path, tmp_path / "d.xmc", labels=tmp_path / "labels.npy", n_features=D, memory_limit="2GB")


def test_keys_of_anndata_are_named(tmp_path: Path) -> None:
    source, _, _ = an_input("anndata", tmp_path)
    with pytest.raises(InputError, match=r"has no kinds \(is 'kind' meant\?\): .*obs/kind"):
        xs.convert(source, tmp_path / "d.xmc", memory_limit="2GB", label_key="kinds")


def test_a_line_that_is_no_pair_is_found_before_the_input_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: Any, **__: Any) -> None:
        raise AssertionError("the conversion was begun")

    monkeypatch.setattr(importlib.import_module("xmc_stream.convert.conversion"), "ConversionRun", run)
    source, given, _ = an_input("libsvm", tmp_path)
    pairs = tmp_path / "pairs"
    pairs.write_text("0 1\nx 2\n")
    with pytest.raises(InputError, match=rf"^{pairs}:2: 'x 2' is not a pair"):
        xs.convert(source, tmp_path / "d.xmc", observed=pairs, memory_limit="2GB", **given)
