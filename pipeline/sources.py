"""The files prompts come in: JSON Lines, Parquet, Arrow, and the directories that Hugging Face writes.

Each becomes :class:`_Lines` or :class:`_Table`: rows to judge one by one, and columns to keep.
"""

import bisect
import contextlib
import json
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import repeat
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

_JSON_LINES = (".jsonl", ".ndjson", ".json")
_ARROW = (".arrow", ".feather")
_LEGAL = "a .jsonl, .ndjson, .json, .parquet, .arrow or .feather file, or a folder of save_to_disk or parquet"
_SPLITS = {"train", "test", "validation"}
_NAMES_SHOWN = 20


class PromptError(ValueError):
    """The source of prompts as a whole cannot be used; the message says why and what to do."""


class RejectReason(StrEnum):
    """Why one row cannot be used."""

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
    TOO_LONG = "too_long"
    """The prompt has more tokens than fit."""
    NO_TOKENS = "no_tokens"
    """The prompt has no token left after tokenisation."""
    UNKNOWN_TOKEN = "unknown_token"
    """The tokenizer gives it an id that the model has no embedding for."""


class Unusable(Exception):
    """Why a row cannot be used: raised while judging it, or kept in place of what could not be read."""

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

    def select(self, names: Sequence[str], rows: Sequence[int]) -> pa.Table:
        used = [self.lines[row] for row in rows]
        arrays = [_array(self.path, name, used) for name in names]
        counted = pa.table([pa.nulls(len(used)), *arrays], names=["", *names])
        return counted.select(range(1, len(names) + 1))  # keeps the number of rows also without columns


@dataclass(frozen=True)
class _Table:
    """The rows of a Parquet or Arrow source."""

    path: Path
    table: pa.Table

    @property
    def num_rows(self) -> int:
        return int(self.table.num_rows)

    @property
    def names(self) -> list[str]:
        return list(self.table.column_names)

    def cells(self, prompt_column: str, id_column: str | None) -> Iterator[Cells]:
        prompts = _values(self.path, self.table, prompt_column)
        ids = repeat(None) if id_column is None else _values(self.path, self.table, id_column)
        for row, (prompt, prompt_id) in enumerate(zip(prompts, ids, strict=False)):
            yield Cells(row, f"row {row}", prompt, prompt_id)

    def select(self, names: Sequence[str], rows: Sequence[int]) -> pa.Table:
        for name in names:
            _check_values(self.path, name, self.table[name])
        used = np.zeros(self.num_rows, dtype=bool)
        used[list(rows)] = True
        return self.table.replace_schema_metadata(None).filter(pa.array(used)).select(names)


Source = _Lines | _Table


# --- reading -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn what goes wrong while reading ``path`` into a :class:`PromptError` that names it."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        message = f"{path} cannot be read ({_first_line(error)}); write it anew, or check its permissions"
        raise PromptError(message) from error


def read_source(path: Path, split: str) -> Source:
    """Open a file or directory that has at least one row.

    Raises:
        PromptError: there is none, or it is not in one of the formats.
    """
    if not path.exists():
        raise PromptError(f"{path} does not exist; name {_LEGAL}")
    source = _Table(path, _read_directory(path, split)) if path.is_dir() else _read_file(path)
    if source.num_rows == 0:
        raise PromptError(f"{path} has no rows; give at least one prompt")
    return source


def _read_file(path: Path) -> Source:
    suffix = path.suffix.lower()
    if suffix not in (*_JSON_LINES, *_ARROW, ".parquet"):
        raise PromptError(f"{path} has the unknown extension {suffix!r}; name {_LEGAL}")
    if path.stat().st_size == 0:
        raise PromptError(f"{path} is empty; give at least one prompt")
    if suffix in _JSON_LINES:
        return _Lines(path, _read_lines(path))
    return _Table(path, _read_arrow(path) if suffix in _ARROW else _read_parquet(path))


def _read_lines(path: Path) -> tuple[_Line, ...]:
    lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return tuple((number, _parse_line(line)) for number, line in enumerate(lines, start=1) if line.strip())


def _parse_line(line: bytes) -> dict[str, object] | Unusable:
    try:
        value = json.loads(line.decode())
        if b"\\u" in line:  # an escape can name half a character, which no UTF-8 file can hold
            json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        return Unusable(RejectReason.BAD_UTF8, f"not UTF-8 text: {error.reason}")
    except (ValueError, RecursionError) as error:
        return Unusable(RejectReason.BAD_JSON, f"not JSON: {_first_line(error)}")
    if not isinstance(value, dict):
        return Unusable(RejectReason.NOT_OBJECT, f"a JSON {type(value).__name__}, not an object")
    return value


def _read_parquet(path: Path) -> pa.Table:
    # read_table would make columns of folders named "key=value"
    with readable(path), pq.ParquetFile(path) as file:
        return file.read()


def _read_arrow(path: Path) -> pa.Table:
    """An Arrow IPC file or stream, whichever its first bytes say."""
    with readable(path), pa.OSFile(str(path)) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        with pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file) as reader:
            return reader.read_all()


