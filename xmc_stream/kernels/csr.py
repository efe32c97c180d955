"""Reading, counting, scaling, transposing and selecting compressed sparse rows."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.kernels.bits import place_of
from xmc_stream.kernels.instructions import fadvise, memcpy, pread, pwrite
from xmc_stream.kernels.jit import inner_kernel, kernel

_ADVICE = hasattr(os, "posix_fadvise")
_WILL_NEED = os.POSIX_FADV_WILLNEED if _ADVICE else 0
_PAGE = 1 << 12


@kernel
def _group(
    begin: int, starts: NDArray[np.int64], counts: NDArray[np.int64], hole: int, most: int
) -> tuple[int, int, bool]:
    """Ranges from `begin` on that are read at once: their end, the item they end before, whether they have no holes.

    most: items that they may span if there are holes.
    """
    low = starts[begin]
    high = low + counts[begin]
    end = begin + 1
    dense = True
    while end < len(starts) and starts[end] - high <= hole:
        if not (dense and starts[end] == high) and starts[end] + counts[end] - low > most:
            break
        dense = dense and starts[end] == high
        high = starts[end] + counts[end]
        end += 1
    return end, high, dense


@kernel
def pread_ranges(
    fd: int,
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    itemsize: int,
    hole: int,
    ahead: int,
    piece: int,
    staging: NDArray[np.uint8],
    out: NDArray[np.uint8],
) -> bool:
    """Read items [start, start + count) of a file for each range (ascending), one after another, into `out`.

    Ranges with holes of at most `hole` items between them are read at once, by way of `staging`, as far as it holds
    them. The kernel is asked for what follows, `ahead` bytes before it is read, in pieces of at most `piece` bytes.
    Returns False when the file gives less than asked for.
    """
    most = len(staging) // itemsize
    filled = 0
    begin = 0
    asked = 0  # ranges before this one are read or asked for
    waiting = 0  # bytes asked for and not yet read, whole pages
    while begin < len(starts):
        while asked < len(starts) and waiting < ahead:
            end, high, _ = _group(asked, starts, counts, hole, most)
            if _ADVICE and asked > begin:
                for at in range(starts[asked] * itemsize, high * itemsize, piece):
                    fadvise(fd, at, min(piece, high * itemsize - at), _WILL_NEED)
            waiting += (high - starts[asked]) * itemsize + _PAGE
            asked = end
        low = starts[begin]
        end, high, dense = _group(begin, starts, counts, hole, most)
        n = (high - low) * itemsize
        waiting -= n + _PAGE
        if dense:
            if n > 0 and pread(fd, out.ctypes.data + filled, n, low * itemsize) != n:
                return False
            filled += n
        else:
            if pread(fd, staging.ctypes.data, n, low * itemsize) != n:
                return False
            while begin < end:  # ranges without a hole between them at once
                first, next_ = starts[begin], starts[begin] + counts[begin]
                begin += 1
                while begin < end and starts[begin] == next_:
                    next_ += counts[begin]
                    begin += 1
                size = (next_ - first) * itemsize
                # the assignment of a slice takes several times as long here
                memcpy(out.ctypes.data + filled, staging.ctypes.data + (first - low) * itemsize, size)
                filled += size
        begin = end
    return True


@kernel
def pwrite_lines(
    fd: int, lines: NDArray[np.int64], hole: int, staging: NDArray[np.uint8], places: NDArray[np.int64],
    values: NDArray[Any],
) -> bool:  # fmt: skip
    """Write values[places[0]], values[places[1]], ... to the lines (ascending) of a file of such lines.

    Lines with holes of at most `hole` lines between them are written at once, by way of `staging`, as far as it holds them:
    what is in the holes is read before. Returns False when the file takes or gives less than it should.
    """
    size = values.shape[1] * values.itemsize
    counts, most = np.ones(len(lines), np.int64), len(staging) // size
    begin = 0
    while begin < len(lines):
        end, high, dense = _group(begin, lines, counts, hole, most)
        if dense:
            end = min(end, begin + most)
            high = lines[end - 1] + 1
        low = lines[begin]
        n = (high - low) * size
        if not dense and pread(fd, staging.ctypes.data, n, low * size) != n:
            return False
        for t in range(begin, end):
            memcpy(staging.ctypes.data + (lines[t] - low) * size, values.ctypes.data + places[t] * size, size)
        if pwrite(fd, staging.ctypes.data, n, low * size) != n:
            return False
        begin = end
    return True


@kernel
def count_indices(indices: NDArray[Any], counts: NDArray[Any]) -> None:
    """counts[j] += how often j occurs."""
    for p in range(len(indices)):
        counts[indices[p]] += 1


@inner_kernel
def sum_of_squares(data: NDArray[Any], begin: int, end: int, total: float) -> float:
    """total + data[begin]^2 + ... + data[end - 1]^2, in that order, in float64."""
    for p in range(begin, end):
        total += np.float64(data[p]) * np.float64(data[p])
    return total


@kernel
def row_norms(indptr: NDArray[np.int64], data: NDArray[Any], out: NDArray[np.float32]) -> None:
    """The l2 norm of each row: out (n,)."""
    for i in range(len(indptr) - 1):
        out[i] = np.sqrt(sum_of_squares(data, indptr[i], indptr[i + 1], 0.0))


@kernel
def scale_rows_l2(indptr: NDArray[np.int64], data: NDArray[np.float32]) -> None:
    """Divide each row by its l2 norm, in place; rows without values, or of zeros, stay as they are."""
    for i in range(len(indptr) - 1):
        total = sum_of_squares(data, indptr[i], indptr[i + 1], 0.0)
        if total > 0.0:
            norm = np.sqrt(total)
            for p in range(indptr[i], indptr[i + 1]):
                data[p] = np.float32(np.float64(data[p]) / norm)


@kernel
def scatter_lines(
    indptr: NDArray[np.int64],
    indices: NDArray[Any],
    data: NDArray[Any],
    first_line: int,
    places: NDArray[np.int64],
    out_indices: NDArray[Any],
    out_data: NDArray[Any],
) -> bool:
    """Transposition: put the entries of lines from first_line on into their columns.

    places (n_columns,): where the next entry of each column goes, moved on. data, out_data: empty for a matrix of ones.
    Returns False where an index is out of range, or its place.
    """
    for i in range(len(indptr) - 1):
        for p in range(indptr[i], indptr[i + 1]):
            j = indices[p]
            if j < 0 or j >= len(places) or places[j] >= len(out_indices):
                return False
            q = places[j]
            places[j] = q + 1
            out_indices[q] = first_line + i
            if len(data):
                out_data[q] = data[p]
    return True


@kernel
def sort_by_bucket(
    indptr: NDArray[np.int64],
    indices: NDArray[Any],
    data: NDArray[Any],
    bucket_of: NDArray[np.int32],
    bounds: NDArray[np.int64],
    starts: NDArray[np.int64],
    out_columns: NDArray[np.uint16],
    out_lines: NDArray[np.uint16],
    out_data: NDArray[Any],
) -> bool:
    """Sort the entries of at most 2^16 lines by bucket; entries of a bucket stay in the order of lines.

    bucket_of (n_columns,); bounds (n_buckets + 1,): ranges of at most 2^16 columns, from whose first those written are
    counted. starts (n_buckets + 1,): gets where each bucket begins, and the end of the last. data, out_data: empty for
    a matrix of ones. Returns False where an index is out of range.
    """
    starts[:] = 0
    for p in range(len(indices)):
        if indices[p] < 0 or indices[p] >= len(bucket_of):
            return False
        starts[bucket_of[indices[p]] + 1] += 1
    for b in range(1, len(starts)):
        starts[b] += starts[b - 1]
    places = starts.copy()
    for i in range(len(indptr) - 1):
        for p in range(indptr[i], indptr[i + 1]):
            b = bucket_of[indices[p]]
            q = places[b]
            places[b] = q + 1
            out_columns[q] = indices[p] - bounds[b]
            out_lines[q] = i
            if len(data):
                out_data[q] = data[p]
    return True


@kernel
def scatter_entries(
    columns: NDArray[np.uint16],
    lines: NDArray[np.uint16],
    data: NDArray[Any],
    first_line: int,
    places: NDArray[np.int64],
    out_indices: NDArray[Any],
    out_data: NDArray[Any],
) -> bool:
    """Transposition: put entries of a bucket (in the order of lines) into their columns.

    columns: from the bucket's first; lines: from first_line. places (n_columns of the bucket,): where the next entry of
    each column goes, moved on. data, out_data: empty for a matrix of ones. Returns False where a place is out of range.
    """
    for p in range(len(columns)):
        q = places[columns[p]]
        if q >= len(out_indices):
            return False
        places[columns[p]] = q + 1
        out_indices[q] = first_line + lines[p]
        if len(data):
            out_data[q] = data[p]
    return True


@kernel
def keep_selected(
    indptr: NDArray[np.int64], indices: NDArray[Any], data: NDArray[Any], features: NDArray[np.int64],
    ends: NDArray[np.int64],
) -> None:  # fmt: skip
    """Move the entries of some features (ascending) to the front of a csr triple, in place; the others are lost.

    indices become places in `features`; row i has the entries [ends[i], ends[i + 1]) then.
    """
    kept = 0
    ends[0] = 0
    for i in range(len(indptr) - 1):
        place = 0
        for p in range(indptr[i], indptr[i + 1]):
            j = indices[p]
            place = place_of(features, place, len(features), j)
            if place == len(features):
                break
            if features[place] == j:
                indices[kept], data[kept] = place, data[p]
                kept, place = kept + 1, place + 1
        ends[i + 1] = kept
