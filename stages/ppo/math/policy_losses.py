"""Losses of the policy by name (algorithm.policy_loss): one function each, of the same arguments, and users'
own. Shapes: [B, T] unless said otherwise.

Sources: PPO arXiv 1707.06347 with dual clipping of arXiv 1912.09729, GSPO (group sequence policy
optimisation) arXiv 2507.18071, CISPO arXiv 2506.13585, SAPO (soft adaptive policy optimisation) arXiv
2511.20347, GMPO (geometric-mean policy optimisation) arXiv 2507.20673.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipeline.config.algorithm import AlgorithmConfig, PolicyLossName
from pipeline.plugins.load import load_plugin
from stages.context import UserError

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


# --- by name ---


def ppo(given: Compared, algorithm: AlgorithmConfig) -> Surrogate:
    """Clip each token's ratio, and bound the loss of negative advantages, which grows with the ratio without
    limit."""
    found = clipped_surrogate(given.log_ratio.exp(), given.advantages, algorithm)
    bound = -given.advantages * algorithm.dual_clip
    negative = given.advantages < 0
    loss = torch.where(negative, torch.minimum(bound, found.loss), found.loss)
    return replace(found, loss=loss, dual_clipped=(found.loss > bound) & negative)


def gspo(given: Compared, algorithm: AlgorithmConfig) -> Surrogate:
    """Clip a response's ratio (eq. 5), the same at all of its tokens."""
    ratio = given.mean_of_response(given.log_ratio).exp().expand_as(given.mask)
    return clipped_surrogate(ratio, given.advantages, algorithm)


def gspo_token(given: Compared, algorithm: AlgorithmConfig) -> Surrogate:
    """Clip a response's ratio with the gradient of each token's own probability (eq. 13). Where a response's
    tokens have one advantage, gradient and value are those of :func:`gspo`."""
    own = given.log_probs - given.log_probs.detach()  # 0, with a gradient
    ratio = (given.mean_of_response(given.log_ratio.detach()) + own).exp()
    return clipped_surrogate(ratio, given.advantages, algorithm)


def cispo(given: Compared, algorithm: AlgorithmConfig) -> Surrogate:
    """Weigh each token's log-probability by its advantage and its clipped ratio, which has no gradient."""
    ratio = given.log_ratio.detach().exp()
    weight = ratio.clamp(1 - algorithm.clip_range_low, 1 + algorithm.clip_range_high)
    return Surrogate(
        loss=-weight * given.advantages * given.log_probs,
        clipped_low=ratio < weight,
        clipped_high=ratio > weight,
        dual_clipped=torch.zeros_like(given.mask),
    )


def sapo(given: Compared, algorithm: AlgorithmConfig) -> Surrogate:
    """Weigh advantages by sigmoid(gate * (ratio - 1)) * 4 / gate, whose slope at ratio 1 is 1 for every gate
    and falls to both sides, the faster the larger the gate is."""
    ratio = given.log_ratio.exp()
    positive = given.advantages > 0
    gate = torch.where(positive, algorithm.gate_positive, algorithm.gate_negative).to(ratio.dtype)
    return Surrogate.unclipped(-given.advantages * torch.sigmoid(gate * (ratio - 1)) * 4 / gate)


def gmpo(given: Compared, algorithm: AlgorithmConfig) -> Surrogate:
    """Multiply a response's mean advantage by the geometric mean of its tokens' ratios, each clipped, in
    logarithms, where that is the more pessimistic; the same at all of its tokens."""
    log_ratio, sign = given.log_ratio, given.advantages.sign()
    clipped = log_ratio.clamp(-algorithm.clip_range_low, algorithm.clip_range_high)
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * clipped)
    ratio = given.mean_of_response(pessimistic).exp()
    is_clipped = pessimistic != log_ratio
    return Surrogate(
        loss=(-given.mean_of_response(given.advantages) * ratio).expand_as(log_ratio),
        clipped_low=is_clipped & (log_ratio < 0),
        clipped_high=is_clipped & (log_ratio > 0),
        dual_clipped=torch.zeros_like(given.mask),
    )


_OURS: dict[str, PolicyLossFunction] = {
    PolicyLossName.PPO: ppo,
    PolicyLossName.GSPO: gspo,
    PolicyLossName.GSPO_TOKEN: gspo_token,
    PolicyLossName.CISPO: cispo,
    PolicyLossName.SAPO: sapo,
    PolicyLossName.GMPO: gmpo,
}


@functools.cache
def policy_loss_function(name: str) -> PolicyLossFunction:
    """Return the loss of that name. Raises PluginError where a user's cannot be imported."""
    if name in _OURS:
        return _OURS[name]
    return users_own(name, load_plugin("algorithm.policy_loss", name))


def users_own(name: str, function: Callable[..., Tensor]) -> PolicyLossFunction:
    """Wrap a user's function: of log_probs (with a gradient), old_log_probs, advantages and mask, all [B, T],
    it returns the loss of each token [B, T]. Each row is a whole response; what it returns for one must not
    depend on the others, which lie beside it by chance.

    Raises (the function returned):
        UserError: the user's returns anything else.
    """

    def called(given: Compared, algorithm: AlgorithmConfig) -> Surrogate:
        loss = function(given.log_probs, given.old_log_probs, given.advantages, given.mask)
        if not isinstance(loss, Tensor) or loss.shape != given.mask.shape:
            found = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(
                f"algorithm.policy_loss={name} returned {found}; it must return the loss of each token, a "
                f"tensor of shape {list(given.mask.shape)}"
            )
        return Surrogate.unclipped(loss)

    return called
