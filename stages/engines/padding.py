"""How rows may be batched so that a model says of each what it says of it alone.

Attention skips padding by its mask. A recurrent model may read it as text (RecurrentGemma, the lightning
attention of MiniMax), one that counts positions from the first column begins too late (BART), and one may mix
up the rows of any batch (RWKV). Of encoders, which reward models may be, some mix tokens with the padding
behind them (FNet, ConvBERT, Nystromformer). Such a model is known by its answers, not by its name.
"""

from collections.abc import Callable, Collection, Sequence
from enum import StrEnum
from typing import TypeVar

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from stages.engines.base import SequenceLimits
from stages.models.passes import count_pass
from stages.ppo.splitting import budgeted

_Score = TypeVar("_Score")

_SHORT, _LONG = 5, 29
"""Tokens of the row that is compared, and of a longer one beside it, where the context has room for that."""
ANSWER = 3
"""Tokens of each answer: the first is read off the prompt, the others off the cache."""
_TOLERANCE = {torch.float32: 1e-4}
_HALF_TOLERANCE = 0.05
"""Nats per token: rounding alone, which padding changes too, is below."""
_SCORE_TOLERANCE = {torch.float32: 1e-5}
"""Largest difference of two scores, divided by the score's size plus one. In half precision: that above."""


class Batching(StrEnum):
    """Rows that a model may be given together."""

    PADDED = "padded"
    """All, padded on the left."""
    ONE_LENGTH = "only rows of one length together"
    ALONE = "one row at a time"

    def groups(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return the places of rows, of the given lengths, that may be in one batch."""
        if self is Batching.ALONE:
            return [[place] for place in range(len(lengths))]
        groups: dict[int, list[int]] = {}
        for place, length in enumerate(lengths):
            groups.setdefault(0 if self is Batching.PADDED else length, []).append(place)
        return [group for _, group in sorted(groups.items())]


class Dictated(LogitsProcessor):
    """A logits processor that chooses given tokens, and notes the distributions that they are chosen from."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self.log_probs: list[Tensor] = []
        """Log-probabilities of all tokens, [B, V] per step."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = self._tokens[len(self.log_probs)]
        self.log_probs.append(torch.log_softmax(scores.float(), dim=-1))
        only = torch.full_like(scores, -torch.inf)
        only[:, token] = 0.0
        return only


def batching_of(model: PreTrainedModel, limits: SequenceLimits) -> Batching:
    """Return the first way of batching in which a row's probabilities are what they are alone.

    Depends on nothing but the model. Where the context has no room for a longer row, nothing is tried, and
    rows go alone.
    """
    if limits.context - ANSWER <= _SHORT:
        return Batching.ALONE
    long, row, answer = trial_tokens(limits)
    alone = distributions(model, [row], answer)[0]
    beside = {Batching.PADDED: long, Batching.ONE_LENGTH: long[:_SHORT]}
    for batching, other in beside.items():
        if is_same(alone, distributions(model, [row, other], answer)[0], model.dtype):
            return batching
    return Batching.ALONE


def trial_tokens(limits: SequenceLimits) -> tuple[list[int], list[int], list[int]]:
    """Return a longer prompt, a shorter one, and an answer to the shorter one that a model is tried with."""
    longest = min(_LONG, limits.context - ANSWER)
    tokens = [i * 7919 % limits.vocabulary for i in range(1, longest + ANSWER + 1)]
    return tokens[:longest], tokens[-_SHORT - ANSWER : -ANSWER], tokens[-ANSWER:]


Score = Callable[[list[list[int]]], list[float]]
"""Function that scores rows of ids in one batch."""


def scoring_batching_of(
    score: Score, limits: SequenceLimits, dtype: torch.dtype, end: int | None, unusual: Collection[int]
) -> Batching:
    """Return the first way of batching in which rows have the scores that they have alone.

    Args:
        end: id that every row ends with, as some heads look for it.
        unusual: ids that no row has besides.
    """
    ends = [] if end is None else [end]
    longest = min(_LONG, limits.context - len(ends))
    known = [id_ for id_ in range(limits.vocabulary) if id_ not in {*unusual, *ends}]
    if longest <= _SHORT or not known:
        return Batching.ALONE
    tokens = [known[i * 7919 % len(known)] for i in range(1, longest + 1)]
    row, beside = [*tokens[-_SHORT:], *ends], {Batching.PADDED: tokens, Batching.ONE_LENGTH: tokens[:_SHORT]}
    for batching, others in beside.items():
        rows = [row, [*others, *ends]]
        alone = [score([one])[0] for one in rows]
        if all(_is_near(*pair, dtype) for pair in zip(score(rows), alone, strict=True)):
            return batching
    return Batching.ALONE


def _is_near(one: float, other: float, dtype: torch.dtype) -> bool:
    """Whether two scores of one row differ by rounding alone."""
    return abs(one - other) <= _SCORE_TOLERANCE.get(dtype, _HALF_TOLERANCE) * (1 + abs(other))


def is_same(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    """Whether two series of distributions [steps, V] differ by rounding alone."""
    difference = one.exp() * (one - other).abs()
    impossible = one.isneginf() & other.isneginf()
    gap = float(difference.masked_fill(impossible, 0.0).sum(dim=-1).mean())
    return gap <= _TOLERANCE.get(dtype, _HALF_TOLERANCE)  # not where it is NaN


@torch.inference_mode()
def distributions(model: PreTrainedModel, prompts: Sequence[Sequence[int]], answer: Sequence[int]) -> Tensor:
    """Return the log-probabilities [B, steps, V] that ``answer`` is given with, to prompts that are padded on
    the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    dictated = Dictated(answer)
    model.generate(  # type: ignore[operator]
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        logits_processor=LogitsProcessorList([dictated]),
        generation_config=GenerationConfig(max_new_tokens=len(answer), do_sample=False, pad_token_id=0),
    )
    return torch.stack(dictated.log_probs, dim=1)


def in_batches(
    sequences: Sequence[Sequence[int]],
    batching: Batching,
    token_budget: int,
    score: Callable[[Sequence[Sequence[int]]], list[_Score]],
) -> list[_Score]:
    """Return what ``score`` gives for each sequence, in batches of similar lengths under a token budget."""
    scores: dict[int, _Score] = {}
    lengths = [(0, len(sequence)) for sequence in sequences]
    for group in batching.groups([length for _, length in lengths]):
        for batch in budgeted(lengths, group, token_budget):
            chosen = [sequences[i] for i in batch]
            scores |= zip(batch, score(chosen), strict=True)
            count_pass(sum(map(len, chosen)), len(chosen) * max(map(len, chosen)))
    return [scores[i] for i in range(len(sequences))]
