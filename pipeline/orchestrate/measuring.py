"""Whether workers of rollouts measure policies besides, so that none of their own start up for that. Pure.

Which of them does, and when, they find themselves (:mod:`pipeline.workers.choosing`): a pass says whether any
may at all, and submits nothing for what they will do.
"""

import math
from collections.abc import Mapping, Sequence

from pipeline.orchestrate.places import room_of
from pipeline.orchestrate.sharing import Work, fits_all, round_of
from pipeline.orchestrate.situation import Estimate, Situation
from pipeline.run.plan import policy_maker
from pipeline.run.tasks import Task
from pipeline.workers.choosing import can_be_missed
from pipeline.workers.measuring import MEASURED, MEASURES

_MOST_BEHIND = 3
"""Policies that wait at most where a worker of evaluations would find no place: with more it gets in line."""


def are_measuring(seen: Situation, chain: Mapping[str, Work], most: Mapping[str, int]) -> bool:
    """Whether workers of rollouts that have nothing else to do measure policies: not where kinds take turns,
    as their places are for others then; nor what takes longer than the rest of an iteration, where a worker
    of its own would find a place beside them.

    Args:
        chain: of the kinds that an iteration is a chain of.
        most: most workers of each kind.
    """
    if not seen.measures or MEASURES not in chain or not _have_places(seen, chain, most):
        return False
    seconds, left = _seconds(seen), _rest_of_iteration(chain)
    is_short = seconds is None or left is None or seconds <= left
    is_missed = not is_short and not can_be_missed(chain[MEASURES].tasks, most[MEASURES] - 1)
    return not (is_missed and _has_own_place(seen, chain, most))


def measured_besides(seen: Situation, chain: Mapping[str, Work], most: Mapping[str, int]) -> frozenset[Task]:
    """Return the evaluations at hand that workers of rollouts do, or will have done, where any measure. What
    was tried in vain is for a worker of its own."""
    undone = [task for task in seen.undone if task.job_kind == MEASURED]
    if not _are_enough(seen, undone, most, _has_own_place(seen, chain, most)):
        return frozenset()
    in_vain = {*seen.left, *seen.tried}
    return frozenset(task for task in undone if task in seen.begun or task not in in_vain)


def _are_enough(
    seen: Situation, undone: Sequence[Task], most: Mapping[str, int], has_own_place: bool
) -> bool:
    """Whether workers of rollouts are there for evaluations, or will be. Where one of their own would find a
    place it comes if they do not keep up, or if it is not known how long one takes and nobody would be there
    for the rollouts that come. Else it gets in line once several policies wait.

    Args:
        undone: the evaluations at hand.
    """
    if not any(task.job_kind == MEASURES for task in seen.undone):
        return bool(seen.crew.staying.get(MEASURES))
    waiting = [t for t in undone if policy_maker(t.iteration) in seen.committed and t not in seen.begun]
    helpers = max(seen.crew.count(MEASURES), most[MEASURES])
    least = 2 if has_own_place and _seconds(seen) is None else 1
    return helpers >= least and len(waiting) <= (1 if has_own_place else _MOST_BEHIND)


def _have_places(
    seen: Situation, chain: Mapping[str, Work], most: Mapping[str, int], beside: int = 0
) -> bool:
    """Whether the workers of all kinds, and so many that measure policies, find places at once: on nodes that
    are known, and in the queue."""
    numbers = {MEASURED: beside, **{kind: most[kind] for kind in chain}}
    slots, room = math.inf if seen.slots is None else seen.slots, room_of(seen.nodes, seen.others)
    return bool(seen.nodes) and sum(numbers.values()) <= slots and fits_all(seen.needs, numbers, room)


def _has_own_place(seen: Situation, chain: Mapping[str, Work], most: Mapping[str, int]) -> bool:
    return _have_places(seen, chain, most, beside=1)


def _seconds(seen: Situation) -> float | None:
    return seen.estimates.get(MEASURED, Estimate()).task


def _rest_of_iteration(chain: Mapping[str, Work]) -> float | None:
    """Return the seconds of an iteration after its rollouts, at least: one task of each further kind, as some
    are at work while rollouts still come. None if unknown."""
    others = [work for kind, work in chain.items() if kind != MEASURES]
    return None if any(work.seconds is None for work in others) else sum(map(round_of, others))
