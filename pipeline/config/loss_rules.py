"""What the policy's loss (algorithm.policy_loss) leaves unused or cannot take. Pure."""

from collections.abc import Iterator

from pipeline.config.algorithm import (
    CLIPPING_LOSSES,
    AlgorithmConfig,
    CorrectionLevel,
    PolicyLossName,
)
from pipeline.config.issue import ConfigIssue
from pipeline.config.schema import Config

_USED_BY = {
    "clip_range_low": CLIPPING_LOSSES,
    "clip_range_high": CLIPPING_LOSSES,
    "dual_clip": frozenset({PolicyLossName.PPO}),
    "gate_positive": frozenset({PolicyLossName.SAPO}),
    "gate_negative": frozenset({PolicyLossName.SAPO}),
}
"""Keys of the losses that come with slurm-ppo, and which of these take them."""
_UNBOUNDED_BELOW = frozenset({PolicyLossName.CISPO, PolicyLossName.GMPO})
"""Losses for which clip_range_low may be 1 or more: a weight without a lower limit, and a logarithm."""


def loss_problems(config: Config) -> Iterator[ConfigIssue]:
    """Yield keys that the loss does not take, and importance weights that it has no place for."""
    algorithm = config.algorithm
    loss = algorithm.policy_loss
    for key, losses in _USED_BY.items():
        if loss not in losses and getattr(algorithm, key) != getattr(AlgorithmConfig, key):
            takers = ", ".join(sorted(losses))
            why = f"algorithm.policy_loss={loss} does not take it, only {takers}; leave it out"
            yield ConfigIssue.at(config, f"algorithm.{key}", why)
    if loss in CLIPPING_LOSSES - _UNBOUNDED_BELOW and algorithm.clip_range_low >= 1:
        why = "a ratio of probabilities is never below 0: nothing would be clipped; give less, e.g. 0.2"
        yield ConfigIssue.at(config, "algorithm.clip_range_low", why)
    if loss == PolicyLossName.GMPO and algorithm.correction.level is CorrectionLevel.TOKEN:
        why = f"algorithm.policy_loss={loss} has one ratio for a response; give geometric"
        yield ConfigIssue.at(config, "algorithm.correction.level", why)
