"""Tables of responses that no engine wrote: what is not given is that of one whole answer to each prompt."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from pipeline.run.schemas import REWARD, ROLLOUT, Validity, conform
from stages.rewards.validity import validities

TEXTS = ["xyz", "a longer answer", "ü", "xyz"]


def rollout_table(tokens: Sequence[Sequence[int]], **columns: Any) -> pa.Table:
    """A rollout table of responses of these ids. Columns that it does not have otherwise come behind."""
    count = len(tokens)
    rows: dict[str, Any] = {
        "prompt_id": [f"p{i}" for i in range(count)],
        "sample_index": [0] * count,
        "prompt_tokens": [[3]] * count,
        "response_tokens": tokens,
        "response_mask": [[True] * len(row) for row in tokens],
        "rollout_logprobs": [[-1.0] * len(row) for row in tokens],
        "finish_reason": ["stop"] * count,
        "num_turns": [1] * count,
        **dict.fromkeys(("prompt_text", "response_text"), [""] * count),
        **dict.fromkeys(("prompt_messages", "response_messages"), [None] * count),
    }
    extra = {name: values for name, values in columns.items() if name not in rows}
    rows |= {name: values for name, values in columns.items() if name in rows and values is not None}
    return conform(rows, ROLLOUT, extra=pa.table(extra))


def reward_table(
    rollout: pa.Table, rewards: Sequence[float | None], mask_truncated: bool = False, **columns: Any
) -> pa.Table:
    """The rewards of a rollout's rows; those without one are unscorable.

    Args:
        columns: scores of components by name, and ``reference_logprobs``, if there are some.
    """
    reference = columns.pop("reference_logprobs", None) or [None] * len(rewards)
    rows = {name: rollout[name] for name in ("prompt_id", "sample_index")}
    scores = {f"reward/{name}": pa.array(values, pa.float32()) for name, values in columns.items()}
    found = [Validity.UNSCORABLE if reward is None else Validity.SCORED for reward in rewards]
    validity = validities(rollout, found, mask_truncated)
    rows |= {"reward": rewards, "reference_logprobs": reference, "validity": validity}
    return conform(rows, REWARD, pa.table(scores))


def table(texts: Sequence[str] = TEXTS, messages: list[str] | None = None, **extra: list) -> pa.Table:
    """A rollout table of two samples per prompt, as a rule gets it."""
    count = range(len(texts))
    return rollout_table(
        [[4]] * len(texts),
        prompt_id=[f"p{i // 2}" for i in count],
        sample_index=[i % 2 for i in count],
        prompt_text=["q"] * len(texts),
        response_text=texts,
        response_messages=messages,
        **extra,
    )


def asked_table(
    texts: list[str], refused: tuple[int, ...] = (), messages: list[str] | None = None, **extra: list
) -> pa.Table:
    """A rollout table to ask a service about; the engine has refused the prompts of some rows."""
    return rollout_table(
        [[] if i in refused else [4] for i in range(len(texts))],
        finish_reason=["refused" if i in refused else "stop" for i in range(len(texts))],
        prompt_text=["q: "] * len(texts),
        prompt_messages=messages,
        response_text=texts,
        **extra,
    )
