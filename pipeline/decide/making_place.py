"""Evictions: which worker leaves for which job, where there are fewer places than workers. Pure.

A worker leaves only for a job that would start in its place, that is wanted now or will be by then, and that
has been given this place: everything is decided here, at once, for all.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.decide.choosing import PATIENCE
from pipeline.decide.crew import Pending, Worker
from pipeline.decide.places import Candidate, Held, Need, count, make_room, place, room_of, with_end_of
from pipeline.decide.sharing import fits_all
from pipeline.decide.situation import Demand, Estimate, Situation
from pipeline.run.tasks import Task
from pipeline.workers.beats import Doing
from pipeline.workers.handover import Handover
from slurm.nodes import Node

_SOON = 3.0
"""Seconds in the queue that are no reason to leave later: leaving takes as long."""
_NOTHING = Need(frozenset(), cpus=0)


@dataclass
class Places:
    """Places of the run's nodes, as they are given away one after the other."""

    seen: Situation
    most: Mapping[str, int]
    room: dict[str, Node]
    candidates: list[Candidate]
    """Workers that may leave, those that are least missed first."""
    leaving: list[Handover] = field(default_factory=list)
    in_vain: set[tuple[Need, str, float, bool]] = field(default_factory=set)
    """What was looked for and not found: places and who may leave only get fewer."""
    lacking: set[str] = field(default_factory=set)
    """Job kinds of which something that is wanted now has found no place."""
    given: set[str] = field(default_factory=set)
    """Job kinds of which something has been given a place."""
    fits_all: bool = False
    """Whether all workers that there are to be have places at once, where no other people's jobs are."""
    slots: float = math.inf
    """Elements that the queue still takes, with those that leave for something in it."""
    is_tight: bool = False
    """Whether the queue or a limit of the user's does not let all workers be there that there are to be."""
    unsubmitted: set[str] = field(default_factory=set)
    """Job kinds of which something that is wanted now is not taken by the queue."""

    def __post_init__(self) -> None:
        self._workers = {worker.name: worker for worker in self.seen.crew.workers}
        self._alike = {worker.name: (worker.job_kind, worker.doing) for worker in self.seen.crew.workers}
        self._there = Counter({kind: len(found) for kind, found in self.seen.crew.staying.items()})

    def leave(self, names: Collection[str], job_kind: str) -> None:
        """Have some workers leave for others of their kind."""
        known = {one.name: one for one in self.candidates}
        chosen = [known.get(name, Candidate(name, (), _NOTHING)) for name in names]
        self._leave(chosen, Handover("", job_kind))

    def is_kept(self, task: Task) -> bool:
        """Whether an early start for a task could take a place that is wanted before it."""
        before = self.seen.kinds_before(task)
        if self.unsubmitted & before:
            return True
        return any(self.seen.may_share(task.job_kind, kind) for kind in self.lacking & before)

    def give(
        self, demand: Demand, need: Need | None, whom: Handover, at: float, is_full: bool, is_limited: bool
    ) -> bool:
        """Give something that is not in the queue a place on nodes, and one in the queue. False where it
        lacks one of them; what must come is put into the queue all the same if that takes it."""
        has_room = need is None or self.find(need, whom, at, is_full, is_limited)
        if not (has_room or demand.must_come):
            return False
        is_taken = self._take_slot(whom, at)
        if demand.must_come and not is_taken:
            self.unsubmitted.add(demand.job_kind)
        return is_taken and has_room

    def _take_slot(self, whom: Handover, at: float) -> bool:
        """Give something a place in the queue: one that is free, or that a worker leaves."""
        if self.slots < 1:
            willing = self._willing(whom.whom, at)
            if not willing:
                return False
            self._leave(willing[:1], whom, self._is_first_try(whom.whom))
        self.slots -= 1
        self.given.add(whom.whom)
        return True

    def find(
        self, need: Need, whom: Handover, at: float, is_full: bool = False, is_limited: bool = False
    ) -> bool:
        """Give a job a place: one that is free, or that workers leave. False where it has none.

        Args:
            whom: what is noted of those that leave for it, but for their names.
            at: unix time at which it is wanted.
            is_full: whether Slurm has found no free place for it.
            is_limited: whether that is for a limit of the user, so that other people's ends are of no use.
        """
        if (key := (need, whom.whom, at, is_full)) in self.in_vain:
            return False
        left = None if is_full else place(self.room, need)
        if left is None and not self.seen.nodes and not is_full:
            return True  # unknown
        if left is None:
            has_room = place(self.room, need) is not None  # as far as the run's own jobs go
            willing = self._willing(whom.whom, at)
            if is_limited and has_room:
                chosen = _within_limit(need, willing)
            else:
                chosen = make_room(_without_room(self.room, need) if is_full else self.room, need, willing)
            if not chosen:
                self.in_vain.add(key)
                return False
            is_others = is_full and not is_limited and has_room and self.fits_all
            self._leave(chosen, whom, is_others or self._is_first_try(whom.whom))
            left = place(self.room, need)
        self.room = left or self.room
        self.given.add(whom.whom)
        return True

    def _leave(self, chosen: Sequence[Candidate], whom: Handover, is_patient: bool = False) -> None:
        """Have workers leave.

        Args:
            is_patient: whether what it is for waits first for as long as they would take to come back.
        """
        self.room = with_end_of(self.room, chosen)
        self.slots += len(chosen)
        staying = [self._workers[one.name] for one in chosen if self._workers[one.name].stays]
        until = self._patience(staying, whom) if is_patient else 0.0
        self.leaving += [replace(whom, worker=one.name, at=max(whom.at, until)) for one in staying]
        names = {one.name for one in chosen}
        self.candidates = [one for one in self.candidates if one.name not in names]
        self._there.subtract(w.job_kind for one in chosen if (w := self._workers[one.name]).stays)

    def _is_first_try(self, job_kind: str) -> bool:
        """Whether a kind has a worker or gets one, and it is not known yet how long its tasks take."""
        if not job_kind or self.seen.estimates.get(job_kind, Estimate()).task is not None:
            return False
        return job_kind in self.given or bool(self.seen.crew.staying.get(job_kind))

    def _patience(self, leaving: Sequence[Worker], whom: Handover) -> float:
        """Return the time (unix) before which no worker leaves for a job that other people keep waiting, or
        that is not the first of a kind of unknown length: all may be done, or they gone, before one that left
        for it were back. Counted from the pass that saw so first."""
        costs = [self._loss(one.job_kind) for one in leaving]
        promised = [one.at for one in self.seen.promised if _is_same(one, whom)]
        return min([self.seen.now + max(costs, default=0.0), *promised])

    def _loss(self, job_kind: str) -> float:
        """Return the seconds that a stage would lose whose worker leaves: what it takes one to come back,
        but for those in which it has nothing to do anyway."""
        cost = self.seen.estimates.get(job_kind, Estimate()).coming_back or 0.0
        use = self.seen.next_use(job_kind)
        return max(0.0, cost - max(0.0, use - self.seen.now)) if use < math.inf else cost

    def _willing(self, whom: str, at: float) -> list[Candidate]:
        """Return the candidates that may leave for something. Of those of a kind that do the same all may, or
        none."""
        found, known = [], dict[tuple[str, Doing], bool]()
        for one in self.candidates:
            alike = self._alike[one.name]
            if alike not in known:
                known[alike] = self._may_leave(self._workers[one.name], whom, at)
            if known[alike]:
                found.append(one)
        return found

    def _may_leave(self, worker: Worker, whom: str, at: float) -> bool:
        """Whether a worker may leave for something: it is one too many, or has its next task later."""
        kind = worker.job_kind
        if not worker.stays:
            return True
        if kind == whom:
            return False
        is_too_many = self._there[kind] > self.most.get(kind, 0)
        if whom and not is_too_many and self.seen.rest(whom) < self._loss(kind):
            return False  # all is done without it before it were back
        if self.seen.is_ahead_of(kind, whom):
            return True  # before it takes a task of a later iteration
        if worker.doing is Doing.BUSY:  # for another run's job one of another run may wait already
            return bool(whom) and self.seen.done_by(kind) <= at < self.seen.next_input(kind)
        if not self.seen.open_tasks(kind) and self.seen.waits_for(kind, whom):
            return True  # whatever is expected: its input comes from there
        return is_too_many or at < self.seen.next_use(kind)


