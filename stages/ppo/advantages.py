"""Advantage estimators. Shapes: [B, T] for per-token values, [B] for scores; mask is true where the policy
wrote the token. Sources: GAE arXiv 1506.02438, GRPO arXiv 2402.03300, RLOO arXiv 2402.14740; edge cases as
verl's core_algos.
"""

import torch
from torch import Tensor

_GROUP_EPSILON = 1e-6


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation, not whitened.

    Tokens outside the mask (an observation within the response, padding after it) neither start nor end
    an estimate: the next value and the running advantage are carried over them.

    Returns:
        advantages [B, T] and returns [B, T]; entries outside the mask carry no meaning.
    """
    advantage = torch.zeros_like(values[:, 0])
    next_value = torch.zeros_like(values[:, 0])
    backwards = []
    for t in reversed(range(values.shape[1])):
        valid = mask[:, t]
        # 1. temporal difference error  2. decayed sum of errors  3. carry over what is not the policy's
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = torch.where(valid, delta + gamma * lam * advantage, advantage)
        next_value = torch.where(valid, values[:, t], next_value)
        backwards.append(advantage)
    advantages = torch.stack(backwards[::-1], dim=1)
    return advantages, advantages + values


def grpo(scores: Tensor, groups: Tensor, mask: Tensor, normalize_std: bool) -> Tensor:
    """Score minus the group's mean, over its unbiased standard deviation; [B, T], 0 outside the mask.

    ``groups`` [B] holds the index of each row's prompt. A row alone in its group keeps its score.
    """
    count, mean, _ = _group_statistics(scores, groups)
    centred = torch.where(count > 1, scores - mean, scores)
    if normalize_std:
        squares = torch.zeros_like(mean).index_add(0, groups, (scores - mean) ** 2)[groups]
        std = (squares / (count - 1).clamp(min=1)).sqrt()
        centred = torch.where(count > 1, centred / (std + _GROUP_EPSILON), centred)
    return centred.unsqueeze(1) * mask


def rloo(scores: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
    """Score minus the mean of the group's other rows; [B, T], 0 outside the mask."""
    count, _, total = _group_statistics(scores, groups)
    others = (total - scores) / (count - 1).clamp(min=1)
    return torch.where(count > 1, scores - others, scores).unsqueeze(1) * mask


def _group_statistics(scores: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and sum of each row's group; each [B]."""
    zeros = torch.zeros_like(scores)
    count = zeros.index_add(0, groups, torch.ones_like(scores))[groups]
    total = zeros.index_add(0, groups, scores)[groups]
    return count, total / count, total


def fraction_of_flat_groups(scores: Tensor, groups: Tensor) -> float:
    """Share of groups whose rewards are all equal: they teach a group estimator nothing."""
    highest = torch.full_like(scores, -torch.inf).scatter_reduce(0, groups, scores, "amax")
    lowest = torch.full_like(scores, torch.inf).scatter_reduce(0, groups, scores, "amin")
    present = torch.isfinite(highest)
    return float((highest == lowest)[present].float().mean())
