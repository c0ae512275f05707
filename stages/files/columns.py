"""Arrow columns of lists as numpy arrays, and arrays as such columns, without a Python list per token."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def lists(column: pa.ChunkedArray) -> list[np.ndarray]:
    """Return the lists of a column, none of which is null, as views of one array. It is a copy: torch warns
    of arrays that cannot be written to."""
    bounds = [0, *lengths(column).cumsum().tolist()]
    whole = np.concatenate([*values(column), np.empty(0, np.int32)])
    return [whole[start:stop] for start, stop in itertools.pairwise(bounds)]


def lengths(column: pa.ChunkedArray) -> np.ndarray:
    """Return [rows] the lengths of a column's lists, none of which is null."""
    return np.concatenate([np.empty(0, np.int64), *(np.diff(chunk.offsets) for chunk in column.chunks)])


def values(column: pa.ChunkedArray) -> Iterator[np.ndarray]:
    """Yield the values of each chunk's lists, end to end."""
    return (chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks)


def column_of(
    flat: np.ndarray, offsets: npt.NDArray[np.integer[Any]], is_null: npt.NDArray[np.bool_]
) -> pa.ListArray:
    """Make a column of lists, row i from ``flat[offsets[i] : offsets[i + 1]]``; nothing may be there where
    ``is_null``."""
    mask = pa.array(is_null) if is_null.any() else None
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(flat), mask=mask)
