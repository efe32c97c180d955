"""NumPy's numbers, flags and texts are taken as Python's: all parameters of all methods, all arguments of all functions.

And what a seed may be: refused in one line else, by everything that takes one, before anything is written.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.methods import METHODS

import xmc_stream as xs
from xmc_stream import estimators
from xmc_stream.arguments import MOST_INT
from xmc_stream.cli import main
from xmc_stream.convert.options import TextOptions
from xmc_stream.errors import InputError
from xmc_stream.methods import registry
from xmc_stream.methods.parameters import Choice, Flag, Number, Whole

LIMIT = 4 * 10**9
CLASSES = [name for name in estimators.__all__ if name != "Estimator"]
FAST = {
    "PDSparse": {"max_passes": 2, "held_out": 0.0}, "LEML": {"rank": 2}, "CPLST": {"rank": 2}, "MEMOIR": {"batch": 10},
}  # fmt: skip


def scalars(value: Any) -> list[Any]:
    """A number, flag or text as NumPy has it."""
    if isinstance(value, bool):
        return [np.bool_(value), np.array(value)]
    if isinstance(value, int):
        return [np.int64(value), np.uint64(value), *([np.int8(value)] if value < 128 else []), np.array(value)]
    if isinstance(value, float):
        exact = np.float32(value).item() == value
        return [np.float64(value), *([np.float32(value)] if exact else []), np.array(value)]
    return [np.str_(value), np.array(value)]


def numpy_of(value: Any) -> Any:
    """The same, numbers as arrays without dimensions, and what holds others."""
    if isinstance(value, tuple | list):
        return type(value)(map(numpy_of, value))
    if isinstance(value, dict):
        return {name: numpy_of(one) for name, one in value.items()}
    return scalars(value)[0 if isinstance(value, str) else -1] if isinstance(value, bool | int | float | str) else value


PARAMETERS = [(solver, name) for solver in METHODS for name in registry.declared(solver).rules()]


@pytest.mark.parametrize(("solver", "name"), PARAMETERS)
def test_every_parameter_of_every_method_takes_numpys_scalars(solver: str, name: str) -> None:
    rule = registry.declared(solver).rules()[name]
    default = registry.declared(solver).defaults()[name]
    if isinstance(rule, Number):
        values: list[Any] = [0.5 if rule.least <= 0.5 <= rule.most else rule.least + 1.0]
        values += [2.0] if rule.most > 2.0 else []
    elif isinstance(rule, Whole):
        values = [rule.least, rule.least + 64]
    elif isinstance(rule, Choice):
        values = list(rule.options)
    else:
        assert isinstance(rule, Flag)
        values = [True, False]
    for value in [*values, *([] if default is None else [default])]:
        try:
            wanted = registry.parameters(solver, {name: value})
        except InputError:  # it does not go with the others' defaults
            continue
        for given in scalars(value) if not isinstance(value, tuple) else [np.array(value)]:
            found = registry.parameters(solver, {name: given})
            assert found == wanted
            assert type(getattr(found, name)) is type(getattr(wanted, name))
            assert json.dumps(found.to_dict()) == json.dumps(wanted.to_dict())
    if isinstance(rule, Number) and rule.several:
        several = registry.parameters(solver, {name: np.array([2.0, 0.5])})
        assert getattr(several, name) == (2.0, 0.5)


def data() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    y = rng.integers(3, size=240)
    X = sp.csr_matrix((np.eye(3)[y] + 0.5 * rng.random((240, 3))).astype(np.float32))
    return X, sp.csr_matrix(np.eye(3, dtype=np.float32)[y])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dataset of 240 rows, a model of it, and files."""
    folder = tmp_path_factory.mktemp("made")
    X, Y = data()
    xs.convert(X, folder / "d.xmc", labels=Y, normalize="l2")
    xs.PPDSparse(memory_limit=LIMIT).fit(folder / "d.xmc", model=folder / "m.model")
    xs.convert(sp.csr_matrix(np.ones((100, 3))), folder / "raw.xmc", labels=Y[:100])
    (folder / "text.csv").write_text("text,labels\n" + "some blue words,a\nother green words,b\n" * 4)
    (folder / "ids.txt").write_text("0\n2\n")
    return folder


