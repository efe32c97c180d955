"""Predictions on disk: `labels` (n x k, -1 where fewer than k) and `scores` (n x k, float32), written by row ranges."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import Crc32cCodec

from xmc_stream.errors import InputError, StoreError
from xmc_stream.stop import stop_if_unwanted
from xmc_stream.store.encoding import index_dtype, naming, publish
from xmc_stream.store.inventory import seal

FORMAT = "xmc_stream predictions"
CHUNK_ROWS = 4096  # jobs write whole chunks, so they never share one


class Predictions:
    """Opened predictions: n_samples, k, and rows of labels and scores."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            group = zarr.open_group(self.path, mode="r")
        except (FileNotFoundError, ValueError, zarr.errors.GroupNotFoundError):
            raise StoreError(
                f"{path} holds no predictions: make them with `xmc-stream predict MODEL DATA {path}`"
            ) from None
        self.attributes = dict(group.attrs)
        if self.attributes.get("format") != FORMAT:
            raise StoreError(f"{path} is a zarr group but holds no predictions of xmc_stream")
        self._labels, self._scores = group["labels"], group["scores"]
        for name in ("labels", "scores"):
            if group[name].nchunks_initialized < group[name].nchunks:  # type: ignore[union-attr]
                raise StoreError(f"{path}/{name} lacks chunks: it is damaged; predict again")
        self.n_samples, self.k = (int(n) for n in self._labels.shape)  # type: ignore[union-attr]

    def rows(self, start: int, stop: int) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """Labels and scores of rows [start, stop)."""
        try:
            return np.asarray(self._labels[start:stop]), np.asarray(self._scores[start:stop])  # type: ignore[index]
        except ValueError as error:
            raise StoreError(f"{self.path} cannot be read ({error}): it is damaged; predict again") from None

    def blocks(self) -> Iterator[tuple[int, NDArray[Any], NDArray[np.float32]]]:
        """First row, labels and scores of a few thousand rows at a time."""
        for start in range(0, self.n_samples, CHUNK_ROWS):
            yield start, *self.rows(start, min(start + CHUNK_ROWS, self.n_samples))


def begin_predictions(path: Path, n_samples: int, n_labels: int, k: int) -> Path:
    """Empty arrays under a work name, which is returned."""
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
        raise InputError(f"{path} exists: give another name, or --overwrite to replace it")
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
    zarr.open_group(work, mode="r+").update_attributes({"format": FORMAT, **attributes})
    seal(work)
    publish(work, path)
