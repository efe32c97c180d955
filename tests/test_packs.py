"""Packs: arrays and matrices in one file are read as those in folders are, and no damage of one goes unseen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from xmc_stream.errors import StoreError
from xmc_stream.kernels import csr
from xmc_stream.ppdsparse.state import UnitState, new_unit_state
from xmc_stream.store import encoding
from xmc_stream.store.chunks import open_array, read_small
from xmc_stream.store.encoding import PackedMatrixWriter, new_matrix, new_pack, pack_damage
from xmc_stream.store.matrix import SparseMatrix
from xmc_stream.store.nodes import plain_array

CHUNK = 64  # bytes, so that few values are several chunks


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "PACK_CHUNK_BYTES", CHUNK)


@settings(max_examples=60)
@given(st.data())
def test_arrays_that_grow_beside_each_other_come_back(tmp_path_factory: Any, data: st.DataObject) -> None:
    path: Path = tmp_path_factory.mktemp("pack") / "p"
    kinds = ("int32", "int64", "float32", "float64")
    written: dict[str, list[Any]] = {kind: [] for kind in kinds}
    with new_pack(path) as pack:
        writers = {kind: encoding.PackedArrayWriter(pack, f"in/{kind}", kind) for kind in kinds}
        for kind, n in data.draw(st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 50)), max_size=12)):
            values = np.arange(len(written[kind]), len(written[kind]) + n).astype(kind)
            writers[kind].append(values)
            written[kind] += values.tolist()
        for writer in writers.values():
            writer.close()
    assert pack_damage(path) == ""
    for kind, values in written.items():
        array = open_array(path / "in" / kind)
        assert (array.dtype, array.size) == (np.dtype(kind), len(values))
        assert array.n_chunks == -(-len(values) * array.dtype.itemsize // CHUNK)
        low, high = sorted(data.draw(st.tuples(st.integers(0, len(values)), st.integers(0, len(values)))))
        assert array.read(low, high).tolist() == values[low:high]
        assert read_small(path / "in", kind, len(values), kind, slice(low, high)).tolist() == values[low:high]
        array.will_need(low, high)


def test_a_pack_that_is_written_again_is_read_anew(tmp_path: Path) -> None:
    """Also where it is as large as the one before, and may have its number."""
    for name, before in (("a", "none"), ("b", "a"), ("c", "b")):
        with new_pack(tmp_path / "p") as pack:
            writer = encoding.PackedArrayWriter(pack, name, "int64")
            writer.append(np.array([ord(name)]))
            writer.close()
        assert open_array(tmp_path / "p" / name).read(0, 1).tolist() == [ord(name)]
        assert plain_array(tmp_path / "p" / before) is None


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.data())
def test_a_matrix_is_read_as_one_in_folders(tmp_path_factory: Any, seed: int, data: st.DataObject) -> None:
    folder: Path = tmp_path_factory.mktemp("pack")
    rng = np.random.default_rng(seed)
    n, bound = int(rng.integers(1, 40)), int(rng.integers(1, 40))
    matrix = sp.random(n, bound, rng.random(), "csr", np.float32, rng)
    matrix.sort_indices()
    with new_pack(folder / "p") as pack, new_matrix(folder / "m", "csr_matrix", (n, bound)) as plain:
        packed = PackedMatrixWriter(pack, "matrix", "csr_matrix", (n, bound), np.float32)
        for writer in (packed, plain):
            writer.append(np.diff(matrix.indptr), matrix.indices, matrix.data)
        packed.close()
    lines = np.array(sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1))))
    answers = []
    for path in (folder / "p" / "matrix", folder / "m"):
        opened = SparseMatrix(path)
        blocks = [opened.block(0, n), opened.gather(lines), *opened.blocks(16 * bound)]
        answers.append([(b.indptr.tolist(), b.indices.tolist(), b.values.tolist()) for b in blocks])
        assert (opened.shape, opened.nnz, opened.encoding) == ((n, bound), matrix.nnz, "csr_matrix")
    assert answers[0] == answers[1]


def test_nothing_is_asked_of_a_kernel_where_there_is_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with new_pack(tmp_path / "p") as pack:
        writer = PackedMatrixWriter(pack, "matrix", "csr_matrix", (3, 5), np.float32)
        writer.append(np.zeros(3, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32))
        writer.close()
    matrix = SparseMatrix(tmp_path / "p" / "matrix")
    spans = matrix.lengths(np.array([0, 2]))
    monkeypatch.setattr(csr, "pread_ranges", None)
    block = matrix.gather(np.array([0, 2]), None, spans)
    assert (block.indptr.tolist(), len(block.indices), len(block.values)) == ([0, 0, 0], 0, 0)


def state(path: Path) -> Path:
    with new_unit_state(path, 3, 20, 30) as writer:
        writer.active.append(np.array([2, 0, 1]), np.array([3, 7, 19]), np.array([0.5, 1.5, 2.5]))
        writer.weights.append(np.array([0, 20, 1]), np.arange(21) % 20, np.arange(21, dtype=np.float32))
    return path


def test_every_flipped_byte_and_every_cut_is_seen(tmp_path: Path) -> None:
    path = state(tmp_path / "s")
    content = path.read_bytes()
    unseen = []
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 8]) + content[at + 1 :])
        if not pack_damage(path):
            unseen.append(at)
        path.write_bytes(content[:at])
        assert pack_damage(path)
    path.write_bytes(content)
    # what is seen of no flip fills up to a multiple of eight between two chunks
    assert pack_damage(path) == ""
    assert not any(content[at] for at in unseen)
    assert len(unseen) < len(content) // 10
    path.unlink()
    assert "cannot be read" in pack_damage(path)


def test_a_damaged_or_missing_state_is_an_error_of_one_line(tmp_path: Path) -> None:
    path = state(tmp_path / "s")
    assert UnitState(path, 3, 20, 30).active.block(0, 3).indices.tolist() == [3, 7, 19]
    os.truncate(path, 100)
    with pytest.raises(StoreError, match=f"{path} fails its checksum"):
        UnitState(path, 3, 20, 30)
    path.unlink()
    with pytest.raises(StoreError, match="is not what it must be"):
        UnitState(path, 3, 20, 30)


def test_what_is_no_member_is_not_there(tmp_path: Path) -> None:
    path = state(tmp_path / "s")
    for name in ("nothing", "active", "active/nothing", "figures/indptr"):
        assert plain_array(path / name) is None
    assert plain_array(tmp_path / "nothing" / "figures") is None


def test_a_pack_takes_its_name_when_it_is_whole(tmp_path: Path) -> None:
    (tmp_path / "s.partial").write_bytes(b"of a writer that was killed")
    with pytest.raises(ValueError, match="stop"), new_pack(tmp_path / "s"):
        raise ValueError("stop")
    assert list(tmp_path.iterdir()) == []
    for left in ("s", "s.partial"):  # by an earlier release
        (tmp_path / left / "figures").mkdir(parents=True)
    with new_pack(tmp_path / "s") as pack:
        pack.write("figures", np.arange(3))
    assert read_small(tmp_path / "s", "figures", 3, np.int64).tolist() == [0, 1, 2]
    with new_pack(tmp_path / "s") as pack:
        pack.write("figures", np.arange(4))
    assert read_small(tmp_path / "s", "figures", 4, np.int64).tolist() == [0, 1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_fewer_lines_than_promised_are_refused(tmp_path: Path) -> None:
    promised = pytest.raises(StoreError, match="active: 0 lines were written where 3 were promised")
    with promised, new_unit_state(tmp_path / "s", 3, 20, 30):
        pass
    assert list(tmp_path.iterdir()) == []


def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What is made durable from now on, file or folder, in turn."""
    paths: list[Path] = []
    fsync = os.fsync

    def noted(fd: int) -> None:
        paths.append(Path(os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    return paths


def test_a_state_is_durable_before_it_has_its_name_and_its_name_when_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = synced(monkeypatch)
    state(tmp_path / "s")
    assert paths == [tmp_path / "s.partial", tmp_path]
    with new_unit_state(tmp_path / "scratch", 0, 20, 30, durable=False):
        pass
    assert len(paths) == 2
