"""Rows of a prompt file as they are judged: cells to look at, columns to keep, reasons against a row.

What is read otherwise than it is written is counted by how. Other columns of JSON Lines have values of any
JSON type, which Arrow keeps only where they agree; where they do not, as answers that are 42 in one row and
"42" in the next, all are text.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import pyarrow as pa


class ReadAs(StrEnum):
    """Kind of reading. The values are parts of names of metrics."""

    JSON_TEXT = "json_text"
    """Messages or tools that are JSON text are what it says."""
    JOINED_PARTS = "joined_parts"
    """Text parts of a message's content are one text."""
    NULL_KEYS = "null_keys"
    """Keys of a message that are null are not there."""
    UNUSED_TOOLS = "unused_tools"
    """Tools beside plain text, which no template makes a prompt of, reach no policy."""
    MESSAGES_AS_TEXT = "messages_as_text"
    """Text that looks like chat messages and is none in JSON, such as Python's own notation, stays text."""
    VALUES_AS_TEXT = "values_as_text"
    """In a column whose types differ all is text: JSON text, of what is not text itself."""
    ONE_BEGIN_TOKEN = "one_begin_token"
    """Plain text that has the token already with which the tokenizer begins texts gets no second one."""


_WORDS = {
    ReadAs.JSON_TEXT: "messages or tools written as JSON text were read as what it says",
    ReadAs.JOINED_PARTS: "text parts of a message's content were joined",
    ReadAs.NULL_KEYS: "keys of a message that are null were left out",
    ReadAs.UNUSED_TOOLS: (
        "tools beside plain text, which no template makes a prompt of, are not given to the policy"
    ),
    ReadAs.MESSAGES_AS_TEXT: (
        "text that looks like chat messages, but is none in JSON (which has double "
        "quotes), is given to the policy as it is"
    ),
    ReadAs.VALUES_AS_TEXT: "values of {column!r}, whose types differ, were read as text",
    ReadAs.ONE_BEGIN_TOKEN: (
        "text that begins with the token that the tokenizer adds by itself was given no second one"
    ),
}


class Reading(NamedTuple):
    """What was read otherwise, of which rows are counted."""

    kind: ReadAs
    column: str = ""
    """Column whose values were; empty where it is the prompt, or its tools."""

    def __str__(self) -> str:
        return _WORDS[self.kind].format(column=self.column)


class RejectReason(StrEnum):
    """Reasons that a row cannot be used."""

    BAD_JSON = "bad_json"
    """The line is not JSON."""
    BAD_CSV = "bad_csv"
    """The row of CSV has more or fewer fields than the header."""
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
    """A message lacks a role or a content that is text, or it or the tools are not what a chat template
    takes."""
    BAD_ROLE = "bad_role"
    """A message's role is not one of system, developer, user, assistant, tool."""
    NOTHING_TO_ANSWER = "nothing_to_answer"
    """The last message is not from the user or a tool."""
    BAD_ID = "bad_id"
    """The id is missing, null, empty, or neither a string nor an integer."""
    DUPLICATE_ID = "duplicate_id"
    """An earlier usable row has the same id, or the same prompt where ids come from content."""
    BAD_ANSWER = "bad_answer"
    """A reward rule cannot score responses to the row, most often as its answer is missing."""
    NO_NUMBER = "no_number"
    """The column of data.sort_by has no number."""
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
    tools: object
    has_id: bool
    """Whether ids are read; None is the id of every row otherwise."""


@dataclass(frozen=True)
class Columns:
    """The columns to keep besides prompt and id."""

    table: pa.Table
    read_as: Counter[Reading] = field(default_factory=Counter)
    """Counts of rows, by what in them was read otherwise than it is written."""


def column(name: str, values: Sequence[object]) -> tuple[pa.Array, Counter[Reading]]:
    """Convert JSON values to one column, of text where their types differ or Arrow has none for them. Returns
    it with the number of values that were made text."""
    kinds = {type(value) for value in values}
    if not (bool in kinds and kinds & {int, float}):  # pyarrow would make numbers of some
        try:
            return pa.array(values), Counter()
        except (pa.ArrowException, OverflowError):
            pass
    texts = [as_text(value) for value in values]
    num_made = sum(new is not old for new, old in zip(texts, values, strict=True))
    return pa.array(texts), Counter({Reading(ReadAs.VALUES_AS_TEXT, name): num_made})


def as_text(value: object) -> str | None:
    """Return text and null as they are, and any other JSON value as its JSON text."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)
