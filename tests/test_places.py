"""Where commands write: names of their own, work folders that are theirs, one process at a time, all or nothing."""

from __future__ import annotations

import importlib
import os
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import pytest
from helpers.compiler import needs_compiler
from helpers.forked import Forked
from helpers.tools import ROOT

import xmc_stream as xs
from xmc_stream.cli import main
from xmc_stream.cli.options import TARGET
from xmc_stream.errors import InputError, ResumeError, StoreError
from xmc_stream.runtime.ledger import Ledger
from xmc_stream.runtime.making import STORE, make
from xmc_stream.store import places
from xmc_stream.store.places import LEDGER, LOCK, claimed, put_back, replace, work_folder

# of each command that writes: what stands before its targets, and behind them
WRITING: dict[str, tuple[str, str]] = {
    "convert": ("t.txt", ""),
    "append": ("d.xmc e.xmc", ""),
    "split": ("d.xmc", ""),
    "select-features": ("d.xmc", "--features ids.txt"),
    "compact": ("rows.model", ""),
    "export": ("d.xmc", ""),
    "copy": ("d.xmc", ""),
    "train": ("d.xmc", "--set max_rounds=1"),
    "tune": ("d.xmc", "--grid lam=0.1,1 --held-out 0.3"),
    "predict": ("m.model d.xmc", "-k 2"),
}
IN_PLACE = {"calibrate"}  # it changes a model
REFUSING = {"split", "select-features", "compact", "export", "predict"}  # a target that stands, also of the same work
NAMES = {"split": ("new-a", "new-b")}  # else one


def targets_of(command: str) -> list[click.Parameter]:
    return [p for p in main.commands[command].params if p.type is TARGET and isinstance(p, click.Argument)]


