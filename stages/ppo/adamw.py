"""AdamW in the host's memory, a part of a tensor at a time."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from stages.ppo.state.slices import MOMENTS

_PART = 1 << 18
"""Elements of a part: few for the memory that they take, and many for the work that it is to begin one."""


class AdamWInParts(torch.optim.AdamW):
    """AdamW that steps a tensor a part at a time: what it makes on the way, twice the size of what it steps,
    is no larger than a part, and each is read from memory once. Numbers are those of torch.optim.AdamW."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step every tensor that has a gradient."""
        assert closure is None, "losses are computed before"
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    _step(tensor, self._state_of(tensor), group)

    def _state_of(self, tensor: nn.Parameter) -> dict[str, Any]:
        """Return a tensor's step count and moments, which are made at the first step."""
        if not self.state[tensor]:
            moments = {name: torch.zeros_like(tensor) for name in MOMENTS}
            self.state[tensor] = {"step": torch.tensor(0.0), **moments}
        state: dict[str, Any] = self.state[tensor]
        return state


def _step(tensor: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
    beta1, beta2 = group["betas"]
    assert tensor.grad is not None
    wholes = (tensor.detach(), tensor.grad, *(state[name] for name in MOMENTS))
    for part, gradient, mean, square in _parts(wholes):
        adam(
            [part],
            [gradient],
            [mean],
            [square],
            [],
            [state["step"].clone()],
            foreach=False,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            decoupled_weight_decay=True,
        )
    state["step"] += 1


def _parts(wholes: Sequence[Tensor]) -> Iterable[Sequence[Tensor]]:
    """Cut tensors of one shape alike; leave them whole where one of them is not in one piece."""
    if not all(whole.is_contiguous() for whole in wholes):
        return [wholes]
    return zip(*(whole.view(-1).split(_PART) for whole in wholes), strict=True)
