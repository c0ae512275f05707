"""Log-probabilities and entropies of logits, and the gradient of logits, some of them at a time.

Everything in fp32 is made of a piece of the logits, again in the backward pass.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

_PIECE = {"cpu": 1 << 18}
"""Logits processed at a time, by kind of device: on a CPU as many as its cache holds."""
_PIECE_ELSEWHERE = 1 << 25
_LOWEST = -1e30
"""A logarithm that stands for that of 0, which times 0 is not a number."""


class TokenOutputs(NamedTuple):
    """Outputs for n tokens, in fp32 at least; also laid out by row, [B, R]."""

    log_probs: Tensor
    """[n]."""
    entropy: Tensor | None
    """[n] entropies of the distributions that the tokens are from; None when not asked for."""
    others: Tensor | None = None
    """[n, k] log-probabilities of further ids; None when not asked for."""
    top: Tensor | None = None
    """[n, k] the most probable ids; None when not asked for. ``others`` are theirs."""


@dataclass(frozen=True)
class AskedTokens:
    """What is asked of a model's predictions."""

    positions: Tensor
    """[n] positions, each once."""
    tokens: Tensor
    """[n] the token at each, whose log-probability is wanted."""
    temperature: float = 1.0
    entropy: bool = False
    """Whether to compute entropies too."""
    entropy_grad: bool = False
    """Whether they have a gradient; computes them as well."""
    others: Tensor | None = None
    """[n, k] further ids at each position, no id twice, whose log-probabilities are wanted."""
    top: int = 0
    """Number of the most probable ids that are wanted, in place of ``others``; without a gradient."""

    @property
    def with_entropy(self) -> bool:
        return self.entropy or self.entropy_grad

    def outputs(self, results: Tensor) -> TokenOutputs:
        """Return what was asked for from ``results`` [2 + :attr:`width`, n] of an autograd function."""
        (log_probs, entropies), further, top = results[:2].unbind(), None, None
        if self.others is not None:
            further = results[2:].T
        elif self.top:
            further, top = results[2 : 2 + self.top].T.detach(), results[2 + self.top :].T.long()
        if not self.with_entropy:
            return TokenOutputs(log_probs, None, further, top)
        return TokenOutputs(log_probs, entropies if self.entropy_grad else entropies.detach(), further, top)

    @property
    def width(self) -> int:
        """Results of each token besides its log-probability and entropy."""
        return 2 * self.top if self.others is None else self.others.shape[1]

    def further(self, log_probs: Tensor, rows: slice) -> Tensor:
        """Return [k, :attr:`width`] of the tokens ``rows`` of log-probabilities [k, V]: those of ``others``,
        or the largest, and their ids as numbers, which are exact up to 2^24."""
        if self.others is not None:
            return log_probs.gather(1, self.others[rows])
        return torch.cat([part.to(log_probs.dtype) for part in log_probs.topk(self.top)], dim=1)


def token_outputs(logits: Tensor, asked: AskedTokens) -> TokenOutputs:
    """Compute log-probabilities of tokens under ``logits`` [P, V] / temperature.

    Ids at -inf have probability 0 and add nothing. A token whose result has a gradient of 0 gives its logits
    one of 0, even if they are not finite.
    """
    return asked.outputs(_TokenOutputs.apply(logits, asked))


class _TokenOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, asked: AskedTokens) -> Tensor:
        measured = empty_measures(asked, logits)
        for piece in _pieces(len(asked.tokens), logits):
            measured[:, piece] = measure(logits[asked.positions[piece]], asked, piece)
        ctx.asked = asked
        ctx.save_for_backward(logits, measured)
        return measured[:-1].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, measured = ctx.saved_tensors
        upstream, gradient = Upstream.of(gradients[0], measured, ctx.asked), torch.zeros_like(logits)
        for piece in _pieces(len(upstream.rows), logits):
            some = upstream.select(piece)
            positions = ctx.asked.positions[some.rows]
            part = logits[positions]
            turn_into_gradient(part, some)
            gradient[positions] = part
        return gradient, None


def empty_measures(asked: AskedTokens, logits: Tensor) -> Tensor:
    """Return [3 + width, n] of the dtype of :func:`measure`."""
    return torch.empty(3 + asked.width, len(asked.tokens), dtype=_precise(logits), device=logits.device)


