"""Chat messages and tools as templates take them: with all their keys, checked one by one."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.data.rows import ReadAs, RejectReason, Unusable
from pipeline.text import shown

_ROLES = ("system", "developer", "user", "assistant", "tool")
_ROLES_TO_ANSWER = ("user", "tool")


@dataclass(frozen=True)
class Message:
    """One chat message."""

    role: str
    content: str | None
    """Text; None where an assistant's message has none, beside its tool calls."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Its other keys, JSON values, such as tool_calls, tool_call_id, name and reasoning_content."""

    @staticmethod
    def of(message: Mapping[str, Any]) -> "Message":
        """Undo :func:`as_dicts` for one message."""
        more = {key: value for key, value in message.items() if key not in ("role", "content")}
        return Message(message["role"], message["content"], more)


Tools = Sequence[Mapping[str, Any]]
"""Descriptions of tools, as JSON objects, in the order in which a template gets them."""


def as_dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return chat messages as dictionaries ``{role, content, ...}``, as other libraries take them."""
    return [{"role": one.role, "content": one.content, **one.more} for one in messages]


def parse_messages(items: Sequence[Mapping[str, Any]]) -> tuple[tuple[Message, ...], set[ReadAs]]:
    """Return the messages of a chat that the model is to answer, and how they were read.

    Raises:
        Unusable: one of them is no message, or there is nothing to answer.
    """
    read_as: set[ReadAs] = set()
    messages = tuple(parse_message(item, place, read_as) for place, item in enumerate(items))
    if not messages:
        raise Unusable(RejectReason.EMPTY, "prompt has no messages")
    last = messages[-1]
    if last.role not in _ROLES_TO_ANSWER:
        why = f"the last message is from the {last.role}, so that nothing is left to answer; leave it out"
        raise Unusable(RejectReason.NOTHING_TO_ANSWER, why)
    if last.role == "user" and not (last.content or "").strip():
        raise Unusable(RejectReason.EMPTY, "the last message is empty or white space")
    return messages, read_as


def parse_message(item: Mapping[str, Any], place: int, read_as: set[ReadAs]) -> Message:
    """Check one message of a chat. Raises Unusable; adds to ``read_as`` how it was read."""
    role = item.get("role")
    if not isinstance(role, str):
        raise _bad(place, f"role is {shown(role) if 'role' in item else 'missing'}, not text")
    if role not in _ROLES:
        detail = f"message {place}: role is {shown(role)}, none of {', '.join(_ROLES)}"
        raise Unusable(RejectReason.BAD_ROLE, detail)
    content = item.get("content")
    if isinstance(content, list):
        content = _joined(content, place)
        read_as.add(ReadAs.JOINED_PARTS)
    more = {key: value for key, value in item.items() if key not in ("role", "content")}
    if any(value is None for value in more.values()):
        read_as.add(ReadAs.NULL_KEYS)
        more = {key: value for key, value in more.items() if value is not None}
    is_call = role == "assistant" and bool(more.get("tool_calls"))
    if not (isinstance(content, str) or (content is None and is_call)):
        raise _bad(place, f"content is {shown(content) if 'content' in item else 'missing'}, not text")
    for key, value in more.items():
        if not isinstance(key, str) or not is_json(value):
            raise _bad(place, f"{shown(key)} is {shown(value)}, which JSON does not hold")
    return Message(role, content, more)


def _joined(parts: Sequence[object], place: int) -> str:
    """Return the text of a content's parts, end to end, as templates that take parts write them."""
    texts: list[str] = []
    for part in parts:
        given = part if isinstance(part, Mapping) else {"text": part}
        rest = {key: one for key, one in given.items() if key not in ("type", "text") and one is not None}
        kind, text = given.get("type") or "text", given.get("text")
        if rest or kind != "text" or not isinstance(text, str):
            raise _bad(place, f"content has the part {shown(part)}; only parts of text can be given")
        texts.append(text)
    if not texts:
        raise _bad(place, "content is an empty list, not text")
    return "".join(texts)


def _bad(place: int, why: str) -> Unusable:
    return Unusable(RejectReason.BAD_MESSAGE, f"message {place}: {why}")


def parse_tools(value: object, column: str) -> tuple[tuple[dict[str, Any], ...] | None, set[ReadAs]]:
    """Return the tools of a chat, None for null and none, and how they were read; JSON text is taken too.

    Raises:
        Unusable: it is no list of objects.
    """
    read_as: set[ReadAs] = set()
    if isinstance(value, Unusable):
        raise value.with_traceback(None)
    if isinstance(value, str) and (found := json_or_none(value)) is not None:
        value = found
        read_as.add(ReadAs.JSON_TEXT)
    if value is None or value in ("", "null", []):
        return None, set()
    if not (isinstance(value, list) and all(isinstance(tool, dict) for tool in value) and is_json(value)):
        way_out = "give another column, or null, as data.tools_column"
        what = f"{column!r} is {shown(value)}, not a list of tools, which are objects; {way_out}"
        raise Unusable(RejectReason.BAD_MESSAGE, what)
    return tuple(value), read_as


def are_tools(value: object) -> bool:
    """Whether a value is a list of tools, of which there is at least one."""
    with contextlib.suppress(Unusable):
        return parse_tools(value, "")[0] is not None
    return False


def messages_in_text(text: str) -> list[dict[str, Any]] | None:
    """Return the chat messages that a text holds as JSON; None where it is something else."""
    if not text.lstrip().startswith("[") or '"role"' not in text:
        return None
    found = json_or_none(text)
    is_chat = isinstance(found, list) and all(isinstance(one, dict) and "role" in one for one in found)
    return found if is_chat else None


def json_or_none(text: str) -> Any:
    """Parse JSON; None where the text is something else, or JSON that no UTF-8 file can hold."""
    try:
        found = json.loads(text)
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return found


def is_json(value: object) -> bool:
    """Whether JSON, which has no times, bytes, NaN and infinities, holds a value."""
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError):
        return False
    return True
