"""The sample browser: prompts with their responses, which the reader filters and sorts."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.metrics.samples import Choice, Sample
from pipeline.report.data import ReportData
from pipeline.report.html import caption, embedded, section, visible, words

_SORTS: Mapping[str, str] = {
    "reward-down": "reward, highest first",
    "reward-up": "reward, lowest first",
    "kl-down": "KL, highest first",
    "kl-up": "KL, lowest first",
    "length-down": "length, longest first",
    "length-up": "length, shortest first",
    "iteration-down": "iteration, newest first",
}


def sample_browser(data: ReportData) -> str:
    """Render the section; empty before the first iteration."""
    if not data.trained:
        return ""
    if not data.samples:
        where = data.run.paths.root / "iterations"
        gone = f"The responses of iteration {data.done} are no longer in {where}, or cannot be read."
        return section("samples", "Samples", caption(gone))
    return section("samples", "Samples", caption(_about(data.samples)), _filters(data.samples), _PLACE)


_PLACE = (
    '<div class="grid" id="cards"></div>'
    '<p><button type="button" id="more" hidden>Show more</button></p>'
    "<noscript><p>The samples need JavaScript.</p></noscript>"
)


def samples_data(samples: Sequence[tuple[Choice, Sample]]) -> str:
    """Embed the samples for the page's script."""
    return embedded("samples-data", [_entry(choice, sample) for choice, sample in samples])


def _about(samples: Sequence[tuple[Choice, Sample]]) -> str:
    iterations = list(dict.fromkeys(sample.iteration for _, sample in samples))
    counts = {choice: sum(other is choice for other, _ in samples) for choice in Choice}
    kinds = ", ".join(f"{count} {choice}" for choice, count in counts.items() if count)
    return (
        f"{len(samples)} responses of {len(iterations)} iteration{'s' * (len(iterations) > 1)} ({kinds}), "
        "chosen by total reward among those of the shards that were read. KL: rollout minus reference "
        "log-probability, summed over the response's own tokens; length in tokens."
    )


def _filters(samples: Sequence[tuple[Choice, Sample]]) -> str:
    iterations = sorted({sample.iteration for _, sample in samples}, reverse=True)
    reasons = sorted({sample.finish_reason for _, sample in samples})
    rewards = [sample.reward for _, sample in samples if math.isfinite(sample.reward)]
    low, high = (f"{min(rewards):.3g}", f"{max(rewards):.3g}") if rewards else ("", "")
    return (
        '<form class="controls card" id="filters" autocomplete="off">'
        '<label class="wide">Text '
        '<input type="search" id="f-text" placeholder="in prompt or response"></label>'
        f"{_select('f-iteration', 'Iteration', [('', 'all'), *((str(i), str(i)) for i in iterations)])}"
        f"{_select('f-choice', 'Chosen as', [('', 'any'), *((str(c), str(c)) for c in Choice)])}"
        f"{_select('f-reason', 'Finish', [('', 'any'), *((reason, reason) for reason in reasons)])}"
        f'<label>Reward from <input type="number" step="any" id="f-low" placeholder="{words(low)}"></label>'
        f'<label>to <input type="number" step="any" id="f-high" placeholder="{words(high)}"></label>'
        f"{_select('f-sort', 'Sort', list(_SORTS.items()))}"
        '<button type="reset">Reset</button><output id="count" for="filters"></output></form>'
    )


def _select(key: str, label: str, options: Sequence[tuple[str, str]]) -> str:
    inside = "".join(f'<option value="{words(value)}">{words(text)}</option>' for value, text in options)
    return f'<label>{words(label)} <select id="{key}">{inside}</select></label>'


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
