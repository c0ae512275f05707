"""When the newest pass is so old that a waiting worker requests one. Pure.

Workers that commit or leave request passes. Where all wait, none would: for a task that only a pass may give
out again, say, or for a worker that was killed.
"""

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

_LEAST_SECONDS = 60.0
_ITERATIONS = 3
_RECENT = 8


def is_overdue(newest: float, now: float, iteration_seconds: float | None) -> bool:
    """Whether a pass is due because the newest one is older than a minute and than three iterations.

    Args:
        newest: unix time at which it ended, or began if it is running. One that is as far in the future, by
            a clock that was wrong, counts as old.
        iteration_seconds: seconds that an iteration takes; None if unknown.
    """
    return abs(now - newest) > max(_LEAST_SECONDS, _ITERATIONS * (iteration_seconds or 0.0))


def seconds_of_iterations(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the median of what the last iterations took, from rows of metrics; None if they do not say."""
    found = [row.get("seconds/iteration") for row in rows]
    known = [float(seconds) for seconds in found if isinstance(seconds, int | float)]
    return statistics.median(known[-_RECENT:]) if known else None
