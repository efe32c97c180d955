"""What is read is a file: a pipe, a device, or a description that is none of a store, ends every command in one line."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import scipy.sparse as sp
from helpers.forked import forked_commands

import xmc_stream as xs
from xmc_stream.cli import main
from xmc_stream.cli.options import PATH
from xmc_stream.errors import XmcStreamError

LIMIT = "1GB"
SECONDS = 60
# what a command takes where nothing else is said of a path
BASE = {
    "convert": {"sources": "d.txt", "target": "new"},
    "append": {"data": "d.xmc", "news": "e.xmc", "out": "new"},
    "info": {"path": "d.xmc"},
    "verify": {"path": "d.xmc"},
    "split": {"data": "d.xmc", "train": "new", "valid": "newer"},
    "select-features": {"data": "d.xmc", "out": "new", "features": "features.txt"},
    "compact": {"model": "rows.model", "out": "new"},
    "export": {"data": "d.xmc", "out": "new.npz"},
    "copy": {"source": "d.xmc", "target": "new"},
    "train": {"data": "d.xmc", "model": "new"},
    "tune": {"data": "d.xmc", "out": "new.json"},
    "calibrate": {"model": "d.model", "data": "e.xmc"},
    "predict": {"model": "d.model", "data": "e.xmc", "out": "new"},
    "evaluate": {"predictions": "d.model", "data": "e.xmc"},
    "demo": {"folder": "new"},
}
# where another path must be said, or none
ALSO: dict[tuple[str, str], dict[str, Any]] = {
    ("select-features", "model"): {"features": None},
    ("convert", "labels"): {"sources": "d.npz"},
    ("convert", "beside"): {"sources": "d.npz", "labels": "d-labels.npz"},
    ("convert", "label_names"): {"sources": "d.npz", "labels": "d-labels.npz"},
    ("convert", "feature_names"): {"sources": "d.npz", "labels": "d-labels.npz"},
    ("predict", "beside"): {"data": "d.npz"},
}
MORE = {"tune": ["--grid", "lam=0.1", "--held-out", "0.6"], "info": ["--json"], "demo": ["--json"]}
PIPES = {("convert", "sources"), ("predict", "data")}  # a text may come through one
UNSEEN = {("predict", "beside")}  # this model learned from nothing beside, and says so first
UNLIMITED = ("info", "copy", "demo")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Stores and files that commands take, and a pipe that nobody writes to."""
    folder = tmp_path_factory.mktemp("files")
    X = sp.random(200, 20, 0.3, "csr", np.float32, random_state=0)
    Y = sp.csr_matrix((np.ones(200, np.float32), np.arange(200) % 5, np.arange(201)), (200, 5))
    for name, rows in (("d.xmc", slice(0, 200)), ("e.xmc", slice(0, 150))):
        xs.convert(X[rows], folder / name, labels=Y[rows], memory_limit="4GB")
    xs.export(folder / "d.xmc", folder / "d.txt")
    xs.export(folder / "d.xmc", folder / "d.npz")
    xs.PPDSparse(memory_limit="4GB").fit(xs.open_dataset(folder / "d.xmc"), model=folder / "d.model")
    xs.GroupLasso(memory_limit="4GB").fit(xs.open_dataset(folder / "d.xmc"), model=folder / "rows.model")
    xs.predict(folder / "d.model", folder / "e.xmc", folder / "p.zarr", k=3)
    (folder / "features.txt").write_text("1\n2\n")
    os.mkfifo(folder / "pipe")
    before = os.getcwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def words(name: str, values: dict[str, Any]) -> list[str]:
    command, found = main.commands[name], [name]
    for parameter in command.params:
        value = values.get(parameter.name or "")
        if value is not None:
            found += [str(value)] if isinstance(parameter, click.Argument) else [parameter.opts[-1], str(value)]
    return found + MORE.get(name, []) + ([] if name in UNLIMITED else ["--memory-limit", LIMIT])


def refused(*commands: list[str]) -> list[str]:
    """The line that each command ends with. They run in one process."""
    found = []
    for arguments, (code, out, said) in zip(commands, forked_commands(*commands, seconds=SECONDS), strict=True):
        assert code == 1, (arguments, code, out, said)
        lines = [line for line in said.splitlines() if line.startswith("xmc-stream: ")]
        assert len(lines) == 1, (arguments, said)
        assert "Traceback" not in said
        found += lines
    return found


PLACES = {
    name: [one.name or "" for one in command.params if isinstance(one.type, type(PATH))]
    for name, command in main.commands.items()
}


