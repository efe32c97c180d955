"""Models whose indices and weights take two bytes on disk: what is read, what is lost, and that all else holds."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from helpers.damage import damage, flip
from helpers.problems import LIMIT, overlapping
from helpers.trainings import kill_when, train
from hypothesis import given, settings
from hypothesis import strategies as st

import xmc_stream as xs
from xmc_stream.errors import InputError, StoreError
from xmc_stream.linear.guide import Guide
from xmc_stream.linear.model import LinearModel
from xmc_stream.linear.weights import HALF_LEAST, HALF_ROUNDS, half_holds, unit_path
from xmc_stream.methods.contract import Step
from xmc_stream.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.ppdsparse.start import path_of
from xmc_stream.store.chunks import described, open_array
from xmc_stream.store.encoding import NARROW_BOUND, ArrayWriter, MatrixWriter, new_matrix
from xmc_stream.store.inventory import seal
from xmc_stream.store.matrix import SparseMatrix, WidenedArray, widened
from xmc_stream.store.model import begin_model, finish_model
from xmc_stream.store.nodes import Group

HALF = {"weight_type": "float16", "prune": 0.0, "memory_limit": LIMIT}
LEAST_NORMAL = 2.0**-14  # of float16: below it weights are rounded by up to 2^-25


def stored_types(model: Path) -> set[tuple[str, str]]:
    """Of indices and of weights on disk, of all units."""
    folders = [*(model / "units").glob("*/weights"), *(model / "guide").glob("weights")]
    return {(open_array(folder / "indices").dtype.name, open_array(folder / "data").dtype.name) for folder in folders}


# ---- arrays


@settings(max_examples=30, deadline=None)
@given(st.data(), st.sampled_from([np.uint16, np.float16]), st.integers(1, 4000), st.sampled_from([256, 1024, 2**20]))
def test_a_narrow_array_reads_as_the_wide_one(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, kind: Any, size: int, chunk: int
) -> None:
    folder = tmp_path_factory.mktemp("narrow")
    values = np.random.default_rng(size).integers(0, 60_000, size).astype(kind)
    writer = ArrayWriter(Group(folder, {}), "a", kind, chunk)
    writer.append(values)
    writer.close()
    np.testing.assert_array_equal(zarr.open_array(folder / "a", mode="r")[:], values)
    array = widened(described(folder / "a"))
    wide = values.astype({np.uint16: np.int32, np.float16: np.float32}[kind])
    assert isinstance(array, WidenedArray)
    assert (array.dtype, array.size) == (wide.dtype, size)
    low = data.draw(st.integers(0, size))
    high = data.draw(st.integers(low, size))
    got = array.read(low, high)
    assert got.dtype == wide.dtype
    np.testing.assert_array_equal(got, wide[low:high])
    assert array.bytes_read == 2 * (high - low)
    counts = np.diff(np.sort(data.draw(st.lists(st.integers(0, size), min_size=2, max_size=9))))
    firsts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    some = slice(None, None, 2)  # ranges with holes between them
    out = np.empty(int(counts[some].sum()), wide.dtype)
    array.read_ranges(firsts[some], counts[some], out)
    wanted = [wide[a : a + n] for a, n in zip(firsts[some], counts[some], strict=True)]
    np.testing.assert_array_equal(out, np.concatenate(wanted))
    for k in range(array.n_chunks):
        array.verify_chunk(k)
    for wrong in ((-1, 0), (0, size + 1), (size, size - 1)):
        with pytest.raises(StoreError, match="damaged"):
            array.read(*wrong)
    with pytest.raises(StoreError, match="damaged"):
        array.read(0, size, np.empty(size - 1, wide.dtype))


@pytest.mark.parametrize(("bound", "kind"), [(NARROW_BOUND, "uint16"), (NARROW_BOUND + 1, "int32")])
def test_indices_take_two_bytes_where_the_last_one_fits(tmp_path: Path, bound: int, kind: str) -> None:
    features = np.array([0, bound - 2, bound - 1], np.int32)
    writer = MatrixWriter(Group(tmp_path / "m", {}), "csc_matrix", (bound, 1), narrow=True)
    writer.append(np.array([3]), features, np.ones(3, np.float32))
    writer.close()
    assert open_array(tmp_path / "m/indices").dtype.name == kind
    block = SparseMatrix(tmp_path / "m").expect((bound, 1), "csc_matrix", np.float32).block(0, 1)
    assert block.indices.dtype == np.int32
    assert block.indices.tolist() == features.tolist()


@pytest.mark.parametrize(
    ("sizes", "version"),
    [
        ({"n_features": NARROW_BOUND, "tiles": []}, 3),
        ({"n_features": NARROW_BOUND + 1, "tiles": []}, 1),
        ({"n_features": NARROW_BOUND + 1, "tiles": [], "units": [0]}, 2),
        ({"n_features": NARROW_BOUND + 1, "tiles": [], "float16_weights": 5}, 3),
        ({"n_features": 10, "rank": 3}, 1),
    ],
)
def test_the_version_says_what_a_reader_must_know(tmp_path: Path, sizes: dict[str, Any], version: int) -> None:
    begin_model(tmp_path / "m.partial")
    finish_model(tmp_path / "m.partial", tmp_path / "m", {"n_labels": 4, "nnz": 0, **sizes})
    assert xs.load_model(tmp_path / "m").attributes["version"] == version


# ---- indices of two bytes


def test_a_model_with_indices_of_four_bytes_opens_and_says_the_same(small: Path, tmp_path: Path) -> None:
    trained = tmp_path / "m"
    xs.PPDSparse(weight_type="float32", memory_limit="2GB").fit(small, model=trained)
    model, test = LinearModel(trained), xs.open_dataset(small.with_name("small-test.xmc"))
    assert stored_types(trained) == {("uint16", "float32")}
    copy = tmp_path / "old"
    shutil.copytree(trained, copy)
    for unit in model.units:
        narrow = model.unit_weights(unit)
        with new_matrix(unit_path(copy, unit) / "weights", "csc_matrix", narrow.shape) as writer:
            block = narrow.block(0, narrow.n_lines)
            writer.append(np.diff(block.indptr), block.indices, block.values)
    seal(copy)
    old = LinearModel(copy)
    assert stored_types(copy) == {("int32", "float32")}
    assert old.digest() == model.digest()
    assert (old.to_scipy() != model.to_scipy()).nnz == 0
    for one, other in zip(old.predict_topk(test, k=5), model.predict_topk(test, k=5), strict=True):
        np.testing.assert_array_equal(one, other)
    assert damage(copy) == damage(trained) == []


# ---- weights of two bytes


def rounded(W: Any) -> Any:
    """Weights as float16 has them, those that it rounds to 0 left out."""
    W = sp.csc_matrix(W, copy=True)
    W.data = W.data.astype(np.float16).astype(np.float32)
    W.eliminate_zeros()
    return W


@pytest.mark.parametrize("guide", [0.0, 1.5])
def test_a_training_with_weights_of_16_bits_rounds_them_and_changes_nothing_else(tmp_path: Path, guide: float) -> None:
    X, Y = overlapping(200, 40, 7)
    whole = xs.PPDSparse(prune=0.0, guide=guide, memory_limit=LIMIT).fit(X, Y).model_
    clf = xs.PPDSparse(guide=guide, **HALF).fit(X, Y, model=tmp_path / "m")
    half = clf.model_
    assert isinstance(half, LinearModel)
    W, wanted = half.to_scipy(), rounded(whole.to_scipy())
    assert W.nnz == wanted.nnz == half.nnz == clf.report_["nnz"]
    assert (wanted != W).nnz == 0
    assert (whole.to_scipy() != W).nnz > 0
    np.testing.assert_array_equal(half.bias(), whole.bias())
    for name in ("objective", "duality_gap", "violation", "rounds"):
        assert half.attributes[name] == whole.attributes[name]
    assert half.attributes["float16_weights"] == half.nnz
    assert "float16_weights" not in whole.attributes
    assert half.attributes["params"]["weight_type"] == "float16"
    assert "weight_type" not in whole.attributes["params"]
    assert half.digest() != whole.digest()
    assert stored_types(tmp_path / "m") == {("uint16", "float16")}
    assert damage(tmp_path / "m") == []
    if guide:
        theirs, mine = Guide.of(LinearModel(whole.path)), Guide.of(half)
        of_theirs, of_mine = (g.weights().block(0, g.n_groups) for g in (theirs, mine))
        np.testing.assert_array_equal(of_mine.indices, of_theirs.indices)
        np.testing.assert_array_equal(of_mine.values, of_theirs.values.astype(np.float16).astype(np.float32))


def test_scores_move_by_no_more_than_rounding_lets_them(tmp_path: Path) -> None:
    X, Y = overlapping(300, 60, 9)
    whole, half = (xs.PPDSparse(**{**HALF, "weight_type": kind}).fit(X, Y).model_ for kind in ("float32", "float16"))
    (labels, scores), (labels_16, scores_16) = (model.predict_topk(X, k=9) for model in (whole, half))
    of_label = np.take_along_axis(scores, np.argsort(labels, axis=1), axis=1)
    of_label_16 = np.take_along_axis(scores_16, np.argsort(labels_16, axis=1), axis=1)
    moved = np.abs(of_label - of_label_16)
    absolute = sp.csr_matrix(abs(X))
    bound = (absolute @ abs(whole.to_scipy())).toarray() * HALF_ROUNDS
    below = absolute @ (np.ones((X.shape[1], 9), np.float32) * 2.0**-25)  # of weights that are smaller than normal
    sums = 1e-6 * (1 + np.abs(of_label))  # float32 sums
    assert (moved <= bound + below + sums).all()
    assert moved.max() > 1e-5
    assert moved.max() > 0.05 * bound.max()  # the bound is not idle


def test_metrics_of_a_model_are_those_of_its_predictions(tmp_path: Path) -> None:
    X, Y = overlapping(300, 60, 9)
    data = xs.convert(X, tmp_path / "d.xmc", labels=Y)
    model = xs.PPDSparse(**HALF).fit(data, model=tmp_path / "m").model_
    xs.predict(model, data, tmp_path / "p", k=5)
    told, all_scores = (xs.evaluate(tmp_path / name, data, ks=(1, 3)) for name in ("p", "m"))
    for k in (1, 3):
        assert told[f"P@{k}"] == all_scores[f"P@{k}"]


@pytest.mark.slow
def test_on_real_data_precision_stays(real: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    train_set, test_set = real("bibtex")
    figures = []
    for kind in ("float32", "float16"):
        model = xs.PPDSparse(weight_type=kind, memory_limit=LIMIT).fit(train_set, model=tmp_path / kind).model_
        xs.predict(model, xs.open_dataset(test_set), tmp_path / f"{kind}.p", k=5)
        figures.append(xs.evaluate(tmp_path / f"{kind}.p", xs.open_dataset(test_set), ks=(1, 3, 5)))
    whole, half = figures
    for k in (1, 3, 5):
        assert abs(whole[f"P@{k}"] - half[f"P@{k}"]) <= 0.05
    sizes = [sum(f.stat().st_size for f in (tmp_path / kind / "units").rglob("*")) for kind in ("float32", "float16")]
    assert sizes[1] < 0.72 * sizes[0]  # 4 bytes a weight instead of 6


@pytest.mark.slow
def test_a_killed_training_ends_with_the_same_bits(small: Path, tmp_path: Path) -> None:
    more = ["--set", "weight_type=float16"]
    train(small, tmp_path / "whole", more=more)
    for name, ready in (("solve", "solve/1/0"), ("finalise", "finalise/0")):
        killed = kill_when(small, tmp_path / name, ready, 0.0, more=more)
        assert killed or name == "finalise"  # which is over soon
        figures = train(small, tmp_path / name, "512MB", 1, more=more)
        assert figures["resumed"]  # also where the model was finished
        assert xs.load_model(tmp_path / name).digest() == xs.load_model(tmp_path / "whole").digest()


@pytest.fixture(scope="module")
def half_model(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("half") / "m"
    xs.PPDSparse(weight_type="float16", memory_limit="2GB").fit(small, model=path)
    return path


@pytest.mark.parametrize("name", ["weights/data", "weights/indices"])
def test_damage_is_found(small: Path, half_model: Path, tmp_path: Path, name: str) -> None:
    copy = tmp_path / "m"
    shutil.copytree(half_model, copy)
    file = copy / "units/00000" / name / "c/0"
    flip(file)
    assert any(str(file) in line for line in damage(copy))
    with pytest.raises(StoreError, match=f"{file} fails its checksum"):
        xs.predict(xs.load_model(copy), xs.open_dataset(small), tmp_path / "p", k=3)
    content = file.read_bytes()
    file.write_bytes(content[:-2])
    with pytest.raises(StoreError, match=str(file)):
        xs.predict(xs.load_model(copy), xs.open_dataset(small), tmp_path / "p", k=3)


def test_a_training_begins_from_such_a_model(small: Path, half_model: Path, tmp_path: Path) -> None:
    xs.PPDSparse(memory_limit="2GB", weight_type="float32").fit(small, model=tmp_path / "m", warm_start=half_model)
    warm = xs.load_model(tmp_path / "m")
    assert stored_types(tmp_path / "m") == {("uint16", "float32")}
    assert warm.attributes["objective"] < 1.1 * xs.load_model(half_model).attributes["objective"]
    again = xs.PPDSparse(memory_limit="2GB", weight_type="float16").fit(small, warm_start=half_model).model_
    assert again.attributes["float16_weights"] == again.nnz
    assert (sp.csc_matrix(again.to_scipy()) != rounded(warm.to_scipy())).nnz == 0


def test_scores_of_such_a_model_are_calibrated(small: Path, half_model: Path, tmp_path: Path) -> None:
    test = xs.open_dataset(small.with_name("small-test.xmc"))
    shutil.copytree(half_model, tmp_path / "m")
    told = xs.calibrate(tmp_path / "m", test)
    assert told["rows"] == test.n_samples
    model = xs.load_model(tmp_path / "m")
    assert model.calibrated == told["applied"]
    assert (model.to_scipy() != xs.load_model(half_model).to_scipy()).nnz == 0
    assert damage(tmp_path / "m") == []


def test_such_a_model_is_exported_and_shown(half_model: Path, tmp_path: Path, commands: Callable[..., Any]) -> None:
    model = xs.load_model(half_model)
    xs.export(half_model, tmp_path / "w.npz")
    W = sp.load_npz(tmp_path / "w.npz")
    assert W.dtype == np.float32
    assert (sp.csc_matrix(W)[: model.n_features] != model.to_scipy()).nnz == 0
    told = commands("info", half_model)
    assert told["params"]["weight_type"] == "float16"
    assert told["float16_weights"] == told["nnz"]


def test_what_float16_cannot_hold_stays_float32(tmp_path: Path) -> None:
    X, Y = overlapping(200, 40, 7)
    X = sp.csr_matrix(X * np.float32(1e9))  # so weights are about 1e-9 and would all be rounded to 0
    whole, half = (
        xs.PPDSparse(**{**HALF, "weight_type": kind}, lam=0.0, guide=1.5, normalize=None)
        .fit(X, Y, model=tmp_path / kind).model_
        for kind in ("float32", "float16")
    )  # fmt: skip
    assert 0 < np.abs(whole.to_scipy().data).max() < HALF_LEAST
    assert half.attributes["float16_weights"] == 0
    assert stored_types(tmp_path / "float16") == {("uint16", "float32")}
    assert (half.to_scipy() != whole.to_scipy()).nnz == 0


@pytest.mark.parametrize(
    ("values", "holds"),
    [
        ([], True), ([0.0], True), ([65504.0, -3.0], True), ([65536.0, 1.0], False), ([1.0, np.inf], False),
        ([2.0**-25, 2.0**-24], False), ([1e-7] * 50, False), ([1.0, 1e-7, 1e-9], True), ([-LEAST_NORMAL] * 3, True),
    ],
)  # fmt: skip
def test_which_weights_float16_holds(values: list[float], holds: bool) -> None:
    weights = np.array(values, np.float32)
    assert half_holds([weights]) == holds
    assert half_holds([weights[:1], weights[1:]]) == holds


@given(st.lists(st.floats(LEAST_NORMAL, 65504.0, width=32), max_size=40))
def test_float16_holds_all_that_is_normal_there(values: list[float]) -> None:
    assert half_holds([np.array(values, np.float32), -np.array(values, np.float32)])


def test_the_least_weight_is_the_least_that_is_not_rounded_to_nothing() -> None:
    assert np.float16(HALF_LEAST) > 0
    assert np.float16(np.nextafter(HALF_LEAST, np.float32(0))) == 0


def test_another_type_is_refused_and_tuning_knows_that_it_concerns_the_finished_model() -> None:
    with pytest.raises(InputError, match="'weight_type' parameter of PPDSparse must be one of float32, float16"):
        xs.PPDSparse(weight_type="float64").fit(*overlapping())
    settings_ = [PPDSparseParameters(C=1.0), PPDSparseParameters(C=2.0, weight_type="float16")]
    assert path_of(settings_) == [Step(0), Step(1, 0)]
