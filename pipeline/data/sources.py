"""The files prompts come in: JSON Lines, CSV, Parquet, Arrow, and the directories that Hugging Face writes.

Each becomes :class:`SourceLines` or :class:`_Table`: rows to judge one by one, and columns to keep.
"""

import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipeline.data.arrow_types import check_buffers, has_json, python_value
from pipeline.data.lines import WANTED, Line, is_csv, is_text, raw_lines, read_lines
from pipeline.data.rows import Cells, Columns, Reading, RejectReason, Unusable, column
from pipeline.data.tables import (
    ARROW,
    KEEP,
    LEGAL,
    Choose,
    PromptError,
    check_is_no_pipe,
    first_line,
    read_directory,
    read_files,
    readable,
)

_SAMPLE_ROWS = 20_000
_SAMPLE_BYTES = 32 << 20
"""Limits of a sample, in rows and bytes: so much is judged and tokenised in seconds."""
_SCAN_BYTES = 16 << 20
"""Bytes of a scan's chunk, if one row has no more."""


@dataclass(frozen=True)
class SourceLines:
    """The rows of a text file, lines of JSON or CSV that are not blank; or rows that come from no file."""

    path: Path
    lines: tuple[Line, ...]
    num_total: int
    """Rows of the file, of which ``lines`` may be a sample."""
    word: str = "line"
    """What messages call a row."""

    @property
    def num_rows(self) -> int:
        return len(self.lines)

    @property
    def names(self) -> list[str]:
        """Keys of all objects, in order of first appearance."""
        objects = [value for _, value in self.lines if not isinstance(value, Unusable)]
        if not objects:
            number, first = self.lines[0]
            if is_csv(self.path):
                raise PromptError(f"{self.path} has no row that fits its header; line {number} has {first}")
            why = f"{self.path} has no line with a JSON object; {self.word} {number} is {first}"
            raise PromptError(f"{why}; {WANTED}")
        return list(dict.fromkeys(key for value in objects for key in value))

    def cells(self, prompt_column: str, id_column: str | None, tools_column: str | None) -> Iterator[Cells]:
        no_prompt = Unusable(RejectReason.MISSING, f"no {prompt_column!r}")
        no_id = Unusable(RejectReason.BAD_ID, f"no {id_column!r}")
        for row, (number, value) in enumerate(self.lines):
            where, has_id = f"{self.word} {number}", id_column is not None
            if isinstance(value, Unusable):
                yield Cells(row, where, value, value, None, has_id)
            else:
                prompt_id = value.get(id_column, no_id) if id_column else None
                tools = value.get(tools_column) if tools_column else None
                yield Cells(row, where, value.get(prompt_column, no_prompt), prompt_id, tools, has_id)

    def columns(self, names: Sequence[str], rows: Sequence[int]) -> Columns:
        """Return columns of some rows."""
        made = [column(name, self._values(name, rows)) for name in names]
        counted = pa.table([pa.nulls(len(rows)), *(array for array, _ in made)], names=["", *names])
        # without columns too, the number of rows is kept
        table = counted.select(range(1, len(names) + 1))
        return Columns(table, sum((read_as for _, read_as in made), Counter()))

    def _values(self, name: str, rows: Sequence[int]) -> list[object]:
        """Return the values of one JSON key; None for a row that lacks it or is no object."""
        found = (self.lines[row][1] for row in rows)
        return [None if isinstance(value, Unusable) else value.get(name) for value in found]


@dataclass(frozen=True)
class _Table:
    """The rows of a Parquet or Arrow source."""

    path: Path
    table: pa.Table
    names: list[str]
    """All columns of the source, of which the table may lack those that are not used."""
    places: Sequence[int]
    """The table's rows in the source, of which it may be a sample."""
    num_total: int

    @property
    def num_rows(self) -> int:
        return int(self.table.num_rows)

    def cells(self, prompt_column: str, id_column: str | None, tools_column: str | None) -> Iterator[Cells]:
        prompts, ids, tools = (
            repeat(None) if name is None else _values(self.path, self.table, name)
            for name in (prompt_column, id_column, tools_column)
        )
        for row, (prompt, prompt_id, own) in enumerate(zip(prompts, ids, tools, strict=False)):
            yield Cells(row, f"row {self.places[row]}", prompt, prompt_id, own, id_column is not None)

    def columns(self, names: Sequence[str], rows: Sequence[int]) -> Columns:
        """Return columns of some rows."""
        for name in names:
            _check_values(self.path, name, self.table[name])
        used = np.zeros(self.num_rows, dtype=bool)
        used[list(rows)] = True
        table = self.table.replace_schema_metadata(None).filter(pa.array(used)).select(names)
        read_as: Counter[Reading] = Counter()
        for index, name in enumerate(names):
            if has_json(table.schema.field(index).type):
                array, made = column(name, list(map(_parsed, table[name])))
                read_as += made
                table = table.set_column(index, name, pa.chunked_array([array]))
        return Columns(table, read_as)


Source = SourceLines | _Table


# --- reading -----------------------------------------------------------------------------------------------


def read_source(
    path: Path,
    split: str,
    wanted: Collection[str] | None = None,
    is_sample: bool = False,
    limit: int | None = None,
) -> Source:
    """Open a file or directory that has at least one row.

    Args:
        wanted: the only columns to read, if the source has them. Default: all.
        is_sample: whether some rows of a large source are enough: the same ones each time, spread over it.
        limit: the most rows to read, the first ones; others count as if they were not there. Default: all.

    Raises:
        PromptError: there is none, or it is not in one of the formats.
    """
    if not path.exists():
        raise PromptError(f"{path} does not exist; name {LEGAL}")
    check_is_no_pipe(path)
    source = _read(path, split, wanted, is_sample, limit)
    if source.num_rows == 0:
        raise PromptError(f"{path} has no rows; give at least one prompt")
    return source


