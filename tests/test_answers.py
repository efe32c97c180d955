"""Answers about a dataset that are kept: asked once, for the same question, while the dataset is in memory."""

from __future__ import annotations

import gc
from weakref import ref

import numpy as np
import pytest
import scipy.sparse as sp

import xmc_stream as xs
from xmc_stream.store.answers import last_answer_kept
from xmc_stream.store.dataset import Dataset


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    X = sp.csr_matrix(np.eye(4, dtype=np.float32))
    return str(xs.convert(X, tmp_path_factory.mktemp("answers") / "d.xmc", labels=X).path)


def test_the_last_answer_is_given_again_to_the_same_question_about_the_same_dataset(path: str) -> None:
    asked: list[tuple[Dataset, list[int], int]] = []

    @last_answer_kept
    def question(dataset: Dataset, some: list[int], more: int = 0) -> int:
        asked.append((dataset, some, more))
        if more < 0:
            raise ValueError("below zero")
        return len(asked)

    one, other = Dataset(path), Dataset(path)
    assert [question(one, [1]), question(one, [1])] == [1, 1]
    assert [question(one, [1], 2), question(one, [1], more=2), question(one, [3]), question(one, [1])] == [2, 3, 4, 5]
    assert [question(other, [1]), question(other, [1]), question(one, [1])] == [6, 6, 5]
    for _ in range(2):
        with pytest.raises(ValueError, match="below zero"):
            question(one, [], -1)
    assert len(asked) == 8


def test_an_answer_keeps_no_dataset(path: str) -> None:
    has = last_answer_kept(lambda dataset: dataset.n_samples)
    dataset = Dataset(path)
    assert has(dataset) == 4
    gone = ref(dataset)
    del dataset
    gc.collect()
    assert gone() is None
