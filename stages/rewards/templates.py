"""Chat templates of reward models and services, tried on every prompt before one is answered."""

from typing import TYPE_CHECKING

from pipeline.config.reward import RemoteConfig, RewardModelConfig
from pipeline.config.schema import Config
from pipeline.data.chat import Rendering
from pipeline.data.rendering import ScoringTemplate
from stages.modeltrial import tried_tokenizer
from stages.rewards.components import same_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def scoring_templates(
    config: Config, policy: "PreTrainedTokenizerBase", rendering: Rendering
) -> list[ScoringTemplate]:
    """Return how every reward model and service reads chats that is not given the policy's own token ids.

    Args:
        policy: the policy's tokenizer.
        rendering: what the policy's chat template is given besides messages and tools.

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
        if not takes_ids:
            own = rendering.without_arguments()
            found.append(ScoringTemplate(f"{key}={directory}", tokenizer, own))
    return found