@pytest.mark.slow
@pytest.mark.parametrize("special", ["pipe", pytest.param("/dev/zero", marks=pytest.mark.soak)])
@pytest.mark.parametrize("command", [name for name, parameters in PLACES.items() if parameters])
def test_a_path_that_is_no_file(folder: Path, command: str, special: str) -> None:
    parameters = [one for one in PLACES[command] if special != "pipe" or (command, one) not in PIPES]
    values = [{**BASE[command], **ALSO.get((command, one), {}), one: special} for one in parameters]
    try:
        for one, line in zip(parameters, refused(*(words(command, each) for each in values)), strict=True):
            assert special in line or (command, one) in UNSEEN
        assert command == "demo" or not (folder / "new").exists()
    finally:
        shutil.rmtree(folder / "new", ignore_errors=True)


KINDS = ["/dev/zero", "pipe", "deep", "long"]
DESCRIPTIONS = list(itertools.product(["d.xmc", "d.model", "rows.model", "p.zarr"], ["zarr.json", "deeper"], KINDS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("store", "inner", "kind"),
    # every kind of each store, at one depth or the other: the depth alternates from kind to kind
    [
        pytest.param(*case, marks=[] if (number + number // 4) % 2 == 0 else pytest.mark.soak)
        for number, case in enumerate(DESCRIPTIONS)
    ],
)
def test_a_description_that_is_none(folder: Path, store: str, inner: str, kind: str) -> None:
    below = {"d.xmc": "X/rows/data", "d.model": "units/00000", "rows.model": "units/rows", "p.zarr": "scores"}[store]
    file = folder / store / (inner if inner == "zarr.json" else f"{below}/zarr.json")
    kept = file.read_bytes()
    file.unlink()
    try:
        if kind in ("deep", "long"):
            file.write_bytes(b"[" * 100_000 if kind == "deep" else json.dumps(["x" * 2**25]).encode())
        else:
            file.symlink_to(folder / kind)
        asked = []
        for command, base in BASE.items():
            for name, value in base.items():
                of_kind = {"d.xmc": "d.xmc", "rows.model": "rows.model", "p.zarr": "d.xmc", "d.model": "d.model"}[store]
                fits = value == of_kind and (store != "p.zarr" or command in ("info", "verify", "copy"))
                if fits:
                    asked.append(words(command, {**base, name: store}))
        assert asked
        for line in refused(*asked):
            assert store in line
    finally:
        file.unlink()
        file.write_bytes(kept)


@pytest.mark.parametrize(
    ("store", "file"),
    [
        *(("d.xmc", file) for file in ("zarr.json", "X/rows/zarr.json", "X/rows/data/zarr.json", "X/rows/data/c/0")),
        *(
            ("d.model", file)
            for file in ("zarr.json", "units/00000/weights/data/zarr.json", "units/00000/weights/data/c/0")
        ),
        *(("rows.model", file) for file in ("zarr.json", "units/rows/weights/zarr.json", "units/rows/weights/c/0")),
        ("p.zarr", "scores/zarr.json"),
    ],
)
def test_reading_that_fails_is_not_called_damage(
    folder: Path, monkeypatch: pytest.MonkeyPatch, store: str, file: str
) -> None:
    """Advice to make a store again would destroy one that is sound."""
    from xmc_stream.store import remote

    whole = remote.regular

    def failing(path: Any) -> int:
        if str(path).endswith(f"{store}/{file}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return whole(path)

    monkeypatch.setattr(remote, "regular", failing)
    path, out = folder / store, folder / "out"
    attempts: dict[str, list[Any]] = {
        "d.xmc": [
            lambda: xs.split(path, out, folder / "out2", memory_limit="4GB"),
            lambda: xs.export(path, folder / "out.npz", memory_limit="4GB"),
            lambda: xs.PPDSparse(memory_limit="4GB").fit(xs.open_dataset(path), model=out),
        ],
        "d.model": [
            lambda: xs.predict(path, folder / "e.xmc", out, memory_limit="4GB"),
            lambda: xs.export(path, folder / "out.npz", memory_limit="4GB"),
        ],
        "rows.model": [lambda: xs.load_model(path).compact(out, memory_limit="4GB")],
        "p.zarr": [lambda: xs.evaluate(path, folder / "e.xmc", ks=(1,), memory_limit="4GB")],
    }
    for attempt in attempts[store]:
        with pytest.raises((XmcStreamError, OSError)) as caught:
            attempt()
        assert file in str(caught.value)
        assert not re.search("damaged|make it again|predict again|train it again", str(caught.value))
    shutil.rmtree(folder / "out.partial", ignore_errors=True)
