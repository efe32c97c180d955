"""No command makes a wrong thing of a damaged store and ends well: a few trials of what benchmarks/damage.py does."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers import damaged
from helpers.damage import flip
from helpers.forked import Forked
from helpers.methods import METHODS
from helpers.spoilt_stores import run_heard

import xmc_stream as xs
from xmc_stream.cli import main
from xmc_stream.cli.options import STORE
from xmc_stream.errors import InputError, StoreError
from xmc_stream.methods import registry
from xmc_stream.methods.contract import Task
from xmc_stream.models import Execution
from xmc_stream.runtime.check import checked_reading
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.inventory import files_of_store
from xmc_stream.training.train import train

TRIALS = 25
LIMIT = "4GB"  # the process runs many tests


def reads_stores(name: str) -> bool:
    return any(
        isinstance(parameter.type, type(STORE)) and parameter.type.stores for parameter in main.commands[name].params
    )


def test_every_command_that_reads_stores_is_tried() -> None:
    tried = {command[0] for target in damaged.TARGETS for command in damaged.commands(target)}
    assert tried >= {name for name in main.commands if reads_stores(name)} | {"plan"}


def test_every_command_that_makes_something_of_stores_can_leave_the_check_out() -> None:
    free = {"convert", "append", "info", "verify", "copy"}  # where it costs nothing beside the rest, or is the work
    for name in filter(reads_stores, main.commands):
        assert ("check" in {parameter.name for parameter in main.commands[name].params}) == (name not in free), name


def _trials(folder: Path) -> None:
    from helpers.spoilt_stores import fuzz_in

    failures = fuzz_in(folder / "stores", range(TRIALS), None, None, True, damaged.attempt, damaged.prepare_all)
    os._exit(len(failures))


@pytest.mark.soak
@pytest.mark.slow
def test_some_trials(tmp_path: Path) -> None:
    with Forked(_trials, tmp_path) as run:
        assert run.wait() == 0, run.stdout + run.stderr


@pytest.fixture
def data(tmp_path: Path) -> Dataset:
    rng = np.random.default_rng(0)
    X = sp.csr_matrix(rng.random((240, 30)).astype(np.float32))
    Y = sp.csr_matrix(np.eye(6, dtype=np.float32)[np.arange(240) % 6])
    return xs.convert(X, tmp_path / "d.xmc", labels=Y, memory_limit=LIMIT)


CHUNK = "X/rows/data/c/0"


def made_of(data: Dataset, tmp_path: Path, **check: bool) -> list[tuple[str, Any]]:
    """What reads X for a product."""
    model = xs.PPDSparse(memory_limit=LIMIT).fit(xs.convert(
        sp.csr_matrix(np.eye(30, dtype=np.float32)), tmp_path / "other.xmc",
        labels=sp.csr_matrix(np.eye(6, dtype=np.float32)[np.arange(30) % 6]), memory_limit=LIMIT,
    ), model=tmp_path / "m").model_  # fmt: skip
    out = tmp_path / "out"
    return [
        ("split", lambda: xs.split(data, out, tmp_path / "out2", memory_limit=LIMIT, **check)),
        ("select", lambda: xs.select_features(data, out, [1, 2], memory_limit=LIMIT, **check)),
        ("export", lambda: xs.export(data, tmp_path / "out.npz", memory_limit=LIMIT, **check)),
        ("predict", lambda: xs.predict(model, data, out, memory_limit=LIMIT, **check)),
        ("evaluate", lambda: xs.evaluate(model, data, memory_limit=LIMIT, **check)),
        ("calibrate", lambda: xs.calibrate(model, data, memory_limit=LIMIT, **check)),
        (
            "tune",
            lambda: xs.tune(
                data,
                "ppdsparse",
                {"lam": [0.1, 0.01]},
                held_out=0.5,
                out=tmp_path / "t.json",
                memory_limit=LIMIT,
                **check,
            ),
        ),
        *([] if check else [("predict_topk", lambda: model.predict_topk(data, 3))]),
    ]


def test_a_flipped_bit_of_the_data_is_named(data: Dataset, tmp_path: Path) -> None:
    attempts = made_of(data, tmp_path)
    flip(data.path / CHUNK)
    for name, attempt in attempts:
        with pytest.raises(StoreError, match=f"{CHUNK} fails its checksum"):
            attempt()
        assert not (tmp_path / "out").exists(), name


OF_MODELS: dict[str, Callable[[Any], Any]] = {
    "digest": lambda model: model.digest(),
    "to_scipy": lambda model: model.to_scipy().toarray(),
    "factors": lambda model: np.vstack(model.factors()),
    "bias": lambda model: model.bias(),
    "selected_features": lambda model: model.selected_features(),
    "label_counts": lambda model: model.label_counts(0, model.n_labels),
    "predict_topk": lambda model: np.hstack(model.predict_topk(sp.eye(30, dtype=np.float32, format="csr"), 3)),
}


def said_of(path: Path, name: str) -> str:
    """What one of these says of a model, as text."""
    try:
        return str(np.asarray(OF_MODELS[name](xs.load_model(path))).tolist())
    except InputError:  # this kind of model has no such thing
        return ""
    except StoreError:
        return "StoreError"


@pytest.mark.parametrize(
    ("solver", "options"),
    [*((name, {}) for name in METHODS), ("group-lasso", {"loss": "multitask"}), ("ppdsparse", {"guide": 2.0})],
)
def test_no_model_gives_what_a_flipped_bit_made_of_it(
    solver: str, options: dict[str, Any], data: Dataset, tmp_path: Path
) -> None:
    path = tmp_path / "m"
    train(Task(data, registry.declared(solver)(**options), 0), path, Execution(LIMIT, 1))
    whole = {name: said_of(path, name) for name in OF_MODELS}  # labels of trees have no weights of their own
    assert sum(said not in ("", "StoreError") for said in whole.values()) >= 5 - (
        registry.declared(solver).solver == "tree"
    )
    for file in (file for file in path.rglob("c/*") if file.is_file()):
        content = file.read_bytes()
        for at in (0, len(content) // 2, len(content) - 1):
            flip(file, at)
            for name in OF_MODELS:
                assert said_of(path, name) in ("StoreError", whole[name]), (file, at, name)
        file.write_bytes(content)


def test_who_leaves_the_check_out_gets_what_the_damage_makes(data: Dataset, tmp_path: Path) -> None:
    attempts = made_of(data, tmp_path, check=False)
    flip(data.path / CHUNK)
    for _, attempt in attempts:
        attempt()
        for made in tmp_path.glob("out*"):
            shutil.rmtree(made) if made.is_dir() else made.unlink()


def test_a_chunk_is_compared_once_a_run_and_only_where_it_is_read(
    data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from xmc_stream.store.chunks import ChunkedArray

    compared: list[str] = []
    compare = ChunkedArray._compare
    monkeypatch.setattr(
        ChunkedArray, "_compare", lambda self, k: (compared.append(str(self.chunk_file(k))), compare(self, k))[1]
    )
    for _ in range(2):  # the second run compares again
        with checked_reading(data.path):
            for _ in range(3):
                X = data.X_rows()
                X.block(0, 100)
                X.gather(np.array([3, 50]))
        assert sorted(compared) == sorted(
            str(data.path / f"X/rows/{name}/c/0") for name in ("data", "indices", "indptr")
        )
        compared.clear()
    data.X_rows().block(0, 100)
    with checked_reading(data.path, check=False):
        data.X_rows().block(0, 100)
    assert not compared


def test_a_calibration_does_not_make_a_damaged_model_sound(data: Dataset, tmp_path: Path) -> None:
    model = xs.PPDSparse(memory_limit=LIMIT).fit(data, model=tmp_path / "m").model_
    file = tmp_path / "m" / "units/00000/zarr.json"
    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises(StoreError, match="metadata_sha256"):
        xs.uncalibrate(model)
    assert not xs.verify(tmp_path / "m", memory_limit=LIMIT)["sound"]


def test_no_copy_is_made_of_a_damaged_dataset(data: Dataset, tmp_path: Path) -> None:
    data.X_columns()
    data.with_observed(sp.csr_matrix(np.ones((240, 6), np.float32)))
    assert {"X/columns/zarr.json", "observed/zarr.json"} <= set(files_of_store(data.path))
    xs.copy(data.path, tmp_path / "copy")
    for name in sorted(files_of_store(data.path)):
        file = data.path / name
        content = file.read_bytes()
        for spoilt in (
            None,
            content[:-1],
            bytes([content[0] ^ 8]) + content[1:],
            content[:-1] + bytes([content[-1] ^ 1]),
        ):
            file.unlink()
            if spoilt is not None:
                file.write_bytes(spoilt)
            with pytest.raises(StoreError):
                xs.copy(data.path, tmp_path / "other")
            assert not (tmp_path / "other").exists(), name
            shutil.rmtree(tmp_path / "other.partial", ignore_errors=True)  # a copy takes nothing again that is there
            file.write_bytes(content)


def test_a_store_without_its_seal_is_refused(data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One flipped bit in the name of the seal takes it away."""
    xs.PPDSparse(memory_limit=LIMIT).fit(data, model=tmp_path / "m")
    limit = ["--memory-limit", LIMIT]
    shutil.copytree(data.path, tmp_path / "whole.xmc")
    monkeypatch.chdir(tmp_path)
    for store, commands in (
        (tmp_path / "m", [["info", "m"], ["predict", "m", "whole.xmc", "out.npz", *limit]]),
        (data.path, [["info", "d.xmc"], ["train", "d.xmc", "out", *limit], ["split", "d.xmc", "out", "out2", *limit]]),
    ):
        file = store / "zarr.json"
        file.write_bytes(file.read_bytes().replace(b"metadata_sha256", b"metadata_sha254"))
        for command in commands:
            code, said, _ = run_heard(command)
            assert code == 1, command
            assert "metadata_sha256" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.xmc", "m", "whole.xmc"]
