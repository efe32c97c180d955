"""The memory limit: sizes in words, refusals that say what would do, and readers that keep to what they were given."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xmc_stream.errors import InputError, MemoryLimitError
from xmc_stream.runtime.plan import MemoryPlan
from xmc_stream.store.encoding import new_matrix
from xmc_stream.store.matrix import SparseMatrix
from xmc_stream.system.memory import MemoryLimit, format_size, of_cgroups, parse_size, resident

MB, MIB = 10**6, 2**20
LEAST = 200 * MIB  # what a process is taken to hold, once it has loaded what it needs
FEW = settings(max_examples=60, deadline=None)
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measured by /proc/self/status")


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("1", 1),
        ("512MB", 512 * 10**6),
        ("4GB", 4 * 10**9),
        ("4GiB", 4 * 2**30),
        ("4gib", 4 * 2**30),
        ("64K", 64_000),
        ("64kB", 64_000),
        ("64Ki", 65_536),
        ("3M", 3 * 10**6),
        ("3MiB", 3 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("0.5KiB", 512),
        ("2T", 2 * 10**12),
        ("2TiB", 2 * 2**40),
        (" 12 MB ", 12 * 10**6),
        ("700 B", 700),
        (123, 123),
        (1e9, 10**9),
        (2**62, 2**62),
    ],
)
def test_a_size_is_read_in_decimal_and_binary_units(size: Any, expected: int) -> None:
    assert parse_size(size) == expected
    assert MemoryLimit.of(size).limit == expected


@pytest.mark.parametrize(
    "size",
    ["", " ", "MB", "-1GB", "1e9", "4 G B", "4GBs", "4I", "4IB", "1,5GB", ".5GB", "1.GB", "four", "0", "0MB", "0.1",
     0, -5, 0.5, float("nan"), float("inf"), 2**63, "9" * 30, "9" * 400 + "GB", "1\n2"],
)  # fmt: skip
def test_what_is_no_size_is_refused_in_one_line_that_shows_how_to_write_it(size: Any) -> None:
    with pytest.raises(InputError) as caught:
        parse_size(size)
    assert str(caught.value).isprintable()
    assert "write it as 512MB, 4GB or 4GiB" in str(caught.value)


@FEW
@given(st.text("0159.kKmMGTiIbBe- \n", max_size=10))
def test_any_text_is_a_positive_size_or_an_input_error(text: str) -> None:
    said = ""
    try:
        size = parse_size(text)
    except InputError as error:
        size, said = 1, str(error)
    assert isinstance(size, int)
    assert size >= 1
    assert said.isprintable()


@FEW
@given(st.integers(1, 9 * 10**15))
def test_a_size_for_people_is_read_back_within_half_a_percent(n: int) -> None:
    text = format_size(n)
    assert re.fullmatch(r"[0-9.]{1,5} (B|kB|MB|GB|TB)", text)
    assert abs(parse_size(text) - n) <= 0.0051 * n + 0.5
    assert n >= 1000 or parse_size(text) == n


def test_no_limit_given_means_part_of_the_free_memory() -> None:
    import psutil

    assert 0 < MemoryLimit.of(None).limit < psutil.virtual_memory().total


def test_what_a_process_holds_already_does_not_count_against_a_limit_that_was_not_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = 3 * 10**8
    held = np.ones(free, np.uint8)  # as the user of a notebook may
    monkeypatch.setattr("xmc_stream.system.memory.available_memory", lambda: free)
    limit = MemoryLimit.of(None)
    assert held.nbytes + free // 2 < limit.limit < resident() + free
    assert limit.budget() > free // 3


def write_cgroup(folder: Path, names: tuple[str, str, str], bound: int | str, used: int, cached: int) -> None:
    """The files of a memory cgroup. names: of bound and use, and what stands before the names of its statistics."""
    folder.mkdir(parents=True, exist_ok=True)
    limit, usage, prefix = names
    (folder / limit).write_text(f"{bound}\n")
    (folder / usage).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"{prefix}active_file {cached}\nother 7\n{prefix}inactive_file 1\n")


def _free(memberships: str, root: Path) -> list[int]:
    return [free for _, free in of_cgroups(memberships, root)]


@pytest.mark.parametrize("version", [1, 2])
def test_what_memory_cgroups_leave_free(tmp_path: Path, version: int) -> None:
    top, names = tmp_path / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    if version == 2:
        top, names = tmp_path, ("memory.max", "memory.current", "")
    write_cgroup(top / "a", names, 1000, 700, 200)
    write_cgroup(top / "a" / "b", names, 300 if version == 1 else "max", 100, 50)
    line = "5:cpu,memory:/a/b" if version == 1 else "0::/a/b"
    expected = [251, 501] if version == 1 else [501]
    assert _free(f"3:cpuset:/a\n{line}\n", tmp_path) == expected
    # a container shows its own group at the top, and may name it as the host does
    write_cgroup(top, names, 90, 100, 4)
    assert _free(line.replace("/a/b", "/docker/77"), tmp_path) == [0]
    assert _free("3:cpuset:/a\n", tmp_path) == []


def test_a_budget_is_what_limit_process_and_reserve_leave() -> None:
    limit = MemoryLimit(4 * 10**9)
    assert limit.reserve > 0
    held = max(resident(), LEAST)
    assert limit.budget() == pytest.approx(4 * 10**9 - held - limit.reserve, abs=4 * MIB)
    assert MemoryLimit(8 * 10**9).reserve > limit.reserve


def test_a_plan_that_does_not_fit_is_refused_with_need_parts_have_and_knob() -> None:
    needs = {"weights": 300 * MB, "rows": 200 * MB, "unused": 0}
    with pytest.raises(MemoryLimitError) as caught:
        MemoryLimit(10**9).check(needs, "training", budget=100 * MB)
    message = str(caught.value)
    assert message.isprintable()
    for part in (
        "training needs 500 MB",
        "weights 300 MB",
        "rows 200 MB",
        "1 GB leaves 100 MB",
        "set memory_limit to",
    ):
        assert part in message
    assert "unused" not in message


def test_a_plan_that_fits_exactly_is_accepted_and_one_byte_more_is_not() -> None:
    limit = MemoryLimit(10**9)
    limit.check({"a": 60 * MB, "b": 40 * MB}, "training", budget=100 * MB)
    with pytest.raises(MemoryLimitError):
        limit.check({"a": 60 * MB, "b": 40 * MB + 1}, "training", budget=100 * MB)


def test_a_limit_smaller_than_the_process_leaves_nothing_rather_than_less() -> None:
    with pytest.raises(MemoryLimitError, match=r"leaves 0 B: "):
        MemoryLimit(MB).check({"a": 1}, "training")


@FEW
@given(st.integers(1, 10**13), st.lists(st.integers(0, 10**13), min_size=1, max_size=3))
def test_the_limit_that_a_refusal_suggests_is_enough_and_not_far_too_much(limit: int, sizes: list[int]) -> None:
    needs = {f"part {i}": size for i, size in enumerate(sizes)}
    try:
        MemoryLimit(limit).check(needs, "training")
    except MemoryLimitError as error:
        [suggested] = re.findall(r"set memory_limit to (.+) or more$", str(error))
        enough = MemoryLimit.of(suggested)
        enough.check(needs, "training")
        assert enough.limit < 1.12 * (sum(sizes) + max(resident(), LEAST) + enough.reserve)


def child(code: str, *arguments: object) -> Any:
    """What a fresh process prints, as JSON."""
    prelude = "import json, os, sys, time\nfrom pathlib import Path\n"
    command = [sys.executable, "-c", prelude + code, *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


PEAK = """
from xmc_stream.system.memory import peak_resident, resident
before = resident()
block = bytearray(b"x") * (100 << 20)
del block
after, peak = resident(), peak_resident()
line = [line for line in open("/proc/self/status") if line.startswith("VmHWM")][0]
print(json.dumps([before, after, peak, int(line.split()[1]) * 1024]))
"""


@pytest.mark.slow
@on_linux
def test_the_peak_is_the_kernels_and_stays_when_memory_is_freed() -> None:
    before, after, peak, kernel = child(PEAK)
    assert abs(peak - kernel) <= 256 * 1024
    assert peak >= before + 99 * MIB
    assert after < before + 20 * MIB


FREED = """
from xmc_stream.system.memory import MemoryLimit, resident
import numpy as np
MemoryLimit.kept("1GB")
before = resident()
for size in (24 << 20, 20 << 20):  # freeing the first one teaches the C library to keep blocks of that size
    held = [np.ones(size, np.uint8), np.ones(1 << 20, np.uint8), np.ones(1 << 10, np.uint8)]
    small = held.pop()
    del held
