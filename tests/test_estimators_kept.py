"""Models that live: saved, pickled, loaded in another process; and temporary folders that do not."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
from helpers.endless import endless
from helpers.forked import Forked
from helpers.problems import LIMIT, overlapping
from helpers.soak import first
from sklearn.exceptions import NotFittedError
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.pipeline import make_pipeline

import xmc_stream as xs
from xmc_stream.errors import InputError
from xmc_stream.system import files

TEXTS, KINDS = ["red round apple", "green sour apple", "fast red car", "slow old car"] * 5, ["fruit"] * 2 + ["car"] * 2


def run(code: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    """A Python program of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=120
    )


def test_a_saved_model_predicts_like_the_estimator(tmp_path: Path) -> None:
    X, Y = overlapping()
    clf = xs.PPDSparse(memory_limit=LIMIT).fit(X, Y)
    kept = clf.save(tmp_path / "new" / "m")
    assert kept.path == tmp_path / "new" / "m"
    assert kept.digest() == clf.model_.digest()
    wanted = clf.predict_topk(X, 3)
    del clf
    loaded = xs.load_model(tmp_path / "new" / "m")
    for one, other in zip(loaded.predict_topk(X, 3), wanted, strict=True):
        assert np.array_equal(one, other)
    assert xs.verify(loaded.path)["sound"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["m"]


def test_saving_replaces_models_alone_and_only_when_told(tmp_path: Path) -> None:
    X, Y = overlapping()
    clf = xs.PPDSparse(memory_limit=LIMIT).fit(X, Y)
    with pytest.raises(NotFittedError):
        xs.PPDSparse().save(tmp_path / "m")
    clf.save(tmp_path / "m")
    other = xs.PPDSparse(memory_limit=LIMIT, lam=0.5).fit(X, Y)
    with pytest.raises(InputError, match=r"exists: .* overwrite=True"):
        other.save(tmp_path / "m")
    assert other.save(tmp_path / "m", overwrite=True).digest() == other.model_.digest()
    with pytest.raises(InputError, match="is the model itself"):
        clf.fit(X, Y, model=tmp_path / "own").save(tmp_path / "own", overwrite=True)
    (tmp_path / "notes").mkdir()
    with pytest.raises(InputError, match="exists"):
        clf.save(tmp_path / "notes", overwrite=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file, not a folder"):
        clf.save(tmp_path / "file" / "m")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", first([xs.PPDSparse, xs.LEML, xs.GroupLasso, xs.LabelTree]), ids=lambda kind: kind.__name__
)
def test_pickles_and_joblib_files_are_whole_in_another_process(kind: Any, tmp_path: Path) -> None:
    """The process that made them has ended, and its temporary folder is gone."""
    make = f"""
import sys, pickle, joblib, numpy as np, xmc_stream as xs
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.pipeline import make_pipeline
texts, kinds = {TEXTS!r}, {KINDS * 5!r}
clf = make_pipeline(TfidfVectorizer(), xs.{kind.__name__}(memory_limit="{LIMIT}")).fit(texts, kinds)
pickle.dump(clf, open(sys.argv[1] + "/a", "wb"))
joblib.dump(clf, sys.argv[1] + "/b")
np.save(sys.argv[1] + "/scores.npy", clf.decision_function(texts))
print(clf[-1].model_.path)
"""
    done = run(make, tmp_path)
    assert done.returncode == 0, done.stderr
    assert not Path(done.stdout.strip()).exists()
    for clf in (pickle.loads((tmp_path / "a").read_bytes()), joblib.load(tmp_path / "b")):
        assert clf.predict(TEXTS).tolist() == KINDS * 5
        assert np.array_equal(clf.decision_function(TEXTS), np.load(tmp_path / "scores.npy"))


def test_a_pipeline_is_pickled_with_its_model() -> None:
    clf = make_pipeline(TfidfVectorizer(), xs.PPDSparse(memory_limit=LIMIT)).fit(TEXTS, KINDS * 5)
    copy = pickle.loads(pickle.dumps(clf))
    assert copy[-1].model_.path != clf[-1].model_.path
    assert np.array_equal(copy.decision_function(TEXTS), clf.decision_function(TEXTS))


OURS = "xmc_stream-*"  # dask has a folder of its own there


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "group", "fits"),
    [(signal.SIGTERM, False, True), (signal.SIGTERM, True, False), (signal.SIGKILL, False, False)],
    ids=["SIGTERM", "SIGTERM to the group", "SIGKILL"],
)
def test_temporary_folders_are_gone_when_a_process_is_ended(
    number: signal.Signals, group: bool, fits: bool, tmp_path: Path
) -> None:
    with Forked(endless, str(tmp_path), fits) as program:
        assert program.wait_until(lambda: program.stdout.endswith("\n")), program.stderr
        place = Path(program.stdout.strip())
        assert place.is_dir()
        assert tmp_path in place.parents
        (os.killpg if group else os.kill)(program.pid, number)
        assert program.wait(60) == -number
    until = time.monotonic() + 20
    while list(tmp_path.glob(OURS)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not list(tmp_path.glob(OURS))


@pytest.mark.slow
def test_a_fork_leaves_the_folders_of_its_parent_alone(tmp_path: Path) -> None:
    code = f"""
import glob, os, sys, tempfile, numpy as np, xmc_stream as xs
tempfile.tempdir = sys.argv[1]
X, y = np.array([[1.0, 0], [0, 1]] * 5), [0, 1] * 5
clf = xs.PPDSparse(memory_limit="{LIMIT}").fit(X, y)
from xmc_stream.system.files import own_folder
child = os.fork()
if child == 0:
    del clf
    other = own_folder()
    assert other.is_dir() and len(glob.glob(sys.argv[1] + "/{OURS}")) == 2
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert len(glob.glob(sys.argv[1] + "/{OURS}")) == 1
print(clf.predict(X).tolist() == y)
"""
    done = run(code, tmp_path)
    assert done.stdout.strip() == "True", done.stderr
    assert not list(tmp_path.glob(OURS))


def test_a_folder_of_the_process_that_was_cleaned_up_is_made_again() -> None:
    first = files.own_folder()
    shutil.rmtree(first)
    shutil.rmtree(first.parent)
    with files.temporary_folder() as folder:
        assert folder.is_dir()
        assert folder.parent.stat().st_mode & 0o77 == 0
    assert not folder.exists()


def test_without_a_shell_folders_go_at_the_end_of_the_process(tmp_path: Path) -> None:
    code = """
import os, sys, tempfile
tempfile.tempdir = sys.argv[1]
os.posix_spawn = lambda *a, **k: (_ for _ in ()).throw(FileNotFoundError())
from xmc_stream.system.files import own_folder
assert own_folder().is_dir()
"""
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob(OURS))


