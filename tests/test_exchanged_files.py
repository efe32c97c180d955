"""A chunk file that is whole in itself and another store's is told from the one that was written, wherever it lies."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import xmc_stream as xs
from xmc_stream.datasets.verify import StoreCheck
from xmc_stream.errors import StoreError
from xmc_stream.runtime.check import check_jobs
from xmc_stream.runtime.job import Notes, run_here
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.inventory import SEAL, seal, take_inventory
from xmc_stream.store.nodes import CRCS
from xmc_stream.store.predictions import Predictions

N, D, K = 150, 40, 12
LIMIT = "3GB"  # the process runs many tests


def matrices(seed: int) -> tuple[Any, Any]:
    """X and Y with as many entries for every seed; feature and label number `seed` have none."""
    rng = np.random.default_rng(seed)
    X = sp.random(N, D - 1, 0.3, "csc", np.float32, random_state=seed)
    Y = sp.csc_matrix(rng.permuted(np.eye(K - 1)[np.arange(N) % (K - 1)], axis=1))
    return without(X, seed), without(Y, seed)


def without(matrix: Any, number: int) -> Any:
    """The matrix with an empty column of that number among its own."""
    indptr = np.insert(matrix.indptr, number, matrix.indptr[number])
    return sp.csr_matrix(sp.csc_matrix((matrix.data, matrix.indices, indptr), (N, matrix.shape[1] + 1)))


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Two stores of each kind, of the same sizes, made from other data."""
    folder = tmp_path_factory.mktemp("twins")
    pairs: dict[str, tuple[Path, Path]] = {
        kind: (folder / f"{kind}-0", folder / f"{kind}-1") for kind in ("data", "linear", "lowrank", "predictions")
    }
    for seed in (0, 1):
        X, Y = matrices(seed)
        data = xs.convert(X, pairs["data"][seed], labels=Y, memory_limit=LIMIT)
        data.X_columns()
        data.with_observed(sp.csr_matrix(np.random.default_rng(seed).permuted(np.arange(N * K) % 2).reshape(N, K)))
        # without the l1 term all weights are there, so the files of both are of the same sizes
        linear = xs.PPDSparse(lam=0.0, memory_limit=LIMIT).fit(data, model=pairs["linear"][seed]).model_
        xs.LEML(rank=3, alternations=1, memory_limit=LIMIT).fit(data, model=pairs["lowrank"][seed])
        xs.predict(linear, data, pairs["predictions"][seed], k=3)
    return pairs


def damage(path: Path) -> list[str]:
    """What verify finds, without an engine."""
    found: list[str] = run_here(StoreCheck(path, take_inventory(path), 12345).loop(), Notes())["damage"]
    return found


def exchanged(store: Path, other: Path) -> Iterator[Path]:
    """Each chunk file, while that of the same name in the other store lies in its place, if it is another."""
    n = 0
    for file in sorted(store.rglob("c/**/*")):
        theirs = other / file.relative_to(store)
        if not file.is_file() or not theirs.exists() or theirs.read_bytes() == (content := file.read_bytes()):
            continue
        if len(content) != theirs.stat().st_size:
            continue
        n += 1
        shutil.copy(theirs, file)
        yield file
        file.write_bytes(content)
    assert n


def run_all(jobs: Any) -> None:
    for job in jobs:
        job.run()


