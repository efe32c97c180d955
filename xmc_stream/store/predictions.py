"""Predictions on disk: `labels` (n x k, -1 where fewer than k) and `scores` (n x k, float32), written by row ranges."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream import flags
from xmc_stream.errors import InputError, StoreError
from xmc_stream.store.encoding import index_dtype
from xmc_stream.store.inventory import StoredArrays, array_files, is_of_format, seal
from xmc_stream.store.names import Names, open_row_ids
from xmc_stream.store.nodes import ZARR_ERRORS, Group, not_understood
from xmc_stream.store.places import naming, publish
from xmc_stream.store.remote import is_mirrored
from xmc_stream.system.stop import stop_if_unwanted

FORMAT = "xmc_stream predictions"
CHUNK_ROWS = 4096  # jobs write whole chunks, so they never share one


class Predictions(StoredArrays):
    """Opened predictions: n_samples, k, and rows of labels and scores.

    Raises StoreError where they are damaged, or chunk files are not those that were written; labels are -1 and more.
    """

    def __init__(self, path: str | Path) -> None:
        if is_mirrored(path):
            raise StoreError(f"{path}: predictions are not read from a URL: `xmc-stream copy` them to a folder")
        self.path = Path(path)
        missing = f"holds no predictions: make them with `xmc-stream predict MODEL DATA {path}`"
        self._open(path, FORMAT, 0, missing, "holds no predictions of xmc_stream")
        import zarr

        try:
            described = [array_files(self.path / name / "zarr.json")[0] for name in ("labels", "scores")]
            arrays: list[Any] = [zarr.open_array(self.path / name, mode="r") for name in ("labels", "scores")]
        except StoreError:
            raise
        except ZARR_ERRORS as error:
            raise not_understood(self.path, error) from None
        self._labels, self._scores = arrays
        shape: tuple[int, ...] = self._labels.shape
        whole = len(shape) == 2 and shape[1] > 0
        types = self._labels.dtype in (np.int32, np.int64) and self._scores.dtype == np.float32
        chunks = (min(CHUNK_ROWS, max(shape[0], 1)), shape[1]) if whole else ()
        if not types or any((array.shape, array.chunks) != (shape, chunks) for array in arrays):
            raise StoreError(f"{path}: its arrays are not those of predictions: it is damaged; predict again")
        self.n_samples, self.k = shape
        for array in described:
            try:
                line = next(array.other_chunks(), "") if array is not None else f"{path} has a group for an array"
            except OSError as error:
                raise not_understood(self.path, error) from None
            if line:
                raise StoreError(f"{line}: it is damaged; predict again")

    def rows(self, start: int, stop: int) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """Labels and scores of rows [start, stop)."""
        try:
            labels, scores = np.asarray(self._labels[start:stop]), np.asarray(self._scores[start:stop])
        except ZARR_ERRORS as error:
            raise not_understood(self.path, error) from None
        if labels.size and labels.min() < -1:
            raise StoreError(f"{self.path} has labels below -1: it is damaged; predict again")
        return labels, scores

    def row_ids(self) -> Names | None:
        """The own ids of the rows that were predicted for, None where they have none. Raises StoreError."""
        return open_row_ids(self.path, self.n_samples)

    def blocks(self) -> Iterator[tuple[int, NDArray[Any], NDArray[np.float32]]]:
        """First row, labels and scores of a few thousand rows at a time."""
        for start in range(0, self.n_samples, CHUNK_ROWS):
            yield start, *self.rows(start, min(start + CHUNK_ROWS, self.n_samples))


def is_predictions(path: Path) -> bool:
    """Whether a folder says it holds predictions."""
    return is_of_format(path, FORMAT)


def begin_predictions(path: Path, n_samples: int, n_labels: int, k: int) -> Path:
    """Empty arrays under a work name, which is returned."""
    import zarr
    from zarr.codecs import Crc32cCodec

    work = path.with_name(path.name + ".partial")
    shutil.rmtree(work, ignore_errors=True)
    group = zarr.create_group(work)
    # zarr leaves out chunks of nothing but the fill value: one that no prediction has, so that what lacks is damage
    for name, dtype, fill_value in (("labels", index_dtype(n_labels), -2), ("scores", np.dtype(np.float32), np.nan)):
        group.create_array(
            name,
            shape=(n_samples, k),
            chunks=(min(CHUNK_ROWS, max(n_samples, 1)), k),
            dtype=dtype,
            compressors=[Crc32cCodec()],
            filters=None,
            fill_value=fill_value,
        )
    return work


def write_predictions(work: Path, start: int, labels: NDArray[np.int64], scores: NDArray[np.float32]) -> None:
    """Fill in rows from `start` on: whole chunks, or up to the last row."""
    import zarr

    stop_if_unwanted()
    group = zarr.open_group(work, mode="r+")
    with naming(work):
        group["labels"][start : start + len(labels)] = labels  # type: ignore[index]
        group["scores"][start : start + len(scores)] = scores  # type: ignore[index]


def refuse_to_replace(path: Path, overwrite: bool, as_file: bool = False) -> None:
    """Raise InputError where something stands at `path` that predictions must not replace."""
    if not path.exists():
        return
    if not overwrite:
        raise InputError(f"{path} exists: give another name, or " + flags.OVERWRITE + " to replace it")
    try:
        fits = path.is_file() if as_file else bool(Predictions(path))
    except StoreError:
        fits = False
    if not fits:
        raise InputError(
            f"{path} exists and is something else than predictions: give another name, or remove it yourself"
        )


def finish_predictions(work: Path, path: Path, attributes: Mapping[str, Any], overwrite: bool) -> None:
    """Give the predictions their name. Raises InputError as `refuse_to_replace` does."""
    refuse_to_replace(path, overwrite)
    Group(work).update_attributes({"format": FORMAT, **attributes})
    for name in ("labels", "scores"):  # which zarr wrote
        array, _ = array_files(work / name / "zarr.json")
        if array is not None:
            array.note_crcs()
    seal(work)
    publish(work, path)
