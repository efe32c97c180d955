"""Every option of a command that may go on, or say that it was done before, is part of what "the same run" means.

`CHANGES` has an option's two values: what a run of the first one left is no answer to the second. An option that is
neither here nor in `SAME` fails: whoever adds one says which it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from helpers.anndata_files import annotated

import xmc_stream as xs
from xmc_stream.cli import main
from xmc_stream.errors import InputError, ResumeError
from xmc_stream.evaluation import calibrate as calibrating
from xmc_stream.methods import registry

Words = tuple[str, ...]
Commands = Callable[..., Any]

# Options that change nothing of the result, each with a value to try.
SAME: dict[str, Words] = {
    "memory_limit": ("--memory-limit", "3GB"),
    "threads": ("--threads", "1"),
    "check": ("--no-check",),
    "verbose": ("--verbose",),
    "quiet": ("--quiet",),
    "debug": ("--debug",),
    "force": ("--force",),
}
ANEW = {"overwrite"}  # begins anew
ELSEWHERE = {"scheduler", "as_json"}  # tests/test_cluster*.py; every run here
NAMES = {"target", "model", "out"}  # of what is made

# Commands that go on, or answer "done before": a call that works, {out} being what it makes.
GOES_ON: dict[str, Words] = {
    "convert": ("a.txt", "{out}"),
    "append": ("old.xmc", "new.xmc", "{out}"),
    "copy": ("old.xmc", "{out}"),
    "train": ("rows.xmc", "{out}", "--set", "max_rounds=1"),
    "tune": ("rows.xmc", "{out}", "--grid", "C=0.5,1", "--set", "max_rounds=1", "--held-out", "0.3"),
}
# Commands that do their work again, or refuse to where something stands: a call that makes {out}.
REFUSES: dict[str, Words] = {
    "split": ("rows.xmc", "{out}", "{out}2"),
    "select-features": ("rows.xmc", "{out}", "--features", "ids.txt"),
    "compact": ("sparse.model", "{out}"),
    "export": ("rows.xmc", "{out}"),
    "predict": ("sparse.model", "rows.xmc", "{out}"),
}
READS = {"info", "verify", "plan", "evaluate"}
CHANGES_ANEW = {
    "calibrate",
    "demo",
}  # calibrate: `test_calibrating_again_is_by_the_rows_given`; demo replaces its own files

CSV: Words = ("t.csv", "{out}")
LISTS: Words = ("l.csv", "{out}", "--label-field", "tags")
TAGS: Words = ("t.csv", "{out}", "--label-field", "tags")
TREE: Words = ("rows.xmc", "{out}", "--solver", "tree", "--set", "C=1")

# (command, option): the call that is made first, and again with the second words behind it.
CHANGES: dict[tuple[str, str], tuple[Words, Words] | tuple[Words, Words, Words]] = {
    ("train", "data"): (("old.xmc", "{out}"), (), ("new.xmc", "{out}")),
    ("train", "solver"): (GOES_ON["train"], ("--solver", "dismec")),
    ("train", "settings"): (GOES_ON["train"], ("--set", "lam=0.3")),
    ("train", "seed"): (GOES_ON["train"], ("--seed", "5")),
    ("train", "warm_start"): (GOES_ON["train"], ("--warm-start", "start.model")),
    ("train", "calibrate"): ((*GOES_ON["train"], "--calibrate", "0.3"), ("--calibrate", "0.4")),
    ("train", "sample_weight"): (GOES_ON["train"], ("--sample-weight", "rows.npy")),
    ("train", "class_weight"): (GOES_ON["train"], ("--class-weight", "labels.npy")),
    ("train", "tree"): ((*TREE, "--tree", "tree.txt"), (), (*TREE, "--tree", "tree2.txt")),
    ("tune", "data"): (GOES_ON["tune"], (), ("rows2.xmc", *GOES_ON["tune"][1:])),
    ("tune", "solver"): (GOES_ON["tune"], ("--solver", "dismec")),
    ("tune", "grids"): (GOES_ON["tune"], ("--grid", "lam=0.1")),
    ("tune", "settings"): (GOES_ON["tune"], ("--set", "lam=0.3")),
    ("tune", "held_out"): (GOES_ON["tune"], ("--held-out", "0.4")),
    ("tune", "seed"): (GOES_ON["tune"], ("--seed", "5")),
    ("append", "data"): (("old.xmc", "new.xmc", "{out}"), (), ("new.xmc", "new.xmc", "{out}")),
    ("append", "news"): (("old.xmc", "new.xmc", "{out}"), (), ("old.xmc", "old.xmc", "{out}")),
    ("append", "columns"): (GOES_ON["append"], ("--columns",)),
    ("copy", "source"): (("old.xmc", "{out}"), (), ("new.xmc", "{out}")),
    ("convert", "sources"): (GOES_ON["convert"], (), ("b.txt", "{out}")),
    ("convert", "format"): (("a.txt", "{out}", "--on-error", "skip"), ("--format", "libsvm")),
    ("convert", "labels"): (("X.npz", "{out}", "--labels", "Y.npz"), (), ("X.npz", "{out}", "--labels", "Y2.npz")),
    ("convert", "beside"): (("a.txt", "{out}"), ("--beside", "beside.npy")),
    ("convert", "like"): (GOES_ON["convert"], ("--like", "old.xmc")),
    ("convert", "zero_based"): (("ones.txt", "{out}"), ("--one-based",)),
    ("convert", "on_error"): (("bad.txt", "{out}", "--on-error", "skip"), (), ("a.txt", "{out}")),
    ("convert", "duplicates"): (GOES_ON["convert"], ("--duplicates", "sum")),
    ("convert", "unseen"): ((*GOES_ON["convert"], "--like", "old.xmc"), ("--unseen", "drop")),
    ("convert", "new_labels"): ((*GOES_ON["convert"], "--like", "old.xmc"), ("--new-labels",)),
    ("convert", "n_features"): (("a.svm", "{out}"), ("--features", "9")),
    ("convert", "n_labels"): (("a.svm", "{out}"), ("--labels-count", "9")),
    ("convert", "label_names"): (GOES_ON["convert"], ("--label-names", "three.txt")),
    ("convert", "feature_names"): (GOES_ON["convert"], ("--feature-names", "four.txt")),
    ("convert", "delimiter"): (CSV, ("--delimiter", ",")),
    ("convert", "quote"): (CSV, ("--quote", "'")),
    ("convert", "header"): (("n.csv", "{out}", "--format", "csv", "--text-field", "1", "--label-field", "2"), ("--no-header",)),
    ("convert", "layer"): (("a.h5ad", "{out}", "--label-key", "kind"), ("--layer", "other")),
    ("convert", "label_key"): (("a.h5ad", "{out}", "--label-key", "kind"), ("--label-key", "word")),
    ("convert", "text_fields"): (CSV, ("--text-field", "more")),
    ("convert", "id_field"): (CSV, ("--id-field", "id")),
    ("convert", "label_field"): (CSV, ("--label-field", "tags")),
    ("convert", "label_delimiter"): (TAGS, ("--label-delimiter", "|")),
    ("convert", "label_lists"): (LISTS, ("--label-lists",)),
    ("convert", "label_ids"): ((*CSV, "--label-field", "id"), ("--label-ids",)),
    ("convert", "analyzer"): (CSV, ("--analyzer", "char")),
    ("convert", "ngrams"): (CSV, ("--ngrams", "1,2")),
    ("convert", "lowercase"): (CSV, ("--keep-case",)),
    ("convert", "stop_words"): (CSV, ("--stop-words", "english")),
    ("convert", "token_pattern"): (CSV, ("--token-pattern", "[a-z]+")),
    ("convert", "min_df"): (CSV, ("--min-df", "2")),
    ("convert", "max_df"): (CSV, ("--max-df", "2")),
    ("convert", "max_features"): (CSV, ("--max-features", "2")),
    ("convert", "sublinear_tf"): (CSV, ("--linear-tf",)),
    ("convert", "idf"): (CSV, ("--no-idf",)),
    ("convert", "hash_features"): (CSV, ("--hash-features", "16")),
    ("convert", "normalize"): (GOES_ON["convert"], ("--normalize", "l2")),
    ("convert", "columns"): (GOES_ON["convert"], ("--columns",)),
    ("convert", "observed"): (GOES_ON["convert"], ("--observed", "pairs.txt")),
}  # fmt: skip
ANSWERS = {("tune", "metric")}  # another answer from what is kept: `test_tune_keeps_what_was_asked_last`


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs of all calls."""
    folder = tmp_path_factory.mktemp("inputs")
    rows = "0 0:1 1:2\n1,2 2:1\n2 3:1 0:0.5\n"
    texts = {
        "a.txt": "3 4 3\n" + rows,
        "b.txt": "3 4 3\n" + rows.replace("0:1", "0:3"),
        "bad.txt": "3 4 3\n" + rows.replace("2:1", "2:x"),
        "ones.txt": "2 5 3\n1 1:1 2:2\n2 3:1\n",
        "a.svm": rows,
        "three.txt": "one\ntwo\nthree\n",
        "four.txt": "e\nf\ng\nh\n",
        "pairs.txt": "0 0\n1 2\n",
        "ids.txt": "0\n3\n",
        "tree.txt": "0 a\n1 a\n2 b\n3 b\n4 b\n",
        "tree2.txt": "0 a\n1 a\n2 a\n3 b\n4 b\n",
        "t.csv": "id,text,more,label,tags\n1,The red Cat,old,p,u|v\n2,red dog dog,new,q,v\n3,a blue fox red,old,p,u\n",
        "l.csv": "text,tags\nthe red cat,\"['u', 'v']\"\nred dog dog,['w']\n",
        "n.csv": "2,1\nthe red cat,pear\nred dog dog,quince\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    rng = np.random.default_rng(0)
    y = rng.integers(0, 5, 400)
    X = sp.random(400, 20, 0.2, "csr", np.float32, rng) + sp.csr_matrix(np.eye(5, 20, dtype=np.float32)[y])
    Y = sp.csr_matrix(np.eye(5, dtype=np.float32)[y])
    small = X[:30], Y[:30]
    sp.save_npz(folder / "X.npz", small[0])
    for name, labels in (("Y", small[1]), ("Y2", small[1][::-1])):
        sp.save_npz(folder / f"{name}.npz", sp.csr_matrix(labels))
    np.save(folder / "beside.npy", np.arange(3, dtype=np.float32)[:, None])
    np.save(folder / "rows.npy", np.linspace(1, 2, 400))
    np.save(folder / "labels.npy", np.linspace(1, 2, 5))
    xs.convert(X, folder / "rows.xmc", labels=Y, normalize="l2")
    xs.convert(X[::-1], folder / "rows2.xmc", labels=Y, normalize="l2")
    for name in ("a", "b"):
        xs.convert(folder / f"{name}.txt", folder / ("old.xmc" if name == "a" else "new.xmc"))
    xs.PPDSparse(max_rounds=1, memory_limit="2GB").fit(folder / "rows.xmc", model=folder / "start.model")
    xs.GroupLasso(lam=0.01, max_passes=3, memory_limit="2GB").fit(folder / "rows.xmc", model=folder / "sparse.model")
    ad = pytest.importorskip("anndata")
    about = annotated(ad, X[:30].toarray(), rng.integers(0, 4, 30), "ab", layers={"other": X[:30].toarray() + 1})
    about.write_h5ad(folder / "a.h5ad")
    return folder


def put(words: Words, out: Path) -> list[str]:
    return [word.replace("{out}", str(out)) for word in words]


def content(path: Path) -> dict[str, str]:
    """All files below a path, or it, with what is in them."""
    every = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return {str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest() for file in every}


def params_of(command: str) -> set[str]:
    return {str(param.name) for param in main.commands[command].params} - {"help"}


def test_every_command_and_option_is_listed() -> None:
    assert set(GOES_ON) | set(REFUSES) | READS | CHANGES_ANEW == set(main.commands)
    for command in GOES_ON:
        changing = {option for of, option in CHANGES.keys() | ANSWERS if of == command}
        known = changing | SAME.keys() | ANEW | ELSEWHERE | NAMES
        assert params_of(command) - known == set()
        assert changing <= params_of(command)


@pytest.mark.parametrize("solver", registry.names())
def test_every_parameter_of_every_method_is_in_the_identity(solver: str) -> None:
    default = registry.parameters(solver, {})
    for name, rule in type(default).rules().items():
        tried = [False, True, None, 1, 7, 64, 0.25, 1.5, *getattr(rule, "options", ())]
        others = [found for value in tried if (found := with_value(solver, name, value)) not in (None, default)]
        assert others, name
        for other in others:
            assert other.to_dict() != default.to_dict(), name


def with_value(solver: str, name: str, value: Any) -> Any:
    """A method's parameters, one of which has this value; None where it may not."""
    try:
        return registry.parameters(solver, {name: value})
    except InputError:
        return None


@pytest.fixture(scope="module")
def stands(files: Path, tmp_path_factory: pytest.TempPathFactory, here: Commands) -> Callable[[str, Words], Path]:
    """What a command makes by these words, made once."""

    @cache
    def made(command: str, words: Words) -> Path:
        out = tmp_path_factory.mktemp("stands") / "out"
        here(command, *put(words, out))
        return out

    return made


@pytest.mark.parametrize(("command", "option"), sorted(CHANGES))
def test_another_value_is_never_answered_by_what_stands(
    command: str, option: str, files: Path, stands: Callable[[str, Words], Path], tmp_path: Path, here: Commands,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(files)
    first, more, *other = CHANGES[command, option]
    second = other[0] if other else (*first, *more)
    out = stands(command, first)
    before = content(out)
    said = here(command, *put(second, out), fails=True)
    assert "out" in said
    assert content(out) == before
    here(command, *put(second, tmp_path / "new"))  # which is no fault of the words


@pytest.mark.parametrize("command", sorted(GOES_ON))
def test_options_that_change_nothing_are_answered_by_what_stands(
    command: str, files: Path, tmp_path: Path, here: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    here(command, *put(GOES_ON[command], tmp_path / "out"))
    stands = content(tmp_path / "out")
    for option in SAME.keys() & params_of(command):
        here(command, *put(GOES_ON[command], tmp_path / "out"), *SAME[option])
        assert content(tmp_path / "out") == stands, option


@pytest.mark.parametrize("command", sorted(REFUSES))
def test_commands_that_do_not_go_on_refuse_what_stands(
    command: str, files: Path, tmp_path: Path, here: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    here(command, *put(REFUSES[command], tmp_path / "out"))
    stands = content(tmp_path)
    assert str(tmp_path / "out") in here(command, *put(REFUSES[command], tmp_path / "out"), fails=True)
    assert content(tmp_path) == stands


def test_a_calibrated_model_is_no_answer_to_a_plain_training_and_a_plain_one_is_calibrated(
    files: Path, tmp_path: Path
) -> None:
    method = xs.PPDSparse(max_rounds=1, memory_limit="2GB")
    whole = method.fit(files / "rows.xmc", model=tmp_path / "whole", calibrate=0.3).model_
    with pytest.raises(ResumeError, match=r"calibrate 0\.3, not None"):
        method.fit(files / "rows.xmc", model=tmp_path / "whole")
    method.fit(files / "rows.xmc", model=tmp_path / "m")
    xs.calibrate(tmp_path / "m", files / "rows2.xmc", memory_limit="2GB")  # by other rows, which nobody held out
    again = method.fit(files / "rows.xmc", model=tmp_path / "m", calibrate=0.3).model_
    assert again.attributes["calibration"] == whole.attributes["calibration"]
    assert again.attributes["calibration"]["fraction"] == 0.3
    assert again.digest() == whole.digest()


def test_an_unfinished_calibration_goes_on_with_its_own_share_alone(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = xs.PPDSparse(max_rounds=1, memory_limit="2GB")
    whole = method.fit(files / "rows.xmc", model=tmp_path / "whole", calibrate=0.4).model_
    with monkeypatch.context() as patched:
        patched.setattr(calibrating, "calibrate_with", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            method.fit(files / "rows.xmc", model=tmp_path / "m", calibrate=0.3)
    again = method.fit(files / "rows.xmc", model=tmp_path / "m", calibrate=0.4).model_
    assert again.attributes["calibration"] == whole.attributes["calibration"]


def test_tune_keeps_what_was_asked_last(files: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.json"
    asked = [
        xs.tune(files / "rows.xmc", grid=grid, fixed=fixed, metric=metric, held_out=0.4, out=out, memory_limit="2GB")
        for metric, grid, fixed in (
            ("P@1", {"C": [1e-6, 1.0]}, {"max_rounds": 1}),
            ("hamming_loss", {"C": [1e-6, 1.0]}, {"max_rounds": 1}),
            ("P@3", {"C": [1e-6, 1.0], "max_rounds": [1]}, {}),
        )
    ]
    assert [one["resumed"] for one in asked] == [False, True, True]
    assert asked[2]["settings"][0]["parameters"] == {"C": 1e-6, "max_rounds": 1}
    kept = json.loads(out.read_text())
    for name in ("metric", "best", "parameters", "settings"):
        assert kept[name] == asked[2][name]
