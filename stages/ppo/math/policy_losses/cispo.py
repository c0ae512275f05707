"""CISPO (arXiv 2506.13585): the ratio is a weight that is clipped, so that no token loses its gradient."""

import torch

from pipeline.config.algorithm import AlgorithmConfig
from stages.ppo.math.policy_losses.contract import Compared, Surrogate


def cispo(given: Compared, algorithm: AlgorithmConfig) -> Surrogate:
    """Weigh each token's log-probability by its advantage and its clipped ratio, which has no gradient."""
    ratio = given.log_ratio.detach().exp()
    weight = ratio.clamp(1 - algorithm.clip_range_low, 1 + algorithm.clip_range_high)
    return Surrogate(
        loss=-weight * given.advantages * given.log_probs,
        clipped_low=ratio < weight,
        clipped_high=ratio > weight,
        dual_clipped=torch.zeros_like(given.mask),
    )
