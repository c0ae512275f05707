"""The files prompts come in: JSON Lines, Parquet, Arrow, and the directories that Hugging Face writes.

Each becomes :class:`_Lines` or :class:`_Table`: rows to judge one by one, and columns to keep.
"""

import json
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import repeat
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipeline.data.columns import Mixed, array, misfits
from pipeline.data.tables import (
    ARROW,
    KEEP,
    LEGAL,
    PromptError,
    first_line,
    read_directory,
    read_part,
    readable,
)
from pipeline.text import shown

_JSON_LINES = (".jsonl", ".ndjson", ".json")
_SAMPLE_ROWS = 20_000
_SAMPLE_BYTES = 32 << 20
"""Limits of a sample, in rows and bytes: so much is judged and tokenised in seconds."""

_SCAN_BYTES = 16 << 20
"""Bytes of a scan's chunk, if one row has no more."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class RejectReason(StrEnum):
    """Reasons that a row cannot be used."""

    BAD_JSON = "bad_json"
    """The line is not JSON."""
    NOT_OBJECT = "not_object"
    """The line is JSON, but not an object."""
    BAD_UTF8 = "bad_utf8"
    """The row holds bytes or escapes that are not Unicode text."""
    MISSING = "missing"
    """The row has no prompt column."""
    NULL = "null"
    """The prompt is null."""
    NOT_TEXT = "not_text"
    """The prompt is neither a string nor a list of messages."""
    EMPTY = "empty"
    """The prompt, or the user's message at its end, is empty or only white space."""
    BAD_MESSAGE = "bad_message"
    """A message lacks a role or a content that is text."""
    BAD_ROLE = "bad_role"
    """A message's role is not one of system, user, assistant, tool."""
    NOTHING_TO_ANSWER = "nothing_to_answer"
    """The last message is not from the user or a tool."""
    BAD_ID = "bad_id"
    """The id is missing, null, empty, or neither a string nor an integer."""
    DUPLICATE_ID = "duplicate_id"
    """An earlier usable row has the same id, or the same prompt where ids come from content."""
    MIXED_TYPES = "mixed_types"
    """A value of another column is of another type than most rows have there."""
    BAD_ANSWER = "bad_answer"
    """A reward rule cannot score responses to the row, most often as its answer is missing."""
    TOO_LONG = "too_long"
    """The prompt has more tokens than fit."""
    NO_TOKENS = "no_tokens"
    """The prompt has no token left after tokenisation."""
    UNKNOWN_TOKEN = "unknown_token"
    """The tokenizer gives the prompt an id that the model has no embedding for."""


