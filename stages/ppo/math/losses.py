"""The losses of policy and critic (PPO, arXiv 1707.06347) and their aggregation. Shapes: [B, T].

A loss is computed per token and aggregated with counts of the *whole* mini-batch, so that the sum over
micro-batches and ranks does not depend on how rows were split.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.config.algorithm import AlgorithmConfig, LossAggregation
from stages.ppo.math.masked import EPSILON, NoValidTokens, masked_sum
from stages.ppo.math.policy_losses.contract import Compared
from stages.ppo.math.policy_losses.named import policy_loss_function


@dataclass(frozen=True)
class Counts:
    """Counts that a mini-batch is averaged over, on all ranks together."""

    tokens: int
    sequences: int
    """Sequences with at least one valid token."""
    scale: float
    """Divisor of seq-mean-token-sum-norm: the longest response that the configuration allows."""

    @staticmethod
    def of(mask: Tensor, scale: float) -> "Counts":
        """Count a mask. Raises NoValidTokens when it is empty: there is no loss then."""
        counts = Counts(int(mask.sum()), int(mask.any(dim=1).sum()), scale)
        if counts.tokens == 0:
            raise NoValidTokens(f"none of the {mask.shape[0]} responses has a token that the policy wrote")
        return counts


@dataclass(frozen=True)
class PolicyLoss:
    """Per-token loss and what clipping did to it; all [B, T]."""

    loss: Tensor
    """Importance weights included."""
    ratio: Tensor
    """Each token's probability over its old one, whatever ratio the loss itself takes."""
    clipped_low: Tensor
    clipped_high: Tensor
    dual_clipped: Tensor


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    algorithm: AlgorithmConfig,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
) -> PolicyLoss:
    """Compute the loss that ``algorithm.policy_loss`` names.

    Args:
        weights: importance weights of the tokens, without gradient; see :mod:`stages.ppo.math.mismatch`.
        mask: where the policy wrote the token; by default everywhere.
    """
    mask = torch.ones_like(log_probs, dtype=torch.bool) if mask is None else mask
    given = Compared(log_probs, old_log_probs, advantages, mask)
    found = policy_loss_function(algorithm.policy_loss)(given, algorithm)
    return PolicyLoss(
        loss=found.loss if weights is None else found.loss * weights,
        ratio=given.log_ratio.exp(),
        clipped_low=found.clipped_low,
        clipped_high=found.clipped_high,
        dual_clipped=found.dual_clipped,
    )


def value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor, clip_range: float
) -> tuple[Tensor, Tensor]:
    """Half the larger squared error of the value and of the value kept near the old one.

    Returns:
        loss [B, T], and where the kept value was the worse one [B, T].
    """
    near_old = torch.clamp(values, old_values - clip_range, old_values + clip_range)
    plain, clipped = (values - returns) ** 2, (near_old - returns) ** 2
    return 0.5 * torch.maximum(plain, clipped), clipped > plain


def aggregate(loss: Tensor, mask: Tensor, mode: LossAggregation, counts: Counts) -> Tensor:
    """One number from per-token losses; summed over the micro-batches of a mini-batch it is the loss."""
    if mode is LossAggregation.TOKEN_MEAN:
        return masked_sum(loss, mask) / counts.tokens
    if mode is LossAggregation.TOKEN_SUM:
        return masked_sum(loss, mask)
    sums = torch.where(mask, loss, 0.0).sum(dim=1)
    if mode is LossAggregation.SEQ_MEAN_TOKEN_MEAN:
        return (sums / (mask.sum(dim=1) + EPSILON)).sum() / counts.sequences
    mean = sums.sum() / counts.sequences
    return mean / counts.scale if mode is LossAggregation.SEQ_MEAN_TOKEN_SUM_NORM else mean
