"""Prompts in: read a file or a dataset directory, say which rows cannot be used, deal the rest to iterations.

Trouble with one row becomes a :class:`Rejected`, trouble with the whole source a :class:`PromptError`.
Nothing here needs a tokenizer or torch; :attr:`RejectReason.TOO_LONG` and ``NO_TOKENS`` come from later.
"""

import bisect
import contextlib
import json
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import repeat
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from pipeline.seeds import derive_seed

_JSON_LINES = (".jsonl", ".ndjson", ".json")
_ARROW = (".arrow", ".feather")
_LEGAL = "a .jsonl, .ndjson, .json, .parquet, .arrow or .feather file, or a folder of save_to_disk or parquet"
_ROLES = ("system", "user", "assistant", "tool")
_ROLES_TO_ANSWER = ("user", "tool")
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


@dataclass(frozen=True)
class Message:
    """One chat message. Other keys of the source's messages are not kept."""

    role: str
    content: str


@dataclass(frozen=True)
class Prompt:
    """One usable prompt: plain text, or the messages of a chat. ``row`` is 0-based in the source."""

    row: int
    prompt_id: str
    prompt: str | tuple[Message, ...]


@dataclass(frozen=True)
class Rejected:
    """One row that cannot be used. ``row`` is 0-based in the source; ``prompt_id`` where it could be read."""

    row: int
    prompt_id: str | None
    reason: RejectReason
    detail: str


@dataclass(frozen=True)
class Prompts:
    """What a source holds. ``columns`` has one row per item of ``rows``: all but prompt and id column."""

    rows: tuple[Prompt, ...]
    columns: pa.Table
    rejected: tuple[Rejected, ...]


@dataclass(frozen=True)
class Deal:
    """The prompts of one shard of one iteration: 0-based ``epoch``, and ``indices`` into the usable rows."""

    epoch: int
    indices: tuple[int, ...]


