"""What a model is asked about, as a dataset: datasets by path, files, matrices and texts; and rows of length one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import InputError
from xmc_stream.models.execution import Execution
from xmc_stream.store.dataset import Dataset, open_dataset
from xmc_stream.store.names import SELECTED
from xmc_stream.store.remote import as_path
from xmc_stream.system.files import temporary_folder
from xmc_stream.system.memory import FEW_BYTES, MemoryLimit
from xmc_stream.system.progress import current

if TYPE_CHECKING:
    from xmc_stream.models.model import Model
    from xmc_stream.store.model import StoredModel

_ENTRY_BYTES = 3 * 8  # of a value of an array: its row and column as they are found, and as they are kept
_NEAR = 1e-4  # as far from one is the length of what was written with few digits, or summed in another order
_SCALED_BYTES = 4 + 4 + 8 + 1  # of a value: before and after, its column, and whether its row stays
_CONVERTED = 0.5  # of a prediction from a file, that converting it takes


def asked(data: Any, execution: Execution) -> Any:
    """What a model is asked about, as its kinds know it: a series or an array of texts as a list, an array as CSR.

    All else stays as it is. Raises InputError for what is no matrix, no text or an empty list, MemoryLimitError where the CSR
    matrix has no room.
    """
    if hasattr(data, "tocsr") or not hasattr(data, "__array__"):
        if are_texts(data):
            _check_texts(data)
        return data
    if (texts := texts_of(data)) is not None:
        _check_texts(texts)
        return texts
    found = np.asarray(data)
    if found.ndim != 2:
        raise InputError(f"got an array of the shape {found.shape}: give rows (n x D), also a single one")
    from scipy.sparse import csr_matrix

    from xmc_stream.convert.matrices.sides import check_real

    check_real(found.dtype, "X")
    n_bytes = (_ENTRY_BYTES + found.dtype.itemsize) * int(np.count_nonzero(found))
    if n_bytes > FEW_BYTES:  # asking the system what is free takes longer than to make a small one
        MemoryLimit.of(execution.memory_limit).check({"X as a CSR matrix": n_bytes}, "taking X")
    return csr_matrix(found)


def texts_of(data: Any) -> list[str] | None:
    """The texts in a list, a series or an array of one dimension; None for anything else.

    Raises InputError where a row is none and the first one is.
    """
    from xmc_stream.convert.formats.frames import column_of

    column = None if isinstance(data, str) else column_of(data)
    if column is None or column.numbers is not None or not column.n_rows:
        return None
    if not isinstance(column.objects(0, 1)[0], str):
        return None
    texts = column.objects(0, column.n_rows)
    other = next((i for i, text in enumerate(texts) if not isinstance(text, str)), None)
    if other is not None:
        raise InputError(
            f"row {other} (from 0) is {texts[other]!r:.40}, and others are texts: give a text for each row"
        )
    return texts


def are_texts(data: Any) -> bool:
    """Whether it is a list of texts."""
    return isinstance(data, Sequence) and all(isinstance(text, str) for text in data)


def _check_texts(texts: Sequence[str]) -> None:
    """Raise InputError where there is none, or one that cannot be written as UTF-8."""
    if not texts:
        raise InputError("got an empty list: give one text or more")
    for i, text in enumerate(texts):
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                raise InputError(
                    f"text {i} (from 0) has half a surrogate pair, which is no text: decode it with errors='replace'"
                ) from None


def converted(data: Any, model: Model, folder: Path, execution: Execution) -> Dataset:
    """Texts, by the model's own vectorizer, or a matrix as a dataset without labels, in `folder`."""
    from scipy.sparse import csr_matrix

    from xmc_stream.convert import convert
    from xmc_stream.convert.matrices.memory import stored
    from xmc_stream.convert.options import TextOptions

    if not are_texts(data):
        none = csr_matrix(([], ([], [])), shape=(data.shape[0], model.n_labels), dtype=np.float32)
        return stored(data, none, folder / "data.xmc", execution.memory_limit)
    with open(folder / "texts.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in data)
    options = TextOptions(text_fields=("text",), label_field="")
    return convert(
        folder / "texts.jsonl",
        folder / "data.xmc",
        like=model.path,
        text=options,
        format="jsonl",
        memory_limit=execution.memory_limit,
        threads=execution.threads,
    )


@contextmanager
def samples(data: Any, model: Model, folder: Path | None, execution: Execution, **reading: Any) -> Iterator[Dataset]:
    """The dataset at `data`, or that it is; anything else is converted for the model, in `folder`, while the block lasts.

    folder: None is the one for temporary files.
    reading: options of `convert` that say how it is read, other than None. Labels need not be there, and any that are
    count for nothing. Raises InputError naming file and line.
    """
    from xmc_stream.convert import convert
    from xmc_stream.convert.formats.registry import FORMATS

    if isinstance(data, Dataset):
        yield data
        return
    if not isinstance(data, str | Path):
        data = asked(data, execution)
        if hasattr(data, "tocsr"):
            data = normalised(model, data, execution)
        with temporary_folder(folder) as scratch:
            yield converted(data, model, scratch, execution)
        return
    data = as_path(data)
    if data.is_dir() and not any(format.recognises(data, b"") for format in FORMATS.values()):
        if reading:
            raise InputError(f"{data} is a dataset: leave out {', '.join(reading)}, which say how a file is read")
        yield open_dataset(data)
        return

    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with temporary_folder(folder) as scratch:
        with current().part(0.0, _CONVERTED):
            dataset = convert(
                data,
                scratch / f"{data.name}.xmc",
                like=model.path,
                unlabelled=True,
                memory_limit=execution.memory_limit,
                threads=execution.threads,
                scheduler=execution.scheduler,
                **reading,
            )
        with current().part(_CONVERTED, 1.0):
            yield dataset


def of_length_one(norms: NDArray[Any]) -> NDArray[np.bool_]:
    """Which rows need not be normalised, by their l2 norms: those of length one, and of zeros alone."""
    return np.asarray((np.abs(norms - 1.0) <= _NEAR) | (norms == 0.0))


def normalised(model: StoredModel, X: Any, execution: Execution) -> Any:
    """A scipy matrix whose rows have length one where the model learned from such; the same object where they do already.

    Each row is as a conversion makes it, bit for bit. A model of selected features knows the rows before the selection
    alone: nothing is done for it. Raises InputError for a matrix that contradicts its shape, MemoryLimitError.
    """
    if model.attributes.get("normalize") != "l2" or SELECTED in model.attributes:
        return X
    from scipy.sparse import csr_matrix

    from xmc_stream.convert.matrices.memory import as_csr
    from xmc_stream.kernels.csr import row_norms, scale_rows_l2

    csr = as_csr(X, "X")
    if csr.dtype.kind not in "biuf":
        return X
    with np.errstate(over="ignore"):  # what is not finite is refused later
        data = np.ascontiguousarray(csr.data, np.float32)
    indptr, norms = np.ascontiguousarray(csr.indptr, np.int64), np.empty(csr.shape[0], np.float32)
    row_norms(indptr, data, norms)
    stay = of_length_one(norms)
    if stay.all() or not np.isfinite(norms).all():
        return X
    if (n_bytes := _SCALED_BYTES * len(data)) > FEW_BYTES:  # asking the system what is free takes its time
        MemoryLimit.of(execution.memory_limit).check({"rows of length one": n_bytes}, "normalising rows")
    scaled = data.copy()
    scale_rows_l2(indptr, scaled)
    kept = np.repeat(stay, np.diff(indptr))
    scaled[kept] = data[kept]
    return csr_matrix((scaled, csr.indices, csr.indptr), shape=csr.shape)
