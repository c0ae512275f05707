"""Rules: Python functions of the user's, or ready ones, called in processes of their own as

    f(*, prompts: list[str], responses: list[str], **columns: list, **arguments) -> Sequence[float | None]

with one entry per response, None where the rule abstains, and a list of numbers or pairs with ``steps``;
``columns`` are the user's own columns of the
prompt file, and of conversations of several turns ``response_messages``, a list of {role, content} messages
each. A rule must give the same scores for the same responses, or a repeated task would not repeat its result.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pyarrow as pa

from pipeline.config.reward import PLAIN_RESPONSES, OnError, RowsPerCall, RuleConfig, prefill_of
from pipeline.plugins.called import PluginFailure, Steps, rule_error, score, timeout_score
from pipeline.plugins.sandbox import Calls, open_calls, start_calls
from pipeline.plugins.trial import plugin_of
from pipeline.run.schemas import ENVIRONMENT_ENTRY
from stages.context import Quoting, UserError
from stages.logs import log
from stages.process.imported import Files, files_behind, is_changed
from stages.process.kept import drop_value, kept_value
from stages.rewards.rows import name_of, rule_inputs
from stages.rewards.validity import Score

_SHOWN = 200
"""Characters of a response in an error message."""


class RuleFailed(Quoting):
    """The user's function raised an error of its own, ended its process or took too long; a retry may
    succeed."""


@dataclass(frozen=True)
class FailedCall:
    """A call that gave no scores."""

    failure: PluginFailure
    rows: pa.Table
    """The call's rows of the rollout table."""


def rule_scores(
    name: str,
    config: RuleConfig,
    rows: pa.Table,
    special: Sequence[str] | None = None,
    stays: bool = False,
    num_judged: int | None = None,
) -> tuple[list[Score | Steps], dict[str, float]]:
    """Return one score per row of a rollout table, or its steps where ``config.steps`` asks for them; and how
    many rows took too long, made the rule fail, where that is no error, or got None.

    The scores do not depend on the number of workers, nor does which row an error names.

    Args:
        special: text of each response with its special tokens, where ``config.special_tokens`` asks for it.
        stays: whether the rule's processes are kept for the next task.
        num_judged: responses of which ``max_failed`` is a share. Default: the rows.

    Raises:
        PluginError: the rule cannot be imported.
        UserError: it cannot be called with these columns, or returned something else than numbers and None.
        RuleFailed: it gave no answer.
    """
    slices = list(call_slices(rows, config.rows_per_call))
    if not slices:
        return [], {}
    inputs = {**rule_inputs(rows), **responses_of(config, rows, special)}
    scores: list[Score | Steps] = []
    failed: list[FailedCall] = []
    with rule_calls(name, config, min(config.workers, len(slices)), stays) as calls:
        late_score = checked_call(calls, config, list(inputs))
        if ENVIRONMENT_ENTRY in inputs:
            calls.prepare({ENVIRONMENT_ENTRY: inputs[ENVIRONMENT_ENTRY]})
        for part, answer in answers(calls, config, inputs, slices):
            if isinstance(answer, PluginFailure):
                failed.append(FailedCall(answer, rows.slice(part.start, part.stop - part.start)))
                scores += [substitute(name, config, failed[-1], late_score)] * failed[-1].rows.num_rows
            else:
                scores += answer
    if config.on_error is OnError.SCORE:
        of_responses = [one for one in failed if one.failure.is_of_response]
        check_failed(name, config, of_responses, rows.num_rows, num_judged or rows.num_rows)
    counts = counts_of(config, scores, failed, late_score)
    return scores, {f"{what}/{name}": float(count) for what, count in counts.items()}


def counts_of(
    config: RuleConfig,
    scores: Sequence[Score | Steps],
    failed: Sequence[FailedCall],
    late_score: float | None,
) -> dict[str, int]:
    """Return how many rows took too long, made the rule fail or got None, where that may be."""
    counts = {}
    if late_score is not None:
        counts["late"] = sum(one.rows.num_rows for one in failed if one.failure.is_late)
    if config.on_error is OnError.SCORE:
        counts["failed"] = sum(one.failure.is_of_response for one in failed)  # a call has one response
    if None in scores:
        counts["abstained"] = sum(score is None for score in scores)
    return counts


def responses_of(config: RuleConfig, rows: pa.Table, special: Sequence[str] | None) -> dict[str, list[str]]:
    """Return the responses' text as the rule wants it: with special tokens, after what prompts begin."""
    plain = rows["response_text"].to_pylist()
    shown = plain if special is None else list(special)
    if config.prefill:
        prompts = rows["prompt_text"].to_pylist()
        shown = [prefill_of(prompt, config) + text for prompt, text in zip(prompts, shown, strict=True)]
    return {"responses": shown, **({} if special is None else {PLAIN_RESPONSES: plain})}


