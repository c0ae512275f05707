"""Targets of the losses, from scores and log-probabilities. N responses, T tokens of the longest."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipeline.config.algorithm import (
    GROUP_ESTIMATORS,
    AlgorithmConfig,
    CorrectionLevel,
    DistillationPlacement,
    Estimator,
    KLPlacement,
)
from pipeline.config.distillation_rules import has_teachers_in
from pipeline.config.schema import Config
from stages.ppo.batching import tensors_on
from stages.ppo.experience import Experience
from stages.ppo.math.advantages import (
    RewardSteps,
    from_steps,
    gae,
    grpo,
    length_adaptive_lambda,
    normalized_steps,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    reward_steps,
    rloo,
    without_own,
)
from stages.ppo.math.kl import kl_per_token
from stages.ppo.math.masked import masked_whiten
from stages.ppo.math.mismatch import importance_weights
from stages.ppo.math.shaping import RunningMoments, flat_groups, shaped_scores


@dataclass(frozen=True)
class TargetScores:
    """Rewards as the estimators take them; both [N]."""

    shaped: Tensor
    greedy: Tensor | None
    """Score of the greedy response to the same prompt, shaped alike."""

    def select(self, indices: Tensor) -> "TargetScores":
        """Return the responses of the given indices."""
        return TargetScores(self.shaped[indices], None if self.greedy is None else self.greedy[indices])


@dataclass(frozen=True)
class Targets:
    """Targets and weights of the losses; all [N, T]."""

    mask: Tensor
    """Mask: true where the policy wrote the token."""
    old_log_probs: Tensor | None
    """Log-probabilities of the old policy (algorithm.old_log_probs); where the first step gives the
    trainer's, None until it has."""
    old_values: Tensor | None
    advantages: Tensor
    returns: Tensor | None
    """Returns, where there is a critic."""
    weights: Tensor | None
    """Importance weights of the policy loss; None when the mismatch is not corrected."""
    reference_log_probs: Tensor | None
    """Reference's log-probabilities, for a KL term in the loss; None without one."""
    kl_coef: float
    teacher_log_probs: Tensor | None = None
    """Teachers' log-probabilities, for a KL to them in the loss; None without one."""
    teacher_weights: Tensor | None = None
    """[N, 1] coefficient of that KL."""
    teacher_top_tokens: Tensor | None = None
    """[N, T, k] ids that the KL is over (algorithm.distillation.top_k); None where it is estimated."""
    teacher_top_log_probs: Tensor | None = None
    """[N, T, k] the teacher's log-probabilities of them."""

    def to(self, device: torch.device) -> "Targets":
        """Return it on a device, from which micro-batches take their rows without waiting; but what has k
        numbers a token stays where it is."""
        names = ("teacher_top_tokens", "teacher_top_log_probs")
        top: dict[str, Any] = {name: getattr(self, name) for name in names}
        none: dict[str, Any] = dict.fromkeys(names)
        moved = tensors_on(device, replace(self, **none))
        return replace(self, **moved, **top)


def shape(config: Config, experience: Experience, moments: RunningMoments) -> TargetScores:
    """Shape the scores of all responses; ``moments`` are those of all scores up to and with these."""
    arguments = (moments, config.algorithm.shaping, config.rollout.max_new_tokens)
    greedy = None if experience.greedy is None else shaped_scores(experience.greedy, *arguments)
    return TargetScores(shaped_scores(experience.outcome, *arguments), greedy)


def token_rewards(
    config: Config, experience: Experience, scores: Tensor, old_log_probs: Tensor | None, kl_coef: float
) -> Tensor:
    """Return [N, T]: the response's score at its last token, less the KL penalty at every token. With rewards
    of steps, these at their tokens, and at the last one what shaping has made of the score besides."""
    kl, mask = config.algorithm.kl, experience.mask
    rewards = torch.zeros_like(experience.rollout_log_probs)
    if experience.reference_log_probs is not None and kl.placement is KLPlacement.REWARD:
        assert old_log_probs is not None
        penalty = kl_per_token(old_log_probs, experience.reference_log_probs, kl.per_token)
        rewards = torch.where(mask, -kl_coef * penalty, 0.0)
    return _with_scores(experience, scores, rewards)


