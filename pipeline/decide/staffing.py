"""Staffing: which workers to submit, and which make place for them. Pure: no clock, queue or disk is read.

Nothing is queued behind workers. A worker finds its next task from records alone; a
pass submits elements where no live worker will do what is ready, or early, so that they have started up when
their input is expected. Where there are fewer places than workers, the same pass decides who leaves for whom:
the worker whose own next task is furthest away, and for nothing that is wanted later than that.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.decide.cancelling import elements_to_cancel, elements_to_cancel_for
from pipeline.decide.choosing import can_be_missed
from pipeline.decide.making_place import make_places
from pipeline.decide.measuring import MEASURED, MEASURES
from pipeline.decide.places import room_of
from pipeline.decide.sharing import Work, fits_all, is_worthwhile, round_of, targets_by_group, worthwhile
from pipeline.decide.situation import Demand, Estimate, Situation, WorkerRequest
from pipeline.run.plan import policy_maker
from pipeline.run.tasks import PREPARE, Stage, Task
from pipeline.workers.beats import Doing
from pipeline.workers.handover import Handover

_LONG_QUEUE = 60.0
"""Seconds in the queue after which those come too late that are submitted when their input is there."""


@dataclass(frozen=True)
class Staffing:
    """Decisions of one pass about workers."""

    requests: tuple[WorkerRequest, ...] = ()
    start_now: tuple[str, ...] = ()
    """Names of pending elements whose input came before their begin time."""
    end_idle: tuple[Handover, ...] = ()
    """Workers that make place for others once they have nothing to do."""
    cancel_pending: tuple[str, ...] = ()
    """Names of pending elements that have nothing to do, where another stage waits for such a place, and of
    those that are more than there are to be."""
    measures: bool = False
    """Whether workers of rollouts that have nothing else to do measure policies."""


def is_freeing_slots(decided: Staffing, doing: Iterable[Doing | None], now: float) -> bool:
    """Whether the queue takes more in a moment: a worker leaves, or what waits is cancelled.

    Args:
        doing: what each worker does.
        now: unix time.
    """
    leaves_now = any(one.at <= now for one in decided.end_idle)
    return bool(decided.cancel_pending) or leaves_now or Doing.LEAVING in doing


def staff(seen: Situation) -> Staffing:
    """Decide which workers to submit, and who makes place.

    1. Never more than wanted, nor than have places: where not all kinds have theirs, they share or take turns
       (:mod:`pipeline.decide.sharing`). Live workers that stay and pending elements count.
    2. A task that workers leave alone gets an element of its own.
    3. What else is ready gets elements, for the highest shards, as far as live workers would not have taken
       it before these have started.
    4. Places that are left are filled early where it is known when the next input comes, once for a task;
       in the first iteration, rollouts start up beside prepare.
    5. A pending element whose input is there does not wait for its begin time.
    6. What would only start up before those that have something to do, or for nothing, leaves the queue
       (:mod:`pipeline.decide.cancelling`); so does, where the queue takes no more, what is wanted later
       than something that is not in it.
    7. For what finds no place workers leave once they have nothing to do: those whose next task is furthest
       away, if it is later than what they leave for. They may be busy yet, if they will have done all that
       is ready by then.
    """
    kinds = [kind for kind in seen.plan.job_kinds if kind in seen.needs and kind in seen.wanted]
    chain = {kind: _work(seen, kind) for kind in kinds}
    most = _targets(seen, chain)
    measures = are_measuring(seen, chain, most)
    besides = measured_besides(seen, chain, most) if measures else frozenset()
    spare = elements_to_cancel(seen, most, besides)
    seen = seen.without(spare).without_ready(besides)
    matters = {kind for kind in seen.early if _starts_early(seen, kind, chain, most)}
    matters -= {task.job_kind for task in besides}
    demands = [d for kind in seen.wanted for d in _demands(seen, kind, most[kind], kind in matters)]
    demands.sort(key=lambda demand: _turn(seen, demand))
    later = elements_to_cancel_for(seen, demands)
    seen = seen.without(later)
    handovers, placed = make_places(seen, most, demands)
    requests = [order for demand in placed for order in demand.requests]
    return Staffing(tuple(requests), tuple(_to_start_now(seen)), handovers, (*spare, *later), measures)


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
    """Return how many workers of the chain may be there: but for one that measures policies, if there is
    anything to measure and each kind of the chain can have one all the same."""
    slots = seen.most_at_once
    if slots == math.inf:
        return slots
    is_beside = any(seen.open_tasks(kind) or seen.crew.count(kind) for kind in seen.aside)
    return max(1, slots - (is_beside and slots > len(chain)))


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
    most, ahead = seen.wanted[job_kind], seen.plan.staleness
    return Work(seen.needs[job_kind], most, tasks, seconds, estimate.turn, ahead)


# --- what is wanted -------------------------------------------------------------------------------------


def _demands(seen: Situation, job_kind: str, most: int, starts_early: bool) -> Iterator[Demand]:
    """Yield what is wanted of one kind, beyond those that are there or pending."""
    free = most - seen.crew.count(job_kind)
    left = _sorted(task for task in seen.ready_by_kind.get(job_kind, ()) if task in seen.only_by_pass)
    sent = sum(e.job_kind == job_kind and e.first in seen.only_by_pass for e in seen.crew.pending)
    if left or sent:  # which no other does: where there is no place an idle worker makes room
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
    ready = [task for task in seen.ready_by_kind.get(job_kind, ()) if task not in seen.only_by_pass]
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
    chosen = [task for task in coming[-number:] if task not in seen.submitted_for] if number > 0 else []
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


def _to_start_now(seen: Situation) -> Iterator[str]:
    for element in seen.crew.pending:
        is_early = element.begin is not None and element.begin > seen.now
        if is_early and all(source in seen.committed for source in seen.plan.inputs(element.first)):
            yield element.name


# Workers of rollouts may measure policies, so that none of their own start up for that. Which of them does,
# and when, they find themselves (pipeline.decide.choosing): a pass says whether any may at all, and submits
# nothing for what they will do.

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
    in_vain = {*seen.only_by_pass, *seen.tried}
    return frozenset(task for task in undone if task in seen.begun or task not in in_vain)


def _are_enough(
    seen: Situation, undone: Sequence[Task], most: Mapping[str, int], has_own_place: bool
) -> bool:
    """Whether workers of rollouts are there for evaluations, or will be. Where one of their own would find a
    place it comes if they do not keep up, or if it is not known how long one takes and none would be left for
    the rollouts that come. Else it gets in line once several policies wait.

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
    are known, in the queue, and by the user's limits."""
    numbers = {MEASURED: beside, **{kind: most[kind] for kind in chain}}
    may_be_there = sum(numbers.values()) <= seen.most_at_once
    return (
        bool(seen.nodes) and may_be_there and fits_all(seen.needs, numbers, room_of(seen.nodes, seen.others))
    )


def _has_own_place(seen: Situation, chain: Mapping[str, Work], most: Mapping[str, int]) -> bool:
    return _have_places(seen, chain, most, beside=1)


def _seconds(seen: Situation) -> float | None:
    return seen.estimates.get(MEASURED, Estimate()).task


def _rest_of_iteration(chain: Mapping[str, Work]) -> float | None:
    """Return the seconds of an iteration after its rollouts, at least: one task of each further kind, as some
    are busy while rollouts still come. None if unknown."""
    others = [work for kind, work in chain.items() if kind != MEASURES]
    return None if any(work.seconds is None for work in others) else sum(map(round_of, others))
