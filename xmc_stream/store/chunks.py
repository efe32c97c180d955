"""Reading 1-D zarr arrays: the chunk files themselves where they are plain, through zarr where they are not.

`read` fills private buffers by pread. A run may compare chunks with their checksums as it reads them: each once, whichever of
its threads comes by it first.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from xmc_stream.errors import StoreError
from xmc_stream.store.nodes import (
    CHECKSUM_BYTES,
    ZARR_ERRORS,
    PlainArray,
    checksum,
    not_understood,
    plain_array,
    unreadable,
)
from xmc_stream.store.remote import ask_for, is_mirrored, open_file, size_of
from xmc_stream.system.files import ASKED
from xmc_stream.system.stop import stop_if_unwanted

if TYPE_CHECKING:  # see nodes: what is plain does without it
    import zarr

_OPEN_FILES = 64  # of one array
_TAKES_ADVICE = hasattr(os, "posix_fadvise")
_STAGING = 1 << 18  # bytes that a sweep reads at a time
# A hole smaller than this is cheaper read over than jumped: see benchmarks/read_paths.py.
_HOLE = 1 << 13
# Bytes that a sweep asks the kernel for ahead of what it reads: see benchmarks/overlap.py.
_AHEAD = 1 << 22
_THROUGH_ZARR = 1 << 27  # bytes of a chunk that zarr reads whole: at most, as no plan counts it
_MOST_CHUNKS = 1 << 18  # of an array that is read through zarr, which lists them
_ALL = slice(None)
_ITEMS = 1 << 19  # of an array that is read by windows
_AHEAD_CHECKED = 4  # chunks behind a URL that are fetched beside each other while they are compared with checksums
_MOST_COMPARED = 1 << 14  # chunks that are known to be compared; one that is forgotten is compared again


@dataclass(frozen=True)
class Comparing:
    """What a run compares as it reads it: the chunks of these stores."""

    stores: tuple[str, ...]
    run: str


@dataclass
class _Comparison:
    done: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


_thread = threading.local()


def comparing() -> Comparing | None:
    """What the arrays that this thread opens now compare."""
    what: Comparing | None = getattr(_thread, "comparing", None)
    return what


def run_comparing(array: Path) -> str:
    """The run that compares the chunks of an array as this thread opens it now; "" where none does."""
    what = comparing()
    if what is None or not f"{array}/".startswith(tuple(f"{store}/" for store in what.stores)):
        return ""
    return what.run


@contextmanager
def compare_while_reading(what: Comparing | None) -> Iterator[None]:
    """Arrays that this thread opens in the block compare a chunk with its checksum before they give anything of it."""
    before, _thread.comparing = comparing(), what
    try:
        yield
    finally:
        _thread.comparing = before


@functools.lru_cache(maxsize=_MOST_COMPARED)
def _comparison(run: str, chunk: str) -> _Comparison:
    return _Comparison()


class ChunkedArray:
    """A 1-D array of a store, read by ranges.

    bytes_read counts what `read` returned. Reading opens only the chunk files of its ranges, and raises StoreError for one
    that is missing or not of its full size, and for ranges that are not the array's, which only another array that is
    damaged asks for. path: of an array whose chunk files are plain; None where zarr reads it.
    """

    def __init__(self, array: zarr.Array[Any] | PlainArray) -> None:
        self._array: Any = array
        self.dtype = array.dtype
        self._itemsize = int(array.dtype.itemsize)  # on disk
        self.path: Path | None
        self._places = array.places if isinstance(array, PlainArray) else None
        self._crcs: str | None = None
        if isinstance(array, PlainArray):
            self.size, self.chunk, self.path, self._crcs = array.size, array.chunk, array.path, array.crcs
        else:
            if len(array.shape) != 1 or array.dtype.kind not in "iuf":
                raise StoreError(
                    f"{array.store_path} has shape {array.shape} and type {array.dtype}: no row of numbers"
                )
            self.size, self.chunk, self.path = int(array.shape[0]), int(array.chunks[0]), None
            if is_mirrored(str(array.store_path)):
                raise StoreError(
                    f"{array.store_path} is compressed, and behind a URL only plain arrays are read: make the store again"
                )
            if self.chunk_bytes > _THROUGH_ZARR or self.n_chunks > _MOST_CHUNKS:
                raise StoreError(
                    f"{array.store_path}: {self.n_chunks} chunks of {self.chunk} items are too many, or too large, to be "
                    "read whole"
                )
        self.bytes_read = 0
        self._files: dict[int, int] = {}
        self._cached: tuple[int, NDArray[Any]] | None = None
        self._staging: NDArray[np.uint8] | None = None
        self._mirrored = self.path is not None and is_mirrored(self.path)
        self._run = "" if self.path is None or self._places is not None else run_comparing(self.path)
        if self.path is not None:
            weakref.finalize(self, _close_all, self._files)

    @property
    def n_chunks(self) -> int:
        """Chunks that hold the array's items."""
        return -(-self.size // self.chunk)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk on disk, without its checksum."""
        return self.chunk * self._itemsize

    def chunk_file(self, k: int) -> Path:
        """The file of chunk k of a plain local array."""
        if self.path is None:
            raise StoreError(f"{self._array.store_path} is compressed or not local: it has no plain chunk files")
        return Path(f"{self.path}/c/{k}") if self._places is None else self.path

    def _begin(self, k: int) -> int:
        """Where chunk k begins in its file."""
        return 0 if self._places is None else self._places[k]

    def check_sizes(self) -> None:
        """Look at all chunk files. Raises StoreError for one that is missing or not of its full size."""
        if self.path is not None:  # elsewhere other writers may leave out chunks of zeros
            for k in range(self.n_chunks):
                self._check_size(k, self.chunk_file(k))

    def _check_size(self, k: int, opened: Path | int) -> None:
        expected = self.chunk_bytes + CHECKSUM_BYTES
        with self._reading(k):
            size = size_of(opened)
        if self._places is not None:  # behind the chunks stands the index, which was read
            size = expected
        if size != expected:
            file = self.chunk_file(k)
            raise StoreError(f"{file} has {size} bytes instead of {expected}: the store is damaged; make it again")

    @contextmanager
    def _reading(self, k: int) -> Iterator[None]:
        """Errors of the system in the block become a StoreError that names the file of chunk k."""
        try:
            yield
        except StoreError:
            raise
        except FileNotFoundError:
            raise StoreError(f"{self.chunk_file(k)} is missing: the store is damaged; make it again") from None
        except OSError as error:
            raise unreadable(self.chunk_file(k), error) from None

    @property
    def name(self) -> str:
        """Where it is."""
        return str(self._array.store_path if self.path is None else self.path)

    def _refuse(self, what: str) -> StoreError:
        return StoreError(f"{self.name} has {self.size} items, not {what}: the store is damaged; make it again")

    def read(self, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Items [start, stop) in a private array, or in `out[: stop - start]`."""
        stop_if_unwanted()
        n = self._count(start, stop, out)
        out = np.empty(n, self.dtype) if out is None else out[:n]
        self._ask_for(start, stop)
        self.bytes_read += n * self._itemsize
        if self._places is not None and n > self.chunk:
            self._from_pack(np.array([start]), np.array([n]), out)
            return out
        position = start
        while position < stop:
            k, offset = divmod(position, self.chunk)
            take = min(stop - position, self.chunk - offset)
            part = out[position - start : position - start + take]
            if self.path is None:
                part[:] = self._through_zarr(k)[offset : offset + take]
            else:
                self._pread(k, offset * self._itemsize, part)
            position += take
        return out

    def windows(self) -> Iterator[NDArray[Any]]:
        """All items in turn, so many at a time that they are few."""
        for start in range(0, self.size, _ITEMS):
            yield self.read(start, min(start + _ITEMS, self.size))

    def read_checked(self, start: int, stop: int) -> NDArray[Any]:
        """As `read`, of chunks that are compared with their checksums first."""
        if self.path is not None:
            for k in range(start // self.chunk, -(-stop // self.chunk)):
                self.verify_chunk(k)
        return self.read(start, stop)

    def close_files(self) -> None:
        """Close the files that reading opened, and give its buffer back; who reads on opens them again."""
        _close_all(self._files)
        self._staging = None

    def _ask_for(self, start: int, stop: int) -> bool:
        """Begin to fetch the chunks of items [start, stop) that are behind a URL yet; whether there are some."""
        if not self._mirrored or start >= stop:
            return False
        chunks = range(start // self.chunk, (stop - 1) // self.chunk + 1)
        return ask_for([self.chunk_file(k) for k in chunks if k not in self._files])

    def _count(self, start: int, stop: int, out: NDArray[Any] | None) -> int:
        """Items in [start, stop), which are the array's and have room in `out`, if there is one."""
        if not 0 <= start <= stop <= self.size:
            raise self._refuse(f"those from {start} to {stop}")
        if out is not None and len(out) < stop - start:
            raise self._refuse(f"at most {len(out)} from {start} to {stop}")
        return stop - start

    def read_ranges(self, firsts: NDArray[np.int64], counts: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Items [first, first + count) of each range (ascending, apart), one after another, into private memory.

        One sweep over the chunks; small holes between ranges are read over.
        """
        stop_if_unwanted()
        if not are_apart(firsts, counts, self.size):
            raise self._refuse("what is asked for in ranges")
        some = counts > 0  # an empty range may begin where no chunk is
        firsts, counts = firsts[some], counts[some]
        if self._mirrored:
            lasts = firsts + counts - 1
            chunks = np.unique(np.concatenate([firsts // self.chunk, lasts // self.chunk])).tolist()
            ask_for([self.chunk_file(k) for k in chunks if k not in self._files])
        places = np.concatenate([[0], np.cumsum(counts)])
        if places[-1] > len(out):
            raise self._refuse(f"at most {len(out)} in these ranges")
        self.bytes_read += int(places[-1]) * self._itemsize
        if self._places is not None:
            if len(firsts):
                self._from_pack(firsts, counts, out)
            return
        r = 0
        while r < len(firsts):
            k = int(firsts[r]) // self.chunk
            inside = int(np.searchsorted(firsts, (k + 1) * self.chunk))  # ranges that begin in the chunk
            stop = inside - int(firsts[inside - 1] + counts[inside - 1] > (k + 1) * self.chunk)
            if stop > r:
                self._sweep(k, firsts[r:stop] - k * self.chunk, counts[r:stop], out[places[r] : places[stop]])
            if stop < inside:  # the last one goes on in the next chunk
                first, count = int(firsts[stop]), int(counts[stop])
                self.bytes_read -= count * self._itemsize
                self.read(first, first + count, out[places[stop] :])
            r = inside

    def _from_pack(self, firsts: NDArray[np.int64], counts: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Ranges (some, none empty) of an array whose chunks are in one file: a single call, without the interpreter's lock."""
        first, last = firsts // self.chunk, (firsts + counts - 1) // self.chunk
        pieces = last - first + 1  # of each range, one a chunk
        of_range = np.repeat(np.arange(len(firsts)), pieces)
        chunks = np.arange(len(of_range)) - (np.cumsum(pieces) - pieces - first)[of_range]
        low = np.maximum(firsts[of_range], chunks * self.chunk)
        high = np.minimum((firsts + counts)[of_range], (chunks + 1) * self.chunk)
        begins = np.array(self._places)[chunks] // self._itemsize
        self._sweep(0, begins + low - chunks * self.chunk, high - low, out)

    def _sweep(self, k: int, starts: NDArray[np.int64], counts: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Ranges of items of chunk k, or of the file that has all chunks, one after another."""
        from xmc_stream.kernels.csr import pread_ranges

        if self.path is None:
            chunk = self._through_zarr(k)
            np.concatenate([chunk[a : a + n] for a, n in zip(starts, counts, strict=True)], out=out)
            return
        itemsize = self._itemsize
        self._compare_once(k)
        if self._staging is None:
            self._staging = np.empty(_STAGING, np.uint8)
        if not pread_ranges(
            self._open(k), starts, counts, itemsize, _HOLE // itemsize, _AHEAD, ASKED, self._staging, out.view(np.uint8),
        ):  # fmt: skip
            raise StoreError(
                f"{self.chunk_file(k)} ends early or cannot be read: look at the disk and run the same command again; "
                "if it stays, make the store again"
            )

    def will_need(self, start: int, stop: int) -> None:
        """Have the kernel read items [start, stop) into the page cache while the caller does something else.

        Takes no memory of the process, and changes nothing but when the bytes come; what is behind a URL is fetched, and
        compressed arrays stay as they are.
        """
        if not 0 <= start <= stop <= self.size:
            raise self._refuse(f"those from {start} to {stop}")
        if self._ask_for(start, stop):
            return
        while self.path is not None and _TAKES_ADVICE and start < stop:
            k, offset = divmod(start, self.chunk)
            take = min(stop - start, self.chunk - offset)
            begin, end = (self._begin(k) + items * self._itemsize for items in (offset, offset + take))
            for at in range(begin, end, ASKED):
                os.posix_fadvise(self._open(k), at, min(ASKED, end - at), os.POSIX_FADV_WILLNEED)
            start += take

    def _open(self, k: int) -> int:
        k = k if self._places is None else 0  # a pack is one file
        fd = self._files.get(k)
        if fd is None:
            while len(self._files) >= _OPEN_FILES:
                os.close(self._files.pop(next(iter(self._files))))
            with self._reading(k):
                fd = self._files[k] = open_file(self.chunk_file(k))
            self._check_size(k, fd)
        return fd

    def _compare_once(self, k: int) -> None:
        """Compare chunk k with its checksum where the run does as it reads, and has not yet; who comes meanwhile waits."""
        if self._run:
            comparison = _comparison(self._run, str(self.chunk_file(k)))
            with comparison.lock:
                if not comparison.done:
                    self._compare(k)  # then it is in the page cache
                    comparison.done = True

    def _pread(self, k: int, offset: int, out: NDArray[Any]) -> None:
        self._compare_once(k)
        fd, offset = self._open(k), offset + self._begin(k)
        view = memoryview(out).cast("B")  # type: ignore[arg-type]
        while view.nbytes:
            with self._reading(k):
                n = os.preadv(fd, [view], offset)
            if n == 0:
                raise StoreError(f"{self.chunk_file(k)} ends early: the store is damaged; make it again")
            view, offset = view[n:], offset + n

    def _through_zarr(self, k: int) -> NDArray[Any]:
        if self._cached is None or self._cached[0] != k:
            self._cached = None  # one chunk at a time is the bound
            try:
                values = np.asarray(self._array[k * self.chunk : min((k + 1) * self.chunk, self.size)])
            except ZARR_ERRORS as error:
                raise not_understood(f"{self.name}, chunk {k},", error) from None
            self._cached = (k, values)
        return self._cached[1]

    def stored_crc(self, k: int) -> str:
        """The checksum that the file of chunk k ends with. Raises StoreError where it is not the one that was written."""
        out = np.empty(CHECKSUM_BYTES, np.uint8)
        self._pread(k, self.chunk_bytes, out)
        return self._written(k, f"{int.from_bytes(out.tobytes(), 'little'):08x}")

    def _written(self, k: int, crc: str) -> str:
        if self._crcs is not None and crc != self._crcs[8 * k : 8 * k + 8]:
            raise StoreError(
                f"{self.chunk_file(k)} is not the file that was written here: the store is damaged; make it again"
            )
        return crc

    def verify_chunk(self, k: int) -> None:
        """Compare chunk k with its checksum, and that with what was written. Raises StoreError naming the file."""
        self._ask_for(k * self.chunk, min((k + _AHEAD_CHECKED) * self.chunk, self.size))
        if self._run:
            self._compare_once(k)
        else:
            self._compare(k)

    def _compare(self, k: int) -> None:
        path = self.chunk_file(k)
        self._check_size(k, path)
        with self._reading(k), open(open_file(path), "rb", buffering=0) as file:
            file.seek(self._begin(k))
            crc = checksum(file, self.chunk_bytes)
        if not crc:
            raise StoreError(f"{path} fails its checksum: the store is damaged; make it again")
        self._written(k, crc)

    def verify(self) -> None:
        """Compare all chunks with their checksums; what is not plain zarr compares as it is read."""
        for k in range(0 if self.path is None else self.n_chunks):
            self.verify_chunk(k)


def described(path: Path) -> PlainArray | zarr.Array[Any]:
    """What the array in a folder is. Raises StoreError where there is none."""
    try:
        if (plain := plain_array(path)) is not None:
            return plain
        import zarr

        return zarr.open_array(path, mode="r")
    except StoreError:
        raise
    except ZARR_ERRORS as error:
        raise not_understood(path, error) from None


def open_array(path: Path) -> ChunkedArray:
    """The array in a folder. Raises StoreError where there is none."""
    return ChunkedArray(described(path))


def plain_arrays(path: Path) -> Iterator[ChunkedArray]:
    """The arrays under a folder that have plain chunk files, by name."""
    for file in sorted(path.rglob("zarr.json")):
        array = plain_array(file.parent)
        if array is not None and not (array.fill_value == 1 and array.nchunks_initialized == 0):
            yield ChunkedArray(array)


def compare_arrays(path: Path) -> None:
    """Compare all arrays under a folder with their checksums. Raises StoreError naming a chunk that is damaged."""
    for array in plain_arrays(path):
        array.verify()


def read_small(group: Path, name: str, size: int, dtype: DTypeLike, part: slice = _ALL) -> NDArray[Any]:
    """An array that is known to be small, or a part of it; its chunks are compared with the checksums.

    size: that it must have. Raises StoreError where it is damaged.
    """
    start, stop, _ = part.indices(size)
    return small_array(group, name, size, dtype).read_checked(start, stop)


def small_array(group: Path, name: str, size: int, dtype: DTypeLike) -> ChunkedArray:
    """An array that must have so many items of a type. Raises StoreError where it is damaged."""
    array = open_array(group / name)
    if array.size != size or array.dtype != dtype:
        raise StoreError(
            f"{array.name} has {array.size} items of {array.dtype} where {size} of {np.dtype(dtype)} belong: the store is "
            "damaged; make it again"
        )
    return array


def are_apart(firsts: NDArray[np.int64], counts: NDArray[np.int64], size: int) -> bool:
    """Whether ranges [first, first + count) ascend, none begins before the last one ends, and all are in [0, size)."""
    if not len(firsts):
        return True
    if firsts[0] < 0 or firsts.max() > size or counts.min() < 0 or counts.max() > size:
        return False
    ends = firsts + counts
    return bool(ends[-1] <= size and (ends[:-1] <= firsts[1:]).all())


def _close_all(files: dict[int, int]) -> None:
    while files:
        os.close(files.popitem()[1])


WINDOW = 1 << 18  # bytes of a file of lines that are read at once
_MOST_LINES = 1 << 24  # bytes of lines between two looks whether to stop


def read_lines(fd: int, path: Path, lines: NDArray[np.int64], staging: NDArray[np.uint8], out: NDArray[Any]) -> None:
    """Fill `out` (n x values) with lines of a plain file of lines of one length; they ascend.

    staging: WINDOW bytes, or a line if that is longer. Raises StoreError where the file ends early or cannot be read.
    """
    from xmc_stream.kernels.csr import pread_ranges

    data, length = out.reshape(-1).view(np.uint8), out.itemsize * out.shape[1]
    step = max(1, _MOST_LINES // length)
    for low in range(0, len(lines), step):
        stop_if_unwanted()
        some = lines[low : low + step].astype(np.int64, copy=False)
        room = data[low * length : (low + len(some)) * length]
        if not pread_ranges(fd, some, np.ones(len(some), np.int64), length, _HOLE // length, 0, WINDOW, staging, room):
            raise StoreError(f"{path} ends early or cannot be read: run the same command again, it goes on")