def measure(logits: Tensor, asked: AskedTokens, rows: slice = slice(None)) -> Tensor:
    """Return [3 + width, k] of logits [k, V] of the tokens ``rows`` of those that are asked for:
    log-probabilities, entropies (0 if not asked for), what :meth:`AskedTokens.further` returns, and the
    logarithms of what the exponentials add up to."""
    first, stop, _ = rows.indices(len(asked.tokens))
    tokens = asked.tokens[rows]
    found = torch.zeros(3 + asked.width, stop - first, dtype=_precise(logits), device=logits.device)
    for piece in _pieces(len(tokens), logits):
        tempered = logits[piece].to(found.dtype) / asked.temperature
        log_probs = torch.log_softmax(tempered, dim=-1)
        found[0, piece] = log_probs.gather(1, tokens[piece, None]).squeeze(1)
        found[-1, piece] = tempered.amax(dim=-1) - log_probs.amax(dim=-1)
        if asked.width:
            of_all = slice(first + piece.start, first + piece.stop)
            found[2:-1, piece] = asked.further(log_probs, of_all).T
        if asked.with_entropy:
            finite = log_probs.clamp_(min=_LOWEST)
            found[1, piece] = -finite.exp().mul_(finite).sum(dim=-1)
    return found


@dataclass(frozen=True)
class Upstream:
    """The gradients of the results of k tokens, those without any left out; all [k]."""

    rows: Tensor
    """Indices of the tokens among those that were asked for."""
    tokens: Tensor
    of_log_probs: Tensor
    of_entropies: Tensor | None
    entropies: Tensor
    normalisers: Tensor
    """As :func:`measure` returns them."""
    temperature: float
    others: Tensor | None = None
    """[k, m] further ids."""
    of_others: Tensor | None = None
    """[k, m]."""

    @classmethod
    def of(cls, gradients: Tensor, measured: Tensor, asked: AskedTokens) -> "Upstream":
        """Return those of ``gradients`` [2 + width, n] that are not 0."""
        given = gradients if asked.entropy_grad else torch.cat([gradients[:1], gradients[2:]])
        rows = given.ne(0).any(dim=0).nonzero().squeeze(1)
        others, of_others = None, None
        if asked.others is not None:
            others, of_others = asked.others[rows], gradients[2:, rows].T
        return cls(
            rows,
            asked.tokens[rows],
            gradients[0, rows],
            gradients[1, rows] if asked.entropy_grad else None,
            measured[1, rows],
            measured[-1, rows],
            asked.temperature,
            others,
            of_others,
        )

    def select(self, piece: slice) -> "Upstream":
        """Return a part of the tokens."""
        parts: dict[str, Any] = {n: one[piece] for n, one in vars(self).items() if isinstance(one, Tensor)}
        return replace(self, **parts)


Slope = Callable[[Tensor], Tensor | float]
"""Derivative of logits [k, v] by what they were made from, element by element."""


def turn_into_gradient(
    logits: Tensor, upstream: Upstream, first: int = 0, slope: Slope | None = None
) -> None:
    """Overwrite logits [k, v] with their gradient: d log p(t) / dz = [t] - p and dH / dz = -p (log p + H).

    Args:
        first: id of the first column, where the logits are of a part of the vocabulary.
        slope: derivative that the gradient is multiplied with.
    """
    for piece in _pieces(len(logits), logits):
        part, some = logits[piece], upstream.select(piece)
        factor = 1.0 if slope is None else slope(part)
        result = part.to(_precise(logits)).div_(some.temperature).sub_(some.normalisers[:, None])
        weight = -some.of_log_probs[:, None]
        if some.of_entropies is not None:
            finite = result.clamp(min=_LOWEST)
            weight = weight - some.of_entropies[:, None] * (finite + some.entropies[:, None])
        if some.of_others is not None:
            weight = weight - some.of_others.sum(dim=1, keepdim=True)
        result.exp_().mul_(weight)
        columns, width = some.tokens - first, logits.shape[1]
        is_inside = (columns >= 0) & (columns < width)
        places = torch.arange(len(columns), device=columns.device), columns.clamp(0, width - 1)
        result[places] += torch.where(is_inside, some.of_log_probs, 0.0)
        if some.others is not None and some.of_others is not None:
            add_at(result, some.others - first, some.of_others)
        part.copy_(result.mul_(factor).div_(some.temperature))


def add_at(target: Tensor, columns: Tensor, values: Tensor) -> None:
    """Add ``values`` [k, m] to the places of ``target`` [k, v] in their rows' ``columns`` [k, m]; those
    outside are left out."""
    width = target.shape[1]
    rows = torch.arange(len(columns), device=columns.device)[:, None].expand_as(columns)
    is_inside = (columns >= 0) & (columns < width)
    places = rows, columns.clamp(0, width - 1)
    target.index_put_(places, torch.where(is_inside, values, 0.0), accumulate=True)


def _precise(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _pieces(number: int, logits: Tensor) -> Iterator[slice]:
    return slices(number, _PIECE.get(logits.device.type, _PIECE_ELSEWHERE) // logits.shape[1])


def slices(number: int, size: int) -> Iterator[slice]:
    """Yield slices of at most ``size``, and at least 1, that make up ``number``."""
    size = max(1, size)
    return (slice(start, min(number, start + size)) for start in range(0, number, size))
