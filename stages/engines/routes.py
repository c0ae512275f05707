"""Routers of a policy that generates: the experts that the tokens of a batch go through
(algorithm.router_replay), and no loss."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.config.model_files import ROUTER_LOGITS
from stages.engines.base import Response
from stages.logs import log
from stages.models.routing import Routing


class RouteNotes:
    """Notes of one batch, whose rows are padded on the left: by an attention mask, which says which columns
    of a pass are tokens, and of which place in their row.

    A pass of fewer rows than are being written is that of the prompts, each once
    (:func:`stages.engines.decoding.prefilled`). What is computed twice counts as it was the last time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        routing: Routing | None,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
    ) -> None:
        """Args:
        routing: None to note nothing.
        """
        self._model, self._routing, self._prompts = model, routing, prompts
        places: dict[tuple[int, ...], int] = {}
        of_row = [places.setdefault(tuple(prompt), len(places)) for prompt in prompts]
        self._of_prompt = torch.tensor(of_row, device=model.device)
        self._rows = torch.arange(len(prompts), device=model.device)
        width = (len(routing.modules), routing.top_k) if routing else (0, 0)
        shape = len(prompts), max(map(len, prompts)) + new_tokens, *width
        self._found = torch.zeros(shape, dtype=torch.int16, device=model.device)
        self._cells: tuple[Tensor, Tensor, Tensor] | None = None

    def keep(self, places: Tensor) -> None:
        """Go on with some of the rows."""
        self._rows = self._rows[places.to(self._rows.device)]

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Note what the passes of the block choose."""
        if self._routing is None:
            yield
            return
        hook = self._model.register_forward_pre_hook(self._begin, with_kwargs=True)
        try:
            with self._routing.choosing(self._note):
                yield
        finally:
            hook.remove()

    def _begin(self, module: Any, arguments: Any, given: dict[str, Any]) -> None:
        """Find the tokens of a pass that begins: of each its place in the batch, its row, its place there."""
        mask, width = given["attention_mask"], given["input_ids"].shape[1]
        lines = torch.arange(len(mask), device=mask.device)
        if len(mask) < len(self._rows):
            lines = self._of_prompt[self._rows]
        columns = (mask.cumsum(1) - 1)[lines, -width:]
        rows, place = mask[lines, -width:].nonzero(as_tuple=True)
        self._cells = lines[rows] * width + place, self._rows[rows], columns[rows, place]

    def _note(self, layer: int, own: Tensor) -> Tensor:
        assert self._cells is not None
        tokens, rows, places = self._cells
        self._found[rows, places, layer] = own[tokens].to(torch.int16)
        return own

    def with_routes(self, responses: Sequence[Response]) -> list[Response]:
        """Return the batch's responses with their experts."""
        if self._routing is None:
            return list(responses)
        found = self._found.flatten(2).cpu().numpy().astype(np.uint16)
        lengths = [len(p) + len(r.tokens) - 1 for p, r in zip(self._prompts, responses, strict=True)]
        rows = zip(responses, found, lengths, strict=True)
        return [replace(response, routes=row[:length].copy()) for response, row, length in rows]


def switch_off_router_logits(model: PreTrainedModel) -> None:
    """Have a mixture of experts give no logits of its routers: transformers would compute a loss of them, for
    which the lengths of the prompt and of the cache would have to be the same."""
    for part in (model.config, model.config.get_text_config()):
        if getattr(part, ROUTER_LOGITS, False):
            setattr(part, ROUTER_LOGITS, False)
            log.info(
                f"{type(model).__name__}: {ROUTER_LOGITS} of its config.json is switched off to generate"
            )
