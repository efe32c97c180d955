"""Files of scipy.sparse.save_npz, a CSR matrix in bounded memory: the arrays in the zip file are read side by side.

Files of numpy.savez too: a dense matrix, and beside it labels as a matrix or as the class of each row.

Stored (uncompressed) arrays are read by ranges like files of their own, deflated ones as streams. Their checksums are
compared either way, those of stored ones when all rows are read. A matrix of another format is loaded whole, and made CSR.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.convert.formats.numpy_arrays import Head, file_array, read_head, side_of
from xmc_stream.convert.matrices.arrays import Array, Take, check_file, csr_side
from xmc_stream.convert.matrices.memory import WholeSide, csr_bytes
from xmc_stream.convert.matrices.sides import Side, check_real
from xmc_stream.convert.messages import one_line
from xmc_stream.errors import InputError
from xmc_stream.system.files import regular

_FORMATS = ("csr", "csc", "coo", "bsr", "dia")  # that save_npz writes
_CSR = ("indptr", "indices", "data")
_INDICES = ("indptr", "indices", "row", "col", "offsets")  # scipy would cut them to integers
_FEATURES = ("X", "x", "features", "embeddings")  # names of dense arrays, where there are several
_LABELS = ("y", "Y", "labels", "classes")
_LARGEST_DIRECTORY = 2**20  # bytes of a directory, which zipfile reads whole and makes ten times as many of
_END, _END64 = (b"PK\x05\x06", "<12xL"), (b"PK\x06\x06", "<40xQ")  # records that tell a directory's size, and where
_STEP = 2**20  # bytes inflated at a time


@dataclass(frozen=True)
class _Member:
    """An array in the zip file. offset: of its first byte, header included, where it is stored; None if deflated."""

    head: Head
    info: zipfile.ZipInfo
    offset: int | None


@contextmanager
def _items(path: str, member: str, skip: int, dtype: np.dtype[Any], start: int, stop: int) -> Iterator[Take]:
    """A deflated array from its beginning on; its checksum is compared at its end."""
    with ExitStack() as opened:
        with _reading(path):
            archive = opened.enter_context(zipfile.ZipFile(path))
            file = opened.enter_context(archive.open(member))
            file.read(skip)

        def take(n: int) -> NDArray[Any]:
            items = np.empty(n, dtype)
            view = memoryview(items.view(np.uint8))  # type: ignore[arg-type]
            with _reading(path):
                while view.nbytes:
                    content = file.read(min(_STEP, view.nbytes))
                    if not content:
                        raise EOFError("it ends early")
                    view[: len(content)] = content
                    view = view[len(content) :]
            return items

        yield take
        with _reading(path):
            _read_on(file)


def _read_on(file: IO[bytes]) -> None:
    """Read an array to its end, where zipfile compares its checksum."""
    while file.read(_STEP):
        pass


def _compare(path: Path, name: str, members: Sequence[str]) -> None:
    """Compare the checksums of arrays that were read by ranges. Raises InputError."""
    with _reading(name), zipfile.ZipFile(path) as archive:
        for member in members:
            with archive.open(f"{member}.npy") as file:
                _read_on(file)


def has_labels(path: Path) -> bool:
    """Whether a .npz has labels beside its features."""
    with _reading(path):
        members = _members(path)
        return not _is_scipy(members) and len(members) > 1 and any(name in members for name in _LABELS)


def _is_scipy(members: Mapping[str, _Member]) -> bool:
    return {"format", "shape", "data"} <= set(members)


def _dense(path: Path, members: Mapping[str, _Member], labels: bool) -> Side:
    """The array of features, or of labels: the only one, or that of such a name."""
    names = [name for name in (_LABELS if labels else _FEATURES) if name in members]
    if len(members) == 1:
        names = list(members)
    if len(names) != 1:
        wanted = f"labels {_LABELS[0]}" if labels else f"features {_FEATURES[0]}"
        raise ValueError(f"it has the arrays {', '.join(sorted(members)) or '(none)'}: call that of the {wanted}")
    head, kinds = members[names[0]].head, [f"npz array {names[0]}"] * 3
    arrays, ways = _arrays(path, members, names)
    return side_of(f"{path}: {names[0]}", kinds, path, head, arrays[0], labels, **ways)


def open_side(path: Path, labels: bool = False) -> Side:
    """The matrix in a .npz, by its directory and the headers of its arrays. Raises InputError.

    labels: it may be class ids, or names of classes.
    """
    name = str(path)
    with _reading(path):
        members = _members(path)
        if not _is_scipy(members):
            return _dense(path, members, labels)
        heads = {name: member.head for name, member in members.items()}
        shapes = {name: head.shape for name, head in heads.items()}
        if shapes["format"] != () or shapes["shape"] != (2,):
            raise ValueError(f"it has the arrays {', '.join(sorted(heads)) or '(none)'}")
        form, shape = (_small(path, members[name]) for name in ("format", "shape"))
        kind = form.item().decode("ascii") if form.dtype.kind == "S" else str(form.item())
        if kind not in _FORMATS or shape.dtype.kind not in "iu" or min(shape) < 0:
            raise ValueError(f"format {kind!r}, shape {' x '.join(map(str, shape))}")
        n_rows, n_columns = (int(n) for n in shape)
        check_real(heads["data"].dtype, name)
        for key in _INDICES:
            if key in heads and heads[key].dtype.kind not in "iu":
                raise ValueError(f"{key} of type {heads[key].dtype}")
        if kind == "csr":
            for key in _CSR:
                if key not in heads or len(heads[key].shape) != 1:
                    raise ValueError(f"no one-dimensional array {key}")
            arrays, ways = _arrays(path, members, _CSR)
            return csr_side(name, "scipy npz", (path,), (n_rows, n_columns), *arrays, **ways)
    entries, dtype = heads["data"].n_items, heads["data"].dtype
    load_bytes = sum(head.n_items * head.dtype.itemsize for head in heads.values())
    # scipy may turn indices of int64 into int32 when it puts the arrays together
    load_bytes += sum(4 * head.n_items for array, head in heads.items() if array != "data")
    load_bytes += csr_bytes(entries, dtype, n_rows)
    load = partial(_load, path.absolute(), name)
    kind = f"scipy npz ({kind})"
    return WholeSide(name, kind, (path,), n_rows, n_columns, entries, load, load_bytes=load_bytes)


def _load(path: Path, name: str) -> Any:
    """The matrix in a .npz, whole. name: what messages call it."""
    from scipy import sparse

    with _reading(name):
        return sparse.load_npz(path)


def _members(path: Path) -> dict[str, _Member]:
    """The arrays in the zip file, by name. Raises ValueError where it is not one of NumPy's."""
    members: dict[str, _Member] = {}
    check_file(path)
    with open(path, "rb", opener=regular) as raw:
        if _directory_size(raw) > _LARGEST_DIRECTORY:
            raise ValueError("more files in it than a matrix has")
        raw.seek(0)
        with zipfile.ZipFile(raw) as archive:
            for info in archive.infolist():
                if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise ValueError(f"compression {info.compress_type} of {info.filename}")
                with archive.open(info) as file:
                    head = read_head(file, info.file_size)
                array = info.filename.removesuffix(".npy")
                if array in members:
                    raise ValueError(f"{info.filename} stands in it twice")
                offset = _data_offset(raw, info) if info.compress_type == zipfile.ZIP_STORED else None
                members[array] = _Member(head, info, offset)
    return members