def _with_scores(experience: Experience, scores: Tensor, rewards: Tensor) -> Tensor:
    """Return rewards of tokens [N, T], plus the scores [N] at their tokens."""
    mask, steps = experience.mask, experience.step_rewards
    at_last = last_tokens(mask)
    if steps is None:
        return torch.where(at_last, rewards + scores.unsqueeze(1), rewards)
    rewards = torch.where(mask & ~steps.isnan(), rewards + steps, rewards)
    return torch.where(at_last, rewards + (scores - experience.outcome.scores).unsqueeze(1), rewards)


def flat_rows(experience: Experience, scores: Tensor) -> Tensor:
    """Return [N] true for the rows of groups from which a group estimator learns nothing: all rows have the
    same score, or where steps have rewards, all steps of them the same reward.

    Args:
        scores: [N] shaped scores.
    """
    ends = step_ends(experience, scores)
    if ends is None:
        return flat_groups(scores, experience.groups)
    rewards = _with_scores(experience, scores, torch.zeros_like(experience.rollout_log_probs))
    steps = reward_steps(rewards, ends, experience.mask)
    return flat_groups(steps.rewards, experience.groups, steps.rows)


def last_tokens(mask: Tensor) -> Tensor:
    """Return [N, T] true at the last token of the policy's; a row of nothing but observations has none."""
    return mask & (mask.flip(1).cumsum(1).flip(1) == 1)


def step_ends(experience: Experience, scores: Tensor) -> Tensor | None:
    """Return [N, T] true where a step ends: where it has a reward, and at the last token of a response that
    has none, or whose score was shaped. None where no component gives rewards of steps."""
    if experience.step_rewards is None:
        return None
    ends = experience.mask & ~experience.step_rewards.isnan()
    needs_last = ~ends.any(dim=1) | (scores != experience.outcome.scores)
    return ends | (last_tokens(experience.mask) & needs_last.unsqueeze(1))


def make_targets(
    config: Config,
    experience: Experience,
    scores: TargetScores,
    old_log_probs: Tensor | None,
    old_values: Tensor | None,
    kl_coef: float,
) -> Targets:
    """Compute advantages, returns where there is a critic, and weights where the mismatch is corrected."""
    algorithm = config.algorithm
    rewards = token_rewards(config, experience, scores.shaped, old_log_probs, kl_coef)
    advantages, returns = estimate(config, experience, rewards, scores, old_values)
    if old_log_probs is not None and has_teachers_in(config, DistillationPlacement.ADVANTAGE):
        advantages = advantages + teacher_advantages(experience, old_log_probs)
    weights = None
    if algorithm.correction.level is not CorrectionLevel.NONE:
        assert old_log_probs is not None
        log_ratio = old_log_probs - experience.rollout_log_probs
        weights = importance_weights(log_ratio, experience.computed, algorithm.correction, advantages)
    reference = None
    if experience.reference_log_probs is not None and algorithm.kl.placement is KLPlacement.LOSS:
        # Others computed it. The loss is masked, but in its backward pass 0 times NaN is NaN.
        reference = torch.where(experience.mask, experience.reference_log_probs, 0.0)
    is_in_loss = has_teachers_in(config, DistillationPlacement.LOSS)
    return Targets(
        mask=experience.mask,
        old_log_probs=old_log_probs,
        old_values=old_values,
        advantages=advantages,
        returns=returns,
        weights=weights,
        reference_log_probs=reference,
        kl_coef=kl_coef,
        teacher_log_probs=experience.teacher_log_probs if is_in_loss else None,
        teacher_weights=experience.teacher_weights if is_in_loss else None,
        teacher_top_tokens=experience.teacher_top_tokens if is_in_loss else None,
        teacher_top_log_probs=experience.teacher_top_log_probs if is_in_loss else None,
    )


def teacher_advantages(experience: Experience, old_log_probs: Tensor) -> Tensor:
    """Return what teachers add to advantages, [N, T]: the negative k1 estimate of KL(policy || teacher) of
    each token, times the weight, without a baseline or a share in later tokens. 0 without a teacher.

    As on-policy distillation of thinkingmachines.ai (2025), which takes it for the whole advantage.
    """
    assert experience.teacher_log_probs is not None
    assert experience.teacher_weights is not None
    is_taught = experience.mask & (experience.teacher_weights > 0)
    gap = experience.teacher_log_probs - old_log_probs
    return torch.where(is_taught, experience.teacher_weights * gap, 0.0)


