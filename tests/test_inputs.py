"""What is wrong with columns, and with files that change, is said of every format alike; and how labels were understood."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.inputs import N, TEXTS, an_input, rows_of_text

import xmc_stream as xs
from xmc_stream.convert.formats.registry import formats
from xmc_stream.convert.options import TextOptions
from xmc_stream.errors import InputError

pytestmark = [
    pytest.mark.filterwarnings("ignore::Warning:anndata"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

FIELDS = {
    "text_fields": ("--text-field", "texts", "text"),
    "label_field": ("--label-field", "tagz", "tags"),
    "id_field": ("--id-field", "NRs", "nr"),
}


def options(field: str, name: str) -> TextOptions:
    given: dict[str, Any] = {"label_field": "tags", field: (name,) if field == "text_fields" else name}
    return TextOptions(**given)


@pytest.mark.parametrize("form", formats())
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
        import gzip

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


def test_keys_of_anndata_are_named(tmp_path: Path) -> None:
    source, _, _ = an_input("anndata", tmp_path)
    with pytest.raises(InputError, match=r"has no kinds \(is 'kind' meant\?\): .*obs/kind"):
        xs.convert(source, tmp_path / "d.xmc", memory_limit="2GB", label_key="kinds")