def _is_same(promised: Handover, whom: Handover) -> bool:
    """Whether a place was promised to the same job or, of a kind that the queue takes no more of, to one."""
    if whom.job or promised.job:
        return promised.job == whom.job
    return promised.at > 0 and promised.whom == whom.whom


def _within_limit(need: Need, willing: Sequence[Candidate]) -> tuple[Candidate, ...] | None:
    """Choose whose end lets a job start that only a limit of its user keeps waiting, on whatever node: one
    that holds as many GPUs, if there is any."""
    gpus = need.gpus * need.num_nodes
    enough = (one for one in willing if one.need.gpus * one.need.num_nodes >= gpus)
    chosen = next(enough, willing[0] if willing else None)
    return None if chosen is None else (chosen,)


def _without_room(room: Mapping[str, Node], need: Need) -> dict[str, Node]:
    """Return nodes of which others have taken all that a job of this kind would fit into."""
    found = {}
    for name, node in room.items():
        fits = need.fits(node)
        found[name] = replace(node, gpus=0, cpus=node.cpus if need.gpus else 0) if fits else node
    return found


def make_places(
    seen: Situation, most: Mapping[str, int], demands: Sequence[Demand]
) -> tuple[tuple[Handover, ...], list[Demand]]:
    """Find places for what waits in the queue and then for what is wanted. Returns who leaves for them, and
    what is to be submitted: early ones for which there is a place, the others in any case."""
    places = Places(
        seen=seen,
        most=most,
        room=free_room(seen),
        candidates=_candidates(seen),
        fits_all=_fits_all(seen, most),
        slots=seen.free_slots,
        is_tight=sum(most[kind] for kind in seen.wanted) > seen.most_at_once,
    )
    full = {e.job_kind: e.is_limited for e in seen.crew.pending if e.lacks_room}
    waiting = [e for e in seen.crew.pending if e.job_kind in seen.needs and seen.has_task(e)]
    for element in waiting:
        if (element.begin or 0.0) <= seen.now:
            _find_for(places, element)
    for foreign in seen.foreign:
        whom = Handover("", "", job=foreign.name)
        places.find(foreign.need, whom, seen.now, True, foreign.is_limited)
    placed = _placed(places, [demand for demand in demands if demand.must_come], full)
    for element in waiting:
        if (element.begin or 0.0) > seen.now and not places.is_kept(element.first):
            _find_for(places, element)
    placed += _placed(places, [demand for demand in demands if not demand.must_come], full, placed)
    return tuple(places.leaving), placed