print(resident() - before)
"""


@pytest.mark.slow
@on_linux
def test_freed_buffers_are_given_back_at_once() -> None:
    assert child(FREED) < 4 * MIB


KEPT = """
from xmc_stream.system.memory import MemoryLimit, resident, return_freed_memory
import numpy as np
MemoryLimit.kept(sys.argv[1])
before = resident()
blocks = [np.ones(1 << 20, np.uint8) for _ in range(100)]
pinned = blocks[-1]
del blocks
kept = resident() - before
return_freed_memory()
print(json.dumps([kept, resident() - before]))
"""


@pytest.mark.slow
@on_linux
def test_freed_buffers_that_the_limit_calls_small_are_given_back_when_asked_for() -> None:
    assert child(KEPT, 10**8)[0] < 4 * MIB
    kept, after = child(KEPT, 4 * 10**9)
    assert kept > 90 * MIB
    assert after < 4 * MIB


THREADS = """
import resource, xmc_stream as xs
from xmc_stream.runtime.plan import MemoryPlan
from xmc_stream.system.memory import resident, return_freed_memory
data, model = sys.argv[1:]
xs.PPDSparse(threads=4, memory_limit="3GB", max_rounds=1).fit(data, model=model + ".first")  # kernels are loaded
keeps, ends = MemoryPlan.keeps_freed, {}
for kept in (False, True):
    MemoryPlan.keeps_freed = keeps if kept else lambda *_: False
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    clf = xs.PPDSparse(threads=4, memory_limit="3GB").fit(data, model=f"{model}.{kept}")
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    after = resident()
    return_freed_memory()
    ends[str(kept)] = [faults, after - resident(), clf.model_.digest()]