@pytest.fixture
def stores(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.parametrize("name", CLASSES)
def test_every_estimator_trains_the_same_by_numpys_scalars(name: str, tmp_path: Path) -> None:
    X, Y = data()
    estimator = getattr(xs, name)
    given = {**FAST.get(name, {}), "seed": 1, "memory_limit": LIMIT, "threads": 2, "progress": False}
    found = estimator(**{**estimator().get_params(), **given})
    found.set_params(**{key: numpy_of(value) for key, value in found.get_params().items()})
    flags = {"overwrite": np.bool_(True), "force": np.bool_(False), "check": np.bool_(True)}
    found.fit(X, Y, model=tmp_path / "a.model", calibrate=np.float64(0.5), **flags)
    assert found.report_["seed"] == 1
    assert estimator(**given).fit(X, Y, calibrate=0.5).model_.digest() == found.model_.digest()
    for k in scalars(2):
        assert found.predict_topk(X, k)[0].tolist() == found.predict_topk(X, 2)[0].tolist()
    assert {path.name for path in tmp_path.iterdir()} == {"a.model"}
    xs.convert(X, tmp_path / "d.xmc", labels=Y)
    assert json.dumps(found.plan(tmp_path / "d.xmc"))


Call = tuple[Callable[..., Any], dict[str, Any]]
RUN = {"memory_limit": LIMIT, "threads": 2, "progress": False}
KEPT = {"memory_limit": LIMIT, "overwrite": True, "progress": False}
TEXT = {
    "min_df": 2, "max_df": 0.9, "max_features": 3, "ngrams": (1, 2), "lowercase": True, "sublinear_tf": False, "idf": True,
    "label_ids": False, "label_field": "labels", "text_fields": ("text",), "analyzer": "word",
}  # fmt: skip
# arguments of a number or flag, of all public functions and methods
CALLS: dict[str, list[dict[str, Any]]] = {
    "append": [{"data": "d.xmc", "new": "d.xmc", "out": "o.xmc", "columns": True, "overwrite": True, **RUN}],
    "calibrate": [{"model": "m.model", "data": "raw.xmc", "check": True, **RUN}],
    "convert": [
        {
            "source": data()[0], "labels": data()[1], "target": "o.xmc", "columns": True, "n_features": 5, "n_labels": 4,
            "sum_duplicates": True, "overwrite": True, "normalize": "l2", **RUN,
        },
        {"source": "text.csv", "target": "t.xmc", "text": TEXT, "header": True, "skip": True, "unlabelled": False},
        {
            "source": "text.csv", "target": "t.xmc", "overwrite": True,
            "text": {**TEXT, "hash_features": 4, "min_df": 1, "max_df": 1.0, "max_features": None},
            "new_labels": False, "drop_unseen": False, "base": None,
        },
    ],
    "copy": [{"source": "d.xmc", "target": "o.xmc", "overwrite": False, "progress": False}],
    "evaluate": [
        {
            "predictions": "m.model", "data": "d.xmc", "train": "d.xmc", "ks": (1, 3), "propensity": (0.55, 1.5),
            "threshold": 0.5, "check": True, **RUN,
        },
    ],
    "export": [{"data": "raw.xmc", "out": "o.txt", "base": 1, "check": True, "format": "libsvm", **KEPT}],
    "load_model": [{"path": "m.model"}],
    "open_dataset": [{"path": "d.xmc"}],
    "predict": [{"model": "m.model", "data": "d.xmc", "out": "p.zarr", "k": 2, "overwrite": True, "check": True, **RUN}],
    "select_features": [{"data": "d.xmc", "out": "o.xmc", "features": "ids.txt", "check": True, **KEPT}],
    "split": [{"data": "d.xmc", "train": "a.xmc", "valid": "b.xmc", "fraction": 0.25, "seed": 3, "check": True, **KEPT}],
    "tune": [
        {
            "data": "d.xmc", "grid": {"lam": [0.01, 0.5]}, "fixed": {"C": 2.0, "max_rounds": 4}, "held_out": 0.5, "seed": 3,
            "out": "tuned.json", "model": "best.model", "overwrite": True, "force": False, "check": True, **RUN,
        },
    ],
    "uncalibrate": [{"model": "m.model"}],
    "verify": [{"path": "d.xmc", **RUN}],
}  # fmt: skip


def row_sparse() -> xs.Model:
    """A model of selected features."""
    model: xs.Model = xs.GroupLasso(memory_limit=LIMIT).fit("d.xmc", model="g.model").model_
    return model


METHODS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "Model.predict_topk": (lambda: xs.load_model("m.model"), {"data": data()[0], "k": 2, **RUN}),
    "Model.compact": (row_sparse, {"path": "o.model", "overwrite": True, "check": True, "memory_limit": LIMIT}),
    "Model.label_counts": (lambda: xs.load_model("m.model"), {"first": 1, "last": 3}),
    "Dataset.label_counts": (lambda: xs.open_dataset("d.xmc"), {"first": 1, "last": 3}),
    "Dataset.row_norms": (lambda: xs.open_dataset("d.xmc"), {"start": 100, "stop": 120}),
    "Dataset.positives_of_ranges": (lambda: xs.open_dataset("d.xmc"), {"n": 3}),
}
_VARY = ("seconds", "peak_rss", "ms_per_sample", "memory_limit", "bytes_on_disk", "model_report", "model_bytes")