def _find_for(places: Places, element: Pending) -> None:
    """Give an element of the queue a place."""
    seen, kind = places.seen, element.job_kind
    at = _wanted_at(seen, element) if seen.is_ready(element.first) else seen.next_use(kind)
    quick = 0.0 if element.lacks_room else _quick(seen, kind)
    since = max(element.since, element.begin or 0.0)
    is_later = (element.begin or 0.0) > seen.now
    whom = Handover("", kind, since + quick if quick or is_later else 0.0, element.name)
    if not places.find(seen.needs[kind], whom, at, element.lacks_room, element.is_limited) and at <= seen.now:
        places.lacking.add(kind)


def _wanted_at(seen: Situation, element: Pending) -> float:
    """Return when an element must have a place whose task is ready (unix time). Nothing waits for what is
    measured of policies: it has time until the others would be there again, unless it has waited for long;
    and any time where it is not known when these go on."""
    kind = element.job_kind
    if kind not in seen.aside:
        return seen.now
    beside = [one for one in seen.plan.job_kinds if seen.may_share(kind, one)]
    known = {one: seen.estimates.get(one, Estimate()) for one in (*beside, kind)}
    turns = [found.turn for found in known.values() if found.turn is not None]
    if not turns:
        return math.inf
    cost = 2 * max(turns) + (known[kind].task or 0.0)
    if seen.now - element.since >= PATIENCE * cost:
        return seen.now
    is_known = all(known[one].next_input is not None or not seen.coming(one) for one in beside)
    return seen.now + cost if is_known else math.inf


