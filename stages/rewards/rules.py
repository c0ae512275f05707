"""Rules: Python functions of the user's, or ready ones, called in processes of their own as

    f(*, prompts: list[str], responses: list[str], **columns: list, **arguments) -> Sequence[float]

with one entry per response; ``columns`` are the user's own columns of the prompt file, and of conversations
of several turns ``response_messages``, a list of {role, content} messages each. A rule must give the same
scores for the same responses, or a repeated task would not repeat its result.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import pyarrow as pa

from pipeline.config.reward import RowsPerCall, RuleConfig
from pipeline.plugins.sandbox import PluginFailure, open_calls, score, signature_error
from pipeline.plugins.trial import plugin_of
from stages.context import UserError
from stages.rewards.rows import name_of, rule_inputs

_SHOWN = 200
"""Characters of a response in an error message."""


class RuleFailed(RuntimeError):
    """The user's function raised an error of its own, ended its process or took too long; a retry may
    succeed."""


def rule_scores(name: str, config: RuleConfig, rows: pa.Table) -> tuple[list[float], dict[str, float]]:
    """Return one number per row of a rollout table; and how many rows took too long, where that is no error.

    The scores do not depend on the number of workers, nor does which row an error names.

    Raises:
        PluginError: the rule cannot be imported.
        UserError: it cannot be called with these columns, or returned something else than numbers.
        RuleFailed: it gave no answer.
    """
    slices = list(call_slices(rows, config.rows_per_call))
    if not slices:
        return [], {}
    inputs = rule_inputs(rows)
    scores: list[float] = []
    num_late = 0
    with open_calls(plugin_of(name, config), min(config.workers, len(slices))) as calls:
        names, limit = [*inputs, *config.arguments], config.time_limit
        if misfit := calls.answer(calls.ask(limit, signature_error, names, 0), limit):
            raise UserError(misfit.text)
        asked = []
        for part in slices:
            arguments = {key: values[part] for key, values in inputs.items()} | dict(config.arguments)
            length = part.stop - part.start
            asked.append((part.start, length, calls.ask(limit * length, score, arguments, length)))
        for start, length, future in asked:
            answer = calls.answer(future, limit * length)
            if isinstance(answer, PluginFailure):
                answer = [substitute(name, config, answer, rows.slice(start, length))] * length
                num_late += length
            scores += answer
    return scores, {} if config.timeout_score is None else {f"late/{name}": float(num_late)}


def call_slices(rows: pa.Table, rows_per_call: RowsPerCall) -> Iterator[slice]:
    """Yield the rows of each call. Responses of a prompt are adjacent."""
    keys: Sequence[Any] = range(rows.num_rows)
    if rows_per_call is RowsPerCall.PROMPT:
        keys = rows["prompt_id"].to_pylist()
    elif rows_per_call is RowsPerCall.SHARD:
        keys = [None] * rows.num_rows
    start = 0
    for _, group in groupby(keys):
        stop = start + len(list(group))
        yield slice(start, stop)
        start = stop


def substitute(name: str, config: RuleConfig, trouble: PluginFailure, rows: pa.Table) -> float:
    """Return the score of a call that took too long, where one is configured; else raise what went wrong."""
    if trouble.is_late and config.timeout_score is not None:
        return config.timeout_score
    where = name_of(rows, 0 if trouble.index is None else trouble.index)
    if trouble.index is None and rows.num_rows > 1:
        where += f" to {name_of(rows, rows.num_rows - 1)}"
    elif trouble.trace:  # what it was that it cannot take
        response = rows["response_text"][trouble.index or 0].as_py()
        where += f", whose response begins {response[:_SHOWN]!r}"
    text = f"reward component {name!r} ({config.function}) {trouble.text} for {where}"
    if trouble.is_users:
        raise UserError(text)
    error = RuleFailed(text)
    if trouble.trace:
        error.add_note(f"In its process: {trouble.trace}")
    raise error
