"""A first look at rewards before anything is generated: what rules give to texts that need no model.

Two such texts are at hand for a prompt: none at all, which any policy may write, and what the prompt file has
as its answer. They say whether the rule tells right from wrong, and in which range it moves; what a policy
will get they do not say.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from pipeline.config.reward import RowsPerCall, RuleConfig
from pipeline.config.schema import Config
from pipeline.plugins.called import PluginFailure, score
from pipeline.plugins.trial import OpenRule, Sample, trial_row

NUM_ROWS = 20
"""Prompts that are looked at."""
_SECONDS = 3.0
"""Seconds for all calls of one rule."""
_COLUMN = "column"
"""Argument by which ready rules are told the column with the answer."""
_ANSWERS = ("ground_truth", "answer", "solution", "reference", "response", "completion", "target")
"""Columns that are taken for the answer where a rule names none, the first that is there."""


@dataclass
class _Seen:
    """Scores of one kind of text."""

    what: str
    scores: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        mean, low, high = sum(self.scores) / len(self.scores), min(self.scores), max(self.scores)
        spread = f" ({low:g} to {high:g})" if low < high else ""
        return f"{self.what} gets {mean:g}{spread}"


def first_look(config: Config, rules: Sequence[OpenRule], samples: Sequence[Sample]) -> Iterator[str]:
    """Yield a line for each rule that may be tried: the mean and the range of its scores for each kind of
    text; and a warning of a text at which it fails.

    Args:
        samples: rows of the prompt file; some are enough.
    """
    for opened in rules:
        if opened.config.trial and samples:
            yield from _lines(opened, config, samples)


def _lines(opened: OpenRule, config: Config, samples: Sequence[Sample]) -> Iterator[str]:
    column = _answer_column(opened.config, samples[0])
    empty, answer = _Seen("an empty response"), _Seen(f"the text of column {column} as response")
    until, end = time.monotonic() + _SECONDS, ""
    for sample, seen, text in _texts(samples, empty, answer, column):
        found = _score(opened, config, sample, text, until - time.monotonic())
        if not isinstance(found, PluginFailure):
            seen.scores.append(found)
            continue
        end = f"; no more in {_SECONDS:g} s"
        if not found.is_late:
            end, at = "", f"for {seen.what} to prompt_id {sample.prompt_id}"
            yield f"warning: {opened.key}={opened.config.function}: {found.text} {at}"
        break
    if told := "; ".join(str(seen) for seen in (empty, answer) if seen.scores):
        prompts = f"{len(empty.scores)} prompt{'s' * (len(empty.scores) > 1)}, without a model"
        yield f"reward {opened.name}: a first look at {prompts}: {told}{end}"


def _texts(
    samples: Sequence[Sample], empty: _Seen, answer: _Seen, column: str | None
) -> Iterator[tuple[Sample, _Seen, str]]:
    for sample in samples:
        yield sample, empty, ""
        if text := _text_of(sample, column):
            yield sample, answer, text


def _score(
    opened: OpenRule, config: Config, sample: Sample, text: str, seconds: float
) -> float | PluginFailure:
    """Return what the rule gives a response, as one of a group of equal ones where it compares them."""
    rule = opened.config
    if seconds <= 0:
        return PluginFailure("", is_late=True)
    num_rows = config.rollout.samples_per_prompt if rule.rows_per_call is RowsPerCall.PROMPT else 1
    row = trial_row(rule, config, sample, text)
    arguments = {key: [value] * num_rows for key, value in row.items()} | rule.arguments
    limit = rule.time_limit * num_rows
    found = opened.calls.call(min(seconds, limit), score, arguments, num_rows)
    if not isinstance(found, PluginFailure):
        return float(found[0])
    if not found.is_late or limit > seconds:
        return found
    # The rule's own limit: in a run it is an error too, or has a score of its own.
    return replace(found, is_late=False) if rule.timeout_score is None else rule.timeout_score


def _answer_column(rule: RuleConfig, sample: Sample) -> str | None:
    """Return the column of the prompt file that holds the answer, as far as is known; None if none is."""
    named = rule.arguments.get(_COLUMN)
    return next(
        (name for name in (named, *_ANSWERS) if isinstance(name, str) and name in sample.columns), None
    )


def _text_of(sample: Sample, column: str | None) -> str | None:
    """Return an answer as the text of a response: the first of several; None where there is no text in it."""
    value = sample.columns.get(column) if column else None
    if isinstance(value, list | tuple):
        value = value[0] if value else None
    return str(value) if isinstance(value, str | int | float) else None
