"""Columns of more bytes than Arrow's 32-bit offsets count, 2 GiB in one array, and rows of them.

Functions of Arrow that put rows together fail there. So values are stored once where rows share them, and get
64-bit offsets where it must be.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.types as kinds


def wide_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the same values with offsets of 64 bits."""
    if kinds.is_string(kind):
        return pa.large_string()
    if kinds.is_binary(kind):
        return pa.large_binary()
    if kinds.is_struct(kind):
        return pa.struct([field.with_type(wide_type(field.type)) for field in kind])
    if kinds.is_list(kind) or kinds.is_large_list(kind):
        return pa.large_list(wide_type(kind.value_type))
    if kinds.is_fixed_size_list(kind):
        return pa.list_(wide_type(kind.value_type), kind.list_size)
    return kind


def combined(column: pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return a column as one array; as it is, in several, if it is too large for one."""
    try:
        return column.combine_chunks()
    except pa.ArrowInvalid:  # offsets overflow
        return column


def take(table: pa.Table, indices: Sequence[int]) -> pa.Table:
    """Return rows of a table, in the order of ``indices``."""
    columns = [_taken(column, indices) for column in table.columns]
    return pa.table(columns, schema=table.schema)


def _taken(column: pa.ChunkedArray, indices: Sequence[int]) -> pa.ChunkedArray:
    try:
        return column.take(pa.array(indices, pa.int64()))
    except pa.ArrowInvalid:  # offsets overflow, of all the column's rows together, too
        rows = (column.slice(index, 1) for index in indices)
        return pa.chunked_array([chunk for row in rows for chunk in row.chunks], column.type)


def repeat(table: pa.Table, times: int, plain: Sequence[str]) -> pa.Table:
    """Return each row ``times`` times, side by side.

    Values of no fixed size are stored once, in a dictionary with 64-bit offsets: an array reads the same.

    Args:
        plain: columns that keep their types instead; of more than 2 GiB they are in several arrays.
    """
    indices = np.repeat(np.arange(table.num_rows, dtype=np.int32), times)
    columns, fields = [], []
    for field, column in zip(table.schema, table.columns, strict=True):
        if field.name in plain or not _has_dictionaries(column.type):
            found = _taken(column, indices.tolist())
        else:
            values = column.cast(wide_type(column.type)).combine_chunks()
            found = pa.chunked_array([pa.DictionaryArray.from_arrays(pa.array(indices), values)])
        columns.append(found)
        fields.append(field.with_type(found.type))
    return pa.table(columns, schema=pa.schema(fields, metadata=table.schema.metadata))


def _has_dictionaries(kind: pa.DataType) -> bool:
    """Whether values are stored once: not those of a few bytes, and Arrow does not read what else it cannot
    have in dictionaries."""
    is_small = any(is_one(kind) for is_one in (kinds.is_primitive, kinds.is_null, kinds.is_decimal))
    return not (is_small or kinds.is_union(kind) or isinstance(kind, pa.BaseExtensionType))