def teaching_rows(config: Config, experience: Experience, scores: TargetScores) -> Tensor | None:
    """Return [N] true for the rows whose policy loss has a gradient: an advantage that is not 0; None where
    others have one too, or a number of all rows decides what is learned."""
    algorithm, correction = config.algorithm, config.algorithm.correction
    others = algorithm.kl.coef > 0 or algorithm.entropy_coef > 0 or algorithm.estimator is Estimator.GAE
    others = others or algorithm.has_own_loss or bool(config.reward.teachers)
    has_mean = correction.level is not CorrectionLevel.NONE and correction.normalize
    if others or has_mean or algorithm.target_kl is not None:
        return None
    rewards = token_rewards(config, experience, scores.shaped, None, kl_coef=0.0)
    advantages, _ = estimate(config, experience, rewards, scores, None)
    return (torch.where(experience.mask, advantages, 0.0) != 0).any(dim=1)


def estimate(
    config: Config, experience: Experience, rewards: Tensor, scores: TargetScores, old_values: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Compute advantages [N, T], and returns [N, T] where there is a critic to learn them."""
    algorithm, mask, groups = config.algorithm, experience.mask, experience.groups
    if algorithm.whiten_rewards:
        rewards = masked_whiten(rewards, mask, shift_mean=False)
    # A response without a token of the policy's has nothing to learn, but its score counts in its group.
    totals = torch.where(mask.any(dim=1), torch.where(mask, rewards, 0.0).sum(dim=1), scores.shaped)
    compared = with_others(mask, groups) if config.rollout.samples_per_prompt > 1 else mask
    match algorithm.estimator:
        case Estimator.GAE:
            assert old_values is not None
            lam: float | Tensor = algorithm.lam
            if algorithm.lam_alpha is not None:
                lam = length_adaptive_lambda(mask, algorithm.lam_alpha)
            advantages, returns = gae(rewards, old_values, mask, algorithm.gamma, lam)
            if algorithm.critic_lam is not None:
                _, returns = gae(rewards, old_values, mask, algorithm.gamma, algorithm.critic_lam)
            if algorithm.whiten_advantages:
                advantages = masked_whiten(advantages, mask)
            return advantages, returns
        case one if one in GROUP_ESTIMATORS and (ends := step_ends(experience, scores.shaped)) is not None:
            return estimate_by_steps(algorithm, reward_steps(rewards, ends, mask), groups, compared), None
        case Estimator.GRPO:
            return grpo(totals, groups, compared, algorithm.normalize_group_std), None
        case Estimator.RLOO:
            return rloo(totals, groups, compared), None
        case Estimator.REINFORCE_PLUS_PLUS:
            return reinforce_plus_plus(rewards, mask, algorithm.gamma)[0], None
        case Estimator.REINFORCE_PLUS_PLUS_BASELINE:
            return reinforce_plus_plus_baseline(totals, groups, compared), None
        case Estimator.REMAX:
            assert scores.greedy is not None
            return remax(rewards, scores.greedy, mask, algorithm.gamma), None


def estimate_by_steps(
    algorithm: AlgorithmConfig, steps: RewardSteps, groups: Tensor, compared: Tensor
) -> Tensor:
    """Compute advantages [N, T] of group estimators from rewards of steps: each is compared with the steps of
    its group, and a token has the sum of those that end there or later. With one step a response these are
    the estimators' own."""
    if algorithm.estimator is Estimator.RLOO:
        return from_steps(steps, without_own(steps, groups), compared)
    scales = algorithm.estimator is Estimator.GRPO and algorithm.normalize_group_std
    found = from_steps(steps, normalized_steps(steps, groups, scales), compared)
    if algorithm.estimator is Estimator.GRPO:
        return found
    return torch.where(compared, masked_whiten(found, compared), 0.0)


def with_others(mask: Tensor, groups: Tensor) -> Tensor:
    """Return the mask [N, T] without rows that are alone in their group [N]: reward models could not take the
    other responses to the prompt, so there is nothing to compare with, and a raw score is no advantage."""
    return mask & (torch.bincount(groups)[groups] > 1).unsqueeze(1)
