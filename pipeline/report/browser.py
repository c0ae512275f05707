"""The sample browser: prompts with their responses, which the reader filters and sorts."""

import math
from collections.abc import Sequence
from typing import Any

from pipeline.metrics.samples import Choice, Sample
from pipeline.text import visible


def filters_of(samples: Sequence[tuple[Choice, Sample]]) -> dict[str, Any]:
    """Return the values that the reader chooses between, and how many samples of which choice there are."""
    counts = {choice: sum(other is choice for other, _ in samples) for choice in Choice}
    rewards = [sample.reward for _, sample in samples if math.isfinite(sample.reward)]
    return {
        "kinds": ", ".join(f"{count} {choice}" for choice, count in counts.items() if count),
        "iterations": sorted({sample.iteration for _, sample in samples}, reverse=True),
        "choices": list(Choice),
        "reasons": sorted({sample.finish_reason for _, sample in samples}),
        "low": f"{min(rewards):.3g}" if rewards else "",
        "high": f"{max(rewards):.3g}" if rewards else "",
    }


def samples_data(samples: Sequence[tuple[Choice, Sample]]) -> list[dict[str, Any]]:
    """Return the samples for the page's script."""
    return [_entry(choice, sample) for choice, sample in samples]


def _entry(choice: Choice, sample: Sample) -> dict[str, Any]:
    return {
        "choice": str(choice),
        "iteration": sample.iteration,
        "id": visible(sample.prompt_id),
        "index": sample.sample_index,
        "prompt": visible(sample.prompt),
        "response": visible(sample.response),
        "reward": _number(sample.reward),
        "components": {visible(name): _number(value) for name, value in sample.components.items()},
        "kl": _number(sample.kl),
        "length": sample.length,
        "reason": visible(sample.finish_reason),
        "turns": sample.num_turns,
    }


def _number(value: float | None) -> float | None:
    """Round to six digits: shards hold rewards in single precision. None for what JSON has no number for."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
