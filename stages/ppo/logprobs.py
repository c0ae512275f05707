"""Log-probabilities of given tokens, and entropies, without copies of all logits in fp32.

A vocabulary of 150,000 ids makes logits the largest tensors of a training step. They are kept once, as the
model gives them; everything in fp32 is made of some of them at a time, again in the backward pass.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

_PIECE = {"cpu": 1 << 18}
"""Logits processed at a time, by kind of device: on a CPU as many as its cache holds."""
_PIECE_ELSEWHERE = 1 << 25


class TokenOutputs(NamedTuple):
    """Outputs for n tokens, in fp32 at least; also laid out by row, [B, R]."""

    log_probs: Tensor
    """[n]."""
    entropy: Tensor | None
    """[n] entropies of the distributions that the tokens are from; None when not asked for."""


def token_outputs(
    logits: Tensor,
    positions: Tensor,
    tokens: Tensor,
    temperature: float = 1.0,
    entropy: bool = False,
    entropy_grad: bool = False,
) -> TokenOutputs:
    """Compute log-probabilities of ``tokens`` [n] under ``logits`` [P, V] / temperature at ``positions`` [n].

    Ids at -inf have probability 0 and add nothing. Each position may be given once. A token whose result has
    a gradient of 0 gives its logits one of 0, even if they are not finite.

    Args:
        entropy: whether to compute entropies too.
        entropy_grad: whether they have a gradient; computes them as well.
    """
    with_entropy = entropy or entropy_grad
    found = _TokenOutputs.apply(logits, positions, tokens, temperature, with_entropy, entropy_grad)
    return TokenOutputs(found[0], found[1] if with_entropy else None)


class _TokenOutputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        positions: Tensor,
        tokens: Tensor,
        temperature: float,
        with_entropy: bool,
        entropy_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.temperature = temperature
        log_probs = torch.empty(len(tokens), dtype=_precise(logits), device=logits.device)
        entropies = torch.empty_like(log_probs) if with_entropy else log_probs.new_empty(0)
        for piece in _pieces(len(tokens), logits):
            of_all = _log_softmax(logits, positions[piece], temperature)
            log_probs[piece] = of_all.gather(1, tokens[piece, None]).squeeze(1)
            if with_entropy:
                entropies[piece] = _entropy_in_place(of_all)
        ctx.entropy_grad = entropy_grad
        if not entropy_grad:
            ctx.mark_non_differentiable(entropies)
        ctx.save_for_backward(logits, positions, tokens, entropies)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Compute d log p(t) / dz = [t] - p and dH / dz = -p (log p + H)."""
        of_log_probs, of_entropies = gradients
        logits, positions, tokens, entropies = ctx.saved_tensors
        wanted = of_log_probs != 0
        if ctx.entropy_grad:
            wanted |= of_entropies != 0
        kept = wanted.nonzero().squeeze(1)
        gradient = torch.zeros_like(logits)
        for piece in _pieces(len(kept), logits):
            some = kept[piece]
            probabilities = _log_softmax(logits, positions[some], ctx.temperature)
            weight = -of_log_probs[some, None]
            if ctx.entropy_grad:
                finite = probabilities.clamp(min=torch.finfo(probabilities.dtype).min)
                weight = weight - of_entropies[some, None] * (finite + entropies[some, None])
            result = probabilities.exp_().mul_(weight)
            result[torch.arange(len(some), device=some.device), tokens[some]] += of_log_probs[some]
            gradient[positions[some]] = result.div_(ctx.temperature).to(gradient.dtype)
        return gradient, None, None, None, None, None


def _precise(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _pieces(number: int, logits: Tensor) -> Iterator[slice]:
    size = max(1, _PIECE.get(logits.device.type, _PIECE_ELSEWHERE) // logits.shape[1])
    return (slice(start, start + size) for start in range(0, number, size))


def _log_softmax(logits: Tensor, positions: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax(logits[positions].to(_precise(logits)).div_(temperature), dim=-1)


def _entropy_in_place(log_probs: Tensor) -> Tensor:
    """Compute entropies [n] of log-probabilities [n, V], whose memory it overwrites."""
    finite = log_probs.clamp_(min=torch.finfo(log_probs.dtype).min)  # 0 times -inf is not a number
    return -finite.exp().mul_(finite).sum(dim=-1)
