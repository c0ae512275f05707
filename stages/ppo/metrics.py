"""Metrics of one update, by the names of :mod:`pipeline.metrics.catalogue`."""

from collections import Counter

import pyarrow.compute as pc
import torch
from torch import Tensor

from pipeline.config.algorithm import CorrectionMode
from pipeline.config.schema import Config
from pipeline.run.schemas import FinishReason, component_column
from stages.ppo.experience import Experience, RewardedRows
from stages.ppo.learner import Update
from stages.ppo.math.masked import masked_mean, masked_sum
from stages.ppo.math.mismatch import effective_share, mismatch_metrics, pushed_outwards, second_moment
from stages.ppo.math.shaping import flat_groups
from stages.ppo.targets import Targets
from stages.ppo.training import Steps


def update_metrics(config: Config, experience: Experience, done: Update) -> dict[str, float]:
    """Return everything the update stage reports."""
    metrics = reward_metrics(config, experience) | response_metrics(experience.rewarded)
    metrics["reward/discarded"] = float(done.num_discarded)
    if done.targets is not None:
        mask = done.experience.mask
        metrics["policy/padding_efficiency"] = done.padding_efficiency
        metrics["policy/computed_responses"] = float(done.experience.computed.any(dim=1).sum())
        metrics["reward/shaped/mean"] = done.scores.shaped.mean().item()
        metrics |= kl_metrics(done) | advantage_metrics(mask, done.targets)
        metrics |= teacher_metrics(done.experience, done.targets)
        metrics |= correction_metrics(config, done.experience, done.targets)
        if done.targets.old_values is not None and done.targets.returns is not None:
            metrics |= value_metrics(mask, done.targets.old_values, done.targets.returns)
    metrics |= step_metrics(done.steps)
    return {name: float(value) for name, value in metrics.items()}


def reward_metrics(config: Config, experience: Experience) -> dict[str, float]:
    """Return metrics of all rewards, also of responses that are left out; of components those that scored."""
    rewarded = experience.rewarded
    scores = rewarded.outcome.scores
    metrics = {
        "reward/mean": scores.mean().item(),
        "reward/std": scores.std(unbiased=False).item(),
        "reward/min": scores.min().item(),
        "reward/max": scores.max().item(),
        "reward/frac_zero_std": fraction_of_flat_prompts(config, rewarded),
    }
    if experience.greedy is not None:
        metrics["reward/greedy/mean"] = experience.greedy.scores.mean().item()
    for name in config.reward.components:
        column = rewarded.rewards[component_column(name)].drop_null()
        if not len(column):  # the rule has abstained from all
            continue
        metrics[f"reward/{name}/mean"] = pc.mean(column).as_py()
        metrics[f"reward/{name}/std"] = pc.stddev(column).as_py()
    return metrics


def fraction_of_flat_prompts(config: Config, rewarded: RewardedRows) -> float:
    """Return the share of prompts whose samples all have the same reward; with one sample each, all prompts
    count as one."""
    scores, groups = rewarded.outcome.scores, rewarded.groups
    if config.rollout.samples_per_prompt == 1:
        return float((scores == scores[0]).all())
    return len(torch.unique(groups[flat_groups(scores, groups)])) / len(torch.unique(groups))


def response_metrics(rewarded: RewardedRows) -> dict[str, float]:
    lengths = rewarded.outcome.lengths
    reasons = Counter(rewarded.responses["finish_reason"].to_pylist())
    metrics = {
        "response_tokens": lengths.sum().item(),
        "response_length/mean": lengths.mean().item(),
        "response_length/min": lengths.min().item(),
        "response_length/max": lengths.max().item(),
        "response_length/clip_ratio": reasons[FinishReason.LENGTH] / len(rewarded),
        "num_turns/mean": pc.mean(rewarded.responses["num_turns"]).as_py(),
    }
    for reason in FinishReason:
        metrics[f"finish_reason/{reason}"] = reasons[reason] / len(rewarded)
    return metrics


def mean_kl(experience: Experience, targets: Targets | None) -> float | None:
    """Return KL(policy || reference) per response, summed over its tokens (k1); None when off or unknown."""
    if experience.reference_log_probs is None or targets is None or targets.old_log_probs is None:
        return None
    difference = targets.old_log_probs - experience.reference_log_probs
    return float(torch.where(experience.mask, difference, 0.0).sum(dim=1).mean())


def kl_metrics(done: Update) -> dict[str, float]:
    """Return the distance of the old policy to the reference, of the responses that went through the policy,
    and between the generation engine and the trainer, of those whose log-probabilities are known before any
    step."""
    experience, targets, mask = done.experience, done.targets, done.experience.computed
    assert targets is not None
    assert targets.old_log_probs is not None
    assert done.before is not None
    assert done.compared is not None
    metrics = mismatch_metrics(experience.rollout_log_probs, done.before, done.compared)
    per_response = mean_kl(experience, targets)
    if per_response is not None and experience.reference_log_probs is not None:
        difference = targets.old_log_probs - experience.reference_log_probs
        metrics["objective/kl"] = per_response
        metrics["objective/kl_per_token"] = float(masked_mean(difference, mask))
    return metrics