def _read_directory(path: Path, split: str) -> pa.Table:
    if (path / "dataset_dict.json").is_file():
        splits = _saved_names(path / "dataset_dict.json", "splits")
        if split not in splits:
            raise PromptError(f"{path} has no split {split!r}; set data.split to one of {listing(splits)}")
        return _read_saved_dataset(path / split)
    if (path / "state.json").is_file():
        return _read_saved_dataset(path)
    parts = sorted(one for one in path.iterdir() if one.suffix.lower() == ".parquet")
    if not parts:
        found = listing(sorted(one.name for one in path.iterdir()))
        raise PromptError(f"{path} is a directory with {found}; name {_LEGAL}")
    tables = [_read_parquet(part) for part in _of_split(path, parts, split)]
    return pa.concat_tables(tables, promote_options="permissive")


def _of_split(path: Path, parts: list[Path], split: str) -> list[Path]:
    """The files named after ``split``; where none is, all of them, unless they are of several splits."""
    if named := [part for part in parts if part.name.startswith(f"{split}-") or part.stem == split]:
        return named
    found = sorted({part.stem.split("-")[0] for part in parts} & _SPLITS)
    if len(found) > 1:
        way_out = "set data.split to one of them, or name a single file"
        raise PromptError(f"{path} has files of the splits {listing(found)}, none of {split!r}; {way_out}")
    return parts


def _read_saved_dataset(path: Path) -> pa.Table:
    """A directory written by ``datasets.Dataset.save_to_disk``: state.json names Arrow streams, in order.

    Before ``datasets`` 1.15, a filtered or shuffled dataset was saved whole with the rows to take beside it.
    """
    state = path / "state.json"
    files = _saved_names(state, "_data_files")
    if not files:
        raise PromptError(f"{state} names no data files; save the dataset anew with save_to_disk")
    table = pa.concat_tables([_read_arrow(path / name) for name in files])
    parts = [_read_arrow(path / name) for name in _saved_names(state, "_indices_data_files")]
    return table.take(pa.concat_tables(parts).column(0)) if parts else table


def _saved_names(path: Path, key: str) -> list[str]:
    """Names of files or splits under ``key`` in a JSON file of ``save_to_disk``; none where it is null."""
    try:
        items = json.loads(path.read_bytes()).get(key) or []
        return [str(item["filename"] if isinstance(item, dict) else item) for item in items]
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        message = f"{path} is not what save_to_disk writes ({error!r}); save the dataset anew"
        raise PromptError(message) from error


# --- columns -----------------------------------------------------------------------------------------------


def _array(path: Path, name: str, lines: Sequence[_Line]) -> pa.Array:
    """The values of one JSON key, null where a line lacks it, as an Arrow array."""
    values = [None if isinstance(value, Unusable) else value.get(name) for _, value in lines]
    array = _array_or_error(values)
    if not isinstance(array, Exception):
        return array

    def is_refused(size: int) -> bool:
        return isinstance(_array_or_error(values[:size]), Exception)

    culprit = bisect.bisect_left(range(len(values)), True, key=is_refused) - 1
    message = f"{path}: the values of {name!r} do not fit one column: line {lines[culprit][0]} has"
    raise PromptError(f"{message} {shown(values[culprit])} ({_first_line(array)}); give all the same type")


def _array_or_error(values: list[object]) -> pa.Array | Exception:
    kinds = {type(value) for value in values}
    if bool in kinds and kinds & {int, float}:  # pyarrow would make numbers of some
        return TypeError("true or false among numbers")
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError) as error:
        return error


def _values(path: Path, table: pa.Table, name: str) -> Iterator[object]:
    """A column as Python values, with :class:`Unusable` where a cell cannot be one."""
    _check_values(path, name, table[name], is_judged_by_row=True)
    return map(_value, table[name])


def _value(scalar: pa.Scalar) -> object:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return Unusable(RejectReason.BAD_UTF8, f"not UTF-8 text: {error.reason}")
    except (ValueError, OverflowError) as error:
        return Unusable(RejectReason.NOT_TEXT, f"not text: {_first_line(error)}")


def _check_values(path: Path, name: str, column: pa.ChunkedArray, is_judged_by_row: bool = False) -> None:
    """Refuse a column whose buffers contradict each other, before anything follows its offsets."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        if not (is_judged_by_row and "UTF8" in str(error)):
            message = f"{path}: column {name!r} is corrupt ({_first_line(error)}); write it anew"
            raise PromptError(message) from error


# --- words -------------------------------------------------------------------------------------------------


def shown(value: object) -> str:
    """A value as messages show it: its type, and its beginning."""
    return f"{type(value).__name__} {reprlib.repr(value)}"


def listing(names: Sequence[str]) -> str:
    """Names as messages list them: quoted, and not too many."""
    first = ", ".join(repr(name) for name in names[:_NAMES_SHOWN])
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return first + more if first else "nothing"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
