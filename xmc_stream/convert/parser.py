"""Lines of text to blocks of rows through the compiled parser, and what is wrong in them to words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xmc_stream.errors import InputError

if TYPE_CHECKING:
    from xmc_stream.convert.source import Like

# x_indptr, x_indices, x_data, y_indptr, y_indices; indptr from 0, indices sorted and unique in a row
ParsedRows = tuple[NDArray[np.int64], NDArray[Any], NDArray[np.float32], NDArray[np.int64], NDArray[Any]]

_LINE_BYTES = 32  # rows are planned for lines of this length; shorter ones are parsed in several steps
_SHOWN = 40  # characters of a token in a message


class Parser:
    """Lines of text to blocks of rows, and what is wrong in them to words.

    name: of the file, for messages; ids must be below n_features and n_labels, which come from `like` if it is given.
    n_labels: None where lines are `id:value id:value ...` alone; noun: what those ids are of, then.
    n_rows counts rows so far; position is where the block given last ends in its text.
    """

    def __init__(
        self,
        name: str,
        n_features: int,
        n_labels: int | None,
        like: Like | None = None,
        first_line: int | Callable[[], int] = 2,
        noun: str = "feature",
    ) -> None:
        from xmc_stream.store.encoding import index_dtype

        self.name = name
        self.n_features = n_features
        self.n_labels = n_labels
        self.n_rows = 0
        self.position = 0
        self._like = like
        self._first_line = first_line
        self._noun = noun
        self._x_dtype = index_dtype(n_features)
        self._y_dtype = index_dtype(n_labels or 0)
        self._allocate(0)

    @property
    def bytes_per_byte(self) -> float:
        """Bytes of arrays a byte of text: a quarter of an entry of X, half an entry of Y, indptrs, the writer's sums."""
        labels = 0.0 if self.n_labels is None else self._y_dtype.itemsize / 2
        return (self._x_dtype.itemsize + 4) / 4 + labels + 6 * 8 / _LINE_BYTES

    def _allocate(self, length: int) -> None:
        """Arrays that hold what `length` bytes of text can hold; rows apart, which are parsed in as many steps."""
        self._capacity = length
        n_rows = length // _LINE_BYTES + 1
        self._x_indptr = np.empty(n_rows + 1, np.int64)
        self._y_indptr = np.empty(n_rows + 1, np.int64)
        self._x_indices = np.empty(length // 4 + 1, self._x_dtype)
        self._x_data = np.empty(length // 4 + 1, np.float32)
        self._y_indices = np.empty(0 if self.n_labels is None else length // 2 + 1, self._y_dtype)

    def blocks(self, text: NDArray[np.uint8]) -> Iterator[ParsedRows]:
        """The rows of a text of whole lines. Raises InputError with file and line."""
        from xmc_stream.kernels import parse

        if len(text) > self._capacity:
            self._allocate(len(text))
        state = np.zeros(parse.STATE_SIZE, np.int64)
        no_data = np.empty(0, np.float32)
        code = parse.FULL
        while code != parse.DONE:
            code = parse.parse_lines(
                text,
                state,
                self.n_features,
                self.n_labels or 0,
                self._x_indptr,
                self._x_indices,
                self._x_data,
                self._y_indptr,
                self._y_indices,
                no_data,
            )
            if code == parse.SLOW:
                code = self._take_slowly(text, state)
            if code not in (parse.DONE, parse.FULL, parse.SLOW):
                raise self._error(code, text, state)
            if code in (parse.DONE, parse.FULL) and state[parse.ROW]:
                n, nx, ny = (int(state[at]) for at in (parse.ROW, parse.X_END, parse.Y_END))
                self.n_rows += n
                self.position = int(state[parse.POSITION])
                yield (
                    self._x_indptr[: n + 1],
                    self._x_indices[:nx],
                    self._x_data[:nx],
                    self._y_indptr[: n + 1],
                    self._y_indices[:ny],
                )
                state[[parse.ROW, parse.X_END, parse.Y_END]] = 0

    def _take_slowly(self, text: NDArray[np.uint8], state: NDArray[np.int64]) -> int:
        """Store a number so near to the middle of two float32 values that only float() can tell; returns the code."""
        from xmc_stream.kernels import parse

        value = float(text[state[parse.CULPRIT] : state[parse.POSITION]].tobytes())
        with np.errstate(over="ignore"):
            rounded = np.float32(value)
        if np.isinf(rounded):
            return parse.VALUE_RANGE
        self._x_data[state[parse.X_END]] = rounded
        state[parse.X_END] += 1
        return parse.SLOW

    def _error(self, code: int, text: NDArray[np.uint8], state: NDArray[np.int64]) -> InputError:
        from xmc_stream.kernels import parse

        first = self._first_line if isinstance(self._first_line, int) else self._first_line()
        where = f"{self.name}:{first + self.n_rows + int(state[parse.ROW])}: "
        culprit = int(state[parse.CULPRIT])
        if self.n_labels is None and code in (parse.BAD_LABEL, parse.LABEL_RANGE):
            code = parse.BAD_FEATURE
        kind = "label" if code in (parse.BAD_LABEL, parse.LABEL_RANGE, parse.LABEL_TWICE) else self._noun
        if code in (parse.LABEL_TWICE, parse.FEATURE_TWICE):
            advice = "leave one of them out" if kind == "label" else "add up the values, or leave one out"
            return InputError(f"{where}{kind} {culprit} stands twice in the row: {advice}")
        token = re.match(rb"[^ \t\n]*", text[culprit : culprit + 1000].tobytes())[0]  # type: ignore[index]
        said = shown(token)
        if b"\0" in token:
            return InputError(f"{where}there is a NUL byte in {said}: the file is damaged or not a text")
        if code in (parse.BAD_VALUE, parse.VALUE_RANGE):
            number = int(self._x_indices[state[parse.X_END]])
            why = "is not a finite decimal number" if code == parse.BAD_VALUE else "is too large for float32"
            return InputError(f"{where}value {said} of {kind} {number} {why}: correct the line")
        if code in (parse.LABEL_RANGE, parse.FEATURE_RANGE):
            size = "K" if kind == "label" else "D"
            bound = self.n_labels if code == parse.LABEL_RANGE else self.n_features
            digits = re.match(rb"\d{1,40}", token)[0].decode()  # type: ignore[index]
            origin = f"which comes from --like {self._like.name}" if self._like else "which comes from the header"
            return InputError(f"{where}{kind} id {digits} is not below {size} = {bound}, {origin}: ids count from 0")
        if re.match(rb"-\d", token):
            return InputError(f"{where}{kind} id in {said} is negative: ids count from 0")
        if code == parse.BAD_LABEL:
            if not token.strip(b"\r"):
                return InputError(f"{where}the list of labels ends in a comma: a label is missing")
            return InputError(f"{where}{said} is not a list of label ids: write them as 1,2,3, before the features")
        apart = "" if self.n_labels is None else ", commas labels"
        return InputError(f"{where}{said} is not a {kind} id:value: blanks separate {kind}s{apart}")


def shown(token: bytes) -> str:
    """A token in quotes, in one line and not too long."""
    text = token.rstrip(b"\r\n").decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