@pytest.mark.slow
def test_training_by_the_command_loads_no_scikit_learn(tmp_path: Path) -> None:
    code = """
import sys, scipy.sparse as sp, xmc_stream as xs
X = sp.eye(30, format="csr")
xs.convert(X, sys.argv[1] + "/d.xmc", labels=X)
from xmc_stream.cli import main
try:
    main(["train", sys.argv[1] + "/d.xmc", sys.argv[1] + "/m", "--json"])
except SystemExit as end:
    assert not end.code
assert not {"sklearn", "pandas"} & set(sys.modules), "loaded"
"""
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr


def test_names_that_the_package_gives() -> None:
    assert xs.__version__.count(".") >= 1
    assert xs.errors.InputError is InputError
    assert {"CPLST", "errors", "PPDSparse"} <= set(xs.__all__)
    assert "__version__" in dir(xs)


def test_only_what_outlives_the_process_is_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    durable: set[int] = set()
    fsync = os.fsync

    def noted(fd: int) -> None:
        durable.add(os.fstat(fd).st_ino)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    X, y = np.eye(6, dtype=np.float32), np.arange(6) % 2
    clf = xs.PPDSparse().fit(X, y)
    assert not durable
    for name in ("saved", "trained"):
        durable.clear()
        if name == "saved":
            clf.save(tmp_path / name)
        else:
            xs.PPDSparse().fit(X, y, model=tmp_path / name)
        files = {file.stat().st_ino for file in (tmp_path / name).rglob("*") if file.name != "events.jsonl"}
        assert len(files) > 5
        assert files <= durable


def test_folders_of_the_process_and_others_are_told_apart(tmp_path: Path) -> None:
    with files.temporary_folder() as folder:
        assert not files.outlives_process(folder)
        assert not files.outlives_process(folder / "model" / "units")
        assert files.outlives_process(folder.parent.parent / (folder.parent.name + "-more") / "model")
    assert files.outlives_process(tmp_path)
