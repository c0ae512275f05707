"""Numbers of one update, by the names of :mod:`pipeline.metrics`."""

from collections import Counter

import pyarrow.compute as pc
import torch
from torch import Tensor

from pipeline.config import Config
from pipeline.schemas import FinishReason, component_column
from stages.ppo.advantages import fraction_of_flat_groups
from stages.ppo.experience import Experience
from stages.ppo.learner import Sums, Targets
from stages.ppo.masked import masked_mean, masked_sum


def update_metrics(config: Config, experience: Experience, targets: Targets, sums: Sums) -> dict[str, float]:
    """Everything the update stage reports."""
    metrics = reward_metrics(config, experience) | response_metrics(config, experience)
    metrics |= kl_metrics(experience, targets.old_log_probs) | loss_metrics(sums)
    if targets.old_values is not None and targets.returns is not None:
        metrics |= value_metrics(experience.mask, targets.old_values, targets.returns, sums)
    return {name: float(value) for name, value in metrics.items()}


def reward_metrics(config: Config, experience: Experience) -> dict[str, float]:
    scores = experience.scores
    metrics = {
        "reward/mean": scores.mean().item(),
        "reward/std": scores.std(unbiased=False).item(),
        "reward/min": scores.min().item(),
        "reward/max": scores.max().item(),
    }
    if config.rollout.samples_per_prompt > 1:
        metrics["reward/frac_zero_std"] = fraction_of_flat_groups(scores, experience.groups)
    else:  # the group is the batch
        metrics["reward/frac_zero_std"] = float((scores == scores[0]).all())
    for name in config.reward.components:
        column = experience.rewards[component_column(name)]
        metrics[f"reward/{name}/mean"] = pc.mean(column).as_py()
        metrics[f"reward/{name}/std"] = pc.stddev(column).as_py()
    return metrics


def response_metrics(config: Config, experience: Experience) -> dict[str, float]:
    lengths = torch.tensor([len(row.response) for row in experience.rows], dtype=torch.float32)
    reasons = Counter(experience.responses["finish_reason"].to_pylist())
    metrics = {
        "response_tokens": lengths.sum().item(),
        "response_length/mean": lengths.mean().item(),
        "response_length/min": lengths.min().item(),
        "response_length/max": lengths.max().item(),
        "response_length/clip_ratio": (lengths >= config.rollout.max_new_tokens).float().mean().item(),
        "num_turns/mean": pc.mean(experience.responses["num_turns"]).as_py(),
    }
    for reason in FinishReason:
        metrics[f"finish_reason/{reason}"] = reasons[reason] / len(experience)
    return metrics


def mean_kl(experience: Experience, old_log_probs: Tensor) -> float | None:
    """KL(policy || reference) per response, summed over its tokens (k1); None when KL is off."""
    if experience.reference_log_probs is None:
        return None
    difference = old_log_probs - experience.reference_log_probs
    return float(torch.where(experience.mask, difference, 0.0).sum(dim=1).mean())


def kl_metrics(experience: Experience, old_log_probs: Tensor) -> dict[str, float]:
    """Distance to the reference, and between the generation engine and the trainer."""
    mask = experience.mask
    mismatch = experience.rollout_log_probs - old_log_probs
    metrics = {
        "mismatch/kl": float(masked_mean(mismatch, mask)),
        "mismatch/max": float(torch.where(mask, mismatch.abs(), 0.0).max()),
    }
    per_response = mean_kl(experience, old_log_probs)
    if per_response is not None and experience.reference_log_probs is not None:
        difference = old_log_probs - experience.reference_log_probs
        metrics["objective/kl"] = per_response
        metrics["objective/kl_per_token"] = float(masked_mean(difference, mask))
    return metrics


def loss_metrics(sums: Sums) -> dict[str, float]:
    per_token = {name: total / sums.tokens for name, total in sums.values.items()}
    metrics = {
        "policy/loss": _mean(sums.policy_losses),
        "policy/entropy": per_token["entropy"],
        "policy/ratio": per_token["ratio"],
        "policy/ratio_error_first": sums.first_ratio_error,
        "policy/approx_kl": per_token["approx_kl"],
        "policy/clip_fraction_low": per_token["clip_low"],
        "policy/clip_fraction_high": per_token["clip_high"],
        "policy/dual_clip_fraction": per_token["dual_clip"],
        "policy/grad_norm": _mean(sums.policy_norms),
    }
    if sums.value_losses:
        metrics["value/loss"] = _mean(sums.value_losses)
        metrics["value/clip_fraction"] = per_token["value_clip"]
        metrics["value/grad_norm"] = _mean(sums.critic_norms)
    return metrics


def value_metrics(mask: Tensor, values: Tensor, returns: Tensor, sums: Sums) -> dict[str, float]:
    """How much of the returns' variance the critic foresaw: 1 is all, 0 no more than a constant."""
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
