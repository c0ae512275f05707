"""A language model's output layer, applied to the tokens that are asked for, some logits at a time.

A vocabulary of 150,000 ids makes logits the largest tensors of a training step. Here they never stand whole:
the forward pass goes through the tokens, the backward pass computes them again and goes through the
vocabulary, so that each row of the layer's gradient is one product, rounded once. The model runs as it always
does, hooks included, and its output layer gives results of tokens instead of logits.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from stages import ranks
from stages.logs import log
from stages.models.hidden import Hiding, hiding_of
from stages.ppo.logits import (
    AskedTokens,
    TokenOutputs,
    Upstream,
    empty_measures,
    measure,
    slices,
    token_outputs,
    turn_into_gradient,
)

_CHUNK = {"cpu": 1 << 24}
"""Logits that exist at a time, by kind of device: enough rows for a product of matrices to be fast."""
_CHUNK_ELSEWHERE = 1 << 26
_ROWS = 1 << 13
"""Rows of the layer's gradient that are computed at once in half precision on a CPU, where a product is made
in fp32 first, beside its result."""
_TRIED = 8
"""Tokens that a model is tried with."""
TOLERANCE = {torch.float32: 1e-3}
"""Largest mean difference of log-probabilities that is rounding, by the model's number format."""
HALF_TOLERANCE = 0.05


class ShapingKind(StrEnum):
    """What a model does to its output layer's numbers."""

    NONE = "none"
    TIMES = "times"
    OVER = "over"
    CAP = "cap"


@dataclass(frozen=True)
class Shaping:
    """How logits are made of what the output layer gives."""

    dtype: torch.dtype
    kind: ShapingKind = ShapingKind.NONE
    number: float = 1.0

    def apply(self, given: Tensor) -> Tensor:
        """Return logits, in the memory of what is given where they have its format."""
        logits = given.to(self.dtype)
        match self.kind:
            case ShapingKind.TIMES:
                return logits.mul_(self.number)
            case ShapingKind.OVER:
                return logits.div_(self.number)
            case ShapingKind.CAP:
                return logits.div_(self.number).tanh_().mul_(self.number)
        return logits

    def slope(self, logits: Tensor) -> Tensor | float:
        """Return the derivative of logits by what they were made from."""
        match self.kind:
            case ShapingKind.TIMES:
                return self.number
            case ShapingKind.OVER:
                return 1 / self.number
            case ShapingKind.CAP:  # clamped, as ids that are hidden are at -inf
                return 1 - (logits / self.number).clamp_(-1, 1).square_()
        return 1.0


def _shapings(model: Any, dtype: torch.dtype) -> Iterator[Shaping]:
    """Yield what a model may do to logits, by the numbers in its configuration that have to do with them."""
    yield Shaping(dtype)
    settings: Any = model.config
    for name, number in vars(settings.get_text_config()).items():
        if isinstance(number, int | float) and number and ("logit" in name or "lm_head" in name):
            for kind in (ShapingKind.TIMES, ShapingKind.OVER, ShapingKind.CAP):
                yield Shaping(dtype, kind, float(number))


@dataclass(frozen=True)
class OutputLayer:
    """An output layer that may be applied to some tokens at a time."""

    layer: nn.Linear
    shaping: Shaping
    hiding: Hiding | None
    """Ids that no token has."""

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, first: int = 0) -> Tensor:
        """Return logits [k, v] of hidden states [k, H] for the ids from ``first`` on, v of them."""
        found = self.shaping.apply(nn.functional.linear(hidden, weight, bias))
        return found if self.hiding is None else self.hiding.fill(found, first)

    def outputs(self, model: nn.Module, given: dict[str, Any], asked: AskedTokens) -> TokenOutputs:
        """Run the model, and compute what is asked of its predictions."""
        found: list[Tensor] = []

        def forward(hidden: Tensor) -> Tensor:
            arguments = (self.layer.weight, self.layer.bias, self, asked)
            results: Tensor = _HeadOutputs.apply(hidden.flatten(0, -2), *arguments)
            return results

        def take(module: nn.Module, arguments: Any, results: Tensor) -> Tensor:
            found.append(results)
            return results.T[None, :, :0].clone()  # which the model takes for logits

        # As the layer's own forward pass, so that what is hooked around it, as by ZeRO 3, gathers its weight
        # once, and again for the backward pass; and the last of the hooks, as those change the results too.
        hook = self.layer.register_forward_hook(take)
        self.layer.forward = forward  # type: ignore[method-assign, assignment]
        try:
            logits = model(**given).logits
        finally:
            del self.layer.forward
            hook.remove()
        # DeepSpeed begins the backward pass where a gradient comes to what the model returned.
        return asked.outputs(found[0] + logits.sum().to(found[0].dtype))


