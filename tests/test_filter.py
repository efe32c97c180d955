"""Filter files: hostile text, and pairs left out of predictions, true labels and every figure."""

from __future__ import annotations

import gzip
import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.executed import predicted
from helpers.problems import tight
from helpers.rankings import every_score, only, pairs_csr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import label_metrics as twin
from reference import metrics as ranking_twin

import xmc_stream as xs
from xmc_stream.convert.formats.pairs import store_pairs
from xmc_stream.errors import InputError, MemoryLimitError
from xmc_stream.metrics import leave_out_labels, leave_out_predictions
from xmc_stream.models import Execution
from xmc_stream.runtime.plan import Cuts
from xmc_stream.store.matrix import SparseMatrix
from xmc_stream.store.predictions import Predictions, begin_predictions, finish_predictions, write_predictions
from xmc_stream.system.memory import MemoryLimit, resident

LIMIT = MemoryLimit(4 * 10**9)
Pairs = list[tuple[int, int]]


def read_back(path: Path) -> tuple[Pairs, tuple[int, int]]:
    matrix = SparseMatrix(path)
    block = matrix.block(0, matrix.n_lines)
    rows = np.repeat(np.arange(block.n), np.diff(block.indptr))
    assert block.data is None
    return list(zip(rows.tolist(), block.indices.tolist(), strict=True)), matrix.shape


def store(tmp_path: Path, text: bytes, n: int = 5, k: int = 9) -> tuple[Pairs, tuple[int, int]]:
    (tmp_path / "f.txt").write_bytes(text)
    store_pairs(tmp_path / "f.txt", tmp_path / "filter", n, k, LIMIT)
    return read_back(tmp_path / "filter")


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 8)), max_size=30), st.sampled_from([b"\n", b"\r\n", b"\n\n"]),
    st.sampled_from([b" ", b"\t", b"  "]), st.booleans(),
)  # fmt: skip
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pairs_in_any_order_are_stored_once_and_sorted(
    tmp_path: Path, pairs: Pairs, end: bytes, blank: bytes, zipped: bool
) -> None:
    text = end.join(b"%d%s%d" % (row, blank, label) for row, label in pairs)
    got, shape = store(tmp_path, gzip.compress(text) if zipped else text)
    assert got == sorted(set(pairs))
    assert shape == (5, 9)


def test_more_pairs_than_are_handled_at_a_time(tmp_path: Path) -> None:
    n, k = 70_000, 50
    keys = np.random.default_rng(0).integers(0, n * k, 200_000)
    keys = np.concatenate([keys, keys[:1000], np.arange(69_999 * k, n * k)])
    got, _ = store(tmp_path, "".join(f"{key // k} {key % k}\n" for key in keys.tolist()).encode(), n, k)
    assert got == [divmod(key, k) for key in sorted(set(keys.tolist()))]


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        (b"0 1\n5 1\n", 2, "row 5 is not below 5"),
        (b"0 1\n0 9\n", 2, "label 9 is not below 9"),
        (b"0 1\n\n1\n", 3, "'1' is not a pair"),
        (b"0 1 2\n", 1, "'0 1 2' is not a pair"),
        (b"0,1\n", 1, "not a pair"),
        (b"-1 2\n", 1, "'-1 2' is not a pair"),
        (b"0 1.0\n", 1, "not a pair"),
        (b"0 1_0\n", 1, "not a pair"),
        (b"0 " + "\u0661".encode() + b"\n", 1, "not a pair"),
        (b"0 1\n\x00\xff\n", 2, "not a pair"),
        (b"0 1" + b"0" * 30 + b"\n", 1, "not a pair"),
        (b"0 " + b"9" * 17 + b"\n", 1, "is not below 9"),
        (b"0 1\n" + b"1" * 5000, 2, "not a pair"),
        (b"0 1\n1 " + b" " * 993 + b"2 23 4\n", 2, "not a pair"),
        (gzip.compress(b"0 1\n" * 50_000, mtime=0)[:-30], 2, "gzip data"),
        (gzip.compress(b"0 1\n", mtime=0)[:6], 1, "gzip data"),
    ],
)
def test_what_is_no_pair_is_named_by_file_and_line(tmp_path: Path, text: bytes, line: int, word: str) -> None:
    with pytest.raises(InputError) as caught:
        store(tmp_path, text)
    message = str(caught.value)
    assert message.isprintable()
    assert word in message
    where = message.partition(": ")[0]
    assert where.rpartition(":")[0] == str(tmp_path / "f.txt")
    assert int(where.rpartition(":")[2]) >= line
    assert [path.name for path in tmp_path.iterdir()] == ["f.txt"]


