"""The mismatch of rollout engine and trainer in log-probabilities of the same tokens, and its correction.

Shapes: [B, T] per token. The log-ratio is trainer minus engine: the importance weight that makes samples of
the engine stand for samples of the trainer's policy is its exponential.
"""

import torch
from torch import Tensor

from pipeline.config.algorithm import CorrectionConfig, CorrectionLevel, CorrectionMode
from stages.ppo.math.masked import EPSILON, masked_mean

_EXPONENT_LIMIT = 20.0


def importance_weights(
    log_ratio: Tensor, mask: Tensor, correction: CorrectionConfig, advantages: Tensor | None = None
) -> Tensor:
    """Compute importance weights [B, T], without gradient; 0 outside the mask.

    Truncation: Ionides, "Truncated importance sampling" (2008); masking: IcePop, arXiv 2510.18855, and M2PO,
    arXiv 2510.01161; geometric mean: GSPO, arXiv 2507.18071.

    Args:
        advantages: advantages [B, T], whose signs m2po needs.
    """
    # 1. one log-ratio per token, or one per response at all of its tokens
    valid = torch.where(mask, log_ratio.detach(), 0.0)
    if correction.level is not CorrectionLevel.TOKEN:
        valid = valid.sum(dim=1, keepdim=True).expand_as(valid)
    if correction.level is CorrectionLevel.GEOMETRIC:
        valid = valid / (mask.sum(dim=1, keepdim=True) + EPSILON)
    # 2. its exponential, bounded
    weights = torch.where(mask, _exp(valid), 0.0)
    if correction.mode is CorrectionMode.MASK:
        is_kept = (weights >= correction.low) & (weights <= correction.high)
        weights = torch.where(is_kept, weights, 0.0)
    else:
        weights = weights.clamp(max=correction.high)
    if correction.mode is CorrectionMode.M2PO:
        assert advantages is not None
        is_left_out = beyond_second_moment(log_ratio.detach(), advantages, mask, correction.second_moment)
        weights = torch.where(is_left_out, 0.0, weights)
    # 3. mean 1 over what was weighted
    return weights / _mean_weight(weights, mask, correction.level) if correction.normalize else weights


def beyond_second_moment(log_ratio: Tensor, advantages: Tensor, mask: Tensor, bound: float) -> Tensor:
    """Return [B, T] true for the tokens that M2PO leaves out (arXiv 2510.01161, algorithm 1).

    Of those that are pushed outwards these have the largest squared log-ratios, and are as many as it takes
    for the mean over the others to be at most ``bound``. Of equal ones all or none is left out, so that the
    order of rows does not matter.
    """
    is_outwards = pushed_outwards(log_ratio, advantages, mask)
    squares = torch.where(is_outwards, log_ratio.double() ** 2, 0.0)
    ascending = squares[is_outwards].sort().values
    means = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1, device=mask.device)
    fitting = (means <= bound).nonzero().flatten()
    kept = int(fitting[-1]) + 1 if len(fitting) else 0
    if kept == len(ascending):
        return torch.zeros_like(mask)
    return is_outwards & (squares >= ascending[kept])


def pushed_outwards(log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return [B, T] true where the advantage pushes the ratio further from 1: where PPO would clip it."""
    return mask & (log_ratio.sign() * advantages.sign() > 0)


def second_moment(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of squared log-ratios; 0 without tokens."""
    return masked_mean(log_ratio.double() ** 2, mask)


def _mean_weight(weights: Tensor, mask: Tensor, level: CorrectionLevel) -> Tensor:
    """Return the mean over tokens, or over responses; 1 where all weights are 0."""
    if level is CorrectionLevel.TOKEN:
        mean = masked_mean(weights, mask)
    else:
        mean = masked_mean(weights.amax(dim=1), mask.any(dim=1))
    return torch.where(mean > EPSILON, mean, 1.0)


def mismatch_metrics(rollout_log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> dict[str, float]:
    """Measure how far the engine is from the trainer. All are 0 (the ratios 1) when they agree.

    Raises nothing for an empty mask: all numbers are then those of agreement.
    """
    log_ratio = torch.where(mask, old_log_probs - rollout_log_probs, 0.0)
    weights = _exp(log_ratio)
    is_response = mask.any(dim=1)
    per_response = log_ratio.sum(dim=1)
    mean_per_response = per_response / mask.sum(dim=1).clamp(min=1)
    metrics = {
        "kl": masked_mean(-log_ratio, mask),
        "k3": masked_mean(weights - log_ratio - 1, mask),
        "max": log_ratio.abs().max(),
        "ppl_ratio": _mean_or_one(_exp(-mean_per_response), is_response),
        "chi2_token": _mean_or_one(_exp(2 * log_ratio), mask) - 1,
        "chi2_sequence": _mean_or_one(_exp(2 * per_response), is_response) - 1,
        "effective_samples": effective_share(weights, mask),
    }
    return {f"mismatch/{name}": float(value) for name, value in metrics.items()}


def effective_share(weights: Tensor, mask: Tensor) -> Tensor:
    """Return Kish's effective sample size as a share of the samples; 1 when all weights are equal."""
    square = torch.where(mask, weights, 0.0).sum() ** 2
    squares = (torch.where(mask, weights, 0.0) ** 2).sum() * mask.sum()
    return torch.where(squares > 0, square / squares, 1.0)


def _exp(log_values: Tensor) -> Tensor:
    return log_values.clamp(-_EXPONENT_LIMIT, _EXPONENT_LIMIT).exp()


def _mean_or_one(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask.any(), masked_mean(values, mask), 1.0)
