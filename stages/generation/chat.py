"""Messages between the policy's turns, rendered as the policy reads them."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipeline.data.chat import Rendering
from pipeline.data.messages import Message, Tools, as_dicts
from stages.context import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANSWER = "ANSWER"
_FIXED = [{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": _ANSWER}]


def continuation_text(
    messages: Sequence[Message], end: str, tokenizer: "PreTrainedTokenizerBase", rendering: Rendering
) -> str:
    """Return the text between a turn that the policy has ended and its next one, by the chat template.

    The ids of what the policy wrote stay as they are. To render the whole conversation again would give
    others: text has more than one tokenisation, and templates leave out parts of earlier turns. So the
    messages are rendered after a fixed question and answer, and what follows the answer's end is taken.

    Args:
        end: text of the stop token that the policy's turn ended with. Where the template ends an answer with
            it, it is not written again.
        rendering: what the template is given besides messages.

    Raises:
        UserError: the template does not go on after an answer where it ends without more messages.
        jinja2.TemplateError: the template refuses the messages.
    """
    ending = _after_answer([], tokenizer, rendering)
    whole = _after_answer(as_dicts(messages), tokenizer, rendering)
    before, found, _ = ending.partition(end)
    written = before + found if found and not before.strip() else ""
    if not whole.startswith(written):
        raise UserError(
            f"the policy's chat template ends an answer with {written!r}, but not when messages follow; it "
            "cannot be used for conversations of several turns"
        )
    return whole[len(written) :]


def _after_answer(
    messages: list[dict[str, Any]], tokenizer: "PreTrainedTokenizerBase", rendering: Rendering
) -> str:
    text = rendering.text(tokenizer, [*_FIXED, *messages], add_generation_prompt=bool(messages))
    return text.partition(_ANSWER)[2]


def messages_json(messages: Sequence[Message] | None) -> str | None:
    return None if messages is None else json.dumps(as_dicts(messages), ensure_ascii=False)


def tools_json(tools: Tools | None) -> str | None:
    return json.dumps(tools, ensure_ascii=False) if tools else None


def messages_of(text: str | None) -> tuple[Message, ...] | None:
    """Parse messages; the inverse of :func:`messages_json`."""
    return None if text is None else tuple(map(Message.of, json.loads(text)))
