"""Rows keep their own ids on the way to predictions, whatever form these have; a dash is standard output."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import text_files
from helpers.commands import cli_command, environment

import xmc_stream as xs
from xmc_stream.convert.options import TextOptions
from xmc_stream.errors import InputError, StoreError
from xmc_stream.models import Execution
from xmc_stream.models.samples import samples
from xmc_stream.store.inventory import seal
from xmc_stream.store.names import new_names
from xmc_stream.store.predictions import Predictions

N, K = 120, 6
IDS = [f"row {i}\té" if i % 3 else f"{i}\n\\" for i in range(N)]
EXECUTION = Execution("2GB", threads=1)


def rows() -> list[dict[str, Any]]:
    return [
        {"key": IDS[i], "text": f"words of mark{i % K} mark{i % K}", "labels": [f"label {i % K}", "all"]}
        for i in range(N)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train.jsonl, train.xmc and m, a model of it."""
    folder = tmp_path_factory.mktemp("ids")
    source = text_files.write_jsonl(folder / "train.jsonl", rows())
    train = xs.convert(source, folder / "train.xmc", text=TextOptions(id_field="key"), memory_limit="2GB")
    xs.PPDSparse(memory_limit="2GB", threads=1).fit(train, model=folder / "m")
    return folder


@pytest.mark.parametrize("name", ["store", "p.npz", "p.txt", "p.jsonl"])
def test_predictions_have_the_ids_of_their_rows(folder: Path, tmp_path: Path, name: str) -> None:
    model, path = xs.load_model(folder / "m"), tmp_path / name
    with samples(folder / "train.jsonl", model, tmp_path, EXECUTION) as dataset:
        assert list(dataset.row_ids() or ()) == IDS
        xs.predict(model, dataset, path, 2, memory_limit="2GB", threads=1)
    train = xs.open_dataset(folder / "train.xmc")
    if name == "store":
        assert list(Predictions(path).row_ids() or ()) == IDS
        assert xs.verify(path)["sound"]
    elif name == "p.npz":
        with np.load(path) as file:
            assert file["ids"].tolist() == IDS
            assert file["labels"].shape == (N, 2)
    elif name == "p.txt":
        found = [line.split("\t") for line in path.read_text().splitlines()]
        assert [name for name, _ in found] == [
            name.replace("\\", r"\\").replace("\t", r"\t").replace("\n", r"\n") for name in IDS
        ]
    else:
        found = [json.loads(line) for line in path.read_text().splitlines()]
        assert [one["id"] for one in found] == IDS
        assert [set(one["labels"]) for one in found] == [{f"label {i % K}", "all"} for i in range(N)]
    assert xs.evaluate(path, train, ks=(1, 2), memory_limit="2GB", threads=1)["P@2"] == 100.0


def test_predictions_of_rows_without_ids_have_none(folder: Path, tmp_path: Path) -> None:
    model = xs.load_model(folder / "m")
    source = text_files.write_jsonl(tmp_path / "new.jsonl", [{"text": "words of mark3"}])
    with samples(source, model, tmp_path, EXECUTION) as dataset:
        for name in ("p.npz", "p.txt", "p.jsonl"):
            xs.predict(model, dataset, tmp_path / name, 1, memory_limit="2GB", threads=1)
    assert "ids" not in np.load(tmp_path / "p.npz")
    assert "\t" not in (tmp_path / "p.txt").read_text()
    assert list(json.loads((tmp_path / "p.jsonl").read_text())) == ["labels", "scores"]


@pytest.mark.parametrize("name", ["store", "p.npz", "p.txt", "p.jsonl"])
def test_damaged_ids_end_in_one_line(folder: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(folder / "train.xmc", tmp_path / "d.xmc")
    model = xs.load_model(folder / "m")
    shutil.rmtree(tmp_path / "d.xmc" / "row_ids")
    with new_names(tmp_path / "d.xmc" / "row_ids") as writer:
        writer.append([b"one"] * (N - 1))
    seal(tmp_path / "d.xmc")
    with pytest.raises(StoreError, match=f"has {N - 1} ids for {N} rows: the store is damaged"):
        xs.predict(model, xs.open_dataset(tmp_path / "d.xmc"), tmp_path / name, 2, memory_limit="2GB", threads=1)
    shutil.rmtree(tmp_path / "d.xmc" / "row_ids")
    with new_names(tmp_path / "d.xmc" / "row_ids") as writer:
        writer.append([b"\xff"] * N)
    seal(tmp_path / "d.xmc")
    if name != "store":
        with pytest.raises(StoreError):
            xs.predict(model, xs.open_dataset(tmp_path / "d.xmc"), tmp_path / name, 2, memory_limit="2GB", threads=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.xmc"]


def test_options_of_reading_do_not_go_with_a_dataset(folder: Path, tmp_path: Path) -> None:
    model = xs.load_model(folder / "m")
    with (
        pytest.raises(InputError, match=r"train\.xmc is a dataset: leave out format"),
        samples(folder / "train.xmc", model, tmp_path, EXECUTION, format="csv"),
    ):
        pass


@pytest.mark.slow
def test_a_table_with_other_columns_to_standard_output(folder: Path, tmp_path: Path) -> None:
    """Nothing on standard output but predictions, and nothing in the folder."""
    table = b"nr,review\n7,words of mark3\n8,words of mark5\n"
    command = cli_command("predict", folder / "m", "-", "-", "-k", 1, "--text-field", "review", "--id-field", "nr")
    done = subprocess.run(
        command, input=table, capture_output=True, check=False, cwd=tmp_path, env=environment()
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.decode().splitlines()]
    assert [one["id"] for one in found] == ["7", "8"]
    assert all(set(one["labels"]) <= {"all", "label 3", "label 5"} for one in found)
    assert b"the best 1 labels of 2 samples" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_no_dataset_is_called_a_dash(folder: Path) -> None:
    with pytest.raises(InputError, match="a dataset is a folder and cannot go to standard output: name it"):
        xs.convert(folder / "train.jsonl", "-")
    assert not Path("-").exists()


@pytest.mark.slow
def test_exporting_to_standard_output(folder: Path, tmp_path: Path, commands: Callable[..., Any]) -> None:
    commands("export", folder / "train.xmc", tmp_path / "out.txt")
    command = cli_command("export", folder / "train.xmc", "-")
    done = subprocess.run(command, capture_output=True, check=False, cwd=tmp_path, env=environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout == (tmp_path / "out.txt").read_bytes()
    assert done.stderr.startswith(b"-: ")
    assert [path.name for path in tmp_path.iterdir()] == ["out.txt"]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["predict", "export"])
def test_a_reader_that_has_enough_is_no_failure(folder: Path, tmp_path: Path, what: str) -> None:
    line = " ".join(["words of mark3"] * 40)
    source = text_files.write_jsonl(tmp_path / "new.jsonl", [{"text": line, "key": str(i)} for i in range(9000)])
    arguments = ["predict", folder / "m", source, "-", "-k", K]
    if what == "export":
        xs.convert(source, tmp_path / "d.xmc", unlabelled=True, memory_limit="2GB")
        arguments = ["export", tmp_path / "d.xmc", "-"]
    with subprocess.Popen(
        cli_command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        assert run.stdout.readline()
        run.stdout.close()
        said = run.stderr.read()
    assert b"Broken" not in said, said
    assert b"Traceback" not in said, said