def compared(result: Any) -> Any:
    """What must be the same of two results."""
    if isinstance(result, dict):
        return {key: compared(value) for key, value in result.items() if key not in _VARY}
    if isinstance(result, xs.Dataset):
        return result.fingerprint, result.attributes.get("normalize")
    if isinstance(result, xs.Model):
        return result.digest()
    if isinstance(result, tuple | list):
        return [compared(one) for one in result]
    return result.tolist() if isinstance(result, np.ndarray) else result


def of_numbers(function: Any) -> set[str]:
    """The arguments that are numbers, flags, or either, by their annotations."""
    hints = {name: str(parameter.annotation) for name, parameter in inspect.signature(function).parameters.items()}
    return {name for name, hint in hints.items() if re.search(r"\b(int|float|bool|Literal\[0)\b", hint)}


def public() -> Iterator[tuple[str, Any]]:
    """Functions that users call, whose arguments are named."""
    for name in xs.__all__:
        found = getattr(xs, name)
        if inspect.isfunction(found):
            yield name, found


@pytest.mark.parametrize("name", [name for name, _ in public()])
def test_every_function_takes_numpys_scalars(name: str, stores: Path) -> None:
    assert of_numbers(getattr(xs, name)) <= {argument for call in CALLS[name] for argument in call}
    for call in CALLS[name]:
        results = []
        for given in (call, {key: numpy_of(value) for key, value in call.items()}):
            given = {key: TextOptions(**value) if key == "text" else value for key, value in given.items()}
            result = getattr(xs, name)(**given)
            results.append(compared(result))
            if isinstance(result, dict):
                json.dumps(result)
            for place in ("t.xmc", "o.xmc") if not given.get("overwrite") else ():
                shutil.rmtree(stores / place, ignore_errors=True)
        assert results[0] == results[1]
    assert not [path for path in stores.rglob("*") if ".partial" in path.name or path.name.startswith(".xmc_stream")]


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_stores_take_numpys_scalars(name: str, stores: Path) -> None:
    owner, call = METHODS[name]
    function = getattr(owner(), name.split(".")[1])
    assert of_numbers(function) <= set(call)
    wanted = compared(function(**call))
    for i in range(2):
        assert (
            compared(function(**{key: scalars(v)[-i] if isinstance(v, int) else v for key, v in call.items()}))
            == wanted
        )


