"""Staffing: which workers to submit, and which make place for them. Pure: no clock, queue or disk is read.

Nothing is queued behind workers. A worker finds its next task from records alone; a
pass submits elements where no live worker will do what is ready, or early, so that they have started up when
their input is expected. Where there are fewer places than workers, the same pass decides who leaves for whom:
the worker whose own next task is furthest away, and for nothing that is wanted later than that.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.orchestrate.making_place import make_places
from pipeline.orchestrate.measuring import are_measuring, measured_besides
from pipeline.orchestrate.places import room_of
from pipeline.orchestrate.sharing import Work, is_worthwhile, targets_by_group, worthwhile
from pipeline.orchestrate.situation import Demand, Estimate, Order, Situation
from pipeline.orchestrate.withdrawing import withdrawn, withdrawn_for
from pipeline.run.tasks import PREPARE, Stage, Task
from pipeline.workers.beats import Doing
from pipeline.workers.handover import Handover

_LONG_QUEUE = 60.0
"""Seconds in the queue after which those come too late that are submitted when their input is there."""


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
    measures: bool = False
    """Whether workers of rollouts that have nothing else to do measure policies."""


def is_making_way(decided: Staffing, doing: Iterable[Doing | None], now: float) -> bool:
    """Whether the queue takes more in a moment: somebody leaves, or what waits was withdrawn.

    Args:
        doing: what each worker does.
        now: unix time.
    """
    leaves_now = any(one.at <= now for one in decided.handovers)
    return bool(decided.withdrawn) or leaves_now or Doing.LEAVING in doing


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
    6. What would only start up before those that have something to do, or for nothing, leaves the queue
       (:mod:`pipeline.orchestrate.withdrawing`); so does, where the queue takes no more, what is wanted later
       than something that is not in it.
    7. For what finds no place workers leave once they have nothing to do: those whose next task is furthest
       away, if it is later than what they leave for. They may be at work yet, if they will have done all that
       is ready by then.
    """
    kinds = [kind for kind in seen.plan.job_kinds if kind in seen.needs and kind in seen.wanted]
    chain = {kind: _work(seen, kind) for kind in kinds}
    most = _targets(seen, chain)
    measures = are_measuring(seen, chain, most)
    besides = measured_besides(seen, chain, most) if measures else frozenset()
    spare = withdrawn(seen, most, besides)
    seen = seen.without(spare).without_ready(besides)
    matters = {kind for kind in seen.early if _starts_early(seen, kind, chain, most)}
    matters -= {task.job_kind for task in besides}
    demands = [d for kind in seen.wanted for d in _demands(seen, kind, most[kind], kind in matters)]
    demands.sort(key=lambda demand: _turn(seen, demand))
    later = withdrawn_for(seen, demands)
    seen = seen.without(later)
    handovers, placed = make_places(seen, most, demands)
    orders = [order for demand in placed for order in demand.orders]
    return Staffing(tuple(orders), tuple(_hurried(seen)), handovers, (*spare, *later), measures)


def _turn(seen: Situation, demand: Demand) -> tuple[float, bool, int]:
    """Return a key by which demands sort in the order in which they get places."""
    iteration = demand.tasks[0].iteration if demand.tasks else 0
    return demand.at, demand.job_kind in seen.aside, iteration


def _targets(seen: Situation, chain: Mapping[str, Work]) -> dict[str, int]:
    """Return the most workers of each kind that there are to be. No place is kept for what an iteration is no
    chain of: prepare is there once, and nothing waits for what is measured of policies."""
    room, slots = room_of(seen.nodes, seen.others), _slots_for(seen, chain)
    found = worthwhile(chain, targets_by_group(chain, room, slots))
    most = {kind: min(wanted, found.get(kind, wanted)) for kind, wanted in seen.wanted.items()}
    if PREPARE in seen.committed:
        most[PREPARE.job_kind] = 0
    for kind in seen.wanted:  # inputs before what reads them
        sources = _upstream(seen, kind)
        keeping_up = [max(most[s], _keep_up(seen, kind, s, most[s])) for s in sources]
        most[kind] = min([most[kind], *keeping_up])
    return most


def _slots_for(seen: Situation, chain: Mapping[str, Work]) -> float:
    """Return how many workers of the chain the queue takes: but for one that measures policies, if there is
    anything to measure and each kind of the chain can have one all the same."""
    if seen.slots is None:
        return math.inf
    is_beside = any(seen.open_tasks(kind) or seen.crew.count(kind) for kind in seen.aside)
    return max(1, seen.slots - (is_beside and seen.slots > len(chain)))


