"""Ways in which rows of prompt files are read otherwise than they are written, for counts."""

from enum import StrEnum
from typing import NamedTuple


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
    NUMBERS_AS_TEXT = "numbers_as_text"
    """Numbers in a column that has text too are text."""
    VALUES_AS_JSON = "values_as_json"
    """Values of a column whose types differ are their JSON text."""
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
    ReadAs.NUMBERS_AS_TEXT: "numbers in {column!r}, which holds text too, were read as text",
    ReadAs.VALUES_AS_JSON: "values of {column!r} of differing types were made JSON text",
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
