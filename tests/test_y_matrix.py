"""Every kind of y that scikit-learn knows, in every container and type of labels: read as scikit-learn does, or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import scipy.sparse as sp
from helpers.problems import LIMIT
from sklearn.multiclass import OneVsRestClassifier
from sklearn.preprocessing import LabelBinarizer, MultiLabelBinarizer
from sklearn.tree import DecisionTreeClassifier
from sklearn.utils.multiclass import type_of_target

import xmc_stream as xs
from xmc_stream import estimators
from xmc_stream.errors import InputError
from xmc_stream.estimators.given import encoded

# by type_of_target's name and the type of labels; "lists" are those of MultiLabelBinarizer, which it does not know
Y: dict[tuple[str, str], list[Any]] = {
    ("binary", "int"): [0, 1, 1, 0, 1],
    ("binary", "signed int"): [-1, 1, 1, -1, 1],
    ("binary", "float"): [0.0, 1.0, 1.0, 0.0, 1.0],
    ("binary", "bool"): [False, True, True, False, True],
    ("binary", "str"): ["no", "yes", "yes", "no", "yes"],
    ("multiclass", "int"): [7, 3, 3, 5, 7],
    ("multiclass", "float"): [7.0, 3.0, 3.0, 5.0, 7.0],
    ("multiclass", "str"): ["c", "a", "a", "b", "nan"],
    ("multilabel-indicator", "int"): [[0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0], [0, 1, 1]],
    ("multilabel-indicator", "float"): [[0.0, 1.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, 1.0]],
    ("multilabel-indicator", "bool"): [[False, True], [True, False], [False, False], [True, True], [False, True]],
    ("multilabel-indicator", "signed int"): [[-1, 1], [1, -1], [-1, -1], [1, 1], [-1, 1]],
    ("multilabel-indicator", "signed float"): [[-1.0, 1.0], [1.0, -1.0], [-1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]],
    ("lists", "int"): [[4, 2], [], [9], [2, 9, 4], [4, 4]],
    ("lists", "float"): [[4.0, 2.0], [], [9.0], [2.0, 9.0, 4.0], [4.0, 4.0]],
    ("lists", "bool"): [[True], [], [False], [True, False], [True, True]],
    ("lists", "str"): [["d", "b"], [], ["x"], ["b", "x", "d"], ["d", "d"]],
}
# what is no y of a classifier, or would be read wrongly
REFUSED: dict[str, list[Any]] = {
    "continuous": [0.5, 1.0, 2.25, 0.5, 1.0],
    "continuous-multioutput": [[0.5, 1.0], [2.25, 0.5], [1.0, 1.5], [0.5, 1.0], [1.0, 0.5]],
    "multiclass-multioutput": [["a", "b"], ["b", "c"], ["c", "a"], ["a", "a"], ["b", "b"]],
    "NaN": [1.0, float("nan"), 2.0, 1.0, 2.0],
    "infinity": [1.0, float("inf"), 2.0, 1.0, 2.0],
    "NaN of an indicator": [[0.0, 1.0], [1.0, float("nan")], [0.0, 0.0], [1.0, 1.0], [0.0, 1.0]],
    "None among numbers": [1, None, 2, 1, 2],
    "None among strings": ["a", None, "b", "a", "b"],
    "None among flags": [True, None, False, True, False],
    "None of an indicator": [[0, 1], [1, None], [0, 0], [1, 1], [0, 1]],
    "None for a list": [["a"], None, ["b"], ["a"], ["b"]],
    "None in a list": [["a"], [None], ["b"], ["a", "b"], []],
    "NaN in a list": [[1.0], [float("nan")], [2.0], [1.0, 2.0], []],
}


def nullable(values: list[Any]) -> str:
    """The pandas type of some values that may be missing."""
    flat = [v for row in values for v in (row if isinstance(row, list) else [row]) if v is not None]
    kinds = {bool: "boolean", int: "Int64", float: "Float64", str: "string"}
    return kinds[type(flat[0])]


def of_arrow(values: list[Any]) -> pd.ArrowDtype:
    """The type of Arrow."""
    return pd.ArrowDtype(pa.array([v for row in values for v in (row if isinstance(row, list) else [row])]).type)


ROWS: dict[str, Callable[[list[Any]], Any]] = {  # one class a row
    "list": list,
    "tuple": tuple,
    "list of NumPy's": lambda v: list(np.array(v)),
    "array": np.array,
    "array of objects": lambda v: np.array(v, object),
    "column": lambda v: np.array(v, object if None in v else None)[:, None],
    "series": pd.Series,
    "series of objects": lambda v: pd.Series(v, dtype=object),
    "nullable series": lambda v: pd.Series(v, dtype=nullable(v)),
    "arrow series": lambda v: pd.Series(v, dtype=of_arrow(v)),
    "categories": lambda v: pd.Series(pd.Categorical(v)),
    "frame": lambda v: pd.DataFrame({"y": v}),
    "nullable frame": lambda v: pd.DataFrame({"y": pd.Series(v, dtype=nullable(v))}),
    "polars": pl.Series,
    "polars frame": lambda v: pl.DataFrame({"y": v}),
    "arrow": pa.array,
}
MATRICES: dict[str, Callable[[list[Any]], Any]] = {  # (n x K)
    "list": list,
    "tuples": lambda v: tuple(map(tuple, v)),
    "list of arrays": lambda v: [np.array(row) for row in v],
    "array": np.array,
    "array by columns": lambda v: np.asfortranarray(np.array(v)),
    "array of objects": lambda v: np.array(v, object),
    "frame": pd.DataFrame,
    "nullable frame": lambda v: pd.DataFrame(v, dtype=nullable(v)),
    "arrow frame": lambda v: pd.DataFrame(v, dtype=of_arrow(v)),
    "sparse frame": lambda v: pd.DataFrame(v).astype(pd.SparseDtype(np.array(v).dtype)),
    "polars frame": lambda v: pl.DataFrame(v, orient="row"),
    "polars series": lambda v: pl.Series(v, dtype=pl.Array(pl.Series(v[0]).dtype, len(v[0]))),
}
SPARSE: dict[str, Callable[[list[Any]], Any]] = {
    **{
        form: (lambda v, form=form: sp.csr_array(np.array(v)).asformat(form))
        for form in ("csr", "csc", "lil", "dok", "bsr")
    },
    "with stored zeros": lambda v: sp.csr_matrix(
        (np.ravel(v), np.tile(np.arange(len(v[0])), len(v)), np.arange(len(v) + 1) * len(v[0])), shape=np.shape(v)
    ),
    "with pairs twice": lambda v: sp.coo_matrix(
        (np.ones(2 * np.count_nonzero(v), np.array(v).dtype), np.tile(np.nonzero(v), 2)), shape=np.shape(v)
    ),
}
LISTS: dict[str, Callable[[list[Any]], Any]] = {
    "lists": list,
    "tuples": lambda v: tuple(map(tuple, v)),
    "sets": lambda v: list(map(set, v)),
    "frozensets": lambda v: list(map(frozenset, v)),
    "arrays": lambda v: list(map(np.array, v)),
    "array of lists": lambda v: np.array([*v, None], object)[:-1],
    "series": pd.Series,
    "arrow series": lambda v: pd.Series(v, dtype=pd.ArrowDtype(pa.array(v).type)),
    "frame": lambda v: pd.DataFrame({"y": v}),
    "polars": pl.Series,
    "polars frame": lambda v: pl.DataFrame({"y": v}),
    "arrow": pa.array,
}


def containers(kind: str, labels: str) -> dict[str, Callable[[list[Any]], Any]]:
    if kind == "multilabel-indicator":
        return MATRICES if "signed" in labels else {**MATRICES, **SPARSE}
    return LISTS if kind == "lists" else ROWS


def of_sklearn(kind: str, values: list[Any]) -> tuple[Any, Any]:
    """Classes and the target (n x K) of zeros and ones, as scikit-learn's tools make them."""
    if kind == "lists":
        binarizer = MultiLabelBinarizer()
        ones = binarizer.fit_transform(values)
        return binarizer.classes_, ones
    y = np.array(values)
    assert type_of_target(y) == kind
    tree = OneVsRestClassifier(DecisionTreeClassifier(random_state=0)).fit(np.eye(len(y)), y)
    learned = tree.predict(np.eye(len(y)))  # by heart
    if kind == "multilabel-indicator":
        return tree.classes_, learned
    assert np.array_equal(learned, y)
    ones = LabelBinarizer().fit_transform(y)
    return tree.classes_, np.hstack([1 - ones, ones]) if kind == "binary" else ones


