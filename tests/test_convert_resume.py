"""A conversion that is killed goes on to the same dataset; one that cannot be written, or is not alone, says so."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.conversions import INPUTS, TEXT, cut_into, files_of, refused, write
from helpers.forked import Forked

from xmc_stream.convert import convert, convert_report
from xmc_stream.convert.conversion import PartJob
from xmc_stream.convert.lines import files
from xmc_stream.convert.plan import plan_writing
from xmc_stream.datasets.split import split
from xmc_stream.errors import InputError, ResumeError, StoreError
from xmc_stream.runtime import making
from xmc_stream.runtime.ledger import Ledger
from xmc_stream.store.dataset import open_dataset

PART = 500


def convert_until(source: str, target: str, when: str, key: str) -> None:
    """Convert, and be killed before or behind the note that a job is done, or while the work folder of what is named is
    removed; or let no file grow beyond some bytes."""
    files._PART = PART
    add, unlimited = Ledger.add, resource.getrlimit(resource.RLIMIT_FSIZE)

    def killing(self: Ledger, name: str, receipt: Any) -> None:
        if when == "behind":
            add(self, name, receipt)
        if name == key:
            os.kill(os.getpid(), signal.SIGKILL)
        add(self, name, receipt)

    def removing(works: list[Path]) -> None:
        [work] = works
        if key != "nothing":
            making.empty(work, work / "ledger")
        if key in ("ledger", "folder"):
            (work / "ledger").unlink()
        if key == "folder":
            work.rmdir()
        os.kill(os.getpid(), signal.SIGKILL)

    if when == "removed":
        making._drop = removing
    elif when == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(key), unlimited[1]))
    else:
        Ledger.add = killing  # type: ignore[method-assign]
    try:
        convert(source, target)
    except StoreError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)  # what it says goes into a file
        print(type(error).__name__, error)


def run_child(source: Path, target: Path, when: str, key: str) -> tuple[int | None, str, str]:
    """Convert in a process that ends as said above: its exit code, stdout and stderr."""
    with Forked(convert_until, str(source), str(target), when, key) as run:
        return run.wait(120), run.stdout, run.stderr


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A text of some twenty parts."""
    cut_into(monkeypatch, PART)
    return write(tmp_path / "a", INPUTS["libsvm"])


