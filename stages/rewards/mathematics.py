"""The ready rule for answers of mathematics, which math-verify parses and compares by their value.

Registered as ``math_match``; needs the extra ``math``. No text that a policy writes is an error of it.
"""

import logging
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from pipeline.plugins.marks import rule
from stages.rewards.ready import answers, check_answers, extracted, matches

try:
    from math_verify import parse, verify
except ModuleNotFoundError as error:
    missing = "math_match needs math-verify: pip install 'slurm-ppo[math]' where the rule is run"
    raise ModuleNotFoundError(missing, name=error.name) from error

SECONDS = 5
"""Seconds for each step, parsing and comparing; what takes longer is not the answer."""
_LONGEST = 2000
"""Characters at the end of a response, or of what its pattern finds, that are looked at."""
_SCIENTIFIC = re.compile(r"(?<![\w.\\])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,4})(?!\w)", re.ASCII)
"""Numbers such as 1e3, of which math-verify reads only what stands before the letter."""
_POWER = r"(?:\^|\*\*)\s*[{(]*\s*"
_TOO_LARGE = re.compile(
    rf"\d\s*[)}}]*\s*{_POWER}\d+\s*[)}}]*\s*(?:\^|\*\*)|{_POWER}\d{{5,}}|\d{{5,}}\s*!|!\s*[)}}]*\s*!|\d{{400,}}"
    r"|\d[eE][-+]?\d{5,}"
)
"""Powers of powers of numbers, powers of large exponents, large factorials: computing them may take more time
and memory than there is, in a step that no alarm interrupts."""

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it reports each text that is no formula


@rule(check=check_answers, timeout_score=0.0)
def math_match(
    *, responses: Sequence[str], column: str = "ground_truth", pattern: str | None = None, **columns: Any
) -> list[float]:
    r"""Score 1 where the response's last answer, in ``\boxed{}``, LaTeX or plain, equals the right one by
    math-verify, else 0.

    Args:
        column: column of the prompt file with the answer, LaTeX or plain, or a list of right ones.
        pattern: regular expression whose first group is looked at; its last match in the response counts.
    """
    found = extracted(responses, pattern)
    return matches(found, answers(columns, column), lambda text, right: is_equal(str(right), text))


def is_equal(right: str, text: str) -> bool:
    """Whether a text's answer has the value of the right one. False where that cannot be known in time."""
    tail = text[-_LONGEST:]
    if _TOO_LARGE.search(tail):
        return False
    mine, theirs = _parsed(tail), _parsed_answer(right)
    try:
        return bool(mine and theirs and verify(theirs, mine, timeout_seconds=SECONDS))
    except Exception:  # of sympy, for a formula that it takes and cannot compare: any of its kinds
        return False


@lru_cache(maxsize=1024)
def _parsed_answer(right: str) -> list[Any]:
    return _parsed(right) or _parsed(f"${right}$")


def _parsed(text: str) -> list[Any]:
    try:
        return list(parse(_SCIENTIFIC.sub(r"\1*10**\2", text), parsing_timeout=SECONDS))
    except Exception:  # of sympy and the grammar's parser, for what is no formula: any of their kinds
        return []
