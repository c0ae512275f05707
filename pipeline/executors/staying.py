"""When an idle process leaves: pure rules. They read no clock and no memory; they are told."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.config.types import Linger

LEAST_FREE = 0.1
"""Share of the machine's memory that has to be free for a new process beside idle ones."""
ALWAYS = math.inf
"""Seconds of idleness where no time is set."""


@dataclass(frozen=True)
class Idle:
    """A process that has done its job and could do another."""

    pool: str
    """The only pool whose jobs it can do."""
    since: float
    """Time at which it became idle."""


def who_leaves(
    idle: Sequence[Idle], linger: Mapping[str, float], now: float, starting: str = "", free: float = 1.0
) -> list[int]:
    """Return the indices of the idle processes that leave now: those whose time is over. If none is and a new
    process does not fit beside them, the one that has been idle longest.

    Args:
        linger: seconds that an idle process of each pool stays.
        now: time, of the same clock as :attr:`Idle.since`.
        starting: pool of a job that is about to get a new process; empty where none is.
        free: share of the machine's memory that is free.
    """
    over = [place for place, one in enumerate(idle) if now >= one.since + linger.get(one.pool, 0.0)]
    if over or not starting or free >= LEAST_FREE:
        return over
    others = [place for place, one in enumerate(idle) if one.pool != starting]
    return sorted(others, key=lambda place: idle[place].since)[:1]


def seconds_of(linger: Linger, has_gpus: bool) -> float:
    """Return the seconds that a stage's idle processes stay on this machine. ``auto``: always, without GPUs;
    never with GPUs, as the stages share those, and an idle process would keep a GPU's memory."""
    if linger == "auto":
        return 0.0 if has_gpus else ALWAYS
    return float(linger)