def _read(
    path: Path, split: str, wanted: Collection[str] | None, is_sample: bool, limit: int | None
) -> Source:
    if path.is_dir():
        found = read_directory(path, split, wanted, _chooser(is_sample, limit))
    elif not is_text(path) and path.suffix.lower() not in (*ARROW, ".parquet"):
        raise PromptError(f"{path} has the unknown extension {path.suffix.lower()!r}; name {LEGAL}")
    elif path.stat().st_size == 0:
        raise PromptError(f"{path} is empty; give at least one prompt")
    elif is_text(path):
        return SourceLines(path, *read_lines(path, _chosen if is_sample else None, limit))
    else:
        found = read_files(path, [path], wanted, _chooser(is_sample, limit))
    num_total = found.num_total if limit is None else min(limit, found.num_total)
    return _Table(path, found.table, found.names, found.places, num_total)


def _chooser(is_sample: bool, limit: int | None) -> Choose | None:
    """Return what chooses the rows of a table to look at: the first ``limit``, or a sample of these; None for
    all."""
    if limit is None:
        return _chosen if is_sample else None

    def choose(num_rows: int, num_bytes: int) -> Sequence[int]:
        first = min(num_rows, limit)
        return _chosen(first, num_bytes * first // max(num_rows, 1)) if is_sample else range(first)

    return choose


def scan(
    path: Path, split: str, names: Sequence[str], size: int, limit: int | None = None
) -> Iterator[tuple[Sequence[str], dict[str, list[object]]]]:
    """Yield all rows of a source, or the first ``limit``, in chunks of up to ``size``: how messages name
    them, and values by column. Rows that are no JSON objects are left out; a value that cannot be one of
    Python is None.

    Raises:
        PromptError: the source cannot be read.
    """
    with readable(path):
        if path.is_file() and is_text(path):
            yield from _scan_lines(path, names, size, limit)
            return
        read = read_directory(path, split, names, None) if path.is_dir() else None
        table = (read or read_files(path, [path], names, None)).table.slice(0, limit)
        for name in table.column_names:
            _check_values(path, name, table[name], is_judged_by_row=True)
        size = max(1, min(size, _SCAN_BYTES * table.num_rows // max(table.nbytes, 1)))
        for start in range(0, table.num_rows, size):
            part = table.slice(start, size)
            where = [f"row {start + i}" for i in range(part.num_rows)]
            yield where, {name: list(map(_kept_value, part[name])) for name in part.column_names}


def _scan_lines(
    path: Path, names: Sequence[str], size: int, limit: int | None
) -> Iterator[tuple[Sequence[str], dict[str, list[object]]]]:
    where: list[str] = []
    values: dict[str, list[object]] = {name: [] for name in names}
    num_bytes = 0
    for line in raw_lines(path, limit):
        row = line.parsed
        if isinstance(row, Unusable):
            continue
        num_bytes += line.size
        where.append(f"line {line.number}")
        for name in names:
            values[name].append(row.get(name))
        if len(where) == size or num_bytes > _SCAN_BYTES:
            yield where, values
            where, values, num_bytes = [], {name: [] for name in names}, 0
    if where:
        yield where, values


def _kept_value(scalar: pa.Scalar) -> object:
    """Return a value of a column as rules get it; None where there is none in Python."""
    if has_json(scalar.type):
        return _parsed(scalar)
    try:
        return scalar.as_py()
    except (ValueError, OverflowError, KeyError, RecursionError):
        return None


def _chosen(num_rows: int, num_bytes: int) -> Sequence[int]:
    """Return the rows to look at, in order."""
    limit = min(_SAMPLE_ROWS, max(num_rows * _SAMPLE_BYTES // max(num_bytes, 1), 1))
    return range(num_rows) if num_rows <= limit else sorted(random.Random(0).sample(range(num_rows), limit))


# --- columns -----------------------------------------------------------------------------------------------


def _values(path: Path, table: pa.Table, name: str) -> Iterator[object]:
    """Return a column as Python values, with :class:`Unusable` where a cell cannot be one."""
    _check_values(path, name, table[name], is_judged_by_row=True)
    return map(_value, table[name])


def _value(scalar: pa.Scalar) -> object:
    try:
        return python_value(scalar)
    except UnicodeDecodeError as error:
        return Unusable(RejectReason.BAD_UTF8, f"not UTF-8 text: {error.reason}")
    except (ValueError, OverflowError, KeyError, RecursionError) as error:
        return Unusable(RejectReason.NOT_TEXT, f"not text: {first_line(error)}")


def _parsed(scalar: pa.Scalar) -> object:
    """Return a JSON value of a column that is kept; the text itself where it is no JSON."""
    try:
        return python_value(scalar)
    except (ValueError, KeyError, RecursionError):
        return scalar.as_py()


def _check_values(path: Path, name: str, column: pa.ChunkedArray, is_judged_by_row: bool = False) -> None:
    """Refuse a column whose buffers contradict each other, before anything follows its offsets."""
    try:
        check_buffers(column) if is_judged_by_row else column.validate(full=True)
    except pa.ArrowInvalid as error:
        message = f"{path}: column {name!r} is corrupt ({first_line(error)}); write it again, or {KEEP}"
        raise PromptError(message) from error