def _placed(
    places: Places, demands: Sequence[Demand], full: Mapping[str, bool], before: Sequence[Demand] = ()
) -> list[Demand]:
    """Return those demands that are to be submitted.

    Args:
        full: job kinds for which Slurm has found no free place, and whether that is for a limit of the user.
        before: what is submitted in any case.
    """
    seen, placed = places.seen, list[Demand]()
    for demand in demands:
        if not demand.must_come and _is_too_early(places, demand, [*before, *placed]):
            continue
        kind = demand.job_kind
        demand = demand if demand.must_come else _behind_earlier(places, demand)
        places.leave(demand.replaces, kind)
        quick = _quick(seen, kind)
        whom = Handover("", kind, (demand.begin or seen.now) + quick if demand.begin or quick else 0.0)
        at = math.inf if kind in seen.aside else demand.at  # no eviction before it has waited
        need, is_full, is_limited = seen.needs.get(kind), kind in full, full.get(kind, False)
        found = sum(places.give(demand, need, whom, at, is_full, is_limited) for _ in demand.tasks)
        if demand.must_come and found < len(demand.tasks):
            places.lacking.add(kind)
        if demand.must_come or found:
            placed.append(demand if demand.must_come else replace(demand, tasks=demand.tasks[-found:]))
    return placed


def _is_too_early(places: Places, demand: Demand, placed: Sequence[Demand]) -> bool:
    """Whether an early start would take a place that an earlier stage needs: one that has work before it and
    no worker, or not all that it wants, and may use the same nodes."""
    seen = places.seen
    if places.is_kept(demand.tasks[0]):
        return True
    there = {one.job_kind for one in placed}
    before = (kind for kind in seen.kinds_before(demand.tasks[0]) if kind not in there)
    lacking = (kind for kind in before if not seen.crew.count(kind) and kind in seen.wanted)
    return any(places.is_tight or seen.may_share(demand.job_kind, kind) for kind in lacking)


def _behind_earlier(places: Places, demand: Demand) -> Demand:
    """Have an early start that is not sure of a place enter the queue no sooner than what waits to do so for
    an earlier stage: it would take the place that was found for that."""
    seen, kind, number = places.seen, demand.job_kind, len(demand.tasks)
    need = seen.needs.get(kind)
    if need is None or (not places.is_tight and count(places.room, need, number) == number):
        return demand
    before = seen.kinds_before(demand.tasks[0])
    rivals = {other for other in before if places.is_tight or seen.may_share(kind, other)}
    begin = max((one.begin or 0.0 for one in seen.crew.pending if one.job_kind in rivals), default=0.0)
    return replace(demand, begin=begin) if begin > max(seen.now, demand.begin or 0.0) else demand


def free_room(seen: Situation) -> dict[str, Node]:
    """Return what the user's own jobs leave of the nodes; of nodes that are not known only that workers are
    there."""
    workers = [w for w in seen.crew.workers if w.job_kind in seen.needs]
    held = [Held(node, seen.needs[w.job_kind]) for w in workers for node in w.nodes]
    known = {node.name for node in seen.nodes}
    unknown = {
        one.node: Node(one.node, one.need.partitions, 0, 0, 0) for one in held if one.node not in known
    }
    return {**unknown, **room_of(seen.nodes, [*held, *seen.others])}


def _fits_all(seen: Situation, most: Mapping[str, int]) -> bool:
    numbers = {kind: most[kind] for kind in seen.wanted if kind in seen.needs and kind not in seen.aside}
    return bool(seen.nodes) and fits_all(seen.needs, numbers, room_of(seen.nodes, seen.others))


def _candidates(seen: Situation) -> list[Candidate]:
    """Return the workers that leave, then those that have nothing to do, then those that are busy: of each
    first those whose next task is furthest away, and those whose start was not in vain. No job gets
    the place of one whose node takes no more jobs."""
    order = {Doing.LEAVING: 0, Doing.WAITING: 1, Doing.BUSY: 2}
    known = {node.name for node in seen.nodes}
    found = [w for w in seen.crew.workers if w.job_kind in seen.needs and w.doing in order]
    found = [w for w in found if not known or known.issuperset(w.nodes)]
    found.sort(key=lambda w: (order[w.doing], -seen.next_input(w.job_kind), not w.has_worked, w.name))
    return [Candidate(w.name, w.nodes, seen.needs[w.job_kind]) for w in found]


def _quick(seen: Situation, job_kind: str) -> float:
    """Return the seconds that a job is in the queue at least: before that no worker leaves for it."""
    least = seen.estimates.get(job_kind, Estimate()).least_queue_wait
    return least if least > _SOON else 0.0
