"""One BLAS thread a job, whichever thread runs it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from threadpoolctl import ThreadpoolController, threadpool_limits

from xmc_stream.system.blas import one_blas_thread


def blas_threads() -> set[int]:
    import scipy.linalg  # noqa: F401 (brings a BLAS of its own)

    return {library["num_threads"] for library in ThreadpoolController().info() if library["user_api"] == "blas"}


def inside() -> set[int]:
    with one_blas_thread():
        return blas_threads()


def test_every_thread_has_one_and_what_was_set_comes_back() -> None:
    before = blas_threads()
    if before == {1}:
        pytest.skip("BLAS has one thread on this machine")
    with one_blas_thread():
        assert blas_threads() == {1}
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        # one after the other, and not always the thread that was first
        assert one.submit(inside).result() == other.submit(inside).result() == one.submit(inside).result() == {1}
        assert inside() == {1}
        assert blas_threads() == before


def test_jobs_beside_each_other_have_one_until_the_last_has_ended() -> None:
    before, entered, first_ended = blas_threads(), Barrier(2), Barrier(2)

    def first() -> None:
        with one_blas_thread():
            entered.wait(30)
        first_ended.wait(30)

    def second() -> set[int]:
        with one_blas_thread():
            entered.wait(30)
            first_ended.wait(30)
            return blas_threads()

    with ThreadPoolExecutor(2) as pool:
        a, b = pool.submit(first), pool.submit(second)
        a.result()
        assert b.result() == {1}
    assert blas_threads() == before


def test_a_limit_that_the_user_holds_is_there_again_afterwards() -> None:
    if max(blas_threads()) < 2:
        pytest.skip("BLAS has one thread on this machine")
    with threadpool_limits(limits=2, user_api="blas"), ThreadPoolExecutor(1) as other:
        assert other.submit(inside).result() == {1}
        assert blas_threads() == {2}
