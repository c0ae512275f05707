"""Rows of a prompt file as they are judged: cells to look at, columns to keep, and reasons against a row."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import pyarrow as pa

from pipeline.data.readings import Reading


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
    tools: object
    has_id: bool
    """Whether ids are read; None is the id of every row otherwise."""


@dataclass(frozen=True)
class Columns:
    """The columns to keep besides prompt and id, of the rows whose values fit."""

    table: pa.Table
    misfits: Mapping[int, str] = field(default_factory=dict)
    """By row, descriptions of values that do not fit a column that the others fit."""
    read_as: Counter[Reading] = field(default_factory=Counter)
    """Counts of rows, by what in them was read otherwise than it is written."""
