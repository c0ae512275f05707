"""Statistics over the valid entries of a matrix. Shapes: values [B, T], mask [B, T] bool.

Values outside the mask never count, not even when they are NaN.
"""

import torch
from torch import Tensor

from stages.context import NumericalError

EPSILON = 1e-8


class NoValidTokens(NumericalError):
    """There is nothing to average over."""


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the valid entries; 0 where there are none (verl's masked_mean, with its epsilon)."""
    return masked_sum(values, mask) / (mask.sum() + EPSILON)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Return the unbiased variance (Bessel). Raises NoValidTokens with fewer than two valid entries."""
    count = int(mask.sum())
    if count < 2:
        raise NoValidTokens(f"variance needs at least 2 valid tokens, and the batch has {count}")
    mean = masked_mean(values, mask)
    return masked_mean((values - mean) ** 2, mask) * count / (count - 1)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Scale valid entries to variance 1 (verl and TRL: unbiased), around 0 or around the mean they had."""
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + EPSILON)
    return whitened if shift_mean else whitened + mean