def read(y: Any) -> Any:
    """What an estimator makes of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "A column-vector y was passed")
        return encoded(y)


CASES = [(kind, labels, form) for kind, labels in Y for form in containers(kind, labels)]


@pytest.mark.parametrize(("kind", "labels", "form"), CASES)
def test_y_is_read_as_scikit_learn_reads_it(kind: str, labels: str, form: str) -> None:
    values = Y[kind, labels]
    classes, ones = of_sklearn(kind, values)
    y = containers(kind, labels)[form](values)
    matrix, target = read(y)
    assert np.array_equal(target.classes, classes)
    assert np.array_equal(matrix.toarray(), ones)
    assert matrix.has_canonical_format
    for other in containers(kind, labels).values():  # score reads the same of the same y, however it is written
        assert np.array_equal(target.matrix(other(values)).toarray(), ones)
    back = target.given(matrix.indices.astype(np.int64), np.diff(matrix.indptr))
    if kind == "lists":
        assert [set(row) for row in back] == [set(row) for row in values]
    else:
        assert np.array_equal(back.toarray() if sp.issparse(back) else back, values)
        assert sp.issparse(back) == sp.issparse(y)


def written(kind: str, labels: str) -> Any:
    """Some y of the kind; nested lists could be lists of labels too."""
    return np.array(Y[kind, labels]) if kind == "multilabel-indicator" else Y[kind, labels]


def family(kind: str, labels: str) -> tuple[str, bool]:
    """What can be scored against each other."""
    return "classes" if kind in ("binary", "multiclass") else kind, labels == "str"


@pytest.mark.parametrize(("kind", "labels"), Y)
def test_score_refuses_a_y_of_another_kind_than_fits(kind: str, labels: str) -> None:
    _, target = read(written(kind, labels))
    for other in Y:
        if family(*other) != family(kind, labels):
            with pytest.raises(InputError, match=r"\bfit\b"):
                target.matrix(written(*other))
    if kind == "multilabel-indicator":
        ones = np.array(Y[kind, labels]) > 0
        assert np.array_equal(target.matrix(sp.csr_matrix(ones)).toarray(), ones)
        with pytest.raises(InputError, match=r"\bfit\b"):
            target.matrix([{1, 0}, {0, 1}])
    else:
        with pytest.raises(InputError, match=r"\bfit\b"):
            target.matrix(sp.csr_matrix(written("multilabel-indicator", "int")))


def test_lists_of_zeros_and_ones_are_what_fit_took_them_for() -> None:
    y = [[0, 1], [1, 0], [1, 1]]
    lists, indicator = read([[0, 1], [1], [0]])[1], read(y)[1]
    assert lists.matrix(y).toarray().tolist() == [[1, 1], [1, 1], [0, 1]]
    assert indicator.matrix(y).toarray().tolist() == y


FORMS = {"continuous": ROWS, "NaN": ROWS, "infinity": ROWS, "None among numbers": ROWS, "None among strings": ROWS}
FORMS |= {"None among flags": ROWS, "None for a list": LISTS, "None in a list": LISTS, "NaN in a list": LISTS}


@pytest.mark.parametrize(("what", "form"), [(what, form) for what in REFUSED for form in FORMS.get(what, MATRICES)])
def test_what_is_no_y_is_refused_in_one_line(what: str, form: str) -> None:
    values = REFUSED[what]
    if what == "multiclass-multioutput" and form in ("list", "tuples", "list of arrays", "polars series"):
        pytest.skip("lists of labels")
    try:
        y = FORMS.get(what, MATRICES)[form](values)
    except (TypeError, ValueError, pa.ArrowException):
        pytest.skip("there is no such container")
    if form == "sparse frame" and what == "multiclass-multioutput":
        pytest.skip("there is no such container")
    with pytest.raises(InputError) as caught:
        read(y)
    assert "\n" not in str(caught.value)
    known = read([["a", "b"], ["b"]] if FORMS.get(what) is LISTS else np.array([1, 2, 3]))[1]
    with pytest.raises(InputError):
        known.matrix(y)


@pytest.mark.parametrize(
    "y",
    [
        {("a",), ("b",)}, frozenset({1, 2}), {"a": 1}.keys(), {"a": 1}, "abc", 5, None, (n for n in (1, 2)), [], [b"a", b"b"],
        ["a", 1], ["a", float("nan")], [["a"], "bc"], [["a", 1], ["b"]], [[["a"]], [["b"]]], [[{}], [1]], [2**70, 1],
        np.array([1j, 2]), np.zeros((2, 2, 2)), np.array([b"a", b"b"]), np.zeros((2, 0)), np.array([[1, 2], [2, 1]]),
        np.array([[-1, 0], [0, -1]]), np.array([[-2, 2], [2, -2]]), np.ma.masked_array([1, 2, 3], [0, 1, 0]),
        sp.csr_matrix([[1, -1], [-1, 1]]), sp.csr_matrix([[0], [1], [2]]), sp.csr_matrix([[1j, 0]]),
        sp.csr_matrix([[np.nan, 0]]), sp.coo_array(np.array([1, 0, 1])), pd.Series(pd.to_datetime(["2020-01-01", None])),
        pd.Series([1, pd.NA], dtype="Int64"), pd.DataFrame({"a": [1, 0], "b": [pd.NA, 1]}, dtype="Int64"), [pd.NA, "a"],
        pl.Series([{"a": 1, "b": 2}, {"a": 2, "b": 1}]),
    ],
    ids=lambda y: type(y).__name__,  # what stands in a set has another order in each process
)  # fmt: skip
def test_what_has_no_order_or_no_labels_is_refused_in_one_line(y: Any) -> None:
    with pytest.raises(InputError) as caught:
        read(y)
    assert "\n" not in str(caught.value)


def test_no_label_that_is_known_is_none_of_another_kind() -> None:
    """Unknown labels of the same kind are misses."""
    classes, lists = read(["a", "b"])[1], read([[1], [2, 3]])[1]
    assert classes.matrix(["c", "a", "0"]).toarray().tolist() == [[0, 0], [1, 0], [0, 0]]
    assert lists.matrix([[4], [3, 3, 0], []]).toarray().tolist() == [[0, 0, 0], [0, 0, 1], [0, 0, 0]]


SEVERAL = [name for name in estimators.__all__ if name != "Estimator"]


@pytest.mark.parametrize("name", SEVERAL)
def test_every_estimator_learns_the_same_of_the_same_y(name: str) -> None:
    rng = np.random.default_rng(0)
    ones = np.eye(3, dtype=int)[rng.integers(3, size=60)]
    X = ones + 0.1 * rng.random(ones.shape)
    options = {"LEML": {"rank": 3}, "CPLST": {"rank": 3}, "MEMOIR": {"batch": 10}}
    options |= {"PDSparse": {"max_passes": 3, "held_out": 0.0}}

    def fitted(y: Any) -> Any:
        return getattr(xs, name)(memory_limit=LIMIT, **options.get(name, {})).fit(X, y)

    known = fitted(ones)
    for y in ((2 * ones - 1).tolist(), pd.DataFrame(ones > 0, dtype="boolean"), (ones * 1.0).tolist()):
        found = fitted(y)
        assert found.model_.digest() == known.model_.digest()
        assert found.score(X, y) == known.score(X, ones) == 1.0
        assert np.array_equal(found.predict(X), np.where(known.predict(X) > 0, 1, np.array(y).min()))
    lists = [[f"label {row.argmax()}"] for row in ones]
    named = fitted(lists)
    assert named.score(X, [2 * row for row in lists]) == 1.0
    for wrong in ([row[0] for row in lists], ones, [[1]] * 60):
        with pytest.raises(InputError, match="fit"):
            named.score(X, wrong)
    with pytest.raises(InputError, match="needs y"):
        named.score(X)
