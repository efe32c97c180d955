"""Estimators as scikit-learn's tools treat them: parameters read, set and copied."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest
from sklearn.base import clone
from sklearn.model_selection import ParameterGrid
from test_pdsparse import LIMIT, problem

import xmc_stream as xs
from xmc_stream.errors import InputError

BOTH = pytest.mark.parametrize("kind", [xs.PPDSparse, xs.PDSparse])


@BOTH
def test_parameters_are_those_of_the_constructor_with_the_solvers_defaults(kind: Any) -> None:
    given = kind().get_params()
    assert list(given) == list(inspect.signature(kind).parameters)
    defaults = {field.name: field.default for field in fields(kind._PARAMETERS)}
    assert {name: given[name] for name in defaults} == defaults
    assert set(given) - set(defaults) == {"seed", "memory_limit", "threads", "scheduler", "progress"}


@BOTH
def test_parameters_are_kept_as_given_until_fit_checks_them(kind: Any) -> None:
    clf = kind(lam=-1, C="much")
    assert (clf.get_params()["lam"], clf.get_params()["C"]) == (-1, "much")
    assert clf.set_params(lam=0.5, seed=3) is clf
    assert (clf.lam, clf.seed, clf.C) == (0.5, 3, "much")
    with pytest.raises(InputError, match=f"'C' parameter of {kind.__name__}"):
        clf.fit(*problem())
    with pytest.raises(InputError, match=f"{kind.__name__} has no parameter 'lamda': it has lam, "):
        clf.set_params(lamda=1)


@BOTH
def test_a_clone_has_the_parameters_and_nothing_learned(kind: Any) -> None:
    clf = kind(lam=0.05, C=2.0, seed=5, memory_limit=LIMIT, threads=1)
    before = clf.get_params()
    clf.fit(*problem())
    assert clf.get_params() == before
    copy = clone(clf)
    assert copy.get_params() == before
    assert not hasattr(copy, "model_")
    with pytest.raises(InputError, match=f"this {kind.__name__} is not fitted yet"):
        copy.predict_topk(problem()[0])
    assert copy.fit(*problem()).model_.digest() == clf.model_.digest()
    assert copy.set_params(lam=0.5).fit(*problem()).model_.digest() != clf.model_.digest()


@pytest.mark.parametrize("lam", [(0.05, 1.0), [0.05, 1.0]])
def test_several_lam_survive_a_clone_and_are_one_parameter_of_a_grid(lam: Any) -> None:
    clf = xs.PDSparse(lam=lam, max_passes=3, memory_limit=LIMIT)
    copy = clone(clf)
    assert copy.lam == lam
    assert type(copy.lam) is type(lam)
    assert copy.parameters() == clf.parameters()
    fitted = copy.fit(*problem(n=200))
    assert copy.lam == lam
    assert {done["lam"] for done in fitted.report_["history"]} == set(lam)
    assert fitted.report_["lam"] in lam
    grid = [clone(clf).set_params(**values) for values in ParameterGrid({"lam": [lam, 0.1], "C": [1.0, 2.0]})]
    assert [(one.parameters().lams, one.C) for one in grid] == [
        (lams, C) for C in (1.0, 2.0) for lams in ((0.05, 1.0), (0.1,))
    ]
