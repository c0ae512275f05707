"""The experts that the routers of a mixture choose for each token: noted where it generates, and chosen once
more where it is trained.

A router's own code computes the weights of its experts. Only what ``torch.topk`` gives it is noted, or
replaced: so the weights of other experts than its own are what it computes of these, with their gradient.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from pipeline.config.routing_rules import num_experts_in
from stages.context import UserError

Choose = Callable[[int, Tensor], Tensor]
"""Function that is given a router's place and its own choice [n, top_k], and returns the experts to take."""
_CHOICES = (torch.topk, Tensor.topk)


@dataclass(frozen=True)
class Routing:
    """The routers of a mixture of experts."""

    modules: tuple[nn.Module, ...]
    """In the order of layers."""
    top_k: int
    """Experts that a token goes through in each layer."""
    num_experts: int

    @property
    def width(self) -> int:
        """Experts that a token goes through in all layers."""
        return len(self.modules) * self.top_k

    @contextlib.contextmanager
    def choosing(self, choose: Choose) -> Iterator[None]:
        """Ask ``choose`` for the experts in all passes of the block, layers that are computed again included.

        Raises:
            UserError: a router has chosen none, or by other means.
        """
        seen: set[int] = set()
        with contextlib.ExitStack() as stack:
            for place, module in enumerate(self.modules):
                stack.enter_context(self._asking(place, module, choose, seen))
            yield
        if len(seen) < len(self.modules):
            raise UserError(
                f"algorithm.router_replay: {type(self.modules[0]).__name__} chooses experts in a way that "
                "cannot be replayed; leave it out"
            )

    @contextlib.contextmanager
    def _asking(self, place: int, module: nn.Module, choose: Choose, seen: set[int]) -> Iterator[None]:
        before, forward = vars(module).get("forward"), module.forward

        def take(own: Tensor) -> Tensor:
            seen.add(place)
            return choose(place, own)

        def asking(*args: Any, **others: Any) -> Any:
            with _Choices(self.top_k, self.num_experts, take):
                return forward(*args, **others)

        module.forward = asking
        try:
            yield
        finally:
            del module.forward
            if before is not None:
                module.forward = before


class _Choices(TorchFunctionMode):
    """What stands between a router and its choice of ``top_k`` of its experts."""

    def __init__(self, top_k: int, num_experts: int, take: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._shape = num_experts, top_k
        self._take = take

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in _CHOICES or args[0].dim() != 2:
            return found
        if (args[0].shape[-1], found.indices.shape[-1]) != self._shape:  # of groups of experts
            return found
        chosen = self._take(found.indices)
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))


def routing_of(model: PreTrainedModel) -> Routing:
    """Return the routers of a model whose choices can be replayed. Raises UserError where it has none."""
    settings: Any = model.config.get_text_config()
    modules, top_k = tuple(routers_in(model)), getattr(settings, "num_experts_per_tok", None)
    num_experts = num_experts_in(settings.to_dict())
    if not (modules and top_k and num_experts):
        raise UserError(f"algorithm.router_replay=true: {type(model).__name__} has no experts; leave it out")
    return Routing(tuple(module for module, _ in modules), int(top_k), num_experts)


def routers_in(model: PreTrainedModel) -> Iterator[tuple[nn.Module, int]]:
    """Yield the routers of a model as transformers names them (``_can_record_outputs``), in the order of
    layers, each with the place of its logits in what it returns."""
    recorders = [one for part in model.modules() for one in _recorders_of(part)]
    for name, module in model.named_modules():
        for one in recorders:
            is_named = one.layer_name is None or f".{one.layer_name.strip('.')}." in f".{name}."
            if one.target_class and isinstance(module, one.target_class) and is_named:
                yield module, one.index
                break


def _recorders_of(part: nn.Module) -> list[OutputRecorder]:
    """Return what a part of a model says of its routers; the whole model and its decoder say the same."""
    given = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits", ())
    return [one for one in (given if isinstance(given, list) else [given]) if isinstance(one, OutputRecorder)]