def teacher_metrics(experience: Experience, targets: Targets) -> dict[str, float]:
    """Return the distance of the old policy to the teachers, of the responses that have one."""
    if experience.teacher_log_probs is None or experience.teacher_weights is None:
        return {}
    assert targets.old_log_probs is not None
    has_teacher = experience.teacher_weights.squeeze(1) > 0
    if not bool(has_teacher.any()):
        return {}
    mask = (experience.mask & has_teacher.unsqueeze(1))[has_teacher]
    gaps = (targets.old_log_probs - experience.teacher_log_probs)[has_teacher]
    return {
        "teacher/kl": float(torch.where(mask, gaps, 0.0).sum(dim=1).mean()),
        "teacher/kl_per_token": float(masked_mean(gaps, mask)),
        "teacher/responses": float(has_teacher.sum()),
    }


def correction_metrics(config: Config, experience: Experience, targets: Targets) -> dict[str, float]:
    """Return what the importance weights do; nothing where there are none."""
    weights, mask = targets.weights, experience.computed
    if weights is None or targets.old_log_probs is None:
        return {}
    metrics = {
        "correction/weight_mean": float(masked_mean(weights, mask)),
        "correction/weight_max": float(weights.max()),
        "correction/masked_share": float(masked_mean((weights == 0).float(), mask)),
        "correction/effective_samples": float(effective_share(weights, mask)),
    }
    if config.algorithm.correction.mode is CorrectionMode.M2PO:
        log_ratio = targets.old_log_probs - experience.rollout_log_probs
        outwards = pushed_outwards(log_ratio, targets.advantages, mask)
        metrics["correction/second_moment"] = float(second_moment(log_ratio, outwards))
        metrics["correction/second_moment_kept"] = float(second_moment(log_ratio, outwards & (weights > 0)))
    return metrics


def advantage_metrics(mask: Tensor, targets: Targets) -> dict[str, float]:
    mean = masked_mean(targets.advantages, mask)
    variance = masked_mean((targets.advantages - mean) ** 2, mask)
    return {"policy/advantage_mean": float(mean), "policy/advantage_std": float(variance) ** 0.5}


_PER_TOKEN = {
    "entropy": "entropy",
    "ratio": "ratio",
    "approx_kl": "approx_kl",
    "kl_loss": "kl_loss",
    "clip_fraction_low": "clip_low",
    "clip_fraction_high": "clip_high",
    "dual_clip_fraction": "dual_clip",
}
"""Metrics of the policy per token, and what they are summed as (:data:`stages.ppo.training.SUMMED`)."""


def step_metrics(steps: Steps) -> dict[str, float]:
    """Return metrics of the optimizer steps. Without any step there are only counts."""
    metrics = {
        "policy/steps": float(len(steps.policy_norms)),
        "policy/skipped_steps": float(len(steps.skipped)),
        "policy/overflow_steps": float(steps.overflows),
        "policy/stopped_early": float(steps.is_stopped),
    }
    if steps.first_ratio_error is not None:
        metrics["policy/ratio_error_first"] = steps.first_ratio_error
    if not steps.sums:
        return metrics
    total = {name: sum(sums[name] for sums in steps.sums) for name in steps.sums[0]}
    per_token = {name: value / steps.tokens for name, value in total.items()}
    if steps.policy_norms:
        metrics["policy/loss"] = total["policy_loss"] / len(steps.sums)
        metrics |= {f"policy/{name}": per_token[summed] for name, summed in _PER_TOKEN.items()}
        metrics["policy/grad_norm"] = _mean(steps.policy_norms)
        metrics["policy/learning_rate"] = steps.rate
    if total["router_loss"]:
        metrics["policy/router_loss"] = total["router_loss"] / len(steps.sums)
    if total["replayed"]:
        metrics["policy/replayed_differ"] = total["replayed_differ"] / total["replayed"]
    if steps.critic_norms:
        metrics["value/loss"] = total["value_loss"] / len(steps.sums)
        metrics["value/clip_fraction"] = per_token["value_clip"]
        metrics["value/grad_norm"] = _mean(steps.critic_norms)
    return metrics


def value_metrics(mask: Tensor, values: Tensor, returns: Tensor) -> dict[str, float]:
    """Return how much of the returns' variance the critic foresaw (1 is all, 0 no more than a constant), and
    the means of values and returns."""
    error = masked_mean((returns - values - masked_mean(returns - values, mask)) ** 2, mask)
    variance = masked_mean((returns - masked_mean(returns, mask)) ** 2, mask)
    explained = 1 - error / variance if variance > 0 else torch.tensor(0.0)
    return {
        "value/explained_variance": float(explained),
        "value/mean": float(masked_mean(values, mask)),
        "value/returns_mean": float(masked_sum(returns, mask) / mask.sum()),
    }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
