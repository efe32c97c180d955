"""Merging of sorted words, against dictionaries."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from xmc_stream.convert.kernels.words import FIRST, ROWS, TIMES
from xmc_stream.convert.tfidf import vocabulary
from xmc_stream.convert.tfidf.table import WordTable, terms_of
from xmc_stream.convert.tfidf.vocabulary import SortedRun, write_sorted_run
from xmc_stream.runtime.job import Notes, run_here

LETTERS = ["a", "b", "z", "é", "日", "𝄞"]


def run_of(folder: Path, words: list[str]) -> SortedRun:
    """A run of different words, numbered as they come; each occurs in as many rows as it has characters."""
    table = WordTable()
    table.numbers(terms_of(words))
    rows = np.array([len(word) for word in words], np.int64)
    for which, values in ((ROWS, rows), (TIMES, 2 * rows), (FIRST, np.arange(len(words)))):
        table.words.counts[: len(words), which] = values
    return write_sorted_run(folder, table, 0)


def test_levels_give_the_order_of_all_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words, sums and the place of each word of a run are those of a sorted dictionary."""
    monkeypatch.setattr(vocabulary, "MERGED", 3)
    monkeypatch.setattr(vocabulary, "WINDOW", 7)
    monkeypatch.setattr(vocabulary, "WINDOW_BYTES", 40)
    rng = np.random.default_rng(5)
    drawn = ["".join(rng.choice(LETTERS, rng.integers(1, 9))) for _ in range(600)]
    lists = [
        list(dict.fromkeys(rng.choice(drawn[i:], n).tolist())) for i, n in enumerate((300, 1, 90, 40, 200, 3, 150))
    ]
    lists[3] = [word for word in lists[3] if word < "b"]  # one that ends early
    runs = [run_of(tmp_path / str(i), words) for i, words in enumerate(lists)]
    result, maps = run_here(vocabulary.merged(tmp_path, "words", runs), Notes())  # type: ignore[misc]
    order = sorted({word for words in lists for word in words}, key=str.encode)
    assert [word.decode() for window, _ in result.windows() for word in window] == order
    rows = Counter({word: sum(len(word) for words in lists if word in words) for word in order})
    counts = result.counts(0, result.n)
    for which, times in ((ROWS, 1), (TIMES, 2)):
        assert counts[:, which].tolist() == [times * rows[word] for word in order]
    firsts = [min(words.index(word) for words in lists if word in words) for word in order]
    assert counts[:, FIRST].tolist() == firsts
    np.arange(len(order), dtype=np.int64).tofile(tmp_path / "ids")
    for words, run, of_run in zip(lists, runs, maps, strict=True):
        places, _ = vocabulary.chosen(run, of_run, tmp_path)
        assert places.tolist() == [order.index(word) for word in words]
