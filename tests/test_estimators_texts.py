"""Estimators learn from texts as a pipeline with a vectorizer does, and keep the vocabulary."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline

import xmc_stream as xs

pd = pytest.importorskip("pandas")
pl = pytest.importorskip("polars")
pa = pytest.importorskip("pyarrow")

LIMIT: dict[str, Any] = {"memory_limit": "2GB"}
TEXTS = [f"{['cat', 'dog', 'fish'][i % 3]} word{i % 7} common stuff" for i in range(90)]
KINDS = np.array(["C", "D", "F"])[np.arange(90) % 3]
FORMS: dict[str, Callable[[list[str]], Any]] = {
    "list": list, "tuple": tuple, "pandas": pd.Series, "polars": pl.Series, "pyarrow": pa.array, "array": np.array,
    "objects": lambda texts: np.array(texts, object),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_texts_are_learned_as_a_pipeline_learns_them(form: str) -> None:
    pipeline = make_pipeline(TfidfVectorizer(sublinear_tf=True), xs.PPDSparse(**LIMIT)).fit(TEXTS, KINDS)
    given = FORMS[form](TEXTS)
    clf = xs.PPDSparse(**LIMIT).fit(given, KINDS)
    assert np.allclose(clf.decision_function(given), pipeline.decision_function(TEXTS), atol=1e-6)
    assert np.array_equal(clf.predict(given), KINDS)
    assert clf.score(given, KINDS) == 1.0
    assert clf.n_features_in_ == len(pipeline[0].vocabulary_)
    assert not hasattr(clf, "feature_names_in_")
    assert clf.predict_topk(given, 2)[0].shape == (90, 2)


def test_the_model_keeps_the_vocabulary(tmp_path: Path) -> None:
    clf = xs.PPDSparse(**LIMIT).fit(TEXTS, [[kind, "x"] for kind in KINDS])
    new = pd.Series(["a fish", "the dog"])
    assert [set(row) for row in clf.predict(new)] == [{"F", "x"}, {"D", "x"}]
    again = pickle.loads(pickle.dumps(clf))
    assert again.predict(new) == clf.predict(new)
    kept = clf.save(tmp_path / "kept.model")
    assert np.array_equal(kept.predict_topk(new, 2)[1], clf.predict_topk(list(new), 2)[1])
    plain = xs.PPDSparse(normalize=None, **LIMIT).fit(TEXTS, KINDS)
    assert plain.model_.attributes["normalize"] == "none"


def test_texts_go_through_cross_validation() -> None:
    assert cross_val_score(xs.PPDSparse(**LIMIT), TEXTS, KINDS, cv=3).tolist() == [1.0] * 3


def test_the_wrong_kind_ends_in_one_line_that_says_what_to_do() -> None:
    numbers = np.random.default_rng(0).normal(size=(90, 3))
    of_numbers = xs.PPDSparse(**LIMIT).fit(numbers, KINDS)
    of_texts = xs.PPDSparse(**LIMIT).fit(TEXTS, KINDS)
    in_column = r"X has b?'cat word0 common stuff' in the place of a number: texts are .* as X\['column'\]"
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: of_numbers.predict(TEXTS), "X is texts, and fit had a matrix"),
        (lambda: of_numbers.predict_topk(pd.Series(TEXTS)), "X is texts, and fit had a matrix"),
        (lambda: xs.PPDSparse().fit(pd.DataFrame({"a": TEXTS}), KINDS), in_column),
        (lambda: xs.PPDSparse().fit(pl.DataFrame({"a": TEXTS}), KINDS), in_column),
        (lambda: xs.PPDSparse().fit(np.array([TEXTS, TEXTS]).T, KINDS), in_column),
        (lambda: xs.PPDSparse().fit(np.array(TEXTS).astype("S"), KINDS), in_column),
        (lambda: xs.PPDSparse().fit([*TEXTS[1:], None], KINDS), "row 89 .* is None, and others are texts"),
    ]
    for call, said in cases:
        with pytest.raises(xs.InputError, match=said) as raised:
            call()
        assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        of_texts.fit(TEXTS[:5], KINDS)
