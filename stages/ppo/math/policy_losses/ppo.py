"""PPO's clipped surrogate (arXiv 1707.06347), with dual clipping (arXiv 1912.09729)."""

from dataclasses import replace

import torch

from pipeline.config.algorithm import AlgorithmConfig
from stages.ppo.math.policy_losses.contract import Compared, Surrogate, clipped_surrogate


def ppo(given: Compared, algorithm: AlgorithmConfig) -> Surrogate:
    """Clip each token's ratio, and bound the loss of negative advantages, which grows with the ratio without
    limit."""
    found = clipped_surrogate(given.log_ratio.exp(), given.advantages, algorithm)
    bound = -given.advantages * algorithm.dual_clip
    negative = given.advantages < 0
    loss = torch.where(negative, torch.minimum(bound, found.loss), found.loss)
    return replace(found, loss=loss, dual_clipped=(found.loss > bound) & negative)
