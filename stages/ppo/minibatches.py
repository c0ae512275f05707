"""The mini-batches of an update: the rows of each step, and which of them go through the models."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipeline.config.schema import Config
from pipeline.config.update import UpdateConfig
from pipeline.run.seeds import derive_seed
from stages import ranks
from stages.ppo.batching import MicroBatch, micro_batches
from stages.ppo.experience import Experience
from stages.ppo.math.losses import Counts


@dataclass(frozen=True)
class MiniBatch:
    """The rows of one optimizer step."""

    rows: Sequence[int]
    """Rows of all ranks, which its losses are averaged over."""
    computed: Sequence[int]
    """Those of them that go through the policy: others have no gradient."""
    micro_batches: Sequence[MicroBatch]
    """Micro-batches of this rank."""
    num_shares: int | None = None
    """Shares that the rows were dealt to; None for one for each rank."""


@dataclass(frozen=True)
class StepPosition:
    """The place of a mini-batch in the run."""

    iteration: int
    epoch: int
    """Epoch in the iteration, 0-based."""
    number: int
    """Mini-batch in its epoch, 0-based."""

    def __str__(self) -> str:
        return f"iteration {self.iteration}, epoch {self.epoch + 1}, mini-batch {self.number + 1}"

    def position(self, config: Config, skipped: int = 0) -> tuple[int, int]:
        """Return the 0-based position among all mini-batches that the run plans, and their number, without
        those of the first iterations that are skipped."""
        epochs, minibatches = config.update.epochs, config.update.minibatches
        before = ((self.iteration - 1 - skipped) * epochs + self.epoch) * minibatches
        return before + self.number, (config.iterations - skipped) * epochs * minibatches


def begin_epochs(
    config: Config, experience: Experience, iteration: int, num_shares: int | None
) -> tuple[Experience, list[MiniBatch]]:
    """Return the mini-batches of the first epoch, and the experience with the rows that go through the policy
    in any: of a mini-batch whose rows have no gradient one does, whose old log-probabilities are needed."""
    first_epoch = split_epoch(config, experience, iteration, 0, num_shares)
    if experience.teaching is None:
        return experience, first_epoch
    teaching = torch.zeros(len(experience), dtype=torch.bool)
    for _, batch in all_minibatches(config, experience, first_epoch, iteration, num_shares):
        teaching[list(batch.computed)] = True
    experience = replace(experience, teaching=teaching)
    return experience, split_epoch(config, experience, iteration, 0, num_shares)


def all_minibatches(
    config: Config,
    experience: Experience,
    first_epoch: list[MiniBatch],
    iteration: int,
    num_shares: int | None = None,
) -> Iterator[tuple[StepPosition, MiniBatch]]:
    """Yield every mini-batch of the update."""
    for epoch in range(config.update.epochs):
        is_first = epoch == 0
        batches = first_epoch if is_first else split_epoch(config, experience, iteration, epoch, num_shares)
        for number, batch in enumerate(batches):
            yield StepPosition(iteration, epoch, number), batch


def split_epoch(
    config: Config, experience: Experience, iteration: int, epoch: int, num_shares: int | None = None
) -> list[MiniBatch]:
    """Split a fresh permutation of the rows with a token that the policy wrote into mini-batches of equal
    size, give or take one row, each dealt over the ranks, and this rank's share of it into micro-batches.

    Args:
        num_shares: as of :func:`stages.ppo.batching.micro_batches`.

    Raises:
        NoValidTokens: there is no such row.
    """
    written = rows_to_learn_from(experience)
    seed = derive_seed(config.seed, iteration, "update", "epoch", epoch)
    order = torch.randperm(len(written), generator=torch.Generator().manual_seed(seed))
    number = min(config.update.minibatches, len(written))
    parts = written[order].tensor_split(number)
    return [minibatch(config, experience, rows.tolist(), num_shares) for rows in parts]


def rows_to_learn_from(experience: Experience) -> Tensor:
    """Return indices of rows with a token that the policy wrote. Others, of prompts that the engine refused,
    go through no model, which may not take their tokens. Raises NoValidTokens when there is none."""
    Counts.of(experience.mask, scale=1.0)
    return experience.mask.any(dim=1).nonzero().flatten()


def minibatch(
    config: Config, experience: Experience, rows: Sequence[int], num_shares: int | None
) -> MiniBatch:
    budget, packed = config.update.micro_batch_tokens, is_packed(config.update)
    place = ranks.rank(), ranks.size(), num_shares
    teaching = experience.teaching
    computed = rows if teaching is None else [i for i in rows if teaching[i]]
    if not computed:  # a step is taken all the same, for which a gradient, of 0, has to be there
        computed = [min(rows, key=lambda i: experience.rows[i].length)]
    shared = experience.shares_prompts and not packed
    micros = micro_batches(experience.rows, computed, budget, packed, *place, shared)
    return MiniBatch(rows, computed, micros, num_shares)


def is_packed(config: UpdateConfig) -> bool:
    """Whether sequences are packed: as configured, else with flash attention, which skips other sequences."""
    if config.remove_padding is not None:
        return config.remove_padding
    return (config.attention or "").startswith("flash")