def checked_call(calls: Calls, config: RuleConfig, columns: Sequence[str]) -> float | None:
    """Return the score of a response that takes too long, if it has one.

    Raises:
        UserError: the rule does not take these columns.
    """
    limit = config.time_limit
    if misfit := calls.call(limit, rule_error, columns, list(config.arguments)):
        raise UserError(misfit.text)
    if config.timeout_score is not None or config.rows_per_call is not RowsPerCall.RESPONSE:
        return config.timeout_score
    found: float | None = calls.call(limit, timeout_score)
    return found


def answers(
    calls: Calls, config: RuleConfig, inputs: Mapping[str, Sequence[Any]], slices: Sequence[slice]
) -> Iterator[tuple[slice, list[Score | Steps] | PluginFailure]]:
    """Yield the rows of each call with their scores, or why there are none, in the rows' order."""
    asked = []
    for part in slices:
        arguments = {key: values[part] for key, values in inputs.items()} | dict(config.arguments)
        length = part.stop - part.start
        seconds = config.time_limit * length
        asked.append((part, seconds, calls.ask(seconds, score, arguments, length, config.steps)))
    for part, seconds, future in asked:
        yield part, calls.answer(future, seconds)


@contextlib.contextmanager
def rule_calls(name: str, config: RuleConfig, workers: int, stays: bool) -> Iterator[Calls]:
    """Open the processes of a rule: those of earlier tasks, where this process stays and the rule's code is
    as it was."""
    if not stays:
        with open_calls(plugin_of(name, config), workers) as calls:
            yield calls
        return
    kept = kept_calls(name, config, workers)
    yield kept.calls
    found = kept.calls.call(config.import_limit, files_behind)
    if isinstance(found, PluginFailure):
        drop_value(kept_name(name))
    else:
        kept.files = found


@dataclass
class KeptCalls:
    """Processes of a rule that stay from task to task."""

    calls: Calls
    files: Files
    """The user's code that they have imported."""


def kept_name(name: str) -> str:
    """Return the name under which the processes of a component's rule are kept."""
    return f"rule {name}"


def kept_calls(name: str, config: RuleConfig, workers: int) -> KeptCalls:
    """Return the processes that are kept for a rule, or new ones."""
    plugin = plugin_of(name, config)

    def make() -> KeptCalls:
        return KeptCalls(start_calls(plugin, workers), {})

    found: KeptCalls = kept_value(kept_name(name), (plugin, workers), make, lambda kept: kept.calls.close())
    if is_changed(found.files):
        drop_value(kept_name(name))
        return kept_calls(name, config, workers)
    return found


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


def substitute(name: str, config: RuleConfig, call: FailedCall, late_score: float | None) -> float:
    """Return the score of a call that took too long or failed, if it has one; else raise what went wrong."""
    if call.failure.is_late and late_score is not None:
        return late_score
    if config.on_error is OnError.SCORE and call.failure.is_of_response:
        return config.error_score
    raise error_of(f"reward component {name!r} ({config.function}) ", call)


def check_failed(
    name: str, config: RuleConfig, failed: Sequence[FailedCall], num_rows: int, num_judged: int
) -> None:
    """Log the first failure of a rule at a response, or raise its error where there are too many, among
    ``num_rows`` of the ``num_judged`` responses that ``max_failed`` is a share of."""
    if not failed:
        return
    start = f"reward component {name!r} ({config.function}) failed at {len(failed)} of {num_rows} responses"
    if len(failed) > config.max_failed * num_judged:
        of_all = f" of the {num_judged} of the iteration" if num_judged > num_rows else ""
        too_many = f", a larger share than max_failed={config.max_failed:g}{of_all}"
        raise error_of(f"{start}{too_many}; the first: it ", failed[0])
    first = error_of(f"{start}, which get error_score={config.error_score:g}; the first: it ", failed[0])
    log.warning(str(first))


def error_of(start: str, call: FailedCall) -> Exception:
    """Return the error of a call, whose message begins with ``start``."""
    failure, rows = call.failure, call.rows
    where = name_of(rows, 0 if failure.index is None else failure.index)
    if failure.index is None and rows.num_rows > 1:
        where += f" to {name_of(rows, rows.num_rows - 1)}"
    elif failure.trace:  # what it was that it cannot take
        response = rows["response_text"][failure.index or 0].as_py()
        where += f", whose response begins {response[:_SHOWN]!r}"
    text = f"{start}{failure.text} for {where}"
    error = UserError(text) if failure.is_users else RuleFailed(text)
    if failure.trace:
        error.add_note(f"In its process: {failure.trace}")
    return error
