"""Which pending elements are cancelled. Pure.

Until an element has a place, other workers may have done its task and all others like it: it would start up
for nothing, in a place that another job may need.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

from pipeline.decide.crew import Pending
from pipeline.decide.making_place import free_room
from pipeline.decide.places import place
from pipeline.decide.situation import Demand, Estimate, Situation
from pipeline.run.tasks import Task


def elements_to_cancel(
    seen: Situation, most: Mapping[str, int], besides: Collection[Task] = ()
) -> tuple[str, ...]:
    """Return the names of the elements that are to leave the queue.

    1. Those that have no task any more, or are not ready for one, where others wait for such a place; and
       those that measure policies and stand before others, as nothing waits for them.
    2. Those that would find no task once they have started up, where the next ones are expected so late
       that elements for them can be submitted in time.
    3. Those that are more than there are to be.
    4. Those that were submitted for what workers of another kind do besides.

    Args:
        most: most workers of each job kind.
        besides: what these do.
    """
    found = dict.fromkeys(_in_the_way(seen))
    found |= dict.fromkeys(element.name for element in seen.crew.pending if element.first in besides)
    for kind in seen.wanted:
        mine = [e for e in seen.crew.pending if e.job_kind == kind and e.first not in seen.only_by_pass]
        found |= dict.fromkeys(element.name for element in _without_use(seen, kind, mine))
        surplus = seen.crew.count(kind) - most[kind] - sum(e.name in found for e in mine)
        newest = [e.name for e in reversed(mine) if e.name not in found]
        found |= dict.fromkeys(newest[: max(0, surplus)])
    return tuple(found)


def elements_to_cancel_for(seen: Situation, demands: Sequence[Demand]) -> tuple[str, ...]:
    """Return the names of further elements that are to leave the queue, as it takes no more: one, of those
    that are wanted later, for each task that must be done now. Those that are wanted last go first.

    Args:
        demands: what is wanted, in the order in which it gets its places.
    """
    due = [task for demand in demands if demand.must_come for task in demand.tasks]
    soon_free = seen.free_slots + sum(not worker.stays for worker in seen.crew.workers)
    lacking = due[int(min(len(due), soon_free)) :]
    left = sorted(seen.crew.pending, key=lambda element: _is_wanted_at(seen, element))
    found: list[str] = []
    for task in lacking:
        if left and _is_wanted_later(seen, left[-1], task):
            found.append(left.pop().name)
    return tuple(found)


def _is_wanted_later(seen: Situation, element: Pending, task: Task) -> bool:
    """Whether an element that waits is wanted later than a task that could be done now."""
    if element.job_kind == task.job_kind or task.job_kind in seen.aside:
        return False
    is_spare = element.job_kind in seen.aside or not seen.has_task(element)
    return is_spare or seen.plan.comes_before(task, element.first)


def _is_wanted_at(seen: Situation, element: Pending) -> tuple[bool, bool, int, int, int]:
    """Return a key by which elements sort in the order in which they are wanted."""
    first, is_aside = element.first, element.job_kind in seen.aside
    return not seen.has_task(element), is_aside, first.iteration, first.stage.position, first.shard


def _in_the_way(seen: Situation) -> Iterator[str]:
    """Yield the elements that could take a place which another stage needs before them."""
    ready = {*seen.ready_by_kind, *(kind for kind in seen.wanted if seen.open_tasks(kind))}
    due = (e for e in seen.crew.pending if seen.has_task(e) and (e.begin or 0.0) <= seen.now)
    wanting = ready.union(element.job_kind for element in due)
    is_limited = any(element.is_limited and seen.has_task(element) for element in seen.crew.pending)
    for element in seen.crew.pending:
        is_spare = not seen.has_task(element) and element.job_kind not in ready
        is_spare = is_spare and (is_limited or _may_need(seen, element.job_kind, wanting))
        if is_spare or _is_too_early(seen, element) or _keeps_waiting(seen, element):
            yield element.name


def _is_too_early(seen: Situation, element: Pending) -> bool:
    """Whether an element that waits for its input is in the queue with one that must have a place before."""
    is_later = element.begin is not None and element.begin > seen.now  # it takes no place yet
    if is_later or not _is_early(seen, element):
        return False
    late = {
        one.job_kind
        for one in seen.crew.pending
        if one.lacks_room and seen.is_ready(one.first) and seen.plan.comes_before(one.first, element.first)
    }
    return _may_need(seen, element.job_kind, late)


def _keeps_waiting(seen: Situation, element: Pending) -> bool:
    """Whether an element that measures policies, and has no place, stands in the queue before one of the
    chain of iterations for which there would be room: Slurm keeps nodes for the first. It goes behind it."""
    if element.job_kind not in seen.aside or not element.lacks_room:
        return False
    after = {
        one.job_kind
        for one in seen.crew.pending
        if one.lacks_room and one.since > element.since and seen.is_ready(one.first)
    }
    room = free_room(seen)
    chain = [kind for kind in after.difference(seen.aside) if kind in seen.needs]
    held_up = [kind for kind in chain if place(room, seen.needs[kind]) is not None]
    return _may_need(seen, element.job_kind, held_up)


def _is_early(seen: Situation, element: Pending) -> bool:
    """Whether the task that an element was submitted for is still to come."""
    return seen.is_undone(element.first) and not seen.is_ready(element.first)


def _may_need(seen: Situation, job_kind: str, wanting: Collection[str]) -> bool:
    """Whether a place of a job kind could be one of another kind's that wants one."""
    return any(kind != job_kind and seen.may_share(job_kind, kind) for kind in wanting)


def _has_time(seen: Situation, estimate: Estimate) -> bool:
    """Whether elements that are submitted later will have started up by the next input. While the time of
    that is unknown: whether the queue is shorter than a start-up; else they keep their place in it."""
    if estimate.next_input is None and estimate.startup is not None:
        return estimate.least_queue_wait <= estimate.startup
    return estimate.has_time(seen.now)


def _without_use(seen: Situation, job_kind: str, mine: list[Pending]) -> list[Pending]:
    """Return the elements of a kind that would find nothing to do: the last of those whose own inputs have
    come."""
    estimate = seen.estimates.get(job_kind, Estimate())
    is_over = not seen.undone  # then all that waits is cancelled
    if is_over or (seen.coming(job_kind) and not _has_time(seen, estimate)):
        return []
    due = [element for element in mine if not _is_early(seen, element)]
    return due[seen.left_over(job_kind, estimate.startup) :]