def test_an_index_takes_numpys_scalars() -> None:
    X = np.eye(3, 4, dtype=np.float32)
    answers = []
    for scalar in (int, np.int64, np.int16, np.array):
        index = xs.InnerProductIndex(
            scalar(3), scalar(4), threads=scalar(1), seed=scalar(2), memory_limit=np.int64(LIMIT)
        )
        index.add(np.arange(3), sp.csr_matrix(X))
        answers.append(index.query(sp.csr_matrix(X), step=scalar(1))[0].tolist())
    assert answers == 4 * [[0, 1, 2]]


BAD_SEEDS = [
    -1,
    2**63,
    2**64,
    10**30,
    1.0,
    True,
    "1",
    None,
    np.float64(2.0),
    np.bool_(True),
    np.int64(-1),
    np.uint64(2**63),
]


@pytest.mark.parametrize("seed", BAD_SEEDS, ids=repr)
def test_what_is_no_seed_is_refused_before_anything_is_written(seed: Any, stores: Path) -> None:
    X, Y = data()
    calls: list[Callable[[], Any]] = [
        lambda: xs.split("d.xmc", "a.xmc", "b.xmc", seed=seed),
        lambda: xs.tune("d.xmc", grid={"lam": [0.01, 0.1]}, held_out=0.5, seed=seed, out="tuned.json", model="t.model"),
        lambda: xs.InnerProductIndex(3, 4, seed=seed),
    ]
    for name in CLASSES:
        clf = getattr(xs, name)(**FAST.get(name, {}), seed=seed)
        calls += [
            lambda clf=clf: clf.fit(X, Y, model="s.model"),  # type: ignore[misc]
            lambda clf=clf: clf.fit("d.xmc", model="s.model", calibrate=0.5),  # type: ignore[misc]
            lambda clf=clf: clf.plan("d.xmc"),  # type: ignore[misc]
        ]
    before = {path.name for path in stores.iterdir()}
    for call in calls:
        with pytest.raises(InputError, match="seed") as caught:
            call()
        assert "\n" not in str(caught.value)
    assert {path.name for path in stores.iterdir()} == before


def test_the_largest_seed_is_taken_by_every_method(tmp_path: Path) -> None:
    X, Y = data()
    for name in CLASSES:
        clf = getattr(xs, name)(**FAST.get(name, {}), seed=np.uint64(MOST_INT), memory_limit=LIMIT).fit(X, Y)
        assert clf.report_["seed"] == clf.model_.attributes["seed"] == MOST_INT


ARGUMENTS = {
    "train": ["d.xmc", "s.model"], "split": ["d.xmc", "a.xmc", "b.xmc"], "tune": ["d.xmc", "tuned.json", "--grid", "lam=1,2"],
}  # fmt: skip


@pytest.mark.parametrize(
    "command", [name for name, one in main.commands.items() if any("--seed" in option.opts for option in one.params)]
)
def test_commands_refuse_what_is_no_seed(command: str, several: Callable[..., Any], tmp_path: Path) -> None:
    X, Y = data()
    xs.convert(X, tmp_path / "d.xmc", labels=Y)
    given = [tmp_path / word if "." in word else word for word in ARGUMENTS[command]]
    for words in ([command], ["plan", command]) if command == "train" else ([command],):
        seeds = ["-1", str(2**63), str(2**64), "1.0", "much"]
        for said in several(*([*words, *given, "--seed", seed] for seed in seeds), fails=True):
            assert "--seed" in said
    assert {path.name for path in tmp_path.iterdir()} == {"d.xmc"}


@pytest.mark.parametrize("several", [(1, 2), [1, 2], [np.int64(1), np.int64(2)], np.array([1, 2])])
def test_options_of_text_take_several_numbers_in_any_way(several: Any) -> None:
    ngrams = TextOptions(ngrams=several).ngrams
    assert (ngrams, json.dumps(ngrams)) == ((1, 2), "[1, 2]")
