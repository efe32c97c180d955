"""Old state goes while a run goes on, and what then has its name stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from xmc_stream.store import removal
from xmc_stream.store.encoding import remove_tree
from xmc_stream.store.removal import Removal


def folder(path: Path, n: int = 3) -> Path:
    (path / "in").mkdir(parents=True)
    for i in range(n):
        (path / "in" / str(i)).write_bytes(bytes(10))
    return path


def test_a_name_is_free_at_once_and_all_is_gone_in_the_end(tmp_path: Path) -> None:
    remover = Removal()
    for _ in range(3):  # those of before are gone first: they have the same name while they go
        remover.begin(folder(tmp_path / "a"), folder(tmp_path / "b"), tmp_path / "was never there")
        assert not (tmp_path / "a").exists()
        assert not (tmp_path / "b").exists()
    folder(tmp_path / "a")
    remover.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert len(list((tmp_path / "a" / "in").iterdir())) == 3


def test_what_a_thread_did_not_come_to_goes_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the process had been killed between the two."""
    with monkeypatch.context() as patch:
        patch.setattr(removal, "remove_tree", lambda path: None)
        killed = Removal()
        killed.begin(folder(tmp_path / "a", 5))
        killed.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["a.old"]
    remover = Removal()
    remover.begin(folder(tmp_path / "a"))
    remover.wait()
    assert not list(tmp_path.iterdir())
    remove_tree(tmp_path / "a.old")  # which is not there
