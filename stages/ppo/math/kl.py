"""KL divergence to other models, per token, and controllers of the coefficient."""

import torch
from torch import Tensor

from pipeline.config.algorithm import KLConfig, KLController, KLEstimator

_EXPONENT_LIMIT = 20.0
_K3_LIMIT = 10.0
_STEP_LIMIT = 0.2
_LEAST = 1e-6
"""Least probability of all tokens together that are not among the top ones: the rounding of fp32."""
_LOWEST = -100.0
"""A logarithm that stands for that of 0."""


def kl_per_token(log_probs: Tensor, reference: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(policy || reference) at each sampled token; any shape.

    Schulman, "Approximating KL divergence" (2020); limits as in verl's kl_penalty.
    """
    difference = log_probs - reference
    match estimator:
        case KLEstimator.K1:
            return difference
        case KLEstimator.ABS:
            return difference.abs()
        case KLEstimator.K2:
            return 0.5 * difference**2
        case KLEstimator.K3:
            log_ratio = (-difference).clamp(-_EXPONENT_LIMIT, _EXPONENT_LIMIT)
            return (torch.exp(log_ratio) - log_ratio - 1).clamp(-_K3_LIMIT, _K3_LIMIT)


def kl_loss_per_token(
    log_probs: Tensor, reference: Tensor, estimator: KLEstimator, straight_through: bool
) -> Tensor:
    """Compute the KL as a term of the loss; any shape.

    The estimators agree in value, not in gradient: that of k2 is the gradient of the KL. Straight through,
    k2's gradient replaces the others' (verl's "k1+", "k3+").
    """
    value = kl_per_token(log_probs, reference, estimator)
    if not straight_through:
        return value
    k2 = kl_per_token(log_probs, reference, KLEstimator.K2)
    return value.detach() + k2 - k2.detach()


def top_kl(log_probs: Tensor, teacher: Tensor) -> Tensor:
    """Compute KL(policy || teacher) of distributions in which all tokens but some count as one.

    sum over these of p (log p - log q), and r (log r - log s) of what is left: r = 1 - sum p, s = 1 - sum q.
    It is at most the KL of the whole distributions (log-sum inequality), and equal where k is the vocabulary.
    The KL is that of arXiv 2306.13649 (reverse, on the policy's own responses). No sample enters, so its
    gradient is exact. r and s are at least 1e-6.

    Args:
        log_probs: [..., k] the policy's, of the k tokens that the teacher finds most probable.
        teacher: [..., k] the teacher's, of the same.

    Returns:
        [...].
    """
    mine, theirs = (given.double().clamp(min=_LOWEST) for given in (log_probs, teacher))
    probability = mine.exp()
    rest, of_teacher = ((1 - p.sum(dim=-1)).clamp(min=_LEAST) for p in (probability, theirs.exp()))
    found = (probability * (mine - theirs)).sum(dim=-1) + rest * (rest.log() - of_teacher.log())
    return found.to(log_probs.dtype)


def next_kl_coef(coef: float, kl: float, num_responses: int, config: KLConfig) -> float:
    """Return the coefficient after an iteration with mean ``kl`` over ``num_responses`` responses.

    Adaptive: proportional control, arXiv 1909.08593 section 2.2.
    """
    if config.controller is KLController.FIXED:
        return coef
    error = min(max(kl / config.target - 1, -_STEP_LIMIT), _STEP_LIMIT)
    return coef * (1 + error * num_responses / config.horizon)
