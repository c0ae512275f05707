"""Reward tables of remote rewards."""

import pyarrow as pa

from pipeline.run.schemas import ROLLOUT, conform


def table(
    texts: list[str], refused: tuple[int, ...] = (), messages: list[str] | None = None, **extra: list
) -> pa.Table:
    """A rollout table; the engine has refused the prompts of some rows."""
    count = len(texts)
    columns = {
        "prompt_id": [f"p{i}" for i in range(count)],
        "sample_index": [0] * count,
        "prompt_tokens": [[3]] * count,
        "response_tokens": [[] if i in refused else [4] for i in range(count)],
        "response_mask": [[] if i in refused else [True] for i in range(count)],
        "rollout_logprobs": [[] if i in refused else [-1.0] for i in range(count)],
        "finish_reason": ["refused" if i in refused else "stop" for i in range(count)],
        "num_turns": [1] * count,
        "prompt_text": ["q: "] * count,
        "prompt_messages": messages or [None] * count,
        "response_text": texts,
        "response_messages": [None] * count,
    }
    return conform(columns, ROLLOUT, extra=pa.table(extra))
