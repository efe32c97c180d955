"""Estimators as scikit-learn's tools treat them: parameters read, set and copied; pickled, and loaded again."""

from __future__ import annotations

import gc
import inspect
import pickle
import shutil
import tempfile
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
from helpers.problems import LIMIT, overlapping
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import ParameterGrid

import xmc_stream as xs
from xmc_stream.errors import InputError, StoreError

BOTH = pytest.mark.parametrize("kind", [xs.PPDSparse, xs.PDSparse])


@BOTH
def test_parameters_are_those_of_the_constructor_with_the_solvers_defaults(kind: Any) -> None:
    given = kind().get_params()
    assert sorted(given) == sorted(inspect.signature(kind).parameters)
    defaults = {field.name: field.default for field in fields(kind._PARAMETERS)}
    assert {name: given[name] for name in defaults} == defaults
    assert set(given) - set(defaults) == {"normalize", "seed", "memory_limit", "threads", "scheduler", "progress"}


@BOTH
def test_parameters_are_kept_as_given_until_fit_checks_them(kind: Any) -> None:
    clf = kind(lam=-1, C="much")
    assert (clf.get_params()["lam"], clf.get_params()["C"]) == (-1, "much")
    assert clf.set_params(lam=0.5, seed=3) is clf
    assert (clf.lam, clf.seed, clf.C) == (0.5, 3, "much")
    with pytest.raises(InputError, match=f"'C' parameter of {kind.__name__}"):
        clf.fit(*overlapping())
    with pytest.raises(ValueError, match="Invalid parameter 'lamda'"):
        clf.set_params(lamda=1)


@BOTH
def test_a_clone_has_the_parameters_and_nothing_learned(kind: Any) -> None:
    clf = kind(lam=0.05, C=2.0, seed=5, memory_limit=LIMIT, threads=1)
    before = clf.get_params()
    clf.fit(*overlapping())
    assert clf.get_params() == before
    copy = clone(clf)
    assert copy.get_params() == before
    assert not hasattr(copy, "model_")
    with pytest.raises(NotFittedError, match=f"This {kind.__name__} instance is not fitted yet"):
        copy.predict_topk(overlapping()[0])
    assert copy.fit(*overlapping()).model_.digest() == clf.model_.digest()
    assert copy.set_params(lam=0.5).fit(*overlapping()).model_.digest() != clf.model_.digest()


@pytest.mark.parametrize("lam", [(0.05, 1.0), [0.05, 1.0]])
def test_several_lam_survive_a_clone_and_are_one_parameter_of_a_grid(lam: Any) -> None:
    clf = xs.PDSparse(lam=lam, max_passes=3, memory_limit=LIMIT)
    copy = clone(clf)
    assert copy.lam == lam
    assert type(copy.lam) is type(lam)
    assert copy.parameters() == clf.parameters()
    fitted = copy.fit(*overlapping(n=200))
    assert copy.lam == lam
    assert {done["lam"] for done in fitted.report_["history"]} == set(lam)
    assert fitted.report_["lam"] in lam
    grid = [clone(clf).set_params(**values) for values in ParameterGrid({"lam": [lam, 0.1], "C": [1.0, 2.0]})]
    assert [(one.parameters().lams, one.C) for one in grid] == [
        (lams, C) for C in (1.0, 2.0) for lams in ((0.05, 1.0), (0.1,))
    ]


def through_pickle(clf: Any, folder: Path) -> Any:
    return pickle.loads(pickle.dumps(clf))


def through_joblib(clf: Any, folder: Path) -> Any:
    joblib.dump(clf, folder / "clf.joblib")
    return joblib.load(folder / "clf.joblib")


COPIES = pytest.mark.parametrize("copied", [through_pickle, through_joblib, lambda clf, folder: deepcopy(clf)])


@COPIES
@pytest.mark.parametrize("kind", [xs.PPDSparse, xs.LEML])
def test_a_copy_of_a_fitted_estimator_brings_its_temporary_model_along(kind: Any, copied: Any, tmp_path: Path) -> None:
    X, Y = overlapping()
    clf = kind(memory_limit=LIMIT, **({"rank": 4} if kind is xs.LEML else {})).fit(X, Y)
    labels, scores = clf.predict_topk(X, 3)
    digest, folder, params = clf.model_.digest(), clf.model_.path, clf.get_params()
    copy = copied(clf, tmp_path)
    assert copy.model_.path != folder
    del clf
    gc.collect()
    assert not folder.exists()
    assert (copy.get_params(), copy.model_.digest()) == (params, digest)
    got = copy.predict_topk(X, 3)
    assert np.array_equal(got[0], labels)
    assert np.array_equal(got[1], scores)
    assert xs.verify(copy.model_.path)["sound"]
    again = copied(copy, tmp_path)  # as of what was loaded
    del copy
    assert again.model_.digest() == digest


def test_temporary_folders_go_with_what_uses_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    X, Y = overlapping()
    clf = xs.PPDSparse(memory_limit=LIMIT).fit(X, Y)
    assert len(list(tmp_path.glob("xmc_stream-*/*"))) == 1  # of the model: that of the data has gone
    first = clf.model_.path
    clf.fit(X, Y)
    gc.collect()
    assert not first.exists()
    model = clf.model_
    del clf
    gc.collect()
    assert model.predict_topk(X, 1)[0].shape == (X.shape[0], 1)  # lives on without its estimator
    del model
    gc.collect()
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        xs.PPDSparse(memory_limit=LIMIT).fit(X, Y[1:])
    assert not list(tmp_path.glob("xmc_stream-*/*"))


@COPIES
def test_a_copy_of_an_estimator_with_a_model_of_its_own_place_refers_to_it(copied: Any, tmp_path: Path) -> None:
    X, Y = overlapping()
    clf = xs.PPDSparse(memory_limit=LIMIT).fit(X, Y, model=tmp_path / "m")
    copy = copied(clf, tmp_path)
    assert copy.model_.path == tmp_path / "m"
    assert np.array_equal(copy.predict_topk(X, 3)[1], clf.predict_topk(X, 3)[1])
    assert copied(clf.model_, tmp_path).path == tmp_path / "m"


def test_a_model_that_is_gone_is_named_when_its_pickle_is_made_or_read(tmp_path: Path) -> None:
    X, Y = overlapping()
    clf = xs.PPDSparse(memory_limit=LIMIT).fit(X, Y, model=tmp_path / "m")
    parcel = pickle.dumps(clf)
    (tmp_path / "m").rename(tmp_path / "other")
    with pytest.raises(StoreError, match=r"/m is not a model: train it first"):
        pickle.loads(parcel)
    clf.fit(X, Y)
    shutil.rmtree(clf.model_.path)
    with pytest.raises(StoreError, match="No such file or directory: mend that and fit again"):
        pickle.dumps(clf)
