"""Ids that no token has: rows of a model's head beyond its tokenizer, which padding has made.

No response has them: their logits are -inf wherever the policy or the reference computes some, so that
engines, training and the reference mean the same distribution.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.config.schema import Config
from stages.models.tokenizers import unknown_ids

_Model = TypeVar("_Model", bound=PreTrainedModel)


def hide_unknown_ids(model: _Model, config: Config) -> _Model:
    """Hide, in all that a language model computes from now on, the ids that the policy's tokenizer has no
    token for. Returns the model."""
    if ids := unknown_ids(config, model.config.get_text_config().vocab_size):
        model.register_forward_hook(Hiding(ids))
    return model


def hiding_of(model: nn.Module) -> "Hiding | None":
    """Return what hides ids in a model, if any."""
    return next((hook for hook in model._forward_hooks.values() if isinstance(hook, Hiding)), None)


def hide_in_vllm(model: nn.Module, ids: Sequence[int]) -> None:
    """Hide ids in a model that vLLM has loaded. Runs where the model is, in vLLM's workers."""
    hiding, compute = Hiding(ids), model.compute_logits

    def compute_logits(*args: Any, **others: Any) -> Tensor | None:
        logits: Tensor | None = compute(*args, **others)  # type: ignore[operator]
        return None if logits is None else hiding.fill(logits)

    model.compute_logits = compute_logits  # type: ignore[assignment]


class Hiding:
    """A forward hook that sets the logits of some ids to -inf."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = torch.tensor(list(ids), dtype=torch.long)
        self._columns, self._last = self._ids, (0, 0, torch.device("cpu"))

    def __call__(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if output.logits.shape[-1]:  # else the output layer has given other results (stages/ppo/head.py)
            self.fill(output.logits)

    def fill(self, logits: Tensor, first: int = 0) -> Tensor:
        """Fill logits [..., V], the first of them of the id ``first``, in place, and return them."""
        width = logits.shape[-1]
        if (first, width, logits.device) != self._last:
            ids = self._ids[(self._ids >= first) & (self._ids < first + width)] - first
            self._last, self._columns = (first, width, logits.device), ids.to(logits.device)
        # Outside the graph: in it, the backward pass would copy the largest tensor of a step. Their gradient
        # is 0 already, as that of every id of probability 0 (stages/ppo/logits.py).
        logits.detach().index_fill_(-1, self._columns, -torch.inf)
        return logits