print(json.dumps(ends))
"""


@pytest.mark.slow
@on_linux
def test_many_threads_keep_what_their_jobs_free_for_the_next_ones_and_give_it_back_in_the_end(
    small: Path, tmp_path: Path
) -> None:
    ends = child(THREADS, small, tmp_path / "m")
    of_keeping, of_not = ends["True"], ends["False"]
    assert of_keeping[0] < 0.8 * of_not[0]
    assert of_keeping[1] < 4 * MIB
    assert of_keeping[2] == of_not[2]


def test_what_is_freed_is_kept_where_the_limit_has_room_for_twice_the_plan_and_threads_are_many() -> None:
    plan = MemoryPlan(2**31, 1000, 4)
    assert plan.keeps_freed({"a": 300, "b": 200})
    assert not plan.keeps_freed({"a": 300, "b": 201})
    assert not MemoryPlan(2**31, 1000, 3).keeps_freed({"a": 1})


GUARD = """
from xmc_stream.errors import MemoryLimitError
from xmc_stream.system.memory import Guard, MemoryLimit, peak_resident, resident
def wait(done):
    end = time.monotonic() + 20
    while not done() and time.monotonic() < end:
        time.sleep(0.005)
    return done()
start = resident()
limit = start + (200 << 20)
with Guard(MemoryLimit(limit), interval=0.01) as guard:
    guard.check()
    quiet = guard.crowded()
    block = bytearray(b"x") * (int(0.9 * limit) - start)
    wait(lambda: guard.now > 0.89 * limit)
    quiet = quiet or guard.crowded()
    block += bytearray(b"x") * int(0.065 * limit)
    crowded = wait(guard.crowded)
    guard.check()
    block += bytearray(b"x") * (60 << 20)
    wait(lambda: guard.now > start + (240 << 20))
    try:
        guard.check()
        message = ""
    except MemoryLimitError as error:
        message = str(error)
    del block
    gone = wait(lambda: guard.now < start + (20 << 20))
    guard.check()