def _upstream(seen: Situation, job_kind: str) -> list[str]:
    return [source for source in seen.plan.upstream(job_kind) if source in seen.wanted]


def _keep_up(seen: Situation, job_kind: str, source: str, workers: int) -> int:
    """Return how many workers of a kind keep up with so many of one whose results they read."""
    own, theirs = (seen.estimates.get(kind, Estimate()).task for kind in (job_kind, source))
    if own is None or not theirs:
        return seen.wanted[job_kind]
    return math.ceil(workers * own / theirs)


def _work(seen: Situation, job_kind: str) -> Work:
    estimate, tasks = seen.estimates.get(job_kind, Estimate()), seen.plan.tasks_of_kind(job_kind)
    seconds = None if estimate.task is None else tasks * estimate.task
    return Work(seen.needs[job_kind], seen.wanted[job_kind], tasks, seconds, estimate.turn)


# --- who is wanted -------------------------------------------------------------------------------------


def _demands(seen: Situation, job_kind: str, most: int, starts_early: bool) -> Iterator[Demand]:
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
    if starts_early:
        yield from _early(seen, job_kind, free - len(chosen), chosen)


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
    coming_back = seen.estimates.get(job_kind, Estimate()).coming_back
    return seen.left_over(job_kind, coming_back) - seen.crew.waiting[job_kind]


def _starts_early(seen: Situation, job_kind: str, chain: Mapping[str, Work], most: Mapping[str, int]) -> bool:
    """Whether workers of a kind that may start early are to: what they are there sooner must be worth it."""
    sooner = seen.estimates.get(job_kind, Estimate()).coming_back
    return _is_first(seen, job_kind) or is_worthwhile(sooner, chain, most)


def _is_first(seen: Situation, job_kind: str) -> bool:
    return job_kind == Stage.ROLLOUT and PREPARE not in seen.committed


def _early(seen: Situation, job_kind: str, free: int, now: Collection[Task]) -> Iterator[Demand]:
    """Yield the demands for the next tasks of a job kind, whose inputs are not there yet. Where these come
    one by one, as many as keep up with that are there for the first one, and the others for the last."""
    coming = [task for task in seen.coming(job_kind) if task not in now]
    number = min(free, len(coming) - len(seen.idle(job_kind)))
    chosen = [task for task in coming[-number:] if task not in seen.begun_with] if number > 0 else []
    estimate, use = seen.estimates.get(job_kind, Estimate()), seen.next_use(job_kind)
    if _is_first(seen, job_kind) or _is_long(estimate):
        yield from _early_demand(seen, chosen, use, seen.now)
    elif estimate.last_input in (None, estimate.next_input):
        yield from _early_demand(seen, chosen, use, estimate.begin())
    else:
        later = max(0, len(chosen) - _keeping_up(seen, job_kind))
        yield from _early_demand(seen, chosen[later:], use, estimate.begin())
        last = max(seen.now, estimate.last_input or seen.now)
        yield from _early_demand(seen, chosen[:later], last, estimate.begin(of_last=True))


def _is_long(estimate: Estimate) -> bool:
    """Whether it is not known when workers of a kind are wanted again, and the queue is so long that they get
    in line whenever that is."""
    has_worked = estimate.task is not None
    return has_worked and estimate.next_input is None and estimate.least_queue_wait >= _LONG_QUEUE


def _early_demand(seen: Situation, tasks: Sequence[Task], at: float, begin: float | None) -> Iterator[Demand]:
    if tasks and begin is not None:
        begin = begin if begin > seen.now else None
        yield Demand(tasks[0].job_kind, at, tuple(tasks), begin, must_come=False)


def _keeping_up(seen: Situation, job_kind: str) -> int:
    """Return how many more workers of a kind keep up with the stages before it as their results come."""
    there = seen.crew.count(job_kind)
    sources = _upstream(seen, job_kind)
    needed = [_keep_up(seen, job_kind, source, seen.crew.count(source)) for source in sources]
    return max(0, min(needed, default=seen.wanted[job_kind]) - there)


def _hurried(seen: Situation) -> Iterator[str]:
    for element in seen.crew.pending:
        is_early = element.begin is not None and element.begin > seen.now
        if is_early and all(source in seen.committed for source in seen.plan.inputs(element.first)):
            yield element.name
