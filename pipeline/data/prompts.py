"""Prompts of a file or a dataset directory, and the rows of it that cannot be used.

A problem with one row becomes a :class:`Rejected`, one with the whole source a :class:`PromptError`. Nothing
here needs a tokenizer or torch; what needs tokens, such as :attr:`RejectReason.TOO_LONG`, is found in
:mod:`pipeline.data.checks`.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from pipeline.config.schema import TOOLS_COLUMN
from pipeline.data.messages import (
    Message,
    Tools,
    are_tools,
    as_dicts,
    messages_in_text,
    parse_messages,
    parse_tools,
)
from pipeline.data.rows import Cells, ReadAs, Reading, RejectReason, Unusable
from pipeline.data.sources import Source, SourceLines, read_source
from pipeline.data.tables import PromptError, readable
from pipeline.text import listing, shown

_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](role|content|from)["']\s*:""")
"""Beginning of a text that was meant for messages."""


@dataclass(frozen=True)
class Prompt:
    """One usable prompt: plain text, or the messages of a chat. ``row`` is 0-based in the source."""

    row: int
    prompt_id: str
    prompt: str | tuple[Message, ...]
    where: str
    """The row as messages name it, e.g. ``line 3``."""
    tools: tuple[dict[str, Any], ...] | None = None
    """Tools that the chat template is given, as JSON objects; None for plain text too."""

    def rejected(self, reason: RejectReason, detail: str) -> "Rejected":
        """Return this row as one that cannot be used after all."""
        return Rejected(self.row, self.prompt_id, reason, f"{self.where}: {detail}")


@dataclass(frozen=True)
class Rejected:
    """One row that cannot be used. ``row`` is 0-based in the source; ``prompt_id`` where it could be read."""

    row: int
    prompt_id: str | None
    reason: RejectReason
    detail: str


@dataclass(frozen=True)
class Prompts:
    """Content of a source. ``columns`` has one row per item of ``rows``: those kept besides prompt and id."""

    rows: tuple[Prompt, ...]
    columns: pa.Table
    rejected: tuple[Rejected, ...]
    num_total: int
    """Rows of the source, of which some may not have been looked at."""
    read_as: Counter[Reading] = field(default_factory=Counter)
    """Counts of usable rows, by what in them was read otherwise than it is written."""

    @property
    def num_rows(self) -> int:
        """Rows that were looked at."""
        return len(self.rows) + len(self.rejected)


def read_prompts(
    path: Path,
    *,
    prompt_column: str,
    id_column: str | None,
    split: str,
    tools_column: str | None = None,
    columns: Sequence[str] | None = None,
    reserved: frozenset[str] = frozenset(),
    is_sample: bool = False,
    limit: int | None = None,
) -> Prompts:
    """Read and judge every row of a source of prompts. Blank lines of a text file are not rows.

    Args:
        path: JSON Lines, CSV, Parquet or Arrow file, or a directory of ``save_to_disk`` or of Parquet files.
        prompt_column: column with a string or a list of messages ``{role, content, ...}``, also as JSON text.
        id_column: column with unique strings or integers; None hashes the prompt's content instead.
        split: the split to read where the directory holds several, or ``.parquet`` files named after it.
        tools_column: column with the tools of a chat, a list of objects. That of the default name need not be
            there.
        columns: other columns to keep. Default: all.
        reserved: names that the columns to keep must not have.
        is_sample: whether some rows of a large source are enough; ``row`` then counts those that were read.
        limit: the most rows to read, the first ones. Default: all.

    Raises:
        PromptError: the source cannot be read, lacks a column, or has columns that cannot be kept.
    """
    ours = [name for name in (prompt_column, id_column, tools_column) if name]
    wanted = None if columns is None else {*ours, *columns}
    with readable(path):
        source = read_source(path, split, wanted, is_sample, limit)
        is_whole = source.num_rows == source.num_total
        kept = None if columns is None else [c for c in columns if is_whole or c in source.names]
        if tools_column not in source.names:
            if tools_column not in (None, TOOLS_COLUMN) and is_whole:
                way_out = "set data.tools_column to one of its columns, or to null"
                raise PromptError(_no_column(path, str(tools_column), way_out, source.names))
            tools_column = None
        read = [name for name in ours if name in source.names]
        others = _check_columns(path, source.names, prompt_column, id_column, kept, reserved, read)
        return _prompts_in(source, prompt_column, id_column, tools_column, others)


def made_prompts(tasks: Sequence[tuple[str, dict[str, Any]]], num_total: int | None = None) -> Prompts:
    """Judge the tasks of environments as rows of a source.

    Args:
        tasks: name and row of each, with ``prompt``, ``tools``, and columns to keep.
        num_total: tasks that there will be, of which these are the first. Default: these.
    """
    source = SourceLines(Path("data.environment"), tuple(tasks), num_total or len(tasks), "task")
    others = [name for name in source.names if name not in (_MADE_PROMPT, TOOLS_COLUMN)]
    return _prompts_in(source, _MADE_PROMPT, None, TOOLS_COLUMN, others)


_MADE_PROMPT = "prompt"
"""Column of tasks with the prompt."""


def _prompts_in(
    source: Source, prompt_column: str, id_column: str | None, tools_column: str | None, others: Sequence[str]
) -> Prompts:
    """Judge every row of a source, and keep columns of those that can be used."""
    rows, rejected, read_as = _sift(source.cells(prompt_column, id_column, tools_column), tools_column)
    found = source.columns(others, [prompt.row for prompt in rows])
    counts = Counter(Reading(kind) for kinds in read_as.values() for kind in kinds)
    return Prompts(tuple(rows), found.table, tuple(rejected), source.num_total, counts + found.read_as)


