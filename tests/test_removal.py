"""Old state goes while a run goes on, and what then has its name stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from xmc_stream.store import removal
from xmc_stream.store.encoding import remove_tree
from xmc_stream.store.removal import remove_beside, wait_for_removals


def folder(path: Path, n: int = 3) -> Path:
    (path / "in").mkdir(parents=True)
    for i in range(n):
        (path / "in" / str(i)).write_bytes(bytes(10))
    return path


def test_a_name_is_free_at_once_and_all_is_gone_in_the_end(tmp_path: Path) -> None:
    remove_beside(folder(tmp_path / "a", 500), folder(tmp_path / "b"), tmp_path / "was never there")
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "b").exists()
    folder(tmp_path / "a")
    wait_for_removals()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert len(list((tmp_path / "a" / "in").iterdir())) == 3


def test_what_a_thread_did_not_come_to_goes_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the process had been killed between the two."""
    with monkeypatch.context() as patch:
        patch.setattr(removal, "remove_tree", lambda path: None)
        remove_beside(folder(tmp_path / "a", 5))
        wait_for_removals()
    assert [path.name for path in tmp_path.iterdir()] == ["a.old"]
    remove_beside(folder(tmp_path / "a"))
    wait_for_removals()
    assert not list(tmp_path.iterdir())
    remove_tree(tmp_path / "a.old")  # which is not there
