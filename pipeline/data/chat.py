"""Chat templates: what they are given besides the messages, and what of the messages they leave out."""

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipeline.data.messages import Message, Tools, as_dicts

_CLOCK = "strftime_now"
"""Function by which templates ask for the time."""
_TOOLS, _CALLS = "tools", "tool_calls"
NEEDED = (_TOOLS, _CALLS)
"""Parts of a prompt without which the model reads another prompt: a template has to write them."""


class Renderer(Protocol):
    """The part of transformers' tokenizers that makes text of messages."""

    chat_template: Any

    @property
    def apply_chat_template(self) -> Callable[..., Any]:
        """Function of the messages and, by name, ``tokenize``, ``add_generation_prompt`` and others."""


@dataclass(frozen=True)
class Rendering:
    """What every chat template of a run is given besides messages and tools."""

    moment: float
    """Unix time that templates get as the current time, in UTC: the same for each task of the run, on any day
    and node."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Values by name, for the policy's template (``model.chat_template_arguments``)."""

    def without_arguments(self) -> "Rendering":
        """Return what templates of others than the policy are given."""
        return Rendering(self.moment)

    def text(
        self,
        renderer: Renderer,
        messages: Sequence[Mapping[str, Any]],
        tools: Tools | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Return the text of a chat. Raises what the template raises, whose errors are of many types."""
        given: dict[str, Any] = dict(self.arguments)
        if tools:
            given[_TOOLS] = [dict(tool) for tool in tools]
        # Tokenizers of the user's own need to take no more than what is used.
        if _CLOCK in str(renderer.chat_template):
            given[_CLOCK] = self._clock
        return str(
            renderer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **given,
            )
        )

    def _clock(self, format: str) -> str:
        return datetime.datetime.fromtimestamp(self.moment, datetime.UTC).strftime(format)


def refusals() -> tuple[type[Exception], ...]:
    """Return the errors of a template that cannot render some messages: its own words, or Python's about a
    missing part."""
    from jinja2 import TemplateError  # not everywhere, and only chats need it

    return (
        TemplateError,
        TypeError,
        ValueError,
        LookupError,
        ArithmeticError,
        AttributeError,
        RecursionError,
    )


Render = Callable[[Sequence[Mapping[str, Any]], Tools | None], str]
"""Function that makes text of messages and tools."""


def left_out(render: Render, messages: Sequence[Message], tools: Tools | None) -> list[str]:
    """Return the parts of a chat, besides roles and contents, that make no difference to its text: keys of
    messages, ``tools``, and ``role developer`` where messages of that role are not written."""
    keys = sorted({key for message in messages for key, value in message.more.items() if value})
    has_developer = any(message.role == "developer" and message.content for message in messages)
    if not (keys or tools or has_developer):
        return []
    dicts = as_dicts(messages)
    whole = render(dicts, tools)

    def is_same(changed: Sequence[Mapping[str, Any]], own: Tools | None) -> bool:
        try:
            return render(changed, own) == whole
        except refusals():  # one that misses a part does not leave it out
            return False

    found = [
        key
        for key in keys
        if is_same([{name: one for name, one in message.items() if name != key} for message in dicts], tools)
    ]
    if tools and is_same(dicts, None):
        found.append(_TOOLS)
    if has_developer and is_same([one for one in dicts if one["role"] != "developer"], tools):
        found.append("role developer")
    return found
