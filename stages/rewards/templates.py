"""Chat templates of reward models and services, tried on every prompt before one is answered."""

from typing import TYPE_CHECKING

from pipeline.config.schema import Config
from pipeline.data.chat import Rendering
from pipeline.data.rendering import ScoringTemplate, scoring_tokenizers
from stages.modeltrial import tried_tokenizer
from stages.tokenizers import same_tokenizer

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
    for key, directory, may_share in scoring_tokenizers(config):
        tokenizer = tried_tokenizer(key, directory, config)
        if not (may_share and same_tokenizer(tokenizer, policy)):
            own = rendering.without_arguments()
            found.append(ScoringTemplate(f"{key}={directory}", tokenizer, own))
    return found