def test_a_dataset(twins: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    store, other = tmp_path / "d.xmc", twins["data"][1]
    shutil.copytree(twins["data"][0], store)
    dataset = Dataset(store)
    seen = set()
    run_all(check_jobs(dataset, True))
    for file in exchanged(store, other):
        seen.add(str(file.relative_to(store).parent.parent))
        assert damage(store), file
        read_by_training = "X/columns" not in str(file)
        if read_by_training:
            with pytest.raises(StoreError, match=str(file)):
                run_all(check_jobs(dataset, observed=True))
        else:
            run_all(check_jobs(dataset, observed=True))
        if "observed" in str(file):
            run_all(check_jobs(dataset))
    assert {f"statistics/{name}" for name in ("label_counts", "feature_counts", "row_norms")} <= seen
    assert {"X/rows/indices", "X/rows/data", "Y/rows/indices", "Y/columns/indices", "X/columns/data"} <= seen
    assert "observed/rows/indices" in seen
    assert damage(store) == []


@pytest.mark.parametrize("kind", ["linear", "lowrank"])
def test_a_model(twins: dict[str, tuple[Path, Path]], tmp_path: Path, kind: str) -> None:
    store, other = tmp_path / "m", twins[kind][1]
    shutil.copytree(twins[kind][0], store)
    data = Dataset(twins["data"][0])
    seen = set()
    for file in exchanged(store, other):
        name = str(file.relative_to(store).parent.parent)
        seen.add(name)
        assert any(str(file) in line for line in damage(store)), file
        if any(part in name for part in ("weights", "bias", "factors", "label_counts")):
            for attempt in (
                lambda: xs.predict(xs.load_model(store), data, tmp_path / "p", k=3),
                lambda: xs.evaluate(store, data),
            ):
                with pytest.raises(StoreError, match=str(file)):
                    attempt()
        else:
            run_all(xs.load_model(store).check_jobs())
    everything = {
        "linear": {f"units/00000/{name}" for name in ("bias", "objective", "duality_gap", "violation")}
        | {f"units/00000/weights/{name}" for name in ("indptr", "indices", "data")},
        "lowrank": {"factors/W", "factors/H"},
    }[kind]
    assert seen == everything | {"label_counts"}
    assert damage(store) == []


def test_predictions(twins: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    store, other = tmp_path / "p", twins["predictions"][1]
    shutil.copytree(twins["predictions"][0], store)
    data = Dataset(twins["data"][0])
    for file in exchanged(store, other):
        assert any(str(file) in line for line in damage(store)), file
        for attempt in (lambda: xs.evaluate(store, data, ks=(1, 3)), lambda: Predictions(store)):
            with pytest.raises(StoreError, match=str(file)):
                attempt()
    assert damage(store) == []
    xs.evaluate(store, data, ks=(1, 3))


def test_an_array_with_its_description(twins: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    """Checksums and all: the seal tells."""
    for kind, name in (("data", "statistics/row_norms"), ("linear", "units/00000/bias"), ("predictions", "labels")):
        store = tmp_path / kind
        shutil.copytree(twins[kind][0], store)
        shutil.rmtree(store / name)
        shutil.copytree(twins[kind][1] / name, store / name)
        assert any(SEAL in line for line in damage(store))
    with pytest.raises(StoreError, match="do not fit metadata_sha256"):
        run_all(check_jobs(Dataset(tmp_path / "data")))
    data = Dataset(twins["data"][0])
    with pytest.raises(StoreError, match="do not fit metadata_sha256"):
        xs.predict(xs.load_model(tmp_path / "linear"), data, tmp_path / "p", k=3)
    xs.predict(xs.load_model(tmp_path / "linear"), data, tmp_path / "p", k=3, check=False)


def test_logs_of_another_run(twins: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    store = tmp_path / "m"
    shutil.copytree(twins["linear"][0], store)
    for name in ("ledger.jsonl", "events.jsonl"):
        shutil.copy(twins["linear"][1] / name, store / name)
        assert damage(store) == [f"{store / name} was changed"]
        shutil.copy(twins["linear"][0] / name, store / name)
    data = tmp_path / "d.xmc"
    shutil.copytree(twins["data"][0], data)
    shutil.copy(store / "ledger.jsonl", data)
    assert damage(data) == [f"{data / 'ledger.jsonl'} does not belong there"]


def test_a_warm_start_from_an_exchanged_model_is_refused(twins: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    store = tmp_path / "m"
    shutil.copytree(twins["linear"][0], store)
    file = "units/00000/weights/data/c/0"
    shutil.copy(twins["linear"][1] / file, store / file)
    data = Dataset(twins["data"][0])
    with pytest.raises(StoreError, match=file):
        xs.PPDSparse(memory_limit=LIMIT).fit(data, model=tmp_path / "again", warm_start=xs.load_model(store))


def as_before(store: Path) -> None:
    """As an earlier version wrote it: no checksums of chunks in the descriptions."""
    for file in store.rglob("zarr.json"):
        about = json.loads(file.read_bytes())
        about["attributes"].pop(CRCS, None)
        file.write_text(json.dumps(about))
    for file in [*store.rglob("zarr.json"), store / "zarr.json"]:
        if SEAL in json.loads(file.read_bytes())["attributes"]:
            seal(file.parent)


def test_what_was_written_before_is_opened_and_checked_as_before(
    twins: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    for kind in ("data", "linear", "lowrank", "predictions"):
        shutil.copytree(twins[kind][0], tmp_path / kind)
        as_before(tmp_path / kind)
        assert damage(tmp_path / kind) == []
    data = Dataset(tmp_path / "data")
    run_all(check_jobs(data, True))
    for kind in ("linear", "lowrank"):
        xs.predict(xs.load_model(tmp_path / kind), data, tmp_path / "p", k=3, overwrite=True)
    assert xs.evaluate(tmp_path / "predictions", data, ks=(3,)) == xs.evaluate(twins["predictions"][0], data, ks=(3,))
    file = tmp_path / "linear/units/00000/bias/c/0"
    shutil.copy(twins["linear"][1] / "units/00000/bias/c/0", file)
    xs.predict(xs.load_model(tmp_path / "linear"), data, tmp_path / "p", k=3, overwrite=True)  # nothing tells
    file.write_bytes(b"\x55" + file.read_bytes()[1:])
    with pytest.raises(StoreError, match="checksum"):
        xs.predict(xs.load_model(tmp_path / "linear"), data, tmp_path / "p", k=3, overwrite=True)
