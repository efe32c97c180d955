"""Columns of frames (pandas, polars, pyarrow) and of lists, in memory, as Parquet has columns: some rows at a time.

These libraries are looked for among what is loaded already: who has a frame has loaded its library.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import InputError


@dataclass(frozen=True)
class Column:
    """A column in memory. part: rows of it, of its own kind; plain, numbers: these as Python's objects, as an array.

    numbers: None where they are not all real numbers.
    """

    n_rows: int
    part: Callable[[int, int], Any]
    plain: Callable[[Any], list[Any]]
    numbers: Callable[[Any], NDArray[Any]] | None = None

    def objects(self, start: int, stop: int) -> list[Any]:
        """Rows [start, stop): texts, numbers, lists of them; None where nothing stands."""
        return self.plain(self.part(start, stop))


@dataclass(frozen=True)
class Frame:
    """Columns by their names."""

    columns: dict[str, Column]

    @property
    def n_rows(self) -> int:
        """Of each column."""
        return next(iter(self.columns.values())).n_rows

    def first(self) -> dict[str, Any]:
        """The first row."""
        return {name: column.objects(0, 1)[0] for name, column in self.columns.items()}


def frame_of(data: Any) -> Frame | None:
    """A frame of pandas, polars or pyarrow; None for anything else. Raises InputError where columns share a name."""
    if (pandas := _loaded("pandas")) and isinstance(data, pandas.DataFrame):
        names, columns = list(data.columns), [_of_pandas(data.iloc[:, i]) for i in range(data.shape[1])]
    elif (polars := _loaded("polars")) and isinstance(data, polars.DataFrame):
        names, columns = data.columns, [_of_polars(column) for column in data.get_columns()]
    elif polars and isinstance(data, polars.LazyFrame):
        raise InputError("X is a LazyFrame of polars: give X.collect()")
    elif (arrow := _loaded("pyarrow")) and isinstance(data, arrow.Table | arrow.RecordBatch):
        names, columns = data.schema.names, [_of_arrow(column) for column in data.columns]
    else:
        return None
    names = [str(name) for name in names]
    if not names:
        raise InputError("the frame has no columns: there is nothing to convert")
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise InputError(f"the frame has two columns {twice!r}: give each a name of its own")
    return Frame(dict(zip(names, columns, strict=True)))


def column_of(data: Any) -> Column | None:
    """A series of pandas or polars, an array of pyarrow or of one dimension, or a list; None for anything else."""
    if (pandas := _loaded("pandas")) and isinstance(data, pandas.Series | pandas.Index):
        return _of_pandas(pandas.Series(data))
    if (polars := _loaded("polars")) and isinstance(data, polars.Series):
        return _of_polars(data)
    if (arrow := _loaded("pyarrow")) and isinstance(data, arrow.Array | arrow.ChunkedArray):
        return _of_arrow(data)
    if isinstance(data, np.ndarray) and data.ndim == 1:
        return Column(len(data), lambda start, stop: data[start:stop].tolist(), _plain_all)
    if isinstance(data, list | tuple):
        return Column(len(data), lambda start, stop: data[start:stop], _plain_all)
    return None


def indicated(matrix: Any) -> Column:
    """The labels of each row of an indicator, a CSR matrix: the columns whose value is not zero."""

    def part(start: int, stop: int) -> Any:
        some = matrix[start:stop]
        return [some.indices[a:b][some.data[a:b] != 0] for a, b in zip(some.indptr[:-1], some.indptr[1:], strict=True)]

    return Column(matrix.shape[0], part, lambda rows: [row.tolist() for row in rows])


def _loaded(library: str) -> Any:
    """A library, where it is loaded."""
    return sys.modules.get(library)


def _of_pandas(column: Any) -> Column:
    def numbers(part: Any) -> NDArray[Any]:
        if isinstance(part.dtype, np.dtype):
            return np.asarray(part)
        missing = bool(part.isna().any())
        return np.asarray(part.to_numpy(dtype=np.float64, na_value=np.nan) if missing else part.to_numpy())

    real = getattr(column.dtype, "kind", "O") in "biuf"
    return Column(
        len(column),
        lambda start, stop: column.iloc[start:stop],
        lambda part: _plain_all(part.tolist()),
        numbers if real else None,
    )


def _of_polars(column: Any) -> Column:
    dtype = column.dtype
    real = dtype.is_integer() or dtype.is_float() or str(dtype) == "Boolean"
    return Column(
        len(column),
        lambda start, stop: column.slice(start, stop - start),
        lambda part: part.to_list(),
        (lambda part: np.asarray(part.to_numpy())) if real else None,
    )


def _of_arrow(column: Any) -> Column:
    types = sys.modules["pyarrow"].types
    real = types.is_integer(column.type) or types.is_floating(column.type) or types.is_boolean(column.type)
    return Column(
        len(column),
        lambda start, stop: column.slice(start, stop - start),
        lambda part: part.to_pylist(),
        (lambda part: np.asarray(part)) if real else None,
    )


def _plain_all(values: Sequence[Any]) -> list[Any]:
    return [value if type(value) is str else _plain(value) for value in values]


def _plain(value: Any) -> Any:
    """A cell of pandas, or an item of a list, as Parquet would have it."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple | AbstractSet):
        return _plain_all(list(value))
    if isinstance(value, str | dict):
        return value
    try:
        return None if value != value else value  # NaN, NaT
    except TypeError:  # NA of pandas has no truth value
        return None


def numbers_of(columns: Sequence[Column], start: int, stop: int) -> NDArray[Any]:
    """Rows [start, stop) of columns that all have numbers, as an array."""
    found = []
    for column in columns:
        assert column.numbers is not None
        values = column.numbers(column.part(start, stop))
        found.append(values.astype(np.float64) if values.dtype.kind == "O" else values)
    return np.stack(found, axis=1)