class _HeadOutputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: OutputLayer, asked: AskedTokens
    ) -> Tensor:
        chosen, logits = hidden[asked.positions], None
        measured, size = empty_measures(asked, hidden), _chunk(weight) // len(weight)
        for piece in slices(len(chosen), size):
            logits = None  # whose memory the next ones take
            logits = head.logits(chosen[piece], weight, bias)
            measured[:, piece] = measure(logits, asked, piece)
        ctx.head, ctx.asked, ctx.shape = head, asked, hidden.shape
        ctx.save_for_backward(chosen, weight, bias, measured, logits if len(chosen) <= size else None)
        return measured[:-1].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        chosen, weight, bias, measured, logits = ctx.saved_tensors
        upstream = Upstream.of(gradients[0], measured, ctx.asked)
        hidden, of_weight, of_bias = chosen[upstream.rows], None, None
        of_hidden = torch.zeros(hidden.shape, dtype=measured.dtype, device=hidden.device)
        if ctx.needs_input_grad[1]:
            of_weight = torch.empty_like(weight)
        if ctx.needs_input_grad[2]:
            of_bias = torch.empty_like(bias)
        size = len(weight) if logits is not None else _chunk(weight) // max(1, len(hidden))
        for ids in slices(len(weight), size):
            part, offset = weight[ids], None if bias is None else bias[ids]
            is_kept = logits is not None
            block = logits[upstream.rows] if is_kept else ctx.head.logits(hidden, part, offset, ids.start)
            turn_into_gradient(block, upstream, ids.start, ctx.head.shaping.slope)
            block = block.to(weight.dtype)
            if of_weight is not None:
                _multiply(block.T, hidden, of_weight[ids])
            if of_bias is not None:
                of_bias[ids] = block.sum(dim=0)
            if ctx.needs_input_grad[0]:
                of_hidden += block @ part
            del block
        of_all = torch.zeros(ctx.shape, dtype=hidden.dtype, device=hidden.device)
        of_all[ctx.asked.positions[upstream.rows]] = of_hidden.to(hidden.dtype)
        return of_all, of_weight, of_bias, None, None


def _multiply(one: Tensor, other: Tensor, result: Tensor) -> None:
    """Write the product of two matrices into a third one."""
    is_direct = result.dtype is torch.float32 or not result.is_cpu
    for rows in slices(len(result), len(result) if is_direct else _ROWS):
        torch.mm(one[rows], other, out=result[rows])


def _chunk(weight: Tensor) -> int:
    return _CHUNK.get(weight.device.type, _CHUNK_ELSEWHERE)


# which models


_HEADS: WeakKeyDictionary[nn.Module, OutputLayer | None] = WeakKeyDictionary()


def head_of(model: nn.Module, input_ids: Tensor, position_ids: Tensor) -> OutputLayer | None:
    """Return a model's output layer if it may be applied to some tokens at a time, as a trial shows the first
    time; None if logits have to stand whole. Every rank must call this.

    Args:
        model: may be under DeepSpeed.
        input_ids: [B, L] tokens to try it with.
        position_ids: [B, L].
    """
    module = getattr(model, "module", model)
    if module not in _HEADS:
        ids, positions = input_ids[:1, :_TRIED], position_ids[:1, :_TRIED]
        given = {"input_ids": ids, "position_ids": positions, "logits_to_keep": ids.shape[1]}
        _HEADS[module] = _found_by_trial(model, module, {**given, "use_cache": False})
        if _HEADS[module] is None and ranks.is_first():
            log.info(
                f"{type(module).__name__}: logits of a micro-batch stand whole, as they are not made by one "
                "linear layer, scaled or capped by a number of config.json"
            )
    return _HEADS[module]


@torch.no_grad()
def _found_by_trial(model: nn.Module, module: Any, given: dict[str, Any]) -> OutputLayer | None:
    layer = module.get_output_embeddings()
    is_plain = isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward
    if not is_plain or "forward" in vars(layer):  # of weights that are moved about, as accelerate does
        return None
    made: list[Tensor] = []
    hook = layer.register_forward_hook(lambda _, __, output: made.append(output.clone()))
    try:
        logits = model(**given).logits
    finally:
        hook.remove()
    # Ranks try tokens of their own, but go through the model together and in the same way.
    head = _explanation(module, layer, made, logits)
    if not _on_all_ranks(head is not None):
        return None
    assert head is not None
    return head if _on_all_ranks(_is_right(head, model, given, logits)) else None


def _explanation(module: Any, layer: nn.Linear, made: list[Tensor], logits: Tensor) -> OutputLayer | None:
    """Return how ``logits`` were made of what the layer gave each time that it was called, if it is known."""
    if len(made) != 1 or made[0].shape != logits.shape:
        return None
    hiding = hiding_of(module)
    for shaping in _shapings(module, logits.dtype):
        shaped = shaping.apply(made[0].clone())
        if torch.equal(shaped if hiding is None else hiding.fill(shaped), logits):
            return OutputLayer(layer, shaping, hiding)
    return None


def _on_all_ranks(holds: bool) -> bool:
    return not bool(ranks.max_over_ranks(torch.tensor(not holds, dtype=torch.int32)))


def _is_right(head: OutputLayer, model: nn.Module, given: dict[str, Any], logits: Tensor) -> bool:
    """Whether the tokens have the log-probabilities that they have by whole logits [1, L, V]."""
    tokens = logits[0].argmax(dim=-1)  # none that is hidden
    asked = AskedTokens(torch.arange(len(tokens), device=tokens.device), tokens)
    try:
        found = head.outputs(model, given, asked).log_probs
    except (RuntimeError, IndexError, ValueError) as error:  # of a model that does more with logits
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return False
    off = float((found - token_outputs(logits.flatten(0, 1), asked).log_probs).abs().mean())
    return off <= TOLERANCE.get(logits.dtype, HALF_TOLERANCE)
