"""Active rows of many large classes on disk, by strips of rows: a group of strips is read and written with a pread a strip.

They come class after class, and leave class after class: files by class are what is put in and what comes out, a file by
strips is what streams beside X.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.blocks import ActiveSets
from xmc_stream.ppdsparse.active_rows import NO_STARTS, ScratchFile
from xmc_stream.ppdsparse.kernels.spill import (
    FRESH,
    POSITIVE,
    RECORD,
    put_back,
    put_by_class,
    put_by_strip,
    wake_records,
)
from xmc_stream.ppdsparse.kernels.stream import ActiveRows
from xmc_stream.ppdsparse.plan import SLICES, SORTED
from xmc_stream.ppdsparse.streaming import Taken
from xmc_stream.store.encoding import index_dtype


@dataclass
class _Taken(Taken):
    """Active rows that were read from disk: of which ranges of the file, and where among them each of these stood."""

    places: list[tuple[int, int]]
    read: NDArray[Any]
    source: NDArray[np.int64]


class SpilledRows:
    """Active rows of n_classes classes: `put` each in turn, then `arrange`; `collect` before `parts` are read."""

    def __init__(self, folder: Path, n_classes: int, n_samples: int, strip_bits: int) -> None:
        self.n_classes, self._n_samples, self._strip_bits = n_classes, n_samples, strip_bits
        self._n_strips = -(-n_samples >> strip_bits)
        self._slice = -(-self._n_strips // SLICES)  # strips of a slice
        n_slices = -(-self._n_strips // self._slice)
        self._begins = np.zeros((n_classes, n_slices + 1), np.int64)  # of each class's active rows in each slice
        self._of_strip = np.zeros(self._n_strips + 1, np.int64)  # where the active rows of each strip begin
        self._sleepers = np.zeros(n_classes, np.int64)
        folder.mkdir(parents=True)
        self._rows = ScratchFile(folder / "rows", index_dtype(n_samples))
        self._alpha, self._flags = ScratchFile(folder / "alpha", np.float64), ScratchFile(folder / "flags", np.uint8)
        self._records = ScratchFile(folder / "records", RECORD)
        self._n = 0

    def put(self, c: int, sets: ActiveSets, approximate: bool) -> None:
        """The active set of class c."""
        flags = np.where(sets.sign > 0, np.uint8(POSITIVE), np.uint8(0))
        if approximate:
            flags[(sets.alpha == 0.0) & (sets.sign < 0)] = FRESH
        self._rows.write(self._n, sets.rows.astype(self._rows.dtype))
        self._alpha.write(self._n, sets.alpha)
        self._flags.write(self._n, flags)
        bounds = np.arange(self._begins.shape[1]) * (self._slice << self._strip_bits)
        self._begins[c] = self._n + np.searchsorted(sets.rows, bounds)
        self._begins[c, -1] = self._n + len(sets.rows)
        self._of_strip[1:] += np.bincount(sets.rows >> self._strip_bits, minlength=self._n_strips)
        self._n += len(sets.rows)

    def arrange(self) -> None:
        """Sort all active rows by strip."""
        np.cumsum(self._of_strip, out=self._of_strip)
        for a, b in self._ranges():
            ptr, rows, alpha, flags = self._by_class(a, b)
            first, last = a * self._slice, min(b * self._slice, self._n_strips)
            out = np.empty(len(rows), RECORD)
            places = self._of_strip[first:last] - self._of_strip[first]
            put_by_strip(ptr, rows, alpha, flags, first, self._strip_bits, places, out)
            self._records.write(int(self._of_strip[first]), out)

    def collect(self) -> None:
        """Bring alpha back to the files by class."""
        for a, b in self._ranges():
            first, last = a * self._slice, min(b * self._slice, self._n_strips)
            active = self._sorted([(first, last)]).active
            for c, begin in enumerate(self._begins[:, a].tolist()):
                self._alpha.write(begin, active.alpha[active.ptr[c] : active.ptr[c + 1]])

    def _ranges(self) -> Iterator[tuple[int, int]]:
        """Ranges of slices with about as many active rows as are sorted at a time."""
        counts = (self._begins[:, 1:] - self._begins[:, :-1]).sum(axis=0)
        begin, total = 0, 0
        for k, count in enumerate(counts.tolist()):
            if k > begin and total + count > SORTED:
                yield begin, k
                begin, total = k, 0
            total += count
        yield begin, len(counts)

    def _by_class(
        self, a: int, b: int
    ) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[np.float64], NDArray[np.uint8]]:
        """ptr, rows, alpha, flags of all classes in slices [a, b)."""
        begins, ends = self._begins[:, a], self._begins[:, b]
        ptr = np.concatenate([[0], np.cumsum(ends - begins)])
        out: list[NDArray[Any]] = [
            np.empty(int(ptr[-1]), file.dtype) for file in (self._rows, self._alpha, self._flags)
        ]
        for c, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
            for file, values in zip((self._rows, self._alpha, self._flags), out, strict=True):
                file.read(begin, end, values[ptr[c] : ptr[c + 1]])
        return ptr, out[0], out[1], out[2]

    def _sorted(self, strips: list[tuple[int, int]]) -> _Taken:
        """The active rows of ranges of strips, by class."""
        places = [(int(self._of_strip[a]), int(self._of_strip[b])) for a, b in strips]
        ends = np.concatenate([[0], np.cumsum([b - a for a, b in places])])
        n = int(ends[-1])
        read = np.empty(n, RECORD)
        for (begin, end), at in zip(places, ends.tolist(), strict=False):
            self._records.read(begin, end, read[at : at + end - begin])
        each = np.concatenate([np.empty(0, np.int64), *(np.arange(a, b) for a, b in strips)])
        strip_ptr = np.concatenate([[0], np.cumsum(self._of_strip[each + 1] - self._of_strip[each])])
        active, source = ActiveRows(
            np.empty(self.n_classes + 1, np.int64), np.empty(n, self._rows.dtype), np.empty(n, np.int8), np.empty(n),
            np.empty(n, np.bool_), NO_STARTS,
        ), np.empty(n, np.int64)  # fmt: skip
        put_by_class(
            strip_ptr, each, self._strip_bits, read, active.ptr, active.rows, active.sign, active.alpha, active.asleep, source
        )  # fmt: skip
        return _Taken(active, places, read, source)

    def take(self, ranges: Sequence[tuple[int, int]]) -> Taken:
        """Ranges of whole strips."""
        return self._sorted([(a >> self._strip_bits, -(-b >> self._strip_bits)) for a, b in ranges])

    def give_back(self, taken: Taken) -> None:
        if isinstance(taken, _Taken):
            active = taken.active
            put_back(active.ptr, active.alpha, active.asleep, taken.source, taken.read, self._sleepers)
            done = 0
            for begin, end in taken.places:
                self._records.write(begin, taken.read[done : done + end - begin])
                done += end - begin

    def sleeping(self) -> NDArray[np.bool_]:
        return self._sleepers > 0

    def wake(self, classes: NDArray[np.bool_]) -> None:
        if not classes.any():
            return
        for begin in range(0, self._n, SORTED):
            records = self._records.read(begin, min(begin + SORTED, self._n))
            wake_records(classes, records)
            self._records.write(begin, records)
        self._sleepers[classes] = 0

    def fresh(self) -> tuple[int, int]:
        """Rows that an approximate search brought in, and those of them that are of use."""
        fresh = used = 0
        for begin in range(0, self._n, SORTED):
            records = self._records.read(begin, min(begin + SORTED, self._n))
            mine = (records["flags"] & FRESH) > 0
            fresh, used = fresh + int(mine.sum()), used + int((records["alpha"][mine] > 0.0).sum())
        return fresh, used

    def parts(self, c: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int8], NDArray[np.float64]]]:
        """Rows, signs, alpha of class c, ascending."""
        first, last = int(self._begins[c, 0]), int(self._begins[c, -1])
        for begin in range(first, last, SORTED):
            end = min(begin + SORTED, last)
            flags = self._flags.read(begin, end)
            sign = np.where(flags & POSITIVE, 1, -1).astype(np.int8)
            yield self._rows.read(begin, end), sign, self._alpha.read(begin, end)

    def close(self) -> None:
        """Close the files."""
        for file in (self._rows, self._alpha, self._flags, self._records):
            file.close()
