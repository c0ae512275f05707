"""Staffing: which workers to submit, and which make place for them. Pure: no clock, queue or disk is read.

Where stages have workers, nothing is queued behind them. A worker finds its next task from records alone; a
pass submits elements where no live worker will do what is ready, or early, so that they have started up when
their input is expected. Where there are fewer places than workers, the same pass decides who leaves for whom:
the worker whose own next task is furthest away, and for nothing that is wanted later than that.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from pipeline.orchestrate.crew import Pending
from pipeline.orchestrate.making_place import make_places
from pipeline.orchestrate.places import room_of
from pipeline.orchestrate.sharing import Work, targets_by_group, worthwhile
from pipeline.orchestrate.situation import Demand, Estimate, Order, Situation, comes_before
from pipeline.run.tasks import PREPARE, Stage, Task
from pipeline.workers.beats import Doing
from pipeline.workers.handover import Handover


@dataclass(frozen=True)
class Staffing:
    """Decisions of one pass about workers."""

    orders: tuple[Order, ...] = ()
    hurried: tuple[str, ...] = ()
    """Names of pending elements whose input came before their begin time."""
    handovers: tuple[Handover, ...] = ()
    """Workers that make place for others once they have nothing to do."""
    withdrawn: tuple[str, ...] = ()
    """Names of pending elements that have nothing to do, where another stage waits for such a place, and of
    those that are more than there are to be."""


def staff(seen: Situation) -> Staffing:
    """Decide which workers to submit, and who makes place.

    1. Never more than wanted, nor than have places: where not all kinds have theirs, they share or take turns
       (:mod:`pipeline.orchestrate.sharing`). Live workers that stay and pending elements count.
    2. A task that workers leave alone gets an element of its own.
    3. What else is ready gets elements, for the highest shards, as far as live workers would not have taken
       it before these have started.
    4. Places that are left are filled early where it is known when the next input comes, once for a task;
       in the first iteration, rollouts start up beside prepare.
    5. A pending element whose input is there does not wait for its begin time.
    6. A pending element that has nothing to do would only start up before those of other stages that have:
       it is withdrawn where they may need the same place.
    7. For what finds no place workers leave once they have nothing to do: those whose next task is furthest
       away, if it is later than what they leave for. They may be at work yet, if they will have done all that
       is ready by then.
    """
    most = _targets(seen)
    withdrawn = _withdrawn(seen, most)
    seen = seen.without(withdrawn)
    demands = [d for kind in seen.wanted for d in _demands(seen, kind, most[kind])]
    demands.sort(key=lambda demand: demand.at)
    handovers, placed = make_places(seen, most, demands)
    orders = [order for demand in placed for order in demand.orders]
    return Staffing(tuple(orders), tuple(_hurried(seen)), handovers, withdrawn)


def _targets(seen: Situation) -> dict[str, int]:
    """Return the most workers of each kind that there are to be."""
    works = {kind: _work(seen, kind) for kind in seen.wanted if kind in seen.needs and _has_work(seen, kind)}
    chain = {kind: work for kind, work in works.items() if kind in seen.plan.job_kinds}
    found = worthwhile(chain, targets_by_group(works, room_of(seen.nodes, seen.others)))
    most = {kind: min(wanted, found.get(kind, wanted)) for kind, wanted in seen.wanted.items()}
    for kind in most:  # inputs before what reads them
        keeping_up = [_keep_up(seen, kind, source, most) for source in _upstream(seen, kind)]
        most[kind] = min([most[kind], *keeping_up])
    return most


def _has_work(seen: Situation, job_kind: str) -> bool:
    """Whether a kind needs places at all: not prepare once it is over, nor an evaluation that never comes."""
    if job_kind == PREPARE.job_kind:
        return PREPARE not in seen.committed
    return seen.plan.share_of_iterations(job_kind) > 0


def _upstream(seen: Situation, job_kind: str) -> list[str]:
    return [source for source in seen.plan.upstream(job_kind) if source in seen.wanted]


def _keep_up(seen: Situation, job_kind: str, source: str, most: Mapping[str, int]) -> int:
    """Return how many workers of a kind keep up with those whose results they read: as many, or more where
    their own tasks take longer."""
    own, theirs = (seen.estimates.get(kind, Estimate()).task for kind in (job_kind, source))
    if own is None or not theirs:
        return seen.wanted[job_kind]
    return math.ceil(most[source] * max(1.0, own / theirs))


def _work(seen: Situation, job_kind: str) -> Work:
    estimate, tasks = seen.estimates.get(job_kind, Estimate()), seen.plan.tasks_of_kind(job_kind)
    seconds = None if estimate.task is None else tasks * estimate.task
    share = seen.plan.share_of_iterations(job_kind)
    if not share:  # prepare, which is there once
        return Work(seen.needs[job_kind], seen.wanted[job_kind], 1, 0.0, 0.0, share)
    return Work(seen.needs[job_kind], seen.wanted[job_kind], tasks, seconds, estimate.coming_back, share)


# --- who is wanted -------------------------------------------------------------------------------------


def _demands(seen: Situation, job_kind: str, most: int) -> Iterator[Demand]:
    """Yield what is wanted of one kind, beyond those who are there or wait in the queue."""
    free = most - seen.crew.count(job_kind)
    left = _sorted(task for task in seen.ready_by_kind.get(job_kind, ()) if task in seen.left)
    sent = sum(e.job_kind == job_kind and e.first in seen.left for e in seen.crew.pending)
    if left or sent:  # which nobody else does: where there is no place an idle worker makes room
        idle = [n for n in seen.idle(job_kind) if _is_waiting(seen, n)]
        idle = idle[: max(0, min(len(left) + sent, len(left) - free))]
        left = left[: max(0, free + len(idle))]
        yield Demand(job_kind, seen.now, tuple(left), replaces=tuple(idle))
    free = max(0, free - len(left))
    chosen = _chosen(seen, job_kind, free)
    if chosen:
        yield Demand(job_kind, seen.now, tuple(chosen))
    early = _early(seen, job_kind, free - len(chosen), chosen)
    if early is not None:
        yield early


def _is_waiting(seen: Situation, name: str) -> bool:
    return any(w.name == name and w.doing is Doing.WAITING for w in seen.crew.workers)


def _sorted(tasks: Iterable[Task]) -> list[Task]:
    """Sort tasks: earlier iterations, and in each the highest shards, first."""
    return sorted(tasks, key=lambda task: (task.iteration, -task.shard))


def _chosen(seen: Situation, job_kind: str, free: int) -> list[Task]:
    """Return the ready tasks, but for those that workers leave alone, that get a worker now."""
    ready = [task for task in seen.ready_by_kind.get(job_kind, ()) if task not in seen.left]
    return _sorted(ready)[: max(0, min(free, _useful(seen, job_kind)))]


def _useful(seen: Situation, job_kind: str) -> int:
    """Return how many more workers of a kind would still find a task once they have started up: live ones
    take one after the other meanwhile."""
    open_tasks = len(seen.open_tasks(job_kind))
    mine = seen.crew.staying.get(job_kind, ())
    takers = sum(w.doing is not Doing.BUSY for w in mine) + seen.crew.waiting[job_kind]
    estimate = seen.estimates.get(job_kind, Estimate())
    meanwhile = 0.0
    if estimate.task and estimate.coming_back is not None:
        meanwhile = len(mine) * estimate.coming_back / estimate.task
    return math.ceil(open_tasks - takers - meanwhile)


def _early(seen: Situation, job_kind: str, free: int, now: Collection[Task]) -> Demand | None:
    """Return the demand for the next tasks of a job kind, whose inputs are not there yet."""
    if job_kind not in seen.early or free <= 0:
        return None
    is_first = job_kind == Stage.ROLLOUT and PREPARE not in seen.committed
    estimate = seen.estimates.get(job_kind, Estimate())
    begin = seen.now if is_first else estimate.begin
    coming = [task for task in seen.coming(job_kind) if task not in now]
    number = min(free, len(coming) - len(seen.idle(job_kind)))
    if begin is None or number <= 0:
        return None
    chosen = tuple(task for task in coming[-number:] if task not in seen.begun_with)
    if not chosen:
        return None
    at = seen.next_use(job_kind)
    return Demand(job_kind, at, chosen, begin if begin > seen.now else None, must_come=False)


def _hurried(seen: Situation) -> Iterator[str]:
    for element in seen.crew.pending:
        is_early = element.begin is not None and element.begin > seen.now
        if is_early and all(source in seen.committed for source in seen.plan.inputs(element.first)):
            yield element.name


def _withdrawn(seen: Situation, most: Mapping[str, int]) -> tuple[str, ...]:
    """Return the pending elements that have no task any more, where others wait for such a place, and those
    that are more than there are to be."""
    ready = {*seen.ready_by_kind, *(kind for kind in seen.wanted if seen.open_tasks(kind))}
    due = (e for e in seen.crew.pending if seen.has_task(e) and (e.begin or 0.0) <= seen.now)
    wanting = ready.union(element.job_kind for element in due)
    spare = (e for e in seen.crew.pending if not seen.has_task(e) and e.job_kind not in ready)
    found = [element.name for element in spare if _is_in_the_way(seen, element.job_kind, wanting)]
    found += [e.name for e in seen.crew.pending if e.name not in found and _is_too_early(seen, e)]
    for kind in seen.wanted:
        mine = [e.name for e in seen.crew.pending if e.job_kind == kind and e.first not in seen.left]
        surplus = seen.crew.count(kind) - most[kind] - sum(name in found for name in mine)
        found += [name for name in reversed(mine) if name not in found][: max(0, surplus)]
    return tuple(found)


def _is_too_early(seen: Situation, element: Pending) -> bool:
    """Whether an element that waits for its input is in the queue with one that must have a place before."""
    is_later = element.begin is not None and element.begin > seen.now  # it takes nobody's place yet
    if is_later or not seen.has_task(element) or seen.is_ready(element.first):
        return False
    late = {
        one.job_kind
        for one in seen.crew.pending
        if one.lacks_room and seen.is_ready(one.first) and comes_before(one.first, element.first)
    }
    return _is_in_the_way(seen, element.job_kind, late)


def _is_in_the_way(seen: Situation, job_kind: str, wanting: Collection[str]) -> bool:
    """Whether a place of a job kind could be one of another kind's."""
    return any(kind != job_kind and seen.may_share(job_kind, kind) for kind in wanting)