class Unusable(Exception):
    """Reason that a row cannot be used: raised while judging it, or kept in place of an unreadable value."""

    def __init__(self, reason: RejectReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Cells:
    """A row's raw prompt and id, or :class:`Unusable` in place of either. ``where`` names it to people."""

    row: int
    where: str
    prompt: object
    prompt_id: object


_Line = tuple[int, dict[str, object] | Unusable]
"""1-based number of a line and its object, or why there is none."""


@dataclass(frozen=True)
class _Lines:
    """The non-blank lines of a JSON Lines file, which are its rows."""

    path: Path
    lines: tuple[_Line, ...]
    num_total: int
    """Rows of the file, of which ``lines`` may be a sample."""

    @property
    def num_rows(self) -> int:
        return len(self.lines)

    @property
    def names(self) -> list[str]:
        """Keys of all objects, in order of first appearance."""
        objects = [value for _, value in self.lines if not isinstance(value, Unusable)]
        if not objects:
            number, first = self.lines[0]
            raise PromptError(f"{self.path} has no line with a JSON object; line {number} is {first}")
        return list(dict.fromkeys(key for value in objects for key in value))

    def cells(self, prompt_column: str, id_column: str | None) -> Iterator[Cells]:
        no_prompt = Unusable(RejectReason.MISSING, f"no {prompt_column!r}")
        no_id = Unusable(RejectReason.BAD_ID, f"no {id_column!r}")
        for row, (number, value) in enumerate(self.lines):
            if isinstance(value, Unusable):
                yield Cells(row, f"line {number}", value, value)
            else:
                prompt_id = None if id_column is None else value.get(id_column, no_id)
                yield Cells(row, f"line {number}", value.get(prompt_column, no_prompt), prompt_id)

    def misfits(self, names: Sequence[str], rows: Sequence[int]) -> dict[int, str]:
        """Find the rows whose values do not fit a column that the others fit, with descriptions."""
        found: dict[int, str] = {}
        for name in names:
            for index, what in misfits(self._values(name, rows)).items():
                found.setdefault(rows[index], f"line {self.lines[rows[index]][0]}: {name!r} has {what}")
        return found

    def select(self, names: Sequence[str], rows: Sequence[int]) -> pa.Table:
        arrays = [self._array(name, rows) for name in names]
        counted = pa.table([pa.nulls(len(rows)), *arrays], names=["", *names])
        return counted.select(range(1, len(names) + 1))  # without columns too, the number of rows is kept

    def _values(self, name: str, rows: Sequence[int]) -> list[object]:
        """Return the values of one JSON key; None for a row that lacks it or is no object."""
        found = (self.lines[row][1] for row in rows)
        return [None if isinstance(value, Unusable) else value.get(name) for value in found]

    def _array(self, name: str, rows: Sequence[int]) -> pa.Array:
        values = self._values(name, rows)
        try:
            return array(values)
        except Mixed as mixed:
            number = self.lines[rows[mixed.culprit]][0]
            message = f"{self.path}: the values of {name!r} do not fit one column: line {number} has"
            raise PromptError(f"{message} {shown(values[mixed.culprit])} ({mixed}); {KEEP}") from mixed


@dataclass(frozen=True)
class _Table:
    """The rows of a Parquet or Arrow source."""

    path: Path
    table: pa.Table
    names: list[str]
    """All columns of the source, of which the table may lack those that nobody wants."""
    places: Sequence[int]
    """The table's rows in the source, of which it may be a sample."""
    num_total: int

    @property
    def num_rows(self) -> int:
        return int(self.table.num_rows)

    def cells(self, prompt_column: str, id_column: str | None) -> Iterator[Cells]:
        prompts = _values(self.path, self.table, prompt_column)
        ids = repeat(None) if id_column is None else _values(self.path, self.table, id_column)
        for row, (prompt, prompt_id) in enumerate(zip(prompts, ids, strict=False)):
            yield Cells(row, f"row {self.places[row]}", prompt, prompt_id)

    def misfits(self, names: Sequence[str], rows: Sequence[int]) -> dict[int, str]:
        """Return nothing: a column has one type."""
        return {}

    def select(self, names: Sequence[str], rows: Sequence[int]) -> pa.Table:
        for name in names:
            _check_values(self.path, name, self.table[name])
        used = np.zeros(self.num_rows, dtype=bool)
        used[list(rows)] = True
        return self.table.replace_schema_metadata(None).filter(pa.array(used)).select(names)


Source = _Lines | _Table


# --- reading -----------------------------------------------------------------------------------------------


def read_source(
    path: Path, split: str, wanted: Collection[str] | None = None, is_sample: bool = False
) -> Source:
    """Open a file or directory that has at least one row.

    Args:
        wanted: the only columns to read, if the source has them. Default: all.
        is_sample: whether some rows of a large source are enough: the same ones each time, spread over it.

    Raises:
        PromptError: there is none, or it is not in one of the formats.
    """
    if not path.exists():
        raise PromptError(f"{path} does not exist; name {LEGAL}")
    source = _read(path, split, wanted, is_sample)
    if source.num_rows == 0:
        raise PromptError(f"{path} has no rows; give at least one prompt")
    return source


def _read(path: Path, split: str, wanted: Collection[str] | None, is_sample: bool) -> Source:
    suffix = path.suffix.lower()
    if path.is_dir():
        table, names = read_directory(path, split, wanted)
    elif suffix not in (*_JSON_LINES, *ARROW, ".parquet"):
        raise PromptError(f"{path} has the unknown extension {suffix!r}; name {LEGAL}")
    elif path.stat().st_size == 0:
        raise PromptError(f"{path} is empty; give at least one prompt")
    elif suffix in _JSON_LINES:
        return _read_lines(path, is_sample)
    else:
        table, names = read_part(path, wanted)
    total = table.num_rows
    places = _chosen(total, table.nbytes, is_sample)
    return _Table(path, table if len(places) == total else table.take(places), names, places, total)


def scan(
    path: Path, split: str, names: Sequence[str], size: int
) -> Iterator[tuple[Sequence[str], dict[str, list[object]]]]:
    """Yield all rows of a source in chunks of up to ``size``: how messages name them, and values by column.
    Rows that are no JSON objects are left out; a value that cannot be one of Python is None.

    Raises:
        PromptError: the source cannot be read.
    """
    with readable(path):
        if path.is_file() and path.suffix.lower() in _JSON_LINES:
            yield from _scan_lines(path, names, size)
            return
        table, _ = read_directory(path, split, names) if path.is_dir() else read_part(path, names)
        size = max(1, min(size, _SCAN_BYTES * table.num_rows // max(table.nbytes, 1)))
        for start in range(0, table.num_rows, size):
            part = table.slice(start, size)
            where = [f"row {start + i}" for i in range(part.num_rows)]
            values = {name: [_known(_value(cell)) for cell in part[name]] for name in part.column_names}
            yield where, values


def _scan_lines(
    path: Path, names: Sequence[str], size: int
) -> Iterator[tuple[Sequence[str], dict[str, list[object]]]]:
    where: list[str] = []
    values: dict[str, list[object]] = {name: [] for name in names}
    num_bytes = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            row = _parse_line(line.removeprefix(_BYTE_ORDER_MARK)) if line.strip() else None
            if not isinstance(row, dict):
                continue
            num_bytes += len(line)
            where.append(f"line {number}")
            for name in names:
                values[name].append(row.get(name))
            if len(where) == size or num_bytes > _SCAN_BYTES:
                yield where, values
                where, values, num_bytes = [], {name: [] for name in names}, 0
    if where:
        yield where, values


def _known(value: object) -> object:
    return None if isinstance(value, Unusable) else value


def _chosen(num_rows: int, num_bytes: int, is_sample: bool) -> Sequence[int]:
    """Return the rows to look at, in order."""
    limit = min(_SAMPLE_ROWS, max(num_rows * _SAMPLE_BYTES // max(num_bytes, 1), 1))
    if not is_sample or num_rows <= limit:
        return range(num_rows)
    return sorted(random.Random(0).sample(range(num_rows), limit))


def _read_lines(path: Path, is_sample: bool) -> _Lines:
    content = path.read_bytes().removeprefix(_BYTE_ORDER_MARK)
    filled = [(number, line) for number, line in enumerate(content.split(b"\n"), start=1) if line.strip()]
    chosen = (filled[row] for row in _chosen(len(filled), len(content), is_sample))
    return _Lines(path, tuple((number, _parse_line(line)) for number, line in chosen), len(filled))


def _parse_line(line: bytes) -> dict[str, object] | Unusable:
    try:
        value = json.loads(line.decode())
        if b"\\u" in line:  # an escape can name half a character, which no UTF-8 file can hold
            json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        return Unusable(RejectReason.BAD_UTF8, f"not UTF-8 text: {error.reason}")
    except (ValueError, RecursionError) as error:
        return Unusable(RejectReason.BAD_JSON, f"not JSON: {first_line(error)}")
    if not isinstance(value, dict):
        return Unusable(RejectReason.NOT_OBJECT, f"a JSON {type(value).__name__}, not an object")
    return value


# --- columns -----------------------------------------------------------------------------------------------


def _values(path: Path, table: pa.Table, name: str) -> Iterator[object]:
    """Return a column as Python values, with :class:`Unusable` where a cell cannot be one."""
    _check_values(path, name, table[name], is_judged_by_row=True)
    return map(_value, table[name])


def _value(scalar: pa.Scalar) -> object:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return Unusable(RejectReason.BAD_UTF8, f"not UTF-8 text: {error.reason}")
    except (ValueError, OverflowError) as error:
        return Unusable(RejectReason.NOT_TEXT, f"not text: {first_line(error)}")


def _check_values(path: Path, name: str, column: pa.ChunkedArray, is_judged_by_row: bool = False) -> None:
    """Refuse a column whose buffers contradict each other, before anything follows its offsets."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        if not (is_judged_by_row and "UTF8" in str(error)):
            message = f"{path}: column {name!r} is corrupt ({first_line(error)}); write it again, or {KEEP}"
            raise PromptError(message) from error
