"""Rules: the user's Python functions ``module:function``, called as

    f(*, prompts: list[str], responses: list[str], **columns: list) -> Sequence[float]

with one entry per response; ``columns`` are the user's own columns of the prompt file. A rule must give the
same scores for the same responses, or a repeated task would not repeat its result.
"""

import math
import traceback
from typing import Any

import pyarrow as pa

from pipeline.config import RuleConfig
from pipeline.plugins import load_plugin
from pipeline.schemas import extra_columns
from stages.context import UserError


class RuleFailed(RuntimeError):
    """The user's function raised an error of its own; perhaps not the next time."""

    def __init__(self, name: str, config: RuleConfig, error: Exception) -> None:
        last = traceback.extract_tb(error.__traceback__)[-1]
        super().__init__(
            f"reward component {name!r} ({config.function}) raised {type(error).__name__}: {error} "
            f"at {last.filename}:{last.lineno}"
        )


def rule_scores(name: str, config: RuleConfig, rows: pa.Table) -> list[float]:
    """One number per row of a rollout table. Raises UserError when the rule gives anything else."""
    columns = {column: rows[column].to_pylist() for column in extra_columns(rows).column_names}
    rule = load_plugin(f"reward.components.{name}.function", config.function)
    prompts, responses = rows["prompt_text"].to_pylist(), rows["response_text"].to_pylist()
    try:
        scores = rule(prompts=prompts, responses=responses, **columns)
    except Exception as error:
        raise RuleFailed(name, config, error) from error
    return checked(name, config, scores, rows)


def checked(name: str, config: RuleConfig, scores: Any, rows: pa.Table) -> list[float]:
    """The rule's answer, if it is one finite number per row."""
    who = f"reward component {name!r} ({config.function})"
    try:
        answer = list(scores)
    except TypeError:
        raise UserError(f"{who} returned {type(scores).__name__} instead of a list of numbers") from None
    if len(answer) != rows.num_rows:
        raise UserError(f"{who} returned {len(answer)} scores for {rows.num_rows} responses")
    for index, score in enumerate(answer):
        if not is_finite_number(score):
            where = f"prompt_id {rows['prompt_id'][index]}, sample {rows['sample_index'][index]}"
            raise UserError(f"{who} returned {score!r} for {where}; a finite number is wanted")
    return [float(score) for score in answer]


def is_finite_number(score: Any) -> bool:
    """Python's, NumPy's and torch's scalars count; text and arrays do not."""
    try:
        return not isinstance(score, str | bytes) and math.isfinite(float(score))
    except (TypeError, ValueError, RuntimeError):
        return False