def test_every_command_that_writes_is_looked_at_here() -> None:
    writes = {name for name in main.commands if targets_of(name)} | {"copy"}  # whose target may be a URL
    assert writes == set(WRITING)


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what commands read."""
    folder = tmp_path_factory.mktemp("things")
    labels = [sorted({i % 4, (i + 1) % 4 if i % 3 else i % 4}) for i in range(400)]
    rows = "".join(f"{','.join(map(str, own))} {i % 7}:1 {7 + i % 3}:0.5\n" for i, own in enumerate(labels))
    (folder / "t.txt").write_text(f"400 10 4\n{rows}")
    (folder / "ids.txt").write_text("0\n3\n")
    (folder / "e.txt").write_text(f"399 10 4\n{rows[: rows.rindex(chr(10), 0, -1) + 1]}")
    for name, text in (("d", "t"), ("e", "e")):
        xs.convert(folder / f"{text}.txt", folder / f"{name}.xmc")
    xs.PPDSparse(max_rounds=1).fit(xs.open_dataset(folder / "d.xmc"), model=folder / "m.model")
    rows_of = xs.GroupLasso(loss="multitask", max_passes=2)
    rows_of.fit(xs.open_dataset(folder / "d.xmc"), model=folder / "rows.model")
    shutil.rmtree(folder / "d.xmc" / "X" / "columns", ignore_errors=True)
    return folder


@pytest.fixture
def place(things: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(things, tmp_path / "at")
    monkeypatch.chdir(tmp_path / "at")
    return tmp_path / "at"


def words(command: str, *names: Any) -> list[Any]:
    before, behind = WRITING[command]
    return [command, *before.split(), *names, *behind.split()]


def tree(folder: Path) -> dict[str, bytes | str]:
    """All that is there; what a link leads to is not followed."""
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else "folder"
    return found


BAD_NAMES = [".", "./", "/", "", "..", "d.xmc/new", "d.xmc/X/new", "m.model/new.txt", "t.txt/new"]


@pytest.mark.parametrize("command", WRITING)
def test_a_name_must_be_one_of_its_own_and_outside_of_stores(
    place: Path, several: Callable[..., Any], command: str
) -> None:
    before = tree(place)
    for name in BAD_NAMES:
        names = [name, *NAMES.get(command, ("", ""))[1:]]
        asked = words(command, *(names if command == "split" else names[:1]))
        for said in several(asked, [*asked, "--overwrite"], fails=True):
            assert "zarr.json" not in said
        assert tree(place) == before, name


@pytest.mark.parametrize("command", WRITING)
def test_what_is_somebody_elses_is_not_touched(place: Path, several: Callable[..., Any], command: str) -> None:
    names = NAMES.get(command, ("new",))
    for name in names:
        for own in (".old", ".new", ".tmp", ".calibration.old", ".store"):
            (place / (name + own)).mkdir()
            (place / (name + own) / "thesis").write_text("mine")
    before = tree(place)
    for name in names:
        for work in (".partial", ".replaced"):
            for kind in ("folder", "file", "link"):
                own = place / (name + work)
                if kind == "folder":
                    own.mkdir()
                    (own / "thesis").write_text("mine")
                elif kind == "file":
                    own.write_text("mine")
                else:
                    own.symlink_to(place / f"{name}.old")
                mine, asked = tree(place), words(command, *names)
                for said in several(asked, [*asked, "--overwrite"], fails=True):
                    assert own.name in said
                assert tree(place) == mine
                (shutil.rmtree if kind == "folder" else os.unlink)(own)
    several(words(command, *names), [*words(command, *names), "--overwrite"])
    after = tree(place)
    assert {name: after[name] for name in before} == before
    tops = {name.split("/")[0] for name in set(after) - set(before)}
    assert tops == set(names)


def test_a_calibration_leaves_folders_of_others_alone(place: Path, commands: Callable[..., Any]) -> None:
    own = place / "new.calibration"
    own.mkdir()
    (own / "thesis").write_text("mine")
    before = tree(place)
    for more in ([], ["--overwrite"]):
        assert "new.calibration" in commands(*words("train", "new"), "--calibrate", 0.4, *more, fails=True)
        assert tree(place) == before


def test_a_tuning_without_a_file_leaves_folders_of_others_alone(place: Path, commands: Callable[..., Any]) -> None:
    own = place / "d.xmc.tune.partial"
    own.mkdir()
    (own / "thesis").write_text("mine")
    before = tree(place)
    for more in ([], ["--overwrite"]):
        assert own.name in commands(*words("tune"), *more, fails=True)
        assert tree(place) == before


def test_a_tuning_learns_before_its_trainings_that_nothing_can_be_written(
    place: Path, commands: Callable[..., Any]
) -> None:
    (place / "folder").mkdir()
    (place / "folder" / "thesis").write_text("mine")
    before = tree(place)
    commands(*words("tune", "folder"), "--overwrite", fails=True)
    for name in ("folder", "t.txt/new", "d.xmc/new", "d.xmc"):
        commands(*words("tune", "new"), "--model", name, "--overwrite", fails=True)
    assert tree(place) == before


@pytest.mark.parametrize("left", ["a file of the user's", "an empty ledger"])
def test_a_prediction_is_refused_before_its_rows_are_read(
    place: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    """An empty ledger is what a command leaves that is killed as it removes its work folder."""

    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("rows were read")

    monkeypatch.setattr("xmc_stream.models.prediction.samples", read)
    (place / "new.txt").write_text("0:1\n")
    (place / "new.txt.partial").mkdir()
    (place / "new.txt.partial" / ("thesis" if "user" in left else LOCK)).touch()
    for overwrite in (False, True) if "user" in left else (False,):
        with pytest.raises(InputError):
            xs.predict("m.model", "t.txt", "new.txt", 2, overwrite=overwrite)


@pytest.mark.parametrize("command", WRITING)
@pytest.mark.parametrize("left", ["folder", "ledger"])
def test_what_a_kill_left_goes_where_the_target_stands(
    place: Path, commands: Callable[..., Any], command: str, left: str
) -> None:
    names = NAMES.get(command, ("new",))
    commands(*words(command, *names))
    before = tree(place)
    for name in names:  # of a copy of this command, which was killed as it began, or at its end
        work_folder(place / name).mkdir()
        if left == "ledger":
            (work_folder(place / name) / (LEDGER if command in ("train", "tune") else LOCK)).touch()
    commands(*words(command, *names), fails=command in REFUSING)
    assert tree(place) == before


@pytest.mark.parametrize("command", WRITING)
def test_one_process_at_a_time_has_a_target(
    place: Path, commands: Callable[..., Any], several: Callable[..., Any], command: str
) -> None:
    names = NAMES.get(command, ("new",))
    for name in names:
        work = place / f"{name}.partial"
        with Ledger(work / (LEDGER if command in ("train", "tune") else LOCK), {"of": "another process"}):
            before, asked = tree(work), words(command, *names)
            for said in several(asked, [*asked, "--overwrite"], fails=True):
                assert f"{work.name} is being written by another run" in said
            assert tree(work) == before
        shutil.rmtree(work)
    commands(*words(command, *names))


def test_targets_of_one_command_are_apart(place: Path, several: Callable[..., Any]) -> None:
    before = tree(place)
    pairs = (("a", "a/b"), ("a/b", "a"), ("a", "a"), ("a", "./a"), ("d.xmc", "b"))
    several(*(["split", "d.xmc", *names] for names in pairs), fails=True)
    assert tree(place) == before


def made(folder: Path, name: str, text: str) -> Path:
    (folder / name).mkdir()
    (folder / name / "text").write_text(text)
    return folder / name


def test_what_a_kill_between_two_names_left_is_put_right(tmp_path: Path) -> None:
    old, aside = made(tmp_path, "s", "old"), tmp_path / "s.replaced"
    aside.mkdir()
    (aside / LOCK).touch()
    old.rename(aside / "store")
    put_back(old)
    assert tree(tmp_path) == {"s": "folder", "s/text": b"old"}
    aside.mkdir()
    (aside / LOCK).touch()
    made(aside, "store", "older")
    put_back(old)  # the new one had its name
    assert tree(tmp_path) == {"s": "folder", "s/text": b"old"}
    replace(made(tmp_path, "work", "new"), old)
    assert tree(tmp_path) == {"s": "folder", "s/text": b"new"}


def test_a_name_that_cannot_be_given_leaves_what_has_it(tmp_path: Path) -> None:
    made(tmp_path, "s", "old")
    with pytest.raises(FileNotFoundError):
        replace(tmp_path / "none", tmp_path / "s")
    assert tree(tmp_path) == {"s": "folder", "s/text": b"old"}


class Killed(BaseException):
    """As if the process had been killed: nothing clears up behind it."""


def test_several_targets_get_their_names_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a kill comes, the same work asked for again ends with all of them; another's work leaves them whole."""

    def run(work: Path, ledger: Ledger) -> dict[str, Any]:
        for name in "ab":
            made(work_folder(tmp_path / name), STORE, f"new {name}")
        return {"n": 2}

    def refuse(path: Path) -> None:
        if path.exists() and "new" in (path / "text").read_text():
            raise InputError(f"{path} exists")

    def ask() -> dict[str, Any]:
        return make([tmp_path / "a", tmp_path / "b"], {"work": 1}, run, refuse, anew=True)

    rename, n = Path.rename, 0

    def killed(self: Path, to: Path) -> Path:
        nonlocal n
        n -= 1
        if n == -1:
            os._exit(9)
        return rename(self, to)

    ends = []
    for at in range(12):
        for name in "ab":
            shutil.rmtree(tmp_path / name, ignore_errors=True)
            made(tmp_path, name, "old")
        n = at
        child = os.fork()
        if not child:
            monkeypatch.setattr(Path, "rename", killed)
            try:
                ask()
            finally:
                os._exit(0)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        if ends[-1] == 0:
            break
        assert ask()["n"] == 2
        assert {name: (tmp_path / name / "text").read_text() for name in "ab"} == {"a": "new a", "b": "new b"}
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert ends == [9] * 6 + [0]  # three renames for each: old aside, new, old away


