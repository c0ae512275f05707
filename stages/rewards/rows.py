"""Inputs of reward models, rules and services, made from a rollout table."""

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pipeline.data.chat import Rendering, refusals
from pipeline.data.tokens import affixes_of, text_ids, written_text
from pipeline.run.schemas import ENVIRONMENT_TASK, PROMPT_TOOLS, extra_columns
from stages.context import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def rule_inputs(rows: pa.Table) -> dict[str, list[Any]]:
    """Return ``prompts``, ``responses`` and the user's columns, an entry per row; of conversations of several
    turns also ``response_messages``."""
    inputs = {column: values_of(rows[column]) for column in extra_columns(rows).column_names}
    if not rows["response_messages"].null_count:  # all rows have them, or none
        inputs["response_messages"] = list(map(json.loads, rows["response_messages"].to_pylist()))
    texts = {"prompts": rows["prompt_text"].to_pylist(), "responses": rows["response_text"].to_pylist()}
    return {**inputs, **texts}


def values_of(column: pa.ChunkedArray) -> list[Any]:
    """Return a column as Python values. Texts that are stored once for all responses to a prompt are one
    object: so they take the memory, and the way to a rule's process, once."""
    kind = column.type
    if not (pa.types.is_dictionary(kind) and pa.types.is_large_string(kind.value_type)):
        return column.to_pylist()
    found: list[Any] = []
    for chunk in column.chunks:
        texts = [*chunk.dictionary.to_pylist(), None]
        found += [texts[-1 if index is None else index] for index in chunk.indices.to_pylist()]
    return found


def texts_with_special_tokens(
    tokenizer: "PreTrainedTokenizerBase", rows: pa.Table, ends: frozenset[int]
) -> list[str]:
    """Return the text of each response's ids with its special tokens, without the one that ended it.

    Args:
        ends: ids that end a response, and are no part of its text.
    """
    columns = rows["response_tokens"].to_pylist(), rows["response_mask"].to_pylist()
    return [
        written_text(tokenizer, ids, mask, ends, special=True) for ids, mask in zip(*columns, strict=True)
    ]


def name_of(rows: pa.Table, index: int) -> str:
    """Return a row's name for error messages."""
    name = f"prompt_id {rows['prompt_id'][index]}, sample {rows['sample_index'][index]}"
    if ENVIRONMENT_TASK not in rows.column_names:
        return name
    return f"{name}, task {rows[ENVIRONMENT_TASK][index]}"


def tokenized_conversations(
    tokenizer: "PreTrainedTokenizerBase", rows: pa.Table, key: str, rendering: Rendering
) -> list[list[int]]:
    """Return, per row of a rollout table, the ids of :func:`conversation_ids`.

    Args:
        key: name of the tokenizer's owner, for error messages.
        rendering: what its chat template is given besides messages and tools.

    Raises:
        UserError: the chat template refuses a row's conversation. Prompts alone were tried by prepare.
    """
    found = []
    names = ("prompt_text", "prompt_messages", "response_text", "response_messages")
    columns = [*(rows[name].to_pylist() for name in names), tools_of(rows)]
    for index, (prompt, messages, response, following, tools) in enumerate(zip(*columns, strict=True)):
        try:
            ids = conversation_ids(tokenizer, rendering, prompt, messages, response, following, tools=tools)
            found.append(ids)
        except refusals() as error:
            raise UserError(
                f"{key}: its chat template refuses {name_of(rows, index)}: {error}; change the template, or "
                "what rollout.multi_turn adds to conversations"
            ) from error
    return found


def tools_of(rows: pa.Table) -> list[str | None]:
    """Return each row's tools, as JSON; None where there are none."""
    if PROMPT_TOOLS not in rows.column_names:
        return [None] * rows.num_rows
    return values_of(rows[PROMPT_TOOLS])


def conversation_ids(
    tokenizer: "PreTrainedTokenizerBase",
    rendering: Rendering,
    prompt: str,
    messages: str | None,
    response: str,
    following: str | None = None,
    *,
    tools: str | None = None,
) -> list[int]:
    """Return the ids of a conversation, by a reward model's own template and tokenizer. For arguments see
    :func:`conversation_text`."""
    text, special = conversation_text(
        tokenizer, rendering, prompt, messages, response, following, tools=tools
    )
    return token_ids(tokenizer, text, special=special)


def conversation_text(
    tokenizer: "PreTrainedTokenizerBase",
    rendering: Rendering,
    prompt: str,
    messages: str | None,
    response: str,
    following: str | None = None,
    *,
    tools: str | None = None,
) -> tuple[str, bool]:
    """Return the text of a conversation, by a reward model's own template, and whether what its tokenizer
    puts around texts belongs to it.

    Args:
        rendering: what the template is given besides messages and tools.
        messages: the prompt's messages, as JSON; None if it is plain text.
        following: messages after the prompt, as JSON. Default: the response.
        tools: the prompt's tools, as JSON. Default: none.
    """
    if messages is None:
        return prompt + response, True
    answer = json.loads(following) if following else [{"role": "assistant", "content": response}]
    conversation = [*json.loads(messages), *answer]
    if tokenizer.chat_template:
        return rendering.text(tokenizer, conversation, json.loads(tools) if tools else None), False
    return "\n".join(message["content"] or "" for message in conversation), True


def token_ids(tokenizer: "PreTrainedTokenizerBase", text: str, special: bool) -> list[int]:
    """Return the ids of a text that is whole, with what the tokenizer puts around texts if ``special``."""
    return text_ids(tokenizer, [text], special=special, ends=True, affixes=affixes_of(tokenizer))[0]
