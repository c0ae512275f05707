"""Sums over each tensor of a trainer's state, by which it is known again, and found out if it is another."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from stages import ranks
from stages.models import device
from stages.ppo.state.slices import MOMENTS, WEIGHT, Slice

Sums = Mapping[str, tuple[float, float]]
"""By kind and name: the sum of all elements, and that of their absolute values, in double precision."""
KINDS = (*MOMENTS, WEIGHT)
_AT_ONCE, _BLOCK = 1 << 22, 1 << 10
"""Elements of which sums are made at once, and those of a block, added up in single precision: a sum
in double precision alone takes eight times as long on a CPU."""
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
            for part in one.parts[kind].split(_AT_ONCE):
                found[row_of[f"{kind}/{one.name}"]] += _pair_of(part).to(found.device)
    rows = ranks.sum_over_ranks(found).tolist()
    return {key: (total, absolute) for key, (total, absolute) in zip(keys, rows, strict=True)}


def _pair_of(part: Tensor) -> Tensor:
    """Return [2] the sum of the elements [n] and that of their absolute values, in double precision."""
    whole = len(part) // _BLOCK * _BLOCK
    blocks = [part[:whole].view(-1, _BLOCK), part[whole:].view(1, -1)]
    sums = [
        torch.stack([block.sum(dim=1), torch.linalg.vector_norm(block, 1, dim=1)]).double().sum(dim=1)
        for block in blocks
        if block.numel()
    ]
    return torch.stack(sums).sum(dim=0)


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