def _directory_size(file: IO[bytes]) -> int:
    """Bytes of a zip file's directory, which is read whole, as the records at the end promise."""
    size = file.seek(0, 2)
    file.seek(max(0, size - 2**16 - 200))
    tail = file.read()
    most = 0
    for magic, form in (_END, _END64):
        at = tail.rfind(magic)
        if 0 <= at <= len(tail) - struct.calcsize(form):
            most = max(most, int(struct.unpack_from(form, tail, at)[0]))
    return most


def _data_offset(file: IO[bytes], info: zipfile.ZipInfo) -> int:
    """Where a stored array's bytes begin, all of which must be in the file."""
    file.seek(info.header_offset + 26)
    lengths: tuple[int, int] = struct.unpack("<HH", file.read(4))
    offset = info.header_offset + 30 + sum(lengths)
    if info.compress_size != info.file_size or offset + info.file_size > file.seek(0, 2):
        raise ValueError(f"{info.filename} goes beyond its end")
    return offset


def _arrays(path: Path, members: Mapping[str, _Member], names: Sequence[str]) -> tuple[list[Array], dict[str, Any]]:
    """Arrays that must fill their members, and how a side reads them: by ranges where all are stored, else as streams."""
    stored = all(members[name].offset is not None for name in names)
    arrays = []
    for name in names:
        head, info, offset = members[name].head, members[name].info, members[name].offset
        if head.n_bytes + head.n_items * head.dtype.itemsize != info.file_size:
            raise ValueError(f"an array of shape {head.shape} and type {head.dtype} in {info.file_size} bytes")
        if stored and offset is not None:
            arrays.append(file_array(path, offset + head.n_bytes, head))
        else:
            stream = partial(_items, str(path.absolute()), info.filename, head.n_bytes, head.dtype)
            arrays.append(Array(head.n_items, head.dtype, stream))
    check = partial(_compare, path.absolute(), str(path), names) if stored else None
    return arrays, {"divisible": stored, "check": check}


def _small(path: Path, member: _Member) -> NDArray[Any]:
    """An array of a few bytes, whole."""
    head = member.head
    n_bytes = head.n_items * head.dtype.itemsize
    if not 0 < n_bytes <= 64 or head.dtype.kind not in "SUiu":
        raise ValueError(f"{member.info.filename} of type {head.dtype}")
    with zipfile.ZipFile(path) as archive, archive.open(member.info) as file:
        content = file.read(head.n_bytes + n_bytes + 1)[head.n_bytes :]
    return np.frombuffer(content, head.dtype).reshape(head.shape)


@contextmanager
def _reading(path: str | Path) -> Iterator[None]:
    """Put errors of reading a .npz into words."""
    try:
        yield
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror or error}): check the name") from None
    except (
        ValueError, LookupError, TypeError, EOFError, RuntimeError, NotImplementedError, OverflowError, struct.error,
        zipfile.BadZipFile, zlib.error,
    ) as error:  # fmt: skip
        raise InputError(
            f"{path} is not a sparse matrix of scipy.sparse.save_npz, and no dense array of numpy.savez ({one_line(error)}): "
            "save it again"
        ) from None
