"""How a tokenizer fits the policy, and its chat template fits prompts: warnings, by the files alone.

What files cannot show is whether the policy was trained with these very ids; a look at the probability that
it gives prompts does (:mod:`stages.trials.likelihood`).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.config.issue import ConfigIssue
from pipeline.config.model_files import text_settings
from pipeline.config.schema import Config
from pipeline.data.chat import Rendering, refusals
from pipeline.data.tables import PromptError
from pipeline.data.tokens import hidden_ids

_UNUSED_MUCH = 0.15
"""Share of a model's ids that its tokenizer has no token for. Padding to a round number is below a twentieth
in the models of the field."""
_LEAST_IDS = 2048
"""Ids of a model below which padding may be any share."""
_QUESTION = {"role": "user", "content": "QUESTION"}
_ANSWER = "ANSWER"
_WHOLE = (_QUESTION, {"role": "assistant", "content": _ANSWER})


def fit_warnings(config: Config, tokenizer: Any, has_chats: bool) -> Iterator[str]:
    """Warn of a tokenizer that looks like another model's, and of a template that begins no answer.

    Args:
        has_chats: whether any prompt is made of messages.
    """
    policy = config.model.policy
    yield from _unused_warnings(policy, tokenizer)
    yield from _begin_warnings(policy, tokenizer)
    if has_chats and (header := missing_header(tokenizer, config.model.chat_template_arguments)):
        yield (
            f"warning: model.policy={policy}: its chat template has no generation prompt: an answer stands "
            f"behind {header!r}, which prompts then lack, so that the policy would have to write that first; "
            "fix its chat_template: add_generation_prompt has to write it"
        )


def check_top_k(config: Config, tokenizer: Any) -> None:
    """Raise PromptError where teachers are asked for more likely tokens than the policy can write."""
    top_k, size = (
        config.algorithm.distillation.top_k,
        text_settings(Path(config.model.policy)).get("vocab_size"),
    )
    if not top_k or not isinstance(size, int):
        return
    if top_k > (most := size - len(hidden_ids(tokenizer, size))):
        why = f"the policy writes {most} of its {size} tokens; legal: 1 to {most}"
        raise PromptError(str(ConfigIssue("algorithm.distillation.top_k", top_k, why)))


def _unused_warnings(policy: str, tokenizer: Any) -> Iterator[str]:
    size = text_settings(Path(policy)).get("vocab_size")
    if not isinstance(size, int) or size < _LEAST_IDS:
        return
    unused = len(hidden_ids(tokenizer, size))
    if unused > _UNUSED_MUCH * size:
        yield (
            f"warning: model.policy={policy}: its tokenizer has no token for {unused:,} of the model's "
            f"{size:,} ids; is it the model's own? Copy the tokenizer's files again from where the model is "
            "from"
        )


def _begin_warnings(policy: str, tokenizer: Any) -> Iterator[str]:
    own, model = getattr(tokenizer, "bos_token_id", None), text_settings(Path(policy)).get("bos_token_id")
    if isinstance(own, int) and isinstance(model, int) and own != model:
        yield (
            f"warning: model.policy={policy}: its tokenizer's begin token is id {own} "
            f"({str(tokenizer.decode([own]))!r}), and bos_token_id of its config.json is {model}; if the "
            "tokenizer is another model's, copy the model's own"
        )


def missing_header(tokenizer: Any, arguments: Any) -> str:
    """Return what a chat template writes between a question and its answer, and no generation prompt does;
    empty where prompts end as they should, or the template does not say.

    Templates whose answers follow the question at once, as ``[/INST]`` ends it, need no generation prompt.

    Args:
        arguments: ``model.chat_template_arguments``.
    """
    if not getattr(tokenizer, "chat_template", None):
        return ""
    rendering = Rendering(0.0, arguments)
    try:
        bare = rendering.text(tokenizer, [_QUESTION])
        prompt = rendering.text(tokenizer, [_QUESTION], add_generation_prompt=True)
        whole = rendering.text(tokenizer, _WHOLE)
    except refusals():
        return ""  # templates of other roles; prompts that it refuses are reported one by one
    if bare != prompt or not whole.startswith(prompt):
        return ""
    header = whole.removeprefix(prompt).partition(_ANSWER)[0]
    return header if header.strip() else ""
