"""Bringing weights that were learned again to those that were committed, and measuring the way."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stages import ranks
from stages.ppo.committed import CommittedWeights
from stages.ppo.math.rounding import nearest_that_rounds_to
from stages.ppo.state.learned import Learned
from stages.ppo.state.slices import WEIGHT
from stages.ppo.trainer import Trainer
from stages.ppo.training import Learner


@dataclass(frozen=True)
class Settled:
    """How far fp32 weights were from the committed ones: sums of absolute values over all ranks' weights."""

    apart: float
    """Sum of the differences between the weights learned now, rounded as for a commit, and the committed."""
    update: float
    """Sum of the iteration's own changes to the weights."""

    @property
    def difference(self) -> float:
        """Distance to what was learned then, relative to what the iteration changed; 0 if nothing was moved.

        Of the fp32 weights of then only their roundings are known. Two that are apart by d round to different
        numbers with probability d / (step of the format), and then by that step, so that the mean difference
        of the roundings is d, and their sum over many weights is that of the differences: where weights are
        spread evenly between numbers of the format, unlike in a run's first iterations. (What has to be moved
        says less: of 1,000 weights that are apart by a thousandth of a step, one.)
        """
        return self.apart / self.update if self.update else float(self.apart > 0)


def settle(trainer: Trainer, weights: CommittedWeights, start: Sequence[Tensor] | None = None) -> Settled:
    """Move each fp32 weight that does not round to the committed one to the nearest value that does.

    Every rank takes part. If all do, nothing is touched.

    Args:
        start: this rank's weights before the iteration.
    """
    sums = torch.zeros(2, dtype=torch.float64)
    for number, one in enumerate(trainer.held()):
        weight = one.parts[WEIGHT]
        committed = weights.part(one.name, one.start, len(one)).to(weight.device)
        sums[0] += _distance(weight.to(committed.dtype).float(), committed.float())
        sums[1] += _distance(weight.cpu(), start[number]) if start else 0.0
        weight.copy_(nearest_that_rounds_to(weight, committed))
    apart, update = ranks.sum_over_ranks(sums).tolist()
    if apart and trainer.config.zero:
        for name, parameter in trainer.trained():
            trainer.set_computed(parameter, weights.whole(name))
    return Settled(apart, update)


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().sum(dtype=torch.float64))


def set_counters(learner: Learner, learned: Learned) -> None:
    """Set the counters of policy and critic to those that an update committed."""
    for trainer in learner.trainers:
        if trainer.name in learned.counters:
            trainer.set_counters(learned.counters[trainer.name])
