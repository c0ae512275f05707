"""Random batches for property tests: padding, observation holes, rows of one token and of none."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

NAN = math.nan
seeds = st.integers(0, 2**31)


def for_any(*arguments, **named) -> Callable:
    """``given`` for functions of small tensors: fewer examples, and no limit on the time of one."""
    return lambda test: settings(max_examples=25)(given(*arguments, **named)(test))


@st.composite
def masks(draw, min_tokens=1):
    """[B, T] with padding, holes and empty rows, but at least ``min_tokens`` valid ones."""
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    bits = draw(st.lists(st.booleans(), min_size=rows * columns, max_size=rows * columns))
    assume(sum(bits) >= min_tokens)
    return torch.tensor(bits).view(rows, columns)


def numbers(shape, seed: int) -> Tensor:
    """Standard normal float64; ``shape`` may be a tensor's."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(frozen=True)
class Batch:
    """What advantage estimators look at. One row per response."""

    mask: Tensor
    rewards: Tensor
    values: Tensor
    groups: Tensor
    baselines: Tensor

    def rows(self, order) -> "Batch":
        """The rows of the given indices."""
        return Batch(*(getattr(self, field.name)[order] for field in fields(self)))

    def dirty(self) -> "Batch":
        """With NaN for every number of a token that is not the policy's."""
        rewards, values = (torch.where(self.mask, x, NAN) for x in (self.rewards, self.values))
        return Batch(self.mask, rewards, values, self.groups, self.baselines)

    def with_observation(self, column: int) -> "Batch":
        """With one token more before ``column`` of every row, which is not the policy's."""
        mask, rewards, values = (
            torch.cat([x[:, :column], torch.full_like(x[:, :1], filler), x[:, column:]], dim=1)
            for x, filler in ((self.mask, False), (self.rewards, NAN), (self.values, NAN))
        )
        return Batch(mask, rewards, values, self.groups, self.baselines)

    def with_empty_row(self) -> "Batch":
        """With one response more, to a prompt of its own, of no token of the policy's."""
        mask, rewards, values = (
            torch.cat([x, torch.zeros_like(x[:1])]) for x in (self.mask, self.rewards, self.values)
        )
        groups = torch.cat([self.groups, self.groups.max().unsqueeze(0) + 1])
        return Batch(mask, rewards, values, groups, torch.cat([self.baselines, torch.ones(1).double()]))


@st.composite
def batches(draw, min_tokens=0):
    mask, seed = draw(masks(min_tokens)), draw(seeds)
    prompts = draw(st.lists(st.integers(0, 3), min_size=len(mask), max_size=len(mask)))
    groups = torch.unique(torch.tensor(prompts), return_inverse=True)[1]
    rewards, values = numbers(mask.shape, seed), numbers(mask.shape, seed + 1)
    return Batch(mask, rewards, values, groups, numbers(len(mask), seed + 2))
