"""Advantage estimators. Shapes: [B, T] for per-token values, [B] for scores; mask is true where the policy
wrote the token. Sources: GAE arXiv 1506.02438, GRPO arXiv 2402.03300, RLOO arXiv 2402.14740, REINFORCE++
arXiv 2501.03262, ReMax arXiv 2310.10505; edge cases as verl's core_algos.

Tokens outside the mask (an observation within the response, padding after it) neither start nor end an
estimate: whatever runs backwards over a response is carried over them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stages.ppo.math.masked import masked_whiten

_GROUP_EPSILON = 1e-6


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Compute generalised advantage estimates, not whitened.

    Args:
        lam: lambda, or one for each response [B].

    Returns:
        advantages [B, T] and returns [B, T]; entries outside the mask carry no meaning.
    """
    if isinstance(lam, Tensor):
        lam = lam.to(values.dtype)
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


def length_adaptive_lambda(mask: Tensor, alpha: float) -> Tensor:
    """Return [B] the lambda of each response, 1 - 1 / (alpha * tokens), at least 0: the weights of the errors
    to come then reach over a share of the response, whatever its length (VAPO, arXiv 2504.05118)."""
    return (1 - 1 / (alpha * mask.sum(dim=1).clamp(min=1).double())).clamp(min=0)


def reinforce_plus_plus(rewards: Tensor, mask: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Compute discounted rewards to come, whitened over all valid tokens.

    Returns:
        advantages [B, T] and returns [B, T], both 0 outside the mask.
    """
    returns = _rewards_to_come(rewards, mask, gamma)
    return torch.where(mask, masked_whiten(returns, mask), 0.0), returns


def remax(rewards: Tensor, baselines: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Compute discounted rewards to come minus the score of the greedy response to the same prompt; [B, T], 0
    outside the mask. ``baselines`` [B] holds that score."""
    return torch.where(mask, _rewards_to_come(rewards, mask, gamma) - baselines.unsqueeze(1), 0.0)


def _rewards_to_come(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Sum discounted rewards from each valid token to the end; [B, T], 0 outside the mask."""
    total = torch.zeros_like(rewards[:, 0])
    backwards = []
    for t in reversed(range(rewards.shape[1])):
        total = torch.where(mask[:, t], rewards[:, t] + gamma * total, total)
        backwards.append(torch.where(mask[:, t], total, 0.0))
    return torch.stack(backwards[::-1], dim=1)


def grpo(scores: Tensor, groups: Tensor, mask: Tensor, normalize_std: bool) -> Tensor:
    """Compute score minus the group's mean, over its unbiased standard deviation; [B, T], 0 outside the mask.

    ``groups`` [B] holds the index of each row's prompt. A row alone in its group keeps its score.
    """
    return torch.where(mask, normalized(scores, groups, normalize_std).unsqueeze(1), 0.0)


def normalized(scores: Tensor, groups: Tensor, normalize_std: bool) -> Tensor:
    """Return [B] scores minus their group's mean, over its unbiased standard deviation."""
    count, mean, _ = _group_statistics(scores, groups)
    centred = torch.where(count > 1, scores - mean, scores)
    if normalize_std:
        squares = torch.zeros_like(mean).index_add(0, groups, (scores - mean) ** 2)[groups]
        std = (squares / (count - 1).clamp(min=1)).sqrt()
        centred = torch.where(count > 1, centred / (std + _GROUP_EPSILON), centred)
    return centred


@dataclass(frozen=True)
class RewardSteps:
    """The steps of all responses, S of them, in order: what of the rewards is each one's."""

    rewards: Tensor
    """[S] sum of the rewards since the step before."""
    rows: Tensor
    """[S] row of each step."""
    ends: Tensor
    """[S] index of its last token."""


def reward_steps(rewards: Tensor, ends: Tensor, mask: Tensor) -> RewardSteps:
    """Cut responses at the tokens where ``ends`` [B, T] is true. What follows a row's last step is part of
    that step."""
    rows, columns = ends.nonzero(as_tuple=True)
    of_row = ends.sum(dim=1)
    first = of_row.cumsum(0) - of_row  # index of a row's first step
    before = torch.minimum(ends.cumsum(dim=1) - ends.long(), (of_row - 1).unsqueeze(1))
    has_any = mask & (of_row > 0).unsqueeze(1)
    sums = torch.zeros(len(rows), dtype=rewards.dtype)
    return RewardSteps(
        sums.index_add(0, (first.unsqueeze(1) + before)[has_any], rewards[has_any]), rows, columns
    )


def from_steps(steps: RewardSteps, values: Tensor, mask: Tensor) -> Tensor:
    """Sum the values [S] of the steps that end at a token or after it; [B, T], 0 outside the mask (process
    supervision of GRPO, arXiv 2402.03300, section 4.1.3)."""
    at_ends = torch.zeros(mask.shape, dtype=values.dtype)
    at_ends[steps.rows, steps.ends] = values
    return torch.where(mask, at_ends.flip(1).cumsum(1).flip(1), 0.0)


def normalized_steps(steps: RewardSteps, groups: Tensor, normalize_std: bool) -> Tensor:
    """Return [S] each step's reward minus the mean of its group's steps, over their standard deviation."""
    of_steps = torch.unique(groups[steps.rows], return_inverse=True)[1]  # rows without a token have no step
    return normalized(steps.rewards, of_steps, normalize_std)


def without_own(steps: RewardSteps, groups: Tensor) -> Tensor:
    """Return [S] each step's reward minus the mean of the steps of the group's other rows; where these have
    none, the reward. With one step a row it is :func:`rloo`."""
    num_rows = len(groups)
    nothing, ones = torch.zeros(num_rows, dtype=steps.rewards.dtype), torch.ones_like(steps.rewards)
    of_row = [nothing.index_add(0, steps.rows, values) for values in (ones, steps.rewards)]
    others = [(nothing.index_add(0, groups, values)[groups] - values)[steps.rows] for values in of_row]
    return torch.where(others[0] > 0, steps.rewards - others[1] / others[0].clamp(min=1), steps.rewards)


def rloo(scores: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
    """Compute score minus the mean of the group's other rows; [B, T], 0 outside the mask."""
    count, _, total = _group_statistics(scores, groups)
    others = (total - scores) / (count - 1).clamp(min=1)
    alone_or_compared = torch.where(count > 1, scores - others, scores)
    return torch.where(mask, alone_or_compared.unsqueeze(1), 0.0)


def reinforce_plus_plus_baseline(scores: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
    """Compute score minus the group's mean, whitened over all valid tokens; [B, T], 0 outside the mask."""
    centred = normalized(scores, groups, normalize_std=False).unsqueeze(1).expand(mask.shape)
    return torch.where(mask, masked_whiten(centred, mask), 0.0)


def _group_statistics(scores: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return count, mean and sum of each row's group; each [B]."""
    zeros = torch.zeros_like(scores)
    count = zeros.index_add(0, groups, torch.ones_like(scores))[groups]
    total = zeros.index_add(0, groups, scores)[groups]
    return count, total / count, total