@given(st.binary(max_size=40) | st.text("0189 \t\r\n-", max_size=30).map(str.encode))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_pairs_or_an_input_error(tmp_path: Path, text: bytes) -> None:
    said = ""
    try:
        got, _ = store(tmp_path, text)
    except InputError as error:
        said = str(error)
    assert said.isprintable()
    if said:
        return
    lines = [line.split() for line in text.split(b"\n")]
    assert got == sorted({(int(line[0]), int(line[1])) for line in lines if line})


def test_a_file_that_is_not_there_and_one_too_large_for_the_limit(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        store_pairs(tmp_path / "none", tmp_path / "filter", 5, 9, LIMIT)
    with pytest.raises(InputError, match="cannot be read"):
        store_pairs(tmp_path, tmp_path / "filter", 5, 9, LIMIT)
    (tmp_path / "f.txt").write_text("0 1\n" * 300_000)
    # half of what the pairs need is left, the reserve (24 MiB and a part of the limit) apart
    small = MemoryLimit(int((max(resident(), 200 * 2**20) + 24 * 2**20 + 20 * 300_000 // 2) * 32 / 31))
    assert small.budget() > 0
    with pytest.raises(MemoryLimitError, match=r"f\.txt"):
        store_pairs(tmp_path / "f.txt", tmp_path / "filter", 5, 9, small)


STORE = """
import json, sys
from pathlib import Path
from xmc_stream.convert.formats.pairs import store_pairs
from xmc_stream.system.memory import MemoryLimit, peak_resident, resident
import xmc_stream.store.encoding
limit = MemoryLimit.kept(10**9)
before = resident()
folder = Path(sys.argv[1])
store_pairs(folder / "f.txt", folder / "filter", 1000, 1000, limit)
print(json.dumps(peak_resident() - before))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measured by /proc/self/status")
def test_storing_pairs_takes_what_was_planned(tmp_path: Path) -> None:
    n = 1_000_000
    with open(tmp_path / "f.txt", "w") as file:
        file.writelines(f"{i} {j}\n" for i in reversed(range(1000)) for j in range(1000))
    done = subprocess.run([sys.executable, "-c", STORE, tmp_path], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 20 * n + 12 * 2**20  # and the chunks being written
    assert SparseMatrix(tmp_path / "filter").nnz == n


@st.composite
def rows_and_pairs(draw: st.DrawFn) -> tuple[list[set[int]], list[set[int]]]:
    n, labels = draw(st.integers(0, 6)), st.sets(st.integers(0, 7))
    return [draw(labels) for _ in range(n)], [draw(labels) for _ in range(n)]


@given(rows_and_pairs(), st.data())
def test_leaving_out_agrees_with_the_twin(problem: Any, data: st.DataObject) -> None:
    rows, barred = problem
    pairs = {(i, label) for i, labels in enumerate(barred) for label in labels}
    indptr, indices = leave_out_labels(*pairs_csr(rows), *pairs_csr(barred))
    assert [indices[a:b].tolist() for a, b in itertools.pairwise(indptr)] == twin.without(
        [sorted(row) for row in rows], pairs
    )
    width = 8
    ranked = [data.draw(st.permutations(sorted(row))) for row in rows]
    labels = np.array([row + [-1] * (width - len(row)) for row in ranked], np.int32).reshape(len(rows), width)
    assert leave_out_predictions(labels, *pairs_csr(barred)).tolist() == twin.without(ranked, pairs, width)


# ---- of a model


@pytest.fixture(scope="module")
def problem(
    small: Path, trained: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, xs.Dataset, Path, set[tuple[int, int]]]:
    """A model, its test set, and a filter: some best labels, some true ones, all but two labels of row 7."""
    folder = tmp_path_factory.mktemp("filter")
    test = xs.open_dataset(small.with_name("small-test.xmc"))
    best, _ = xs.load_model(trained).predict_topk(test, 3, memory_limit="2GB")
    truth = test.Y_rows().block(0, test.n_samples)
    pairs = {(i, int(best[i, i % 3])) for i in range(0, test.n_samples, 2)}
    pairs |= {(i, int(truth.indices[truth.indptr[i]])) for i in range(100) if truth.indptr[i] < truth.indptr[i + 1]}
    pairs |= {(7, label) for label in range(1100) if label not in (400, 1050)}
    lines = [f"{row} {label}\n" for row, label in pairs]
    (folder / "f.txt").write_text("".join(lines + lines[:5]))
    return trained, test, folder / "f.txt", pairs


def test_barred_labels_make_room_for_others(problem: Any, tmp_path: Path) -> None:
    path, test, file, pairs = problem
    model = xs.load_model(path)
    full, full_scores = model.predict_topk(test, 1100, memory_limit="4GB")
    expected = leave_out_predictions(full, *pairs_csr([{lb for r, lb in pairs if r == i} for i in range(len(full))]))
    for execution in (Execution("2GB", 2), Execution(tight(), 1), Execution("2GB", 2, cuts=Cuts(rows=13))):
        predicted(model, test, tmp_path / "p", 5, execution, overwrite=True, filter=file)
        labels, scores = Predictions(tmp_path / "p").rows(0, test.n_samples)
        assert np.array_equal(labels, expected[:, :5])
        of_label = np.zeros_like(full_scores)
        np.put_along_axis(of_label, full, full_scores, axis=1)
        kept = np.where(labels >= 0, np.take_along_axis(of_label, labels.clip(min=0), axis=1), -np.inf)
        assert np.array_equal(scores, kept)
    assert sorted(labels[7, :2].tolist()) == [400, 1050]
    assert labels[7, 2:].tolist() == [-1, -1, -1]
    assert Predictions(tmp_path / "p").attributes["filter"] == "f.txt"
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


@pytest.mark.slow
def test_every_figure_is_that_of_data_without_the_pairs(problem: Any, tmp_path: Path) -> None:
    path, test, file, pairs = problem
    scores, Y = every_score(xs.load_model(path), test)
    for row, label in pairs:
        scores[row, label], Y[row, label] = -np.inf, False
    true = [set(np.flatnonzero(y).tolist()) for y in Y]
    ranked = [[int(lb) for lb in np.lexsort((np.arange(1100), -row))[:5] if row[lb] > -np.inf] for row in scores]
    ranked = [row + [-1] * (5 - len(row)) for row in ranked]
    expected = ranking_twin.ranking_figures(ranked, true, (1, 3, 5), None)
    expected |= twin.label_figures(scores.tolist(), true, 0.0, 1100)
    expected["average_auc"] = float(sum(twin.row_auc(scores[i].tolist(), y) for i, y in enumerate(true)) / len(true))
    expected["n_samples"] = test.n_samples
    got = xs.evaluate(path, test, memory_limit="2GB", filter=file)
    # pairs of the filter score -inf, as labels without training rows do: the twin puts them below these
    assert got.pop("average_auc") == pytest.approx(expected.pop("average_auc"), rel=1e-4)
    assert got == pytest.approx(expected, rel=1e-9)
    got = xs.evaluate(path, test, memory_limit="2GB", filter=file)
    assert only(got) != only(xs.evaluate(path, test, memory_limit="2GB"))
    # stored predictions, made with the filter or with room for what it takes away
    rankings = {name: value for name, value in got.items() if "@" in name or name == "n_samples"}
    model = xs.load_model(path)
    for name, k, pairs_file in (("with", 5, file), ("wide", 1100, None)):
        xs.predict(model, test, tmp_path / name, k, memory_limit="4GB", filter=pairs_file)
        assert xs.evaluate(tmp_path / name, test, filter=file) == rankings


def test_predictions_that_the_filter_leaves_too_short_are_refused(small: Path, tmp_path: Path) -> None:
    test = xs.open_dataset(small.with_name("small-test.xmc"))
    work = begin_predictions(tmp_path / "p", test.n_samples, 1100, 4)
    labels = np.tile(np.array([3, 1, 4, 2]), (test.n_samples, 1))
    labels[5] = [1, 3, -1, -1]  # more than these were not to be had
    write_predictions(work, 0, labels, np.zeros(labels.shape, np.float32))
    finish_predictions(work, tmp_path / "p", {}, False)
    file = tmp_path / "f.txt"
    file.write_text("5 1\n5 3\n")
    xs.evaluate(tmp_path / "p", test, ks=(4,), filter=file)
    file.write_text("9 1\n9 2\n8 4\n")
    xs.evaluate(tmp_path / "p", test, ks=(2,), filter=file)
    with pytest.raises(InputError, match=r"row 9 of .* fewer than 3 of its 4 predictions.*k 5 or more"):
        xs.evaluate(tmp_path / "p", test, ks=(1, 3), filter=file)


def test_a_bad_filter_ends_each_command_in_one_line(problem: Any, tmp_path: Path, commands: Callable[..., Any]) -> None:
    path, test, file, _ = problem
    bad = tmp_path / "bad.txt"
    bad.write_text("0 1\n300 1\n")
    out = tmp_path / "p"
    assert f"{bad}:2: row 300 is not below 300" in commands(
        "predict", path, test.path, out, "--filter", bad, fails=True
    )
    assert [path.name for path in tmp_path.iterdir()] == ["bad.txt"]
    assert f"{bad}:2: row 300" in commands("evaluate", path, test.path, "--filter", bad, fails=True)
    commands("predict", path, test.path, out, "--filter", file, "-k", 3)
    figures = commands("evaluate", out, test.path, "--filter", file, "-k", 3)
    assert figures == xs.evaluate(out, test, ks=(3,), filter=file)