@pytest.fixture
def parts_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the parts that this process reads."""
    numbers: list[int] = []
    original = PartJob.run

    def counting(self: PartJob) -> Any:
        numbers.append(self.number)
        return original(self)

    monkeypatch.setattr(PartJob, "run", counting)
    return numbers


def killed(source: Path, target: Path, when: str, key: str) -> None:
    """Convert in a process that is killed there."""
    code, *said = run_child(source, target, when, key)
    assert code == -9, said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "when", "key"),
    [
        ("libsvm", "before", "read/00000"), ("libsvm", "behind", "read/00003"), ("libsvm", "before", "write/Y/lengths"),
        ("libsvm", "behind", "write/X/data"), ("libsvm", "before", "whole"), ("libsvm", "behind", "whole"),
        ("jsonl", "behind", "merge/words/0/0000"), ("jsonl", "before", "weigh/00002"), ("jsonl", "behind", "whole"),
    ],
)  # fmt: skip
def test_a_killed_conversion_goes_on(
    source: Path, tmp_path: Path, name: str, when: str, key: str, parts_read: list[int]
) -> None:
    write(source, INPUTS[name])
    expected = files_of(convert(source, tmp_path / "whole.xmc").path)
    n_parts = len(parts_read)
    assert n_parts > 5
    parts_read.clear()
    target = tmp_path / "d.xmc"
    killed(source, target, when, key)
    assert not target.exists()
    dataset, figures = convert_report(source, target, memory_limit="3GB")
    assert files_of(dataset.path) == expected
    done_before = {"read/00000": 0, "read/00003": 4}.get(key, n_parts)
    assert parts_read == list(range(done_before, n_parts))
    assert figures["resumed"] == (done_before > 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "d.xmc", "whole.xmc"]


@pytest.mark.slow
def test_relative_paths_go_on_with_relative_ones(
    source: Path, tmp_path: Path, parts_read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    killed(Path("a"), Path("d.xmc"), "behind", "read/00003")
    _, figures = convert_report("a", "d.xmc")
    assert figures["resumed"]
    assert figures["dataset"] == "d.xmc"
    assert parts_read[0] == 4


@pytest.mark.slow
def test_what_has_its_name_already_is_not_made_again(source: Path, tmp_path: Path, parts_read: list[int]) -> None:
    target = tmp_path / "d.xmc"
    killed(source, target, "behind", "whole")
    work = tmp_path / "d.xmc.partial"
    (work / "store").rename(target)  # killed between giving the name and cleaning up
    dataset, figures = convert_report(source, target)  # where `overwrite` would be needed else
    assert figures["resumed"]
    assert figures["n_samples"] == dataset.n_samples == 59
    assert parts_read == []
    assert not work.exists()


@pytest.mark.slow
@pytest.mark.parametrize("removed", ["nothing", "pieces", "ledger", "folder"])
def test_killed_when_it_has_its_name_it_is_done(
    source: Path, tmp_path: Path, removed: str, parts_read: list[int]
) -> None:
    target, mask = tmp_path / "d.xmc", write(tmp_path / "mask", b"0 0\n1 1\n")
    killed(source, target, "removed", removed)
    before = files_of(target)
    for _ in range(2):
        _, figures = convert_report(source, target)
        assert figures["resumed"]
        assert (figures["n_samples"], figures["bytes_in"]) == (59, source.stat().st_size)
    assert "libsvm text, converted before from the same input" in figures["said"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "d.xmc", "mask"]
    options: list[dict[str, Any]] = [
        {"normalize": "l2"}, {"columns": True}, {"base": 0}, {"observed": mask}, {"like": target}, {"n_labels": 90},
    ]  # fmt: skip
    for other in options:
        assert "exists: give another name, or overwrite=True" in refused(target, source, **other)
    os.utime(source, ns=(0, source.stat().st_mtime_ns + 1))
    assert "exists: give another name, or overwrite=True" in refused(target, source)
    os.utime(source, ns=(0, source.stat().st_mtime_ns - 1))
    assert parts_read == []
    assert files_of(target) == before
    _, figures = convert_report(source, target, overwrite=True)  # which asks for it
    assert not figures["resumed"]
    assert parts_read
    assert files_of(target) == before


def test_what_came_of_a_conversion_is_not_taken_for_it(source: Path, tmp_path: Path) -> None:
    whole = convert(source, tmp_path / "d.xmc")
    split(whole, tmp_path / "train.xmc", tmp_path / "valid.xmc", fraction=0.3)
    assert whole.n_samples > open_dataset(tmp_path / "train.xmc").n_samples
    for name in ("train.xmc", "valid.xmc"):
        assert "exists: give another name, or overwrite=True" in refused(tmp_path / name, source)


@pytest.mark.slow
def test_what_is_read_once_is_never_the_same_again(tmp_path: Path) -> None:
    pipe, target = tmp_path / "pipe", tmp_path / "d.xmc"
    os.mkfifo(pipe)
    for again in (False, True):
        threading.Thread(target=pipe.write_bytes, args=(TEXT,), daemon=True).start()
        if again:
            assert "exists: give another name, or overwrite=True" in refused(target, pipe)
        else:
            convert(pipe, target)


def test_a_mask_that_was_removed_is_stored_again_by_the_same_command(source: Path, tmp_path: Path) -> None:
    target, mask = tmp_path / "d.xmc", write(tmp_path / "mask", b"0 0\n1 1\n58 2\n")
    convert(source, target, observed=mask)
    shutil.rmtree(target / "observed")
    assert convert(source, target, observed=mask).observed_rows().nnz == 3
    assert "exists" in refused(target, source)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["normalize", "base", "content", "time"])
def test_another_input_or_option_begins_anew(source: Path, tmp_path: Path, how: str, parts_read: list[int]) -> None:
    target = tmp_path / "d.xmc"
    killed(source, target, "behind", "read/00003")
    options: dict[str, Any] = {"normalize": {"normalize": "l2"}, "base": {"base": 0}}.get(how, {})
    if how == "content":
        write(source, INPUTS["libsvm"].replace(b"38:59.38", b"38:11.38"))
    if how == "time":
        os.utime(source, ns=(0, source.stat().st_mtime_ns + 1))
    dataset, figures = convert_report(source, target, **options)
    assert not figures["resumed"]
    assert "an unfinished conversion of something else, in d.xmc.partial, was dropped" in figures["said"]
    assert parts_read[0] == 0
    assert files_of(dataset.path) == files_of(convert(source, tmp_path / "whole.xmc", **options).path)
    assert not (tmp_path / "d.xmc.partial").exists()


@pytest.mark.slow
def test_a_damaged_piece_is_found_and_the_next_command_begins_anew(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "d.xmc"
    killed(source, target, "behind", "read/00003")
    piece = tmp_path / "d.xmc.partial/pieces/00002-X/data"
    content = bytearray(piece.read_bytes())
    content[5] ^= 1
    piece.write_bytes(content)
    with pytest.raises(StoreError, match=r"00002-X/data fails its checksum: give the same command again"):
        convert(source, target)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    dataset, figures = convert_report(source, target)
    assert not figures["resumed"]
    assert dataset.n_samples == 59


@pytest.mark.slow
def test_bad_input_after_a_kill_leaves_nothing(source: Path, tmp_path: Path) -> None:
    write(source, INPUTS["libsvm"] + b"\nx\n")
    killed(source, tmp_path / "d.xmc", "behind", "read/00003")
    with pytest.raises(InputError, match=r"a:63: 'x' is not a list of label ids"):
        convert(source, tmp_path / "d.xmc")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.slow
def test_a_full_disk_is_named_and_the_conversion_goes_on_when_there_is_room(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "d.xmc"
    write(source, INPUTS["libsvm"] + b"\n0 5000:1\n")
    for limit, begun in ((100, False), (20_000, True)):  # the first part; an array of the dataset, of 5,000 numbers
        _, out, said = run_child(source, target, "full", str(limit))
        assert out.startswith(f"StoreError {target} cannot be written (File too large): "), (out, said)
        assert (out.count("\n"), said) == (1, "")
        assert not target.exists()
        assert (tmp_path / "d.xmc.partial").exists() == begun
    dataset, figures = convert_report(source, target)
    assert figures["resumed"]
    assert dataset.n_samples == 60


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Until something holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.01)


@pytest.mark.slow
def test_of_two_conversions_to_one_target_the_second_is_refused(tmp_path: Path) -> None:
    target, pipe = tmp_path / "d.xmc", tmp_path / "pipe"
    other = write(tmp_path / "a", TEXT)
    convert(other, tmp_path / "warm.xmc")
    os.mkfifo(pipe)
    first = threading.Thread(target=convert, args=(pipe, target), daemon=True)
    first.start()
    with open(pipe, "wb", buffering=0) as file:
        file.write(b"40000 4 3\n" + b"0 1:1\n" * 20000)
        wait_for((tmp_path / "d.xmc.partial/ledger").exists)
        wait_for(lambda: b"identity" in (tmp_path / "d.xmc.partial/ledger").read_bytes())
        for overwrite in (False, True):
            with pytest.raises(ResumeError, match=r"d\.xmc\.partial is being written by another run: wait for it"):
                convert(other, target, overwrite=overwrite)
        file.write(b"1 2:1\n" * 20000)
    first.join(60)
    assert not first.is_alive()
    assert open_dataset(target).n_samples == 40000
    assert not (tmp_path / "d.xmc.partial").exists()


@pytest.mark.slow
def test_a_pipe_that_was_refused_is_read_from_its_beginning_the_next_time(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def send(content: bytes) -> None:
        threading.Thread(target=pipe.write_bytes, args=(content,), daemon=True).start()

    before = len(os.listdir("/proc/self/fd"))
    for content, options in (
        (b"no rows\n", {}),
        (b"\x93NUMPY\x01\x00" + bytes(200), {}),
        (TEXT, {"labels": tmp_path / "missing"}),
        (b"0 0:1\n", {"labels": tmp_path / "missing"}),
        (b"5 4\n" + TEXT, {"labels": tmp_path / "missing"}),
        (TEXT + b"x\n", {}),
    ):
        send(content)
        refused(tmp_path / "d.xmc", pipe, **options)
    assert len(os.listdir("/proc/self/fd")) == before
    send(TEXT)
    assert convert(pipe, tmp_path / "d.xmc").n_samples == 5


def test_a_target_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    good = write(tmp_path / "a", TEXT)
    write(tmp_path / "d.xmc.partial", b"a file of that name")
    with pytest.raises(InputError, match=r"d\.xmc\.partial is in the way"):
        convert(good, tmp_path / "d.xmc")
    assert (tmp_path / "d.xmc.partial").read_bytes() == b"a file of that name"
    (tmp_path / "folder").mkdir()
    for overwrite in (False, True):
        assert "exists" in refused(tmp_path / "folder", good, overwrite=overwrite)
        assert "exists" in refused(good, good, overwrite=overwrite)
    convert(good, tmp_path / "new" / "folders" / "d.xmc")
    shutil.rmtree(tmp_path / "new")


def test_a_ledger_of_another_kind_is_no_harm(tmp_path: Path) -> None:
    good = write(tmp_path / "a", TEXT)
    work = tmp_path / "d.xmc.partial"
    (work / "pieces").mkdir(parents=True)
    write(work / "ledger", b"")
    write(work / "junk", b"junk")
    with Ledger(work / "ledger", {"of": "something else"}) as ledger:
        ledger.add("read/00000", {"pieces": {}})
    assert convert(good, tmp_path / "d.xmc").n_samples == 5
    assert not work.exists()


def test_the_longest_row_and_columns_of_x_are_planned() -> None:
    plain = plan_writing(10**9, 1, 10**6, 10, 10**8, 10)
    assert plan_writing(10**9, 1, 10**6, 10, 10**8, 10, longest=2**26).need - plain.need == 2**26 - 2**24
    assert plan_writing(10**9, 1, 10**6, 10, 10**8, 10, x_columns=True).need - plain.need == 32 * (10**6 - 10)
