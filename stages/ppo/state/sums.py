"""Sums over each tensor of a trainer's state, by which it is known again, and found out if it is another."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from stages import ranks
from stages.models.devices import device
from stages.ppo.state.slices import MOMENTS, WEIGHT, Slice

Sums = Mapping[str, tuple[float, float]]
"""By kind and name: the sum of all elements, and that of their absolute values, in double precision."""
KINDS = (*MOMENTS, WEIGHT)
_BLOCK = 1 << 10
"""Elements of a block, added up in single precision: a sum in double precision alone takes eight times as
long on a CPU."""
_AT_ONCE, _IN_CACHE = 1 << 24, 1 << 17
"""Elements whose sums are made at once, on a GPU and on a CPU."""
_TOLERANCE = 1e-6
"""Part of the sum of absolute values that adding up in other blocks may change."""


def sums_of(slices: Iterable[Slice], names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Add up all ranks' slices. Every rank takes part, and has the result.

    Args:
        slices: what this rank writes.
        names: names of all parameters, the same on every rank.
    """
    keys = [f"{kind}/{name}" for name in names for kind in KINDS]
    row_of = {key: row for row, key in enumerate(keys)}
    found = torch.zeros(len(keys), 2, dtype=torch.float64, device=device())
    for one in slices:
        for kind in KINDS:
            found[row_of[f"{kind}/{one.name}"]] += _pair_of(one.parts[kind]).to(found.device)
    rows = ranks.sum_over_ranks(found).tolist()
    return {key: (total, absolute) for key, (total, absolute) in zip(keys, rows, strict=True)}


def _pair_of(part: Tensor) -> Tensor:
    """Return [2] the sum of the elements [n] and that of their absolute values, in double precision."""
    blocks = [_sums_of_blocks(some) for some in part.split(_IN_CACHE if part.is_cpu else _AT_ONCE)]
    return torch.cat(blocks, dim=1).double().sum(dim=1)


def _sums_of_blocks(some: Tensor) -> Tensor:
    """Return [2, blocks] the sums of elements [n] and of their absolute values."""
    whole = len(some) // _BLOCK * _BLOCK
    sums = [
        part.sum(dim=1)
        for both in (some, some.abs())
        for part in (both[:whole].view(-1, _BLOCK), both[whole:].view(1, -1))
    ]
    return torch.cat(sums).view(2, -1)


def largest_difference(found: Sums, expected: Sums) -> tuple[str, float]:
    """Return the tensor whose sum differs most, and by how much, relative to its absolute values. A tensor
    that only one side has differs by 1."""
    worst = ("", 0.0)
    for key in sorted({*found, *expected}):
        if key not in found or key not in expected:
            return key, 1.0
        size = max(found[key][1], expected[key][1])
        difference = max(abs(a - b) for a, b in zip(found[key], expected[key], strict=True))
        if difference and difference / size > worst[1]:
            worst = key, difference / size
    return worst


def contradiction(found: Sums, expected: Sums) -> str | None:
    """Return in words how a state is not the one whose sums were noted; None if it is, but for rounding: the
    sums may have been added up in another order."""
    key, difference = largest_difference(found, expected)
    if difference <= _TOLERANCE:
        return None
    return f"its {key} is not what was learned: their sums differ by {difference:.1e}"