def content_id(prompt: str | tuple[Message, ...], tools: Tools | None = None) -> str:
    """Return the xxh3_128 hex digest of a prompt's canonical JSON: equal content has the same id anywhere."""
    plain: object = prompt if isinstance(prompt, str) else as_dicts(prompt)
    text = json.dumps(
        {"messages": plain, "tools": tools} if tools else plain,
        ensure_ascii=False,
        sort_keys=True,
        separators=(",", ":"),
    )
    return xxhash.xxh3_128_hexdigest(text.encode())


def write_rejected(path: Path, rejected: Sequence[Rejected]) -> None:
    """Write one JSON object per line: row, prompt_id, reason, detail."""
    path.write_text("".join(json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in rejected), "utf-8")


def summarize(rejected: Sequence[Rejected]) -> str:
    """Summarise on one line, e.g. ``7 rows cannot be used: 3 empty, 2 duplicate_id, 2 too_long``."""
    if not rejected:
        return "all rows can be used"
    counts = sorted(Counter(one.reason for one in rejected).items(), key=lambda item: (-item[1], item[0]))
    reasons = ", ".join(f"{count} {reason}" for reason, count in counts)
    return f"{len(rejected)} row{'s' * (len(rejected) != 1)} cannot be used: {reasons}"


def _no_column(path: Path, name: str, way_out: str, names: Sequence[str]) -> str:
    return f"{path} has no column {name!r} in any row; {way_out}: {listing(names)}"


def _check_columns(
    path: Path,
    names: Sequence[str],
    prompt_column: str,
    id_column: str | None,
    kept: Sequence[str] | None,
    reserved: frozenset[str],
    read: Sequence[str],
) -> list[str]:
    """Return the columns to keep besides prompt and id, in the source's order; ``read`` are used besides.
    Raises PromptError."""
    for name, way_out in (
        (prompt_column, "set data.prompt_column to one of its columns"),
        (id_column, "leave data.id_column out, or set it to one of the columns"),
        *((name, "data.columns may name") for name in kept or ()),
    ):
        if name is not None and name not in names:
            raise PromptError(_no_column(path, name, way_out, names))
    ours = (prompt_column, *([id_column] if id_column else []))
    used = [name for name in names if kept is None or name in kept or name in read]
    if repeated := [name for name, count in Counter(used).items() if count > 1]:
        raise PromptError(f"{path} has several columns of the name {listing(repeated)}; keep one of each")
    others = [name for name in used if name not in ours and (kept is None or name in kept)]
    if clashes := [name for name in others if name in reserved]:
        way_out = "rename them, or name the columns to keep in data.columns"
        raise PromptError(f"{path} has columns with reserved names: {listing(clashes)}; {way_out}")
    return others


_Sifted = tuple[list[Prompt], list[Rejected], dict[int, frozenset[ReadAs]]]
"""Usable rows, rejected ones, and by row how a usable one was read otherwise than it is written."""


def _sift(cells: Iterable[Cells], tools_column: str | None) -> _Sifted:
    rows: list[Prompt] = []
    rejected: list[Rejected] = []
    read_as: dict[int, frozenset[ReadAs]] = {}
    shared: dict[frozenset[ReadAs], frozenset[ReadAs]] = {}
    seen: dict[str, str] = {}
    for cell in cells:
        prompt_id = None
        try:
            prompt_id = _parse_id(cell.prompt_id) if cell.has_id else None
            prompt, how = _parse_prompt(cell.prompt)
            tools = None
            if isinstance(prompt, str):
                how |= {ReadAs.UNUSED_TOOLS} if are_tools(cell.tools) else set()
            elif tools_column:
                tools, also = parse_tools(cell.tools, tools_column)
                how |= also
            prompt_id = prompt_id or content_id(prompt, tools)
            if prompt_id in seen:
                same = "id" if cell.has_id else "prompt"
                raise Unusable(RejectReason.DUPLICATE_ID, f"same {same} as {seen[prompt_id]}")
        except Unusable as unusable:
            detail = f"{cell.where}: {unusable.detail}"
            rejected.append(Rejected(cell.row, prompt_id, unusable.reason, detail))
        else:
            seen[prompt_id] = cell.where
            rows.append(Prompt(cell.row, prompt_id, prompt, cell.where, tools))
            if how:
                kinds = frozenset(how)
                read_as[cell.row] = shared.setdefault(kinds, kinds)  # a million rows have the same
    return rows, rejected, read_as


def _parse_id(value: object) -> str:
    if isinstance(value, Unusable):
        raise value.with_traceback(None)
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise Unusable(RejectReason.BAD_ID, f"id is {shown(value)}, not text or an integer")
    if not str(value).strip():
        raise Unusable(RejectReason.BAD_ID, "id is empty")
    return str(value)


def _parse_prompt(value: object) -> tuple[str | tuple[Message, ...], set[ReadAs]]:
    if isinstance(value, Unusable):
        raise value.with_traceback(None)
    if value is None:
        raise Unusable(RejectReason.NULL, "prompt is null")
    written = messages_in_text(value) if isinstance(value, str) else None
    items = value if written is None else written
    if isinstance(items, list) and all(isinstance(item, Mapping) for item in items):
        messages, read_as = parse_messages(items)
        return messages, read_as if written is None else read_as | {ReadAs.JSON_TEXT}
    if not isinstance(value, str):
        raise Unusable(RejectReason.NOT_TEXT, f"prompt is {shown(value)}, not text or a list of messages")
    if not value.strip():
        raise Unusable(RejectReason.EMPTY, "prompt is empty or white space")
    return value, {ReadAs.MESSAGES_AS_TEXT} if _MESSAGES.match(value) else set()