def test_a_target_that_another_process_made_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    target = tmp_path / "a"

    def refuse(path: Path) -> None:
        if path.exists():
            raise InputError(f"{path} exists")

    def run(work: Path, ledger: Ledger) -> dict[str, Any]:
        raise AssertionError("it was begun")

    looked = iter([False, True])

    def late(path: Path) -> None:
        if next(looked):
            made(tmp_path, "a", "theirs")
        refuse(path)

    with pytest.raises(InputError, match="exists"):
        make(target, {"work": 1}, run, late)
    assert tree(tmp_path) == {"a": "folder", "a/text": b"theirs"}


def test_an_unfinished_training_and_other_work_of_one_name_do_not_meet(tmp_path: Path) -> None:
    for mine, other in ((LEDGER, LOCK), (LOCK, LEDGER)):
        work = tmp_path / f"{mine}.partial"
        with Ledger(work / mine, {"of": "one"}):
            pass
        before = tree(work)
        with pytest.raises(InputError, match="another command that has not ended"):
            Ledger(work / other, {"of": "other"})
        assert tree(work) == before


def test_who_waits_for_a_lock_that_is_removed_takes_the_new_one(tmp_path: Path) -> None:
    """The file that is locked is the one that has the name: else two processes might have a lock each."""
    work = tmp_path / "a.partial"
    fd = places.hold(work / LOCK)
    places.remove_held(work / LOCK)
    with Ledger(work / LOCK, {"of": "next"}), pytest.raises(ResumeError):  # though the first is still open
        places.hold(work / LOCK)
    os.close(fd)


