"""Which part of each parameter's optimizer state a rank holds, as DeepSpeed splits it at each ZeRO stage."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from stages import ranks

MOMENTS = ("exp_avg", "exp_avg_sq")
WEIGHT = "weight"
"""Kind of the fp32 weight, which AdamW changes."""


@dataclass(frozen=True)
class Slice:
    """A part of one parameter, flat: what a rank holds of its moments and of its fp32 weight."""

    name: str
    start: int
    """Index of its first element in the flat parameter."""
    parts: Mapping[str, Tensor]
    """[n] views of the optimizer's own memory, by kind: two moments, and the weight."""

    def __len__(self) -> int:
        return len(self.parts[WEIGHT])

    def cut(self, start: int, stop: int) -> "Slice":
        """Return elements ``start`` to ``stop`` of these."""
        parts = {kind: part[start:stop] for kind, part in self.parts.items()}
        return replace(self, start=self.start + start, parts=parts)


def held(
    parameters: Iterable[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer, zero_stage: int
) -> Iterator[Slice]:
    """Return what this rank holds: of every parameter, in order, though it may be nothing.

    Args:
        parameters: those that are trained, by name.
        optimizer: the AdamW below DeepSpeed's wrapper.
    """
    for name, parameter in parameters:
        if zero_stage == 0:
            state = optimizer.state[parameter]
            parts = {kind: state[kind].view(-1) for kind in MOMENTS}
            yield Slice(name, 0, parts | {WEIGHT: parameter.detach().view(-1)})
        elif zero_stage == 3:
            yield _partition(name, parameter)
        else:
            yield _fragment(name, parameter)


def own(slices: Iterable[Slice], zero_stage: int) -> list[Slice]:
    """Return what this rank writes: together the ranks have every element once. Empty parts are left out.

    With ZeRO that is what each holds; without, every rank holds all, and takes an equal share of each.
    """
    if zero_stage == 0:
        slices = [one.cut(*share_of(len(one), ranks.rank(), ranks.size())) for one in slices]
    return [one for one in slices if len(one)]


def share_of(total: int, rank: int, size: int) -> tuple[int, int]:
    """Return where a rank's equal share of ``total`` elements begins and ends, as ZeRO 3 splits them."""
    length = -(-total // size)
    return min(total, length * rank), min(total, length * (rank + 1))


def _fragment(name: str, parameter: Any) -> Slice:
    """Return the part of a parameter that lies in this rank's flat fp32 partition (ZeRO 1 and 2)."""
    mapping = parameter._hp_mapping
    if mapping is None:
        nothing = torch.empty(0, dtype=torch.float32)
        return Slice(name, 0, dict.fromkeys((*MOMENTS, WEIGHT), nothing))
    parts = {kind: mapping.get_hp_fragment(kind).detach() for kind in MOMENTS}
    parts[WEIGHT] = mapping.get_hp_fragment().detach()
    return Slice(name, mapping.lp_fragment_address.start, parts)


def _partition(name: str, parameter: Any) -> Slice:
    """Return the part of a parameter that ZeRO 3 gave to this rank, without the padding after its end."""
    start, stop = share_of(parameter.ds_numel, ranks.rank(), ranks.size())

    def part(moment: str | None) -> Tensor:
        # DeepSpeed's public getter copies to the device what is offloaded to the host.
        optimizer = parameter._z3_optimizer
        found: Tensor = optimizer._get_fp32_opt_state_partition(parameter, True, moment)[0]
        return found.detach()[: stop - start]

    return Slice(name, start, {kind: part(kind) for kind in MOMENTS} | {WEIGHT: part(None)})
