"""Chat templates of reward models and services, tried on every prompt before one is answered."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.reward import RemoteConfig, RewardModelConfig
from pipeline.config.schema import Config
from pipeline.data.prompts import Message, as_dicts
from stages.generation.chat import REFUSALS
from stages.modeltrial import tried_tokenizer
from stages.tokenizers import same_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANSWER = {"role": "assistant", "content": "ANSWER"}


@dataclass(frozen=True)
class ScoringTemplate:
    """A chat template that is not the policy's."""

    key: str
    """Configuration key and value that name the tokenizer's directory, for messages."""
    tokenizer: "PreTrainedTokenizerBase"

    def refusal(self, messages: Sequence[Message]) -> str | None:
        """Return why it does not take a prompt with an answer; None if it does."""
        try:
            self.tokenizer.apply_chat_template([*as_dicts(messages), _ANSWER], tokenize=False)
        except REFUSALS as error:
            return f"the chat template of {self.key} refuses it: {error}"
        return None


def scoring_templates(config: Config, policy: "PreTrainedTokenizerBase") -> list[ScoringTemplate]:
    """Return chat templates of every reward model and service that is not given the policy's own token ids.

    Args:
        policy: the policy's tokenizer.

    Raises:
        UserError: a tokenizer cannot be loaded.
    """
    found = []
    for name, component in config.reward.components.items():
        key = f"reward.components.{name}"
        if isinstance(component, RewardModelConfig):
            key, directory = f"{key}.path", component.path
        elif isinstance(component, RemoteConfig) and component.tokenizer:
            key, directory = f"{key}.tokenizer", component.tokenizer
        else:
            continue
        tokenizer = tried_tokenizer(key, directory, config)
        takes_ids = isinstance(component, RewardModelConfig) and same_tokenizer(tokenizer, policy)
        if tokenizer.chat_template and not takes_ids:
            found.append(ScoringTemplate(f"{key}={directory}", tokenizer))
    return found
