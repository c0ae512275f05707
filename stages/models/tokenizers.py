"""Tokenizers of model directories: those of transformers, or those that a function of the user's makes.

Importing this imports no transformers, which takes seconds.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config.model_files import text_settings
from pipeline.config.schema import Config, ModelConfig
from pipeline.data.tokens import Ends, ends_of, hidden_ids, what_makes_ids
from pipeline.plugins.load import load_plugin
from stages.context import Context, UserError
from stages.process.kept import kept_value

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def tokenizer_of(context: Context, directory: str) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of a model of the user's as :func:`load_tokenizer` does, once in a process for the
    same files; one that a function of the user's makes is made for each task, as it may remember things."""
    model = context.config.model
    if model.tokenizer:
        return load_tokenizer(directory, model)
    key = (context.fingerprint_of(directory), model)
    found: PreTrainedTokenizerBase = kept_value(
        f"tokenizer {directory}", key, lambda: load_tokenizer(directory, model)
    )
    return found


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> frozenset[str]:
    """Return the tokens that are left out of a text of a tokenizer's ids, as far as it says: one that a
    function of the user's makes may not."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    named = getattr(tokenizer, "all_special_tokens", ())
    return frozenset({*named, *(str(token) for token in added if token.special)})


def policy_ends(context: Context) -> Ends:
    """Return the ids that end a response, by the policy's model, tokenizer, template and by what is given."""
    model, given = context.config.model, context.config.rollout.stop_token_ids
    return ends_of(Path(model.policy), tokenizer_of(context, model.policy), given)


def stop_ids_of(context: Context) -> tuple[int, ...]:
    """Return the ids that end a response and that the policy can write."""
    size = text_settings(Path(context.config.model.policy)).get("vocab_size")
    ids = sorted(policy_ends(context).ids)
    return tuple(id_ for id_ in ids if not isinstance(size, int) or id_ < size)


def unknown_ids(config: Config, size: int) -> list[int]:
    """Return the ids below ``size`` that the policy's tokenizer has no token for, or its model no place: a
    teacher's may be larger."""
    model = config.model

    def find() -> list[int]:
        own = text_settings(Path(model.policy)).get("vocab_size", size)
        return sorted({*hidden_ids(load_tokenizer(model.policy, model), size), *range(own, size)})

    found: list[int] = kept_value("unknown ids", (model, size), find)
    return found


def same_tokenizer(one: "PreTrainedTokenizerBase", other: "PreTrainedTokenizerBase") -> bool:
    """Whether both give the same ids for the same text or messages, so that ids may be passed on."""
    if one.chat_template != other.chat_template:
        return False
    mine, others = (getattr(tokenizer, "backend_tokenizer", None) for tokenizer in (one, other))
    if mine and others:
        return what_makes_ids(mine) == what_makes_ids(others)
    return type(one) is type(other) and one.get_vocab() == other.get_vocab()


def check_step_token(tokenizer: "PreTrainedTokenizerBase", key: str, token: str) -> int:
    """Return the id of a ``step_token``. Raises UserError naming its key where it is not one token."""
    ids: list[int] = tokenizer([token], add_special_tokens=False, verbose=False)["input_ids"][0]
    if len(ids) != 1:
        raise UserError(
            f"{key}={token}: is {len(ids)} tokens to the reward model's tokenizer; give one of its tokens, "
            "or leave it out"
        )
    return ids[0]


def check_tells_places(tokenizer: "PreTrainedTokenizerBase", directory: str) -> None:
    """Raise UserError where a tokenizer does not say at which characters tokens lie, as steps need it."""
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            f"{directory}: its tokenizer does not say where tokens lie in a text, which takes a fast one "
            "(tokenizer.json); leave steps out, or give one"
        )


def load_tokenizer(directory: str | Path, model: ModelConfig) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a policy or reward model.

    ``model.tokenizer`` may name a function that makes it from the directory: anything with those methods and
    attributes of transformers' tokenizers that :mod:`stages` uses.

    Raises:
        PluginError: the function cannot be imported.
    """
    if model.tokenizer:
        made: PreTrainedTokenizerBase = load_plugin("model.tokenizer", model.tokenizer)(str(directory))
        return made
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        str(directory), local_files_only=True, trust_remote_code=model.trust_remote_code
    )
