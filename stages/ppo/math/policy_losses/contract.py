"""What a policy loss is given, and what it returns. Shapes: [B, T] unless said otherwise."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.config.algorithm import AlgorithmConfig

_EXPONENT_LIMIT = 20.0


@dataclass(frozen=True)
class Compared:
    """The policy beside the one that it was before its first step, at tokens that the policy wrote."""

    log_probs: Tensor
    """Log-probabilities, with a gradient."""
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    """True where the policy wrote the token. What lies elsewhere must not reach a response's own numbers."""

    @property
    def log_ratio(self) -> Tensor:
        """New minus old; limited, so that one wild token does not become infinity."""
        return (self.log_probs - self.old_log_probs).clamp(-_EXPONENT_LIMIT, _EXPONENT_LIMIT)

    def mean_of_response(self, values: Tensor) -> Tensor:
        """Return [B, 1] the mean over a response's tokens; 0 where it has none."""
        valid = torch.where(self.mask, values, 0.0).sum(dim=1, keepdim=True)
        return valid / self.mask.sum(dim=1, keepdim=True).clamp(min=1)


@dataclass(frozen=True)
class Surrogate:
    """A loss for each token, before importance weights and aggregation, and what clipping did to it."""

    loss: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    dual_clipped: Tensor

    @staticmethod
    def unclipped(loss: Tensor) -> "Surrogate":
        nowhere = torch.zeros_like(loss, dtype=torch.bool)
        return Surrogate(loss, nowhere, nowhere, nowhere)


PolicyLossFunction = Callable[[Compared, AlgorithmConfig], Surrogate]


def clipped_surrogate(ratio: Tensor, advantages: Tensor, algorithm: AlgorithmConfig) -> Surrogate:
    """Return the more pessimistic of the plain surrogate and that of the clipped ratio (arXiv 1707.06347)."""
    clipped_ratio = ratio.clamp(1 - algorithm.clip_range_low, 1 + algorithm.clip_range_high)
    plain, clipped = -advantages * ratio, -advantages * clipped_ratio
    is_clipped = clipped > plain
    return Surrogate(
        loss=torch.maximum(plain, clipped),
        clipped_low=is_clipped & (ratio < 1),
        clipped_high=is_clipped & (ratio > 1),
        dual_clipped=torch.zeros_like(is_clipped),
    )
