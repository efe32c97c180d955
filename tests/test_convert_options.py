"""The options of a conversion: one object, the keywords of Python, the flags of the shell."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse

import xmc_stream as xs
from xmc_stream.convert import convert_report
from xmc_stream.convert.options import with_overrides

LIMIT: dict[str, Any] = {"memory_limit": "2GB"}


def test_keywords_change_single_options(tmp_path: Path) -> None:
    (tmp_path / "a.svm").write_text("1 1:3 2:4\n2 2:1\n")
    how = xs.ConvertOptions(base=1, normalize="l2", n_features=7, columns=True, **LIMIT)
    kept = xs.convert(tmp_path / "a.svm", tmp_path / "kept.xmc", how)
    assert (kept.n_features, kept.attributes["normalize"]) == (7, "l2")
    changed = xs.convert(tmp_path / "a.svm", tmp_path / "changed.xmc", how, normalize=None, n_features=9)
    assert (changed.n_features, changed.attributes["normalize"]) == (9, "none")
    by_name = xs.convert(tmp_path / "a.svm", tmp_path / "named.xmc", base=1, normalize="l2", n_features=7, columns=True)
    assert by_name.fingerprint == kept.fingerprint
    # both are the same conversion
    assert convert_report(tmp_path / "a.svm", tmp_path / "named.xmc", how)[1]["resumed"]


def test_help_shows_every_option_by_name() -> None:
    shown = inspect.signature(xs.convert).parameters
    assert list(shown)[:3] == ["source", "target", "options"]
    options = {one.name: one.default for one in fields(xs.ConvertOptions)}
    assert {name: one.default for name, one in list(shown.items())[3:]} == options
    assert all(one.kind is one.KEYWORD_ONLY for one in list(shown.values())[3:])


@pytest.mark.parametrize(
    ("keyword", "said"),
    [
        ("normalise", r"'normalise' \(is 'normalize' meant\?\)"),
        ("label_delimiter", r"goes into text=TextOptions\(label_delimiter=\.\.\.\)"),
        ("zzz", "'zzz'$"),
    ],
)
def test_an_unknown_keyword_is_named_with_the_nearest(keyword: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=said):
        xs.convert("a.txt", tmp_path / "d.xmc", **{keyword: 1})
    with pytest.raises(TypeError, match="must be ConvertOptions, got dict"):
        xs.convert("a.txt", tmp_path / "d.xmc", {keyword: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"normalize": "l1"}, "normalize must be one of none, l2, got 'l1'"),
        ({"base": 2}, "base must be one of 0, 1, got 2"),
        ({"n_features": -1}, "n_features"),
        ({"n_labels": 2.5}, "n_labels"),
        ({"delimiter": "ab"}, "delimiter must be one ASCII character"),
        ({"text": xs.TextOptions(label_field="a"), "label": "b"}, "leave out one"),
    ],
)
def test_options_are_checked_where_they_are_made(option: dict[str, Any], said: str) -> None:
    with pytest.raises(xs.InputError, match=said):
        xs.ConvertOptions(**option)


def test_numbers_of_numpy_are_pythons() -> None:
    how = xs.ConvertOptions(n_features=np.int64(3), skip=np.bool_(True), normalize=np.str_("l2"))  # type: ignore[arg-type]
    assert (type(how.n_features), how.skip, type(how.normalize)) == (int, True, str)
    assert pickle.loads(pickle.dumps(how)).n_features == 3
    assert with_overrides(how, {}) is how


def test_fields_of_text_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('words,more,tags\n"a blue hat",of felt,hats\n"a red shoe",of leather,shoes\n')
    short = xs.convert(tmp_path / "a.csv", tmp_path / "short.xmc", text="words", label="tags", **LIMIT)
    text = xs.TextOptions(text_fields=("words",), label_field="tags")
    long = xs.convert(tmp_path / "a.csv", tmp_path / "long.xmc", text=text, **LIMIT)
    assert short.arrays_digest() == long.arrays_digest()
    both = xs.convert(tmp_path / "a.csv", tmp_path / "both.xmc", text=["words", "more"], label="tags", **LIMIT)
    assert both.n_features > short.n_features


def test_the_command_makes_the_same_dataset(tmp_path: Path, commands: Any) -> None:
    (tmp_path / "a.csv").write_text('words;tags\n"a blue hat";hats|blue\n"a red shoe";shoes\n')
    text = xs.TextOptions(text_fields=("words",), label_field="tags", label_delimiter="|", ngrams=(1, 2))
    made = xs.convert(tmp_path / "a.csv", tmp_path / "python.xmc", text=text, delimiter=";", normalize="none", **LIMIT)
    flags = "--text-field words --label-field tags --label-delimiter | --ngrams 1,2 --delimiter ; --normalize none"
    commands("convert", tmp_path / "a.csv", tmp_path / "shell.xmc", *flags.split(), "--memory-limit", "2GB")
    assert xs.open_dataset(tmp_path / "shell.xmc").fingerprint == made.fingerprint
    # and is the same conversion
    _, report = convert_report(tmp_path / "a.csv", tmp_path / "shell.xmc", text=text, delimiter=";", normalize="none")
    assert report["resumed"]


def test_matrices_in_one_object(tmp_path: Path) -> None:
    X = sparse.csr_matrix(np.eye(4, dtype=np.float32))
    how = xs.ConvertOptions(labels=X, **LIMIT)
    assert xs.convert(X, tmp_path / "d.xmc", how).n_labels == 4


def test_the_command_knows_the_formats_that_there_are() -> None:
    from xmc_stream.cli import data
    from xmc_stream.convert.formats.registry import FORMATS

    assert sorted(data.FORMATS) == sorted(FORMATS)
