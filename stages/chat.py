"""Prompts as the policy reads them."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from pipeline.data import Message
from stages.context import UserError


def prompt_text(prompt: str | Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> str:
    """The text that the policy continues: plain text as it is, messages through the chat template."""
    if isinstance(prompt, str):
        return prompt
    if not tokenizer.chat_template:
        raise UserError(
            "data.prompts holds chat messages, but the policy's tokenizer has no chat template; "
            "add chat_template to the tokenizer, or give prompts as plain text"
        )
    messages = [{"role": m.role, "content": m.content} for m in prompt]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
