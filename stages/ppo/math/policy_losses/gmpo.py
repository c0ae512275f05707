"""Geometric-mean policy optimisation (arXiv 2507.20673): a response has the mean of its clipped ratios."""

import torch

from pipeline.config.algorithm import AlgorithmConfig
from stages.ppo.math.policy_losses.contract import Compared, Surrogate


def gmpo(given: Compared, algorithm: AlgorithmConfig) -> Surrogate:
    """Multiply a response's mean advantage by the geometric mean of its tokens' ratios, each clipped, in
    logarithms, where that is the more pessimistic; the same at all of its tokens."""
    log_ratio, sign = given.log_ratio, given.advantages.sign()
    clipped = log_ratio.clamp(-algorithm.clip_range_low, algorithm.clip_range_high)
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * clipped)
    ratio = given.mean_of_response(pessimistic).exp()
    is_clipped = pessimistic != log_ratio
    return Surrogate(
        loss=(-given.mean_of_response(given.advantages) * ratio).expand_as(log_ratio),
        clipped_low=is_clipped & (log_ratio < 0),
        clipped_high=is_clipped & (log_ratio > 0),
        dual_clipped=torch.zeros_like(given.mask),
    )