print(json.dumps([quiet, crowded, message, gone, guard.peak - start, peak_resident() - start]))
"""


@pytest.mark.slow
@on_linux
def test_the_guard_samples_records_the_peak_and_ends_a_run_at_the_limit_only() -> None:
    quiet, crowded, message, gone, peak, kernel = child(GUARD)
    assert (quiet, crowded, gone) == (False, True, True)
    for part in ("at the limit of", "can be resumed", "memory_limit", "threads"):
        assert part in message
    assert message.isprintable()
    assert 240 * MIB < peak <= kernel + MIB


ROWS, ROW, BOUND = 120_000, 100, 200_000


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A matrix of 96 MB of entries: row i holds the value i % 1000, ROW times."""
    path = tmp_path_factory.mktemp("large") / "matrix"
    step = 10_000
    with new_matrix(path, "csr_matrix", (ROWS, BOUND)) as writer:
        indices = np.tile(np.arange(0, BOUND, BOUND // ROW), step)
        values = np.repeat(np.arange(step, dtype=np.float32) % 1000, ROW)
        for _ in range(0, ROWS, step):
            writer.append(np.full(step, ROW), indices, values)
    SparseMatrix(path).gather(np.arange(3))  # compiles what children load
    return path


CACHE = """
from xmc_stream.system.memory import peak_resident, resident
from xmc_stream.store.matrix import SparseMatrix
import numpy as np
def set_cache(path, state):
    for file in Path(path).rglob("c/*"):
        fd = os.open(file, os.O_RDONLY)
        if state == "cold":
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            while os.read(fd, 1 << 20):
                pass
        os.close(fd)
"""
STREAM = (
    CACHE
    + """
ends = {}
for cache in ("warm", "cold"):
    set_cache(sys.argv[1], cache)
    matrix = SparseMatrix(sys.argv[1])
    before, total, rows = resident(), 0.0, 0
    for block in matrix.blocks(8 << 20):
        total += float(block.values.sum(dtype=np.float64))
        rows += block.n
    del block
    ends[cache] = [peak_resident() - before, matrix.bytes_read, rows, total]
print(json.dumps(ends))
"""
)
GATHER = (
    CACHE
    + """
matrix = SparseMatrix(sys.argv[1])
matrix.gather(np.arange(2))  # loads its kernel
rows = np.sort(np.random.default_rng(0).choice(matrix.n_lines, 10_000, replace=False))
before, ends = resident(), {}
for cache in ("cold", "warm"):
    set_cache(sys.argv[1], cache)
    block = matrix.gather(rows)
    ends[cache] = [peak_resident() - before, len(block.indices) * matrix.entry_bytes]
    right = bool((block.values.reshape(10_000, -1) == (rows % 1000)[:, None]).all())
    ends[cache].append(right)
    del block
print(json.dumps(ends))
"""
)


@pytest.mark.slow
@on_linux
def test_streaming_a_store_takes_a_block_and_not_the_store(large: Path) -> None:
    for cache, (growth, bytes_read, rows, total) in child(STREAM, large).items():
        assert rows == ROWS
        assert total == ROWS // 1000 * ROW * sum(range(1000))
        assert bytes_read > 95 * MB
        assert growth < 40 * MB, cache


@pytest.mark.slow
@on_linux
def test_gathering_random_rows_takes_their_bytes_and_not_the_pages_around(large: Path) -> None:
    for cache, (growth, row_bytes, right) in child(GATHER, large).items():
        assert right
        assert row_bytes == 10_000 * ROW * 8
        assert growth < row_bytes + 8 * MB, cache


def test_the_least_limit_is_part_of_a_refusal_and_goes_with_it_to_other_processes() -> None:
    error = pickle.loads(pickle.dumps(MemoryLimitError("it needs more", 1_000_001)))
    assert (error.args[0], error.least) == ("it needs more", 1_000_001)
    assert error.in_shell == "it needs more: set --memory-limit to 2MB or more"
    assert str(error) == "it needs more: set memory_limit to 2MB or more"
    assert (MemoryLimitError("why").least, MemoryLimitError("why").in_shell) == (None, "why")