class _Unusable(Exception):
    """Why a row cannot be used: raised while judging it, or kept in place of what could not be read."""

    def __init__(self, reason: RejectReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class _Cells:
    """A row's raw prompt and id, or :class:`_Unusable` in place of either. ``where`` names it to people."""

    row: int
    where: str
    prompt: object
    prompt_id: object


_Line = tuple[int, dict[str, object] | _Unusable]
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
        objects = [value for _, value in self.lines if not isinstance(value, _Unusable)]
        if not objects:
            number, first = self.lines[0]
            raise PromptError(f"{self.path} has no line with a JSON object; line {number} is {first}")
        return list(dict.fromkeys(key for value in objects for key in value))

    def cells(self, prompt_column: str, id_column: str | None) -> Iterator[_Cells]:
        no_prompt = _Unusable(RejectReason.MISSING, f"no {prompt_column!r}")
        no_id = _Unusable(RejectReason.BAD_ID, f"no {id_column!r}")
        for row, (number, value) in enumerate(self.lines):
            if isinstance(value, _Unusable):
                yield _Cells(row, f"line {number}", value, value)
            else:
                prompt_id = None if id_column is None else value.get(id_column, no_id)
                yield _Cells(row, f"line {number}", value.get(prompt_column, no_prompt), prompt_id)

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

    def cells(self, prompt_column: str, id_column: str | None) -> Iterator[_Cells]:
        prompts = _values(self.path, self.table, prompt_column)
        ids = repeat(None) if id_column is None else _values(self.path, self.table, id_column)
        for row, (prompt, prompt_id) in enumerate(zip(prompts, ids, strict=False)):
            yield _Cells(row, f"row {row}", prompt, prompt_id)

    def select(self, names: Sequence[str], rows: Sequence[int]) -> pa.Table:
        for name in names:
            _check_values(self.path, name, self.table[name])
        used = np.zeros(self.num_rows, dtype=bool)
        used[list(rows)] = True
        return self.table.replace_schema_metadata(None).filter(pa.array(used)).select(names)


_Source = _Lines | _Table


def read_prompts(
    path: Path,
    *,
    prompt_column: str,
    id_column: str | None,
    split: str,
    reserved: frozenset[str] = frozenset(),
) -> Prompts:
    """Read and judge every row of a source of prompts. Blank lines of a JSON Lines file are not rows.

    Args:
        path: JSON Lines, Parquet or Arrow file, or a directory of ``save_to_disk`` or of ``.parquet`` files.
        prompt_column: column with a string or a list of messages ``{role, content}``.
        id_column: column with unique strings or integers; None hashes the prompt's content instead.
        split: the split to read where the directory holds a dataset with several.
        reserved: names that the other columns must not have.

    Raises:
        PromptError: the source cannot be read, lacks a column, or has columns that cannot be kept.
    """
    with _readable(path):
        source = _read_source(path, split)
        others = _check_columns(path, source.names, prompt_column, id_column, reserved)
        rows, rejected = _sift(source.cells(prompt_column, id_column), ids_from_content=id_column is None)
        columns = source.select(others, [prompt.row for prompt in rows])
    return Prompts(tuple(rows), columns, tuple(rejected))


def content_id(prompt: str | tuple[Message, ...]) -> str:
    """The xxh3_128 hex digest of a prompt's canonical JSON: the same content has the same id anywhere."""
    plain = prompt if isinstance(prompt, str) else [asdict(message) for message in prompt]
    text = json.dumps(plain, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(text.encode())


def write_rejected(path: Path, rejected: Sequence[Rejected]) -> None:
    """Write one JSON object per line: row, prompt_id, reason, detail."""
    path.write_text("".join(json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in rejected), "utf-8")


def summarize(rejected: Sequence[Rejected]) -> str:
    """One line for people, e.g. ``7 rows cannot be used: 3 empty, 2 duplicate_id, 2 too_long``."""
    if not rejected:
        return "all rows can be used"
    counts = sorted(Counter(one.reason for one in rejected).items(), key=lambda item: (-item[1], item[0]))
    reasons = ", ".join(f"{count} {reason}" for reason, count in counts)
    return f"{len(rejected)} row{'s' * (len(rejected) != 1)} cannot be used: {reasons}"


def deal(
    num_prompts: int,
    *,
    iteration: int,
    prompts_per_iteration: int,
    num_shards: int,
    shard: int,
    seed: int,
    shuffle: bool,
) -> Deal:
    """The prompts of one shard of one 1-based iteration, as a pure function of the arguments.

    An epoch is an order of all prompts, cut into iterations, and those into contiguous shards. What is left
    at an epoch's end is not dealt in that epoch, so that no iteration has a prompt twice.

    Raises:
        ValueError: there are fewer prompts than one iteration needs.
    """
    assert iteration >= 1, iteration
    assert 0 <= shard < num_shards, (shard, num_shards)
    assert prompts_per_iteration % num_shards == 0, (prompts_per_iteration, num_shards)
    if num_prompts < prompts_per_iteration:
        raise ValueError(
            f"{num_prompts} usable prompts are fewer than the {prompts_per_iteration} of one iteration; "
            f"set data.prompts_per_iteration to at most {num_prompts}, or give more prompts"
        )
    epoch, turn = divmod(iteration - 1, num_prompts // prompts_per_iteration)
    size = prompts_per_iteration // num_shards
    start = turn * prompts_per_iteration + shard * size
    order = _epoch_order(num_prompts, seed, epoch) if shuffle else np.arange(num_prompts)
    return Deal(epoch, tuple(order[start : start + size].tolist()))


def _epoch_order(num_prompts: int, seed: int, epoch: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """A permutation of ``range(num_prompts)`` that depends on nothing but the arguments.

    numpy guarantees the stream of raw integers of Philox across its versions, but not what
    ``Generator.permutation`` makes of it; hence the prompts are sorted by one raw integer each.
    """
    raw = np.random.Philox(key=derive_seed(seed, "epoch", epoch)).random_raw(num_prompts)
    return np.argsort(raw, kind="stable")


# --- sources -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what goes wrong while reading ``path`` into a :class:`PromptError` that names it."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        message = f"{path} cannot be read ({_first_line(error)}); write it anew, or check its permissions"
        raise PromptError(message) from error


def _read_source(path: Path, split: str) -> _Source:
    if not path.exists():
        raise PromptError(f"{path} does not exist; name {_LEGAL}")
    source = _Table(path, _read_directory(path, split)) if path.is_dir() else _read_file(path)
    if source.num_rows == 0:
        raise PromptError(f"{path} has no rows; give at least one prompt")
    return source


def _read_file(path: Path) -> _Source:
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


def _parse_line(line: bytes) -> dict[str, object] | _Unusable:
    try:
        value = json.loads(line.decode())
        if b"\\u" in line:  # an escape can name half a character, which no UTF-8 file can hold
            json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        return _Unusable(RejectReason.BAD_UTF8, f"not UTF-8 text: {error.reason}")
    except (ValueError, RecursionError) as error:
        return _Unusable(RejectReason.BAD_JSON, f"not JSON: {_first_line(error)}")
    if not isinstance(value, dict):
        return _Unusable(RejectReason.NOT_OBJECT, f"a JSON {type(value).__name__}, not an object")
    return value


def _read_parquet(path: Path) -> pa.Table:
    with pq.ParquetFile(path) as file:  # read_table would make columns of folders named "key=value"
        return file.read()


def _read_arrow(path: Path) -> pa.Table:
    """An Arrow IPC file or stream, whichever its first bytes say."""
    with pa.OSFile(str(path)) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        with pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file) as reader:
            return reader.read_all()


def _read_directory(path: Path, split: str) -> pa.Table:
    if (path / "dataset_dict.json").is_file():
        splits = _saved_names(path / "dataset_dict.json", "splits")
        if split not in splits:
            raise PromptError(f"{path} has no split {split!r}; set data.split to one of {_listing(splits)}")
        return _read_saved_dataset(path / split)
    if (path / "state.json").is_file():
        return _read_saved_dataset(path)
    parts = sorted(one for one in path.iterdir() if one.suffix.lower() == ".parquet")
    if not parts:
        found = _listing(sorted(one.name for one in path.iterdir()))
        raise PromptError(f"{path} is a directory with {found}; name {_LEGAL}")
    return pa.concat_tables([_read_part(part, _read_parquet) for part in parts], promote_options="permissive")


def _read_saved_dataset(path: Path) -> pa.Table:
    """A directory written by ``datasets.Dataset.save_to_disk``: state.json names Arrow streams, in order.

    Before ``datasets`` 1.15, a filtered or shuffled dataset was saved whole with the rows to take beside it.
    """
    state = path / "state.json"
    files = _saved_names(state, "_data_files")
    if not files:
        raise PromptError(f"{state} names no data files; save the dataset anew with save_to_disk")
    table = pa.concat_tables([_read_part(path / name, _read_arrow) for name in files])
    parts = [_read_part(path / name, _read_arrow) for name in _saved_names(state, "_indices_data_files")]
    return table.take(pa.concat_tables(parts).column(0)) if parts else table


def _saved_names(path: Path, key: str) -> list[str]:
    """Names of files or splits under ``key`` in a JSON file of ``save_to_disk``; none where it is null."""
    try:
        items = json.loads(path.read_bytes()).get(key) or []
        return [str(item["filename"] if isinstance(item, dict) else item) for item in items]
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        message = f"{path} is not what save_to_disk writes ({error!r}); save the dataset anew"
        raise PromptError(message) from error


def _read_part(path: Path, read: Callable[[Path], pa.Table]) -> pa.Table:
    with _readable(path):
        return read(path)


# --- columns -----------------------------------------------------------------------------------------------


def _check_columns(
    path: Path, names: Sequence[str], prompt_column: str, id_column: str | None, reserved: frozenset[str]
) -> list[str]:
    """The columns besides prompt and id, in the source's order."""
    if prompt_column not in names:
        way_out = f"set data.prompt_column to one of its columns: {_listing(names)}"
        raise PromptError(f"{path} has no column {prompt_column!r} in any row; {way_out}")
    if id_column is not None and id_column not in names:
        way_out = f"leave data.id_column out, or set it to one of the columns: {_listing(names)}"
        raise PromptError(f"{path} has no column {id_column!r} in any row; {way_out}")
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise PromptError(f"{path} has several columns of the name {_listing(repeated)}; keep one of each")
    others = [name for name in names if name not in (prompt_column, id_column)]
    if clashes := [name for name in others if name in reserved]:
        raise PromptError(f"{path} has columns with reserved names: {_listing(clashes)}; rename them")
    return others


def _array(path: Path, name: str, lines: Sequence[_Line]) -> pa.Array:
    """The values of one JSON key, null where a line lacks it, as an Arrow array."""
    values = [None if isinstance(value, _Unusable) else value.get(name) for _, value in lines]
    array = _array_or_error(values)
    if not isinstance(array, Exception):
        return array

    def is_refused(size: int) -> bool:
        return isinstance(_array_or_error(values[:size]), Exception)

    culprit = bisect.bisect_left(range(len(values)), True, key=is_refused) - 1
    message = f"{path}: the values of {name!r} do not fit one column: line {lines[culprit][0]} has"
    raise PromptError(f"{message} {_shown(values[culprit])} ({_first_line(array)}); give all the same type")


def _array_or_error(values: list[object]) -> pa.Array | Exception:
    kinds = {type(value) for value in values}
    if bool in kinds and kinds & {int, float}:  # pyarrow would make numbers of some
        return TypeError("true or false among numbers")
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError) as error:
        return error


def _values(path: Path, table: pa.Table, name: str) -> Iterator[object]:
    """A column as Python values, with :class:`_Unusable` where a cell cannot be one."""
    _check_values(path, name, table[name], is_judged_by_row=True)
    return map(_value, table[name])


def _value(scalar: pa.Scalar) -> object:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return _Unusable(RejectReason.BAD_UTF8, f"not UTF-8 text: {error.reason}")
    except (ValueError, OverflowError) as error:
        return _Unusable(RejectReason.NOT_TEXT, f"not text: {_first_line(error)}")


def _check_values(path: Path, name: str, column: pa.ChunkedArray, is_judged_by_row: bool = False) -> None:
    """Refuse a column whose buffers contradict each other, before anything follows its offsets."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        if not (is_judged_by_row and "UTF8" in str(error)):
            message = f"{path}: column {name!r} is corrupt ({_first_line(error)}); write it anew"
            raise PromptError(message) from error


# --- rows --------------------------------------------------------------------------------------------------


def _sift(cells: Iterable[_Cells], *, ids_from_content: bool) -> tuple[list[Prompt], list[Rejected]]:
    rows: list[Prompt] = []
    rejected: list[Rejected] = []
    seen: dict[str, str] = {}
    for cell in cells:
        prompt_id = None
        try:
            prompt_id = None if ids_from_content else _parse_id(cell.prompt_id)
            prompt = _parse_prompt(cell.prompt)
            prompt_id = prompt_id or content_id(prompt)
            if prompt_id in seen:
                same = "prompt" if ids_from_content else "id"
                raise _Unusable(RejectReason.DUPLICATE_ID, f"same {same} as {seen[prompt_id]}")
        except _Unusable as unusable:
            detail = f"{cell.where}: {unusable.detail}"
            rejected.append(Rejected(cell.row, prompt_id, unusable.reason, detail))
        else:
            seen[prompt_id] = cell.where
            rows.append(Prompt(cell.row, prompt_id, prompt))
    return rows, rejected


def _parse_id(value: object) -> str:
    if isinstance(value, _Unusable):
        raise value.with_traceback(None)
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise _Unusable(RejectReason.BAD_ID, f"id is {_shown(value)}, not text or an integer")
    if not str(value).strip():
        raise _Unusable(RejectReason.BAD_ID, "id is empty")
    return str(value)


def _parse_prompt(value: object) -> str | tuple[Message, ...]:
    if isinstance(value, _Unusable):
        raise value.with_traceback(None)
    if value is None:
        raise _Unusable(RejectReason.NULL, "prompt is null")
    if isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
        return _check_turns(tuple(_parse_message(item, place) for place, item in enumerate(value)))
    if not isinstance(value, str):
        raise _Unusable(RejectReason.NOT_TEXT, f"prompt is {_shown(value)}, not text or a list of messages")
    if not value.strip():
        raise _Unusable(RejectReason.EMPTY, "prompt is empty or white space")
    return value


def _parse_message(item: Mapping[str, object], place: int) -> Message:
    for key in ("role", "content"):
        if not isinstance(item.get(key), str):
            found = _shown(item[key]) if key in item else "missing"
            raise _Unusable(RejectReason.BAD_MESSAGE, f"message {place}: {key} is {found}, not text")
    message = Message(str(item["role"]), str(item["content"]))
    if message.role not in _ROLES:
        detail = f"message {place}: role is {_shown(message.role)}, none of {', '.join(_ROLES)}"
        raise _Unusable(RejectReason.BAD_ROLE, detail)
    return message


def _check_turns(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Whether there is something for the model to answer at the end of a chat."""
    if not messages:
        raise _Unusable(RejectReason.EMPTY, "prompt has no messages")
    last = messages[-1]
    if last.role not in _ROLES_TO_ANSWER:
        raise _Unusable(RejectReason.NOTHING_TO_ANSWER, f"the last message is from the {last.role}")
    if last.role == "user" and not last.content.strip():
        raise _Unusable(RejectReason.EMPTY, "the last message is empty or white space")
    return messages


# --- words -------------------------------------------------------------------------------------------------


def _shown(value: object) -> str:
    """A value as messages show it: its type, and its beginning."""
    return f"{type(value).__name__} {reprlib.repr(value)}"


def _listing(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_NAMES_SHOWN])
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return shown + more if shown else "nothing"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
