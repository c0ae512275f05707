"""Columns of every layout that Arrow knows, reduced to those that all of its functions take, and as Python
values."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.types as kinds


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the same values without views, dictionaries and run-lengths, which Polars, pandas'
    categories and DuckDB write, and for which Arrow lacks functions."""
    if kinds.is_dictionary(kind) or kinds.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if kinds.is_string_view(kind):
        return pa.large_string()
    if kinds.is_binary_view(kind):
        return pa.large_binary()
    if kinds.is_struct(kind):
        return pa.struct([field.with_type(plain_type(field.type)) for field in kind])
    if kinds.is_map(kind):
        return pa.map_(plain_type(kind.key_type), plain_type(kind.item_type))
    if kinds.is_fixed_size_list(kind):
        return pa.list_(plain_type(kind.value_type), kind.list_size)
    if kinds.is_large_list(kind) or kinds.is_large_list_view(kind):
        return pa.large_list(plain_type(kind.value_type))
    if kinds.is_list(kind) or kinds.is_list_view(kind):
        return pa.list_(plain_type(kind.value_type))
    return kind


def plain(table: pa.Table) -> pa.Table:
    """Return a table with the same values in columns of plain types. Raises pa.ArrowException."""
    for index, field in enumerate(table.schema):
        wanted = plain_type(field.type)
        if wanted != field.type:
            check_buffers(table.column(index))
            column = _as_type(table.column(index), wanted)
            table = table.set_column(index, field.with_type(wanted), column)
    return table


def check_buffers(column: pa.ChunkedArray) -> None:
    """Raise pa.ArrowInvalid where buffers contradict each other, before anything follows offsets, which might
    end the process. Text that is not UTF-8 is refused later, row by row."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise


def _as_type(column: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray:
    # Arrow 26 makes lists of list views whose offsets end too soon, without an error.
    if not any(kinds.is_list_view(one) or kinds.is_large_list_view(one) for one in inner_types(column.type)):
        with contextlib.suppress(pa.ArrowNotImplementedError):  # there is no such cast, as of run-lengths
            return column.cast(wanted)
    return pa.chunked_array([pa.array(chunk.to_pylist(), wanted) for chunk in column.chunks], wanted)


def inner_types(kind: pa.DataType) -> Iterator[pa.DataType]:
    """Yield a type and all types within it."""
    yield kind
    for index in range(kind.num_fields):
        yield from inner_types(kind.field(index).type)


def has_json(kind: pa.DataType) -> bool:
    """Whether values of the type are, or hold, texts that Arrow marks as JSON, as ``datasets`` does."""
    return any(isinstance(one, pa.JsonType) for one in inner_types(kind))


def python_value(scalar: pa.Scalar) -> Any:
    """Return a scalar as the JSON value that it stands for: maps are objects, and a null in a struct, which
    is there where other rows have a key, is no entry.

    Raises:
        ValueError, OverflowError, RecursionError: it cannot be a Python value.
        KeyError: a map has a key twice.
    """
    if not kinds.is_nested(scalar.type) and not isinstance(scalar.type, pa.BaseExtensionType):
        return scalar.as_py()
    return _json_value(scalar.as_py(maps_as_pydicts="strict"), scalar.type)


def _json_value(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if isinstance(kind, pa.JsonType):
        found = json.loads(value) if isinstance(value, str) else value
        if isinstance(value, str) and "\\u" in value:  # half a character, which no UTF-8 text can hold
            json.dumps(found, ensure_ascii=False).encode()
        return found
    if kinds.is_struct(kind):
        inner = {field.name: field.type for field in kind}
        return {key: _json_value(one, inner[key]) for key, one in value.items() if one is not None}
    if kinds.is_map(kind):
        return {key: _json_value(one, kind.item_type) for key, one in value.items()}
    if kinds.is_nested(kind) and not kinds.is_union(kind):
        return [_json_value(one, kind.value_type) for one in value]
    return value
