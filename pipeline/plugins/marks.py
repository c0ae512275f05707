"""What a rule says of itself beside its code, as attributes of the function.

Imports nothing but the standard library: the processes of rules import it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

CHECK = "check"
"""Attribute with a function ``check(rows, **arguments)``: rows of the prompt file, each a dictionary of the
user's own columns; it returns for each row why the rule cannot score responses to it, or None."""
TIMEOUT_SCORE = "timeout_score"
"""Attribute with the score of a response that takes too long, where the configuration gives none."""
NAMED_ARGUMENTS = "named_arguments"
"""Attribute of a rule that takes no ``arguments`` but its own parameters; the rest it gets are columns."""

PREPARE = "prepare"
"""Attribute with a function of some of the columns, by name, that is called once in each process before its
first score: what it takes is no part of a response's time."""

Check = Callable[..., Sequence[str | None]]
Row = Mapping[str, Any]
_Rule = TypeVar("_Rule", bound=Callable[..., Any])


def rule(
    *,
    check: Check | None = None,
    timeout_score: float | None = None,
    prepare: Callable[..., None] | None = None,
) -> Callable[[_Rule], _Rule]:
    """Mark a rule that comes along: with its check of the prompt file, with its score of a response that
    takes too long, with what it needs before its first score, and as one that names its arguments."""
    given = {CHECK: check, TIMEOUT_SCORE: timeout_score, PREPARE: prepare, NAMED_ARGUMENTS: True}

    def mark(function: _Rule) -> _Rule:
        for name, value in given.items():
            if value is not None:
                setattr(function, name, value)
        return function

    return mark
