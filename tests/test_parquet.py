"""Parquet: the rows that JSONL of the same records gives."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import text_files

import xmc_stream as xs
from xmc_stream.errors import InputError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_parquet_is_what_jsonl_is(compression: str, tmp_path: Path) -> None:
    documents = text_files.documents(300)
    table = pyarrow.Table.from_pylist(documents)
    parquet.write_table(table, tmp_path / "in.parquet", row_group_size=70, compression=compression)
    source = text_files.write_jsonl(tmp_path / "in.jsonl", documents)
    one = xs.convert(source, tmp_path / "one.xmc", memory_limit="2GB")
    other = xs.convert(tmp_path / "in.parquet", tmp_path / "other.xmc", memory_limit="2GB")
    assert other.fingerprint == one.fingerprint
    assert list(other.label_names() or ()) == list(one.label_names() or ())


def test_ids_and_bad_rows(tmp_path: Path) -> None:
    rows = [{"text": f"words {i}", "labels": [i]} for i in range(9)]
    rows[6]["text"] = None
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in.parquet", row_group_size=4)
    with pytest.raises(InputError, match=r"in.parquet:7: field 'text' is null"):
        xs.convert(tmp_path / "in.parquet", tmp_path / "out.xmc", memory_limit="2GB")
    dataset = xs.convert(tmp_path / "in.parquet", tmp_path / "out.xmc", memory_limit="2GB", skip=True)
    assert (dataset.n_samples, dataset.n_labels, dataset.attributes["skipped"]) == (8, 9, 1)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"text": "words " * 1000, "labels": ["a"]}] * 50), path)
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:30], b"PAR1", whole[:20] + b"\xff" * 40 + whole[60:]):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"in\.parquet"):
            xs.convert(path, tmp_path / "out.xmc", memory_limit="2GB")
    assert not (tmp_path / "out.xmc").exists()


def test_a_first_row_that_is_not_utf8_is_named_or_left_out(tmp_path: Path) -> None:
    texts = [b"\xff bad", b"good words here", b"more good words"]
    column = pyarrow.Array.from_buffers(
        pyarrow.string(), 3, [None, *pyarrow.array(texts, pyarrow.binary()).buffers()[1:]]
    )
    table = pyarrow.table({"text": column, "labels": [["a"], ["b"], ["a"]]})
    for n, name in ((3, "all"), (1, "one")):
        parquet.write_table(table.slice(0, n), tmp_path / f"{name}.parquet")
        with pytest.raises(xs.InputError, match=rf"{name}\.parquet:1: "):
            xs.convert(tmp_path / f"{name}.parquet", tmp_path / "d.xmc")
    assert xs.convert(tmp_path / "all.parquet", tmp_path / "d.xmc", skip=True).n_samples == 2
