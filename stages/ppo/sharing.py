"""Whether a model may be given one prompt with several responses in one line (:mod:`stages.ppo.batching`).

Attention has to take a mask of pairs of positions and positions that do not rise along the line. A model is
known by its answers, but for attention over a window, which only long lines would show.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from stages import ranks
from stages.logs import log
from stages.ppo.batching import MicroBatch, Row, collate, collate_shared
from stages.ppo.forward import seen_in
from stages.ppo.head import HALF_TOLERANCE, TOLERANCE

_PROMPT, _RESPONSES = 5, (2, 4)
"""Tokens of what a model is tried with."""
_MASKED = ("eager", "sdpa")
"""Attention that takes a mask of pairs."""
_WHOLE = "full_attention"
"""Name of the layers whose attention is over all that comes before."""
_FOUND: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def can_share(model: nn.Module) -> bool:
    """Whether a model's answers in shared lines are those of rows of their own, by a trial the first time.
    Never on GPUs, whose fast attention takes no mask. Every rank must call this.

    Args:
        model: may be under DeepSpeed.
    """
    module: Any = getattr(model, "module", model)
    if module not in _FOUND:
        parameter = next(model.parameters())
        is_known = parameter.device.type == "cpu" and has_whole_attention(module.config)
        _FOUND[module] = is_known and not bool(ranks.max_over_ranks(torch.tensor(not _is_right(model))))
        if is_known and not _FOUND[module] and ranks.is_first():
            log.info(
                f"{type(module).__name__}: each response goes through the model with a prompt of its own"
            )
    return _FOUND[module]


def has_whole_attention(described: PreTrainedConfig) -> bool:
    """Whether every layer's attention is over all that comes before, by an implementation that takes a mask.
    Pure."""
    settings = described.get_text_config()
    layers = getattr(settings, "layer_types", None) or [_WHOLE]
    has_window = getattr(settings, "sliding_window", None) and getattr(settings, "use_sliding_window", True)
    is_masked = getattr(described, "_attn_implementation", None) in _MASKED
    return is_masked and not has_window and set(layers) == {_WHOLE}


@torch.no_grad()
def _is_right(model: nn.Module) -> bool:
    """Whether the last hidden states before the tokens of two responses are, but for rounding, the same in a
    shared line as in rows of their own."""
    module: Any = getattr(model, "module", model)
    vocabulary = module.config.get_text_config().vocab_size
    ids = [i * 7919 % vocabulary for i in range(1, _PROMPT + sum(_RESPONSES) + 1)]
    prompt, rest = ids[:_PROMPT], ids[_PROMPT:]
    rows = [Row(prompt, rest[: _RESPONSES[0]]), Row(prompt, rest[_RESPONSES[0] :])]
    device = next(model.parameters()).device
    try:
        apart, shared = (
            _hidden(model, batch.to(device))
            for batch in (collate(rows, [0, 1]), collate_shared(rows, [[0, 1]]))
        )
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return False
    off = float((apart - shared).abs().mean() / apart.abs().mean())
    return off <= TOLERANCE.get(next(model.parameters()).dtype, HALF_TOLERANCE)


def _hidden(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Return hidden states [n, H] of the positions before response tokens: a critic's values, of one number
    and 0 at first, would show nothing."""
    places = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
    found = model(**places, **seen_in(model, batch), use_cache=False, output_hidden_states=True)
    last: Tensor = found.hidden_states[-1]
    return last.flatten(0, 1)[batch.predictors].float()
