"""Routers of a mixture of experts: what each gives for every token, and the loss that it is trained with.

transformers names a class's routers (``_can_record_outputs``), and has a loss of them where config.json has
its weight, ``router_aux_loss_coef``. The model's own computation of it is switched off: it would count
padding, and takes no mask of shared lines.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.config.model_files import ROUTER_LOGITS
from pipeline.config.schema import ModelConfig
from stages.context import UserError
from stages.models.loading import without_weights
from stages.models.routing import routers_in
from stages.ppo.batching import MicroBatch
from stages.ppo.math.routing import balance_loss

_KEY = "algorithm.router_aux_loss_coef"
_WEIGHT = "router_aux_loss_coef"
"""Setting of config.json: the weight of the loss, which transformers adds where ROUTER_LOGITS is true."""


@dataclass(frozen=True)
class Routers:
    """The routers of a policy, whose loss is a part of the policy's."""

    modules: tuple[tuple[nn.Module, int], ...]
    """Each with the place of its logits in what it returns."""
    top_k: int
    """Experts that a token goes through."""
    coef: float
    """Weight of the loss."""

    @contextlib.contextmanager
    def recorded(self) -> Iterator[dict[nn.Module, Tensor]]:
        """Collect the logits that each router gives last, in the order of layers: the first pass of a model
        comes after a trial of its output layer."""
        found: dict[nn.Module, Tensor] = {}

        def note(module: nn.Module, place: int, given: Any) -> None:
            found[module] = given[place] if isinstance(given, tuple) else given

        hooks = [
            module.register_forward_hook(lambda router, _, given, place=place: note(router, place, given))
            for module, place in self.modules
        ]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()

    def loss(self, logits: Mapping[nn.Module, Tensor], batch: MicroBatch) -> Tensor:
        """Return the loss of one micro-batch, over its real tokens."""
        return balance_loss(list(logits.values()), batch.is_real, self.top_k)


def routers_of(model: PreTrainedModel, coef: float | None) -> Routers | None:
    """Return the routers whose loss is to be trained with; None where none is.

    Args:
        coef: weight of the loss; by default that of config.json, if its output_router_logits is true.

    Raises:
        UserError: a weight is given, and the model has no such loss.
    """
    settings: Any = model.config.get_text_config()
    own = getattr(settings, _WEIGHT, None)
    if coef is None:
        coef = own if getattr(settings, ROUTER_LOGITS, False) and own else 0.0
    if coef == 0:
        return None
    modules, top_k = tuple(routers_in(model)), getattr(settings, "num_experts_per_tok", None)
    if own is None or not modules or not top_k:
        what = "has no experts" if not modules else f"has no loss of its routers ({_WEIGHT}) in transformers"
        raise UserError(f"{_KEY}={coef}: {type(model).__name__} {what}; leave it out, or give 0")
    return Routers(modules, int(top_k), float(coef))


def check_routers(model: ModelConfig, coef: float | None) -> None:
    """Check that the policy has the loss of its routers that is asked for, without its weights. Raises
    UserError."""
    if coef:
        routers_of(without_weights(model), coef)


def silenced(model: nn.Module) -> dict[str, bool]:
    """Return the argument of a forward pass that keeps a mixture of experts from computing the loss itself;
    nothing for other models."""
    settings: Any = getattr(getattr(model, "module", model), "config", None)
    parts = (settings, settings.get_text_config()) if settings is not None else ()
    return {ROUTER_LOGITS: False} if any(getattr(part, ROUTER_LOGITS, False) for part in parts) else {}
