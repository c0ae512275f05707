"""Generation with transformers that computes a prompt once for all of its responses, and lets rows leave the
batch when they have ended.

Both need a cache of keys and values alone, from which ``generate`` goes on. Whether a model's answers are
then those that it gives alone is tried, as batching is (:mod:`stages.engines.padding`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from stages.engines.base import SequenceLimits
from stages.engines.padding import ANSWER, Dictated, distributions, is_same, trial_tokens
from stages.models.passes import PassedTokens

_FIRST, _GROWTH = 8, 4
"""Tokens until ended rows leave for the first time, and then each time this part of what was written."""


@dataclass(frozen=True)
class Decoding:
    """How the rows of a batch are written."""

    processors: LogitsProcessorList
    """Choose each row's next token."""
    keep: Callable[[Tensor], None]
    """Called with the places of the rows that stay, when others leave."""
    limits: Sequence[int]
    """Most tokens of each row."""
    stop_ids: Sequence[int]
    first: int = _FIRST
    """Tokens until rows leave for the first time."""

    def settings(self, tokens: int) -> GenerationConfig:
        """Return the settings of a call that writes at most so many tokens."""
        return GenerationConfig(
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=list(self.stop_ids) or None,
            pad_token_id=self.stop_ids[0] if self.stop_ids else 0,
        )


@dataclass(frozen=True)
class Written:
    """What a batch was answered, and what it took."""

    tokens: list[list[int]]
    """Tokens of each row, which may go on behind a stop token or the row's limit."""
    passed: PassedTokens
    """Prompts that went through the model, those with a copy once, and the positions computed in all."""


def decode(model: PreTrainedModel, prompts: Sequence[Sequence[int]], how: Decoding) -> Written:
    """Answer a batch, from a cache with its prompts."""
    ids, mask = (part.to(model.device) for part in padded(prompts, "left", 0))
    cache, stops, done = prefilled(model, prompts), set(how.stop_ids), 0
    rows = list(range(len(prompts)))
    written: list[list[int]] = [[] for _ in rows]
    passed = of_prompts([*dict.fromkeys(map(tuple, prompts))])
    while rows:
        steps = min(max(how.limits[row] for row in rows) - done, max(how.first, done // _GROWTH))
        output = model.generate(  # type: ignore[operator]
            input_ids=ids,
            attention_mask=mask,
            past_key_values=cache,
            logits_processor=how.processors,
            generation_config=how.settings(steps),
        )
        new = output[:, ids.shape[1] :].tolist()
        for row, tokens in zip(rows, new, strict=True):
            written[row] += tokens
        done += len(new[0])
        passed = passed.plus(PassedTokens(0, len(rows) * len(new[0])))
        going = [k for k, row in enumerate(rows) if done < how.limits[row] and stops.isdisjoint(new[k])]
        ids, mask = output, torch.nn.functional.pad(mask, (0, len(new[0])), value=1)
        if going and len(going) < len(rows):
            kept = torch.tensor(going)
            cache.batch_select_indices(kept)
            ids, mask = ids[going], mask[going]
            how.keep(kept)
        rows = [rows[k] for k in going]
    return Written(written, passed)


def of_prompts(prompts: Sequence[Sequence[int]]) -> PassedTokens:
    """Return what goes through a model as prompts are read."""
    return PassedTokens(sum(map(len, prompts)), len(prompts) * max(map(len, prompts)))


def prefilled(model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> DynamicCache:
    """Return a cache with all of each prompt but its last token, each prompt computed once; an empty one
    where no two are alike."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    places: dict[tuple[int, ...], int] = {}
    of_row = [places.setdefault(tuple(prompt), len(places)) for prompt in prompts]
    if len(places) == len(prompts) or max(map(len, prompts)) < 2:
        return cache
    ids, mask = (part.to(model.device) for part in padded(list(places), "left", 0))
    model.generate(  # type: ignore[operator]
        input_ids=ids,
        attention_mask=mask,
        past_key_values=cache,
        generation_config=GenerationConfig(max_new_tokens=1, do_sample=False, pad_token_id=0),
    )
    if (surplus := cache.get_seq_length() - (ids.shape[1] - 1)) > 0:
        cache.crop(-surplus)
    cache.batch_select_indices(torch.tensor(of_row))
    return cache


def can_go_on(model: PreTrainedModel, limits: SequenceLimits) -> bool:
    """Whether :func:`decode` gives a row the probabilities that it has alone. Depends on the model alone."""
    settings = model.config.get_text_config(decoder=True)
    layers = DynamicCache(config=settings).layers
    if model.config.is_encoder_decoder or not layers or any(type(one) is not DynamicLayer for one in layers):
        return False
    long, row, answer = trial_tokens(limits)
    dictated = Dictated(answer)
    how = Decoding(
        LogitsProcessorList([dictated]), lambda kept: None, [1, ANSWER, ANSWER], stop_ids=(), first=1
    )
    alone = distributions(model, [row], answer)[0]
    try:
        with torch.inference_mode():
            decode(model, [long, row, row], how)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return False
    found = torch.stack([step[-1] for step in dictated.log_probs])
    return len(dictated.log_probs) == ANSWER and is_same(alone, found, model.dtype)


def padded(sequences: Sequence[Sequence[int]], side: str, pad: int) -> tuple[Tensor, Tensor]:
    """Return [B, T] ids and attention mask."""
    ids = [torch.tensor(list(sequence), dtype=torch.long) for sequence in sequences]
    mask = [torch.ones_like(row) for row in ids]
    return pad_sequence(ids, True, pad, side), pad_sequence(mask, True, 0, side)
