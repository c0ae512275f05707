"""KL divergence to the reference model: per-token estimators and controllers of the coefficient."""

import torch
from torch import Tensor

from pipeline.config.algorithm import KLConfig, KLController, KLEstimator

_EXPONENT_LIMIT = 20.0
_K3_LIMIT = 10.0
_STEP_LIMIT = 0.2


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


def next_kl_coef(coef: float, kl: float, num_responses: int, config: KLConfig) -> float:
    """Return the coefficient after an iteration with mean ``kl`` over ``num_responses`` responses.

    Adaptive: proportional control, arXiv 1909.08593 section 2.2.
    """
    if config.controller is KLController.FIXED:
        return coef
    error = min(max(kl / config.target - 1, -_STEP_LIMIT), _STEP_LIMIT)
    return coef * (1 + error * num_responses / config.horizon)