def _columns(data: str) -> None:
    xs.open_dataset(data).X_columns()


def test_columns_that_are_made_twice_at_once_are_whole(place: Path) -> None:
    """And what a kill leaves of them is no damage: the data stay sound, and the next one makes them."""
    data = place / "d.xmc"
    with ExitStack() as processes:
        runs = [processes.enter_context(Forked(_columns, str(data))) for _ in range(3)]
        assert [(run.wait(), run.stderr) for run in runs] == [(0, "")] * 3
    assert xs.verify(data)["sound"]
    whole = tree(data)
    shutil.rmtree(data / "X" / "columns")
    left = data / "X" / "columns.partial"  # of a process that was killed
    shutil.copytree(data / "X" / "rows", left / "columns")
    (left / LOCK).touch()
    shutil.copytree(left, data / "observed.partial")
    assert xs.verify(data)["sound"]
    xs.copy(data, place / "copied.xmc")
    assert not (place / "copied.xmc" / "X" / "columns.partial").exists()
    xs.open_dataset(data).X_columns()
    shutil.rmtree(data / "observed.partial")
    assert tree(data) == whole


def test_a_work_folder_inside_a_store_is_waited_for(tmp_path: Path) -> None:
    with claimed(tmp_path / "columns") as work:
        assert work.parent == tmp_path
        with pytest.raises(ResumeError):
            places.hold(work / LOCK)
    assert tree(tmp_path) == {}


def test_a_copy_reads_what_is_there(place: Path) -> None:
    """A damaged file of the right size is found: where a copy goes on, and where it is given again."""
    xs.copy("d.xmc", "c.xmc")
    chunk = Path("c.xmc/X/rows/data/c/0")
    right = chunk.read_bytes()
    chunk.write_bytes(bytes([right[0] ^ 1]) + right[1:])
    with pytest.raises(InputError):
        xs.copy("d.xmc", "c.xmc")
    assert xs.copy("d.xmc", "c.xmc", overwrite=True)["copied_files"] > 0
    assert chunk.read_bytes() == right
    assert xs.copy("d.xmc", "c.xmc")["copied_files"] == 0


def test_a_copy_that_ended_as_it_was_made_durable_goes_on(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from xmc_stream.runtime import making

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(making, "fsync_tree", full)
        with pytest.raises(StoreError):
            xs.copy("d.xmc", "c.xmc")
    assert not Path("c.xmc").exists()
    damaged = Path("c.xmc.partial/store/X/rows/data/c/0")
    damaged.write_bytes(bytes(damaged.stat().st_size))
    xs.copy("d.xmc", "c.xmc")
    assert xs.verify("c.xmc")["sound"]
    assert not Path("c.xmc.partial").exists()


def test_replacing_makes_the_new_store_durable_before_its_name(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    real = places.replace
    monkeypatch.setattr(places, "replace", lambda work, path: (order.append("name"), real(work, path)))
    monkeypatch.setattr("xmc_stream.runtime.making.fsync_tree", lambda *_: order.append("durable"))
    xs.export("d.xmc", "new.npz")
    assert order == ["durable", "durable", "name", "name"]


def _calibrate_for_ever(*words: str) -> None:
    from xmc_stream.evaluation import calibrate as calibration

    calibration.learn = lambda *_: (print("there", flush=True), time.sleep(60))
    main(["calibrate", *words])


@pytest.mark.slow
def test_temporary_folders_go_with_a_process_that_is_killed(place: Path) -> None:
    before = tree(place)
    with Forked(_calibrate_for_ever, "m.model", "e.xmc") as run:
        assert run.wait_until(lambda: run.stdout == "there\n"), run.stderr
        assert list(place.glob(".xmc_stream-*/*/predictions"))
        run.kill()
    for _ in range(200):
        if not list(place.glob(".xmc_stream-*")):
            break
        time.sleep(0.05)
    assert tree(place) == before


@pytest.mark.soak
@pytest.mark.slow
@needs_compiler
def test_commands_killed_at_a_system_call_end_as_undisturbed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python benchmarks/kill_calls.py FOLDER --trials 300` is what is run by hand."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    campaign = importlib.import_module("kill_calls").campaign
    assert campaign(tmp_path / "killed", int(os.environ.get("XMC_STREAM_KILLS", "4")), 5) == []
