"""Rollout tables as a rule gets them."""

from collections.abc import Sequence

import pyarrow as pa

from pipeline.run.schemas import ROLLOUT, conform

TEXTS = ["xyz", "a longer answer", "ü", "xyz"]


def table(texts: Sequence[str] = TEXTS, messages: list[str] | None = None, **extra: list) -> pa.Table:
    """A rollout table of two samples per prompt."""
    count = len(texts)
    columns = {
        "prompt_id": [f"p{i // 2}" for i in range(count)],
        "sample_index": [i % 2 for i in range(count)],
        "prompt_tokens": [[3]] * count,
        "response_tokens": [[4]] * count,
        "response_mask": [[True]] * count,
        "rollout_logprobs": [[-1.0]] * count,
        "finish_reason": ["stop"] * count,
        "num_turns": [1] * count,
        "prompt_text": ["q"] * count,
        "prompt_messages": [None] * count,
        "response_text": list(texts),
        "response_messages": messages or [None] * count,
    }
    return conform(columns, ROLLOUT, extra=pa.table(extra))
