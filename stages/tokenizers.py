"""Tokenizers of model directories: those of transformers, or those that a function of the user's makes.

Importing this imports no transformers, which takes seconds.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config.schema import ModelConfig
from pipeline.plugins.load import load_plugin
from stages.engines.kept import kept_value

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from stages.context import Context


def tokenizer_of(context: "Context", directory: str) -> "PreTrainedTokenizerBase":
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
