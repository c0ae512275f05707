"""Inputs of reward models, rules and services, made from a rollout table."""

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pipeline.data.tokens import affixes_of, text_ids
from pipeline.run.schemas import extra_columns
from stages.context import UserError
from stages.generation.chat import REFUSALS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def rule_inputs(rows: pa.Table) -> dict[str, list[Any]]:
    """Return ``prompts``, ``responses`` and the user's columns, an entry per row; of conversations of several
    turns also ``response_messages``."""
    inputs = {column: rows[column].to_pylist() for column in extra_columns(rows).column_names}
    if not rows["response_messages"].null_count:  # all rows have them, or none
        inputs["response_messages"] = list(map(json.loads, rows["response_messages"].to_pylist()))
    texts = {"prompts": rows["prompt_text"].to_pylist(), "responses": rows["response_text"].to_pylist()}
    return {**inputs, **texts}


def name_of(rows: pa.Table, index: int) -> str:
    """Return a row's name for error messages."""
    return f"prompt_id {rows['prompt_id'][index]}, sample {rows['sample_index'][index]}"


def tokenized_conversations(
    tokenizer: "PreTrainedTokenizerBase", rows: pa.Table, key: str
) -> list[list[int]]:
    """Return, per row of a rollout table, the ids of :func:`conversation_ids`.

    Args:
        key: name of the tokenizer's owner, for error messages.

    Raises:
        UserError: the chat template refuses a row's conversation. Prompts alone were tried by prepare.
    """
    found = []
    names = ("prompt_text", "prompt_messages", "response_text", "response_messages")
    for index, texts in enumerate(zip(*(rows[name].to_pylist() for name in names), strict=True)):
        try:
            found.append(conversation_ids(tokenizer, *texts))
        except REFUSALS as error:
            raise UserError(
                f"{key}: its chat template refuses {name_of(rows, index)}: {error}; change the template, or "
                "what rollout.multi_turn adds to conversations"
            ) from error
    return found


def conversation_ids(
    tokenizer: "PreTrainedTokenizerBase",
    prompt: str,
    messages: str | None,
    response: str,
    following: str | None = None,
) -> list[int]:
    """Return the ids of a conversation, by a reward model's own template and tokenizer.

    Args:
        messages: the prompt's messages, as JSON; None if it is plain text.
        following: messages after the prompt, as JSON. Default: the response.
    """
    if messages is None:
        return token_ids(tokenizer, prompt + response, special=True)
    answer = json.loads(following) if following else [{"role": "assistant", "content": response}]
    conversation = [*json.loads(messages), *answer]
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(conversation, tokenize=False)
        return token_ids(tokenizer, str(text), special=False)
    return token_ids(tokenizer, "\n".join(message["content"] for message in conversation), special=True)


def token_ids(tokenizer: "PreTrainedTokenizerBase", text: str, special: bool) -> list[int]:
    """Return the ids of a text that is whole, with what the tokenizer puts around texts if ``special``."""
    return text_ids(tokenizer, [text], special=special, ends=True, affixes=affixes_of(tokenizer))[0]
