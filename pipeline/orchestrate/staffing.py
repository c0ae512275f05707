"""Staffing: which workers to submit, and which make place for them. Pure: no clock, queue or disk is read.

Where stages have workers, nothing is queued behind them. A worker finds its next task from records alone; a
pass submits elements where no live worker will do what is ready, or early, so that they have started up when
their input is expected. Where there are fewer places than workers, the same pass decides who leaves for whom:
the worker whose own next task is furthest away, and for nothing that is wanted later than that.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby

from pipeline.orchestrate.crew import Crew, Pending, Worker
from pipeline.orchestrate.places import Candidate, Held, Need, make_room, place, room_of, with_end_of
from pipeline.orchestrate.sharing import Work, targets_by_group
from pipeline.run.plan import Plan
from pipeline.run.tasks import PREPARE, Stage, Task
from pipeline.workers.beats import Doing
from pipeline.workers.handover import Handover
from slurm.nodes import Node


@dataclass(frozen=True)
class Estimate:
    """Expectations for one job kind, in seconds; None where nothing is known yet."""

    next_input: float | None = None
    """Unix time at which the inputs of its next task are expected to be committed."""
    queue_wait: float | None = None
    """A later quantile of the time from submission to start."""
    startup: float | None = None
    """Seconds from a job's start until it can begin a task."""
    task: float | None = None
    """Seconds that a task takes."""

    @property
    def coming_back(self) -> float | None:
        """Seconds until a worker is there that is submitted now."""
        return None if self.startup is None else self.startup + (self.queue_wait or 0.0)

    @property
    def begin(self) -> float | None:
        """Unix time at which to enter the queue, so as to be ready when the input is there."""
        if self.next_input is None or self.queue_wait is None or self.startup is None:
            return None
        return self.next_input - self.queue_wait - self.startup


@dataclass(frozen=True)
class Order:
    """An array to submit."""

    tasks: tuple[Task, ...]
    """Tasks of one job kind and iteration; each element begins with one."""
    begin: float | None = None
    """Unix time before which it need not start; None: now."""


@dataclass(frozen=True)
class Foreign:
    """A job of the same user, of another run or of none, that waits for room."""

    name: str
    need: Need


@dataclass(frozen=True)
class Staffing:
    """Decisions of one pass about workers."""

    orders: tuple[Order, ...] = ()
    hurried: tuple[str, ...] = ()
    """Names of pending elements whose input came before their begin time."""
    handovers: tuple[Handover, ...] = ()
    """Workers that make place for others once they have nothing to do."""
    withdrawn: tuple[str, ...] = ()
    """Names of pending elements that have nothing to do, where another stage waits for such a place."""


@dataclass(frozen=True)
class Situation:
    """A run and its workers, as one pass sees them."""

    plan: Plan
    tasks: Sequence[Task]
    """Tasks of the iteration at hand and of the next, by iteration."""
    crew: Crew
    held: Mapping[Task, str]
    """See :func:`pipeline.orchestrate.crew.held_tasks`."""
    committed: Collection[Task]
    """At least those of these tasks and of what they read."""
    ready: Collection[Task]
    """Tasks that nobody holds, and whose inputs are committed."""
    wanted: Mapping[str, int]
    """Most workers by job kind, as the settings say."""
    now: float
    """Unix time."""
    estimates: Mapping[str, Estimate] = field(default_factory=dict)
    """What is expected of each job kind."""
    early: Collection[str] = ()
    """Job kinds whose workers start early."""
    begun_with: Collection[Task] = ()
    """Tasks that elements have been submitted for: one that left without its task is not sent early again."""
    left: Collection[Task] = ()
    """Tasks that failed in such a way that no worker takes them by itself: only an element that was submitted
    for one does it (:mod:`pipeline.workers.choosing`)."""
    needs: Mapping[str, Need] = field(default_factory=dict)
    """What jobs of each kind ask for."""
    nodes: Sequence[Node] = ()
    """Nodes of the run's partitions; none where they are not known."""
    others: Sequence[Held] = ()
    """What jobs of the same user hold that are not of the run's stages."""
    foreign: Sequence[Foreign] = ()
    """Jobs of the same user that wait for room, and are not of the run's stages."""

    def idle(self, job_kind: str) -> list[str]:
        """Return the names of workers, and those to be, that have no task; those that wait come first."""
        busy = set(self.held.values())
        staying = sorted(
            (w for w in self.crew.workers if w.stays and w.doing is not Doing.BUSY),
            key=lambda worker: worker.doing is not Doing.WAITING,
        )
        crew: list[Worker | Pending] = [*staying, *self.crew.pending]
        return [one.name for one in crew if one.job_kind == job_kind and one.name not in busy]

    def is_ready(self, task: Task) -> bool:
        """Whether a task of those at hand could be done now."""
        return task not in self.committed and all(i in self.committed for i in self.plan.inputs(task))

    def open_tasks(self, job_kind: str) -> Sequence[Task]:
        """Return the tasks of a kind that are ready and that no worker is at, whoever was submitted for
        them; without those that workers leave alone."""
        return self._open.get(job_kind, ())

    @cached_property
    def _open(self) -> Mapping[str, Sequence[Task]]:
        at_work = {w.name for w in self.crew.workers if w.doing is Doing.BUSY}
        begun = {task for task, name in self.held.items() if name in at_work}
        found: dict[str, list[Task]] = {}
        for task in self.tasks:
            is_taken = task in begun or task in self.left or self.plan.must_have_ended(task) in begun
            if not is_taken and self.is_ready(task):
                found.setdefault(task.job_kind, []).append(task)
        return found

    def next_use(self, job_kind: str) -> float:
        """Return when there is a task for a worker of a kind that waits (unix time); infinite if that is not
        known."""
        return self.now if self.open_tasks(job_kind) else self.next_input(job_kind)

    def next_input(self, job_kind: str) -> float:
        """Return when the next inputs of a kind that are not there are expected (unix time); infinite if that
        is not known."""
        expected = self.estimates.get(job_kind, Estimate()).next_input
        return math.inf if expected is None else max(expected, self.now)

    @cached_property
    def _staying(self) -> Counter[str]:
        return Counter(worker.job_kind for worker in self.crew.workers if worker.stays)

    def done_by(self, job_kind: str) -> float:
        """Return when workers of a kind will have begun with all that is ready (unix time)."""
        if not (tasks := self.open_tasks(job_kind)):
            return self.now
        seconds = self.estimates.get(job_kind, Estimate()).task
        workers = self._staying[job_kind]
        return self.now + len(tasks) * seconds / workers if seconds is not None and workers else math.inf


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
    seen = replace(seen, crew=seen.crew.without(withdrawn))
    demands = [d for kind in seen.wanted for d in _demands(seen, kind, most[kind])]
    demands.sort(key=lambda demand: demand.at)
    handovers, placed = _make_places(seen, most, demands)
    orders = [order for demand in placed for order in demand.orders]
    return Staffing(tuple(orders), tuple(_hurried(seen)), handovers, withdrawn)


def _targets(seen: Situation) -> dict[str, int]:
    """Return the most workers of each kind that there are to be."""
    works = {kind: _work(seen, kind) for kind in seen.wanted if kind in seen.needs}
    found = targets_by_group(works, room_of(seen.nodes, seen.others))
    return {kind: min(most, found.get(kind, most)) for kind, most in seen.wanted.items()}


def _work(seen: Situation, job_kind: str) -> Work:
    estimate, tasks = seen.estimates.get(job_kind, Estimate()), seen.plan.tasks_of_kind(job_kind)
    seconds = None if estimate.task is None else tasks * estimate.task
    share = seen.plan.share_of_iterations(job_kind)
    if not share:  # prepare, which is there once
        seconds, back = 0.0, 0.0
        return Work(seen.needs[job_kind], seen.wanted[job_kind], seconds, back, share)
    return Work(seen.needs[job_kind], seen.wanted[job_kind], seconds, estimate.coming_back, share)


# --- who is wanted -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Demand:
    """Workers of one kind that are wanted, by something that begins at the same time."""

    job_kind: str
    at: float
    """Unix time at which their inputs are, or are expected."""
    tasks: tuple[Task, ...]
    """A task for each of them."""
    begin: float | None = None
    """Unix time before which they need not start; None: now."""
    must_come: bool = True
    """Whether they are submitted also where there is no place, to wait for one."""
    replaces: tuple[str, ...] = ()
    """Names of idle workers of their kind that leave for them."""

    @property
    def orders(self) -> list[Order]:
        return [Order(tasks, self.begin) for tasks in _by_iteration(self.tasks)]


def _demands(seen: Situation, job_kind: str, most: int) -> Iterator[Demand]:
    """Yield what is wanted of one kind, beyond those who are there or wait in the queue."""
    free = most - seen.crew.count(job_kind)
    left = _sorted(task for task in seen.ready if task.job_kind == job_kind and task in seen.left)
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
    ready = [task for task in seen.ready if task.job_kind == job_kind and task not in seen.left]
    return _sorted(ready)[: max(0, min(free, _useful(seen, job_kind)))]


def _useful(seen: Situation, job_kind: str) -> int:
    """Return how many more workers of a kind would still find a task once they have started up: live ones
    take one after the other meanwhile."""
    open_tasks = len(seen.open_tasks(job_kind))
    mine = [w for w in seen.crew.workers if w.job_kind == job_kind and w.stays]
    takers = sum(w.doing is not Doing.BUSY for w in mine)
    takers += sum(element.job_kind == job_kind for element in seen.crew.pending)
    estimate = seen.estimates.get(job_kind, Estimate())
    meanwhile = 0.0
    if estimate.task and estimate.coming_back is not None:
        meanwhile = len(mine) * estimate.coming_back / estimate.task
    return math.ceil(open_tasks - takers - meanwhile)


def _by_iteration(tasks: Iterable[Task]) -> Iterator[tuple[Task, ...]]:
    for _, group in groupby(sorted(tasks), key=lambda task: task.iteration):
        yield tuple(group)


def _early(seen: Situation, job_kind: str, free: int, now: Collection[Task]) -> Demand | None:
    """Return the demand for the next tasks of a job kind, whose inputs are not there yet."""
    if job_kind not in seen.early or free <= 0:
        return None
    is_first = job_kind == Stage.ROLLOUT and PREPARE not in seen.committed
    estimate = seen.estimates.get(job_kind, Estimate())
    begin = seen.now if is_first else estimate.begin
    coming = [task for task in _coming(seen, job_kind) if task not in now]
    number = min(free, len(coming) - len(seen.idle(job_kind)))
    if begin is None or number <= 0:
        return None
    chosen = tuple(task for task in coming[-number:] if task not in seen.begun_with)
    if not chosen:
        return None
    at = seen.next_use(job_kind)
    return Demand(job_kind, at, chosen, begin if begin > seen.now else None, must_come=is_first)


def _coming(seen: Situation, job_kind: str) -> list[Task]:
    """Return the tasks of a job kind that are neither done, held nor ready, in the next iteration that has
    any."""
    done = {*seen.committed, *seen.held, *seen.ready}
    coming = [task for task in seen.tasks if task.job_kind == job_kind and task not in done]
    return [task for task in coming if task.iteration == coming[0].iteration]


def _hurried(seen: Situation) -> Iterator[str]:
    for element in seen.crew.pending:
        is_early = element.begin is not None and element.begin > seen.now
        if is_early and all(source in seen.committed for source in seen.plan.inputs(element.first)):
            yield element.name


def _withdrawn(seen: Situation, most: Mapping[str, int]) -> tuple[str, ...]:
    """Return the pending elements that have no task any more, where others wait for such a place, and those
    that are more than there are to be."""
    ready = {task.job_kind for task in seen.ready}.union(k for k in seen.wanted if seen.open_tasks(k))
    due = (e for e in seen.crew.pending if _has_task(seen, e) and (e.begin or 0.0) <= seen.now)
    wanting = ready.union(element.job_kind for element in due)
    spare = (e for e in seen.crew.pending if not _has_task(seen, e) and e.job_kind not in ready)
    found = [element.name for element in spare if _is_in_the_way(seen, element.job_kind, wanting)]
    for kind in seen.wanted:
        mine = [e.name for e in seen.crew.pending if e.job_kind == kind and e.first not in seen.left]
        surplus = seen.crew.count(kind) - most[kind] - sum(name in found for name in mine)
        found += [name for name in reversed(mine) if name not in found][: max(0, surplus)]
    return tuple(found)


def _has_task(seen: Situation, element: Pending) -> bool:
    return element.first in seen.tasks and element.first not in seen.committed


def _is_in_the_way(seen: Situation, job_kind: str, wanting: Collection[str]) -> bool:
    """Whether a place of a job kind could be one of another kind's."""
    mine = _partitions(seen, job_kind)
    return any(kind != job_kind and not mine.isdisjoint(_partitions(seen, kind)) for kind in wanting)


def _partitions(seen: Situation, job_kind: str) -> frozenset[str]:
    return seen.needs[job_kind].partitions if job_kind in seen.needs else frozenset()


# --- who makes place -----------------------------------------------------------------------------------


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

    def __post_init__(self) -> None:
        self._workers = {worker.name: worker for worker in self.seen.crew.workers}
        self._there = Counter(w.job_kind for w in self.seen.crew.workers if w.stays)

    def leave(self, names: Collection[str], whom: str) -> None:
        """Have some workers leave."""
        known = {one.name: one for one in self.candidates}
        self._leave([known.get(name, Candidate(name, (), _NOTHING)) for name in names], whom, 0.0)

    def find(
        self, need: Need, whom: str, at: float, begin: float | None = None, is_full: bool = False
    ) -> bool:
        """Give a job a place: one that is free, or that workers leave. False where it has none.

        Args:
            whom: name of the job or its kind.
            at: unix time at which it is wanted.
            begin: unix time before which nobody need leave.
            is_full: whether Slurm has found no free place for it.
        """
        if (key := (need, whom, at, is_full)) in self.in_vain:
            return False
        left = None if is_full else place(self.room, need)
        if left is None and not self.seen.nodes and not is_full:
            return True  # nobody knows
        if left is None:
            room = _without_room(self.room, need) if is_full else self.room
            willing = [one for one in self.candidates if self._may_leave(one.name, whom, at)]
            chosen = make_room(room, need, willing)
            if not chosen:
                self.in_vain.add(key)
                return False
            self._leave(chosen, whom, begin or 0.0)
            left = place(self.room, need)
        self.room = left or self.room
        return True

    def _leave(self, chosen: Sequence[Candidate], whom: str, at: float) -> None:
        self.room = with_end_of(self.room, chosen)
        staying = (one.name for one in chosen if self._workers[one.name].stays)
        self.leaving += [Handover(name, whom, at) for name in staying]
        self.candidates = [one for one in self.candidates if one not in chosen]
        self._there.subtract(w.job_kind for one in chosen if (w := self._workers[one.name]).stays)

    def _may_leave(self, name: str, whom: str, at: float) -> bool:
        """Whether a worker may leave for something: it is one too many, or has its next task later."""
        worker = self._workers[name]
        kind = worker.job_kind
        if not worker.stays:
            return True
        if kind == whom:
            return False
        if worker.doing is Doing.BUSY:
            return self.seen.done_by(kind) <= at < self.seen.next_input(kind)
        return self._there[kind] > self.most.get(kind, 0) or at < self.seen.next_use(kind)


def _without_room(room: Mapping[str, Node], need: Need) -> dict[str, Node]:
    """Return nodes of which others have taken all that a job of this kind would fit into."""
    found = {}
    for name, node in room.items():
        fits = need.fits(node)
        found[name] = replace(node, gpus=0, cpus=node.cpus if need.gpus else 0) if fits else node
    return found


def _make_places(
    seen: Situation, most: Mapping[str, int], demands: Sequence[Demand]
) -> tuple[tuple[Handover, ...], list[Demand]]:
    """Find places for what waits in the queue and then for what is wanted. Returns who leaves for them, and
    what is to be submitted: early ones for which there is a place, the others in any case."""
    places = Places(seen, most, _free_room(seen), _candidates(seen))
    full = {e.job_kind for e in seen.crew.pending if e.lacks_room}
    for element in seen.crew.pending:
        kind = element.job_kind
        if kind in seen.needs and _has_task(seen, element) and (element.begin or 0.0) <= seen.now:
            at = seen.now if seen.is_ready(element.first) else seen.next_use(kind)
            places.find(seen.needs[kind], kind, at, is_full=element.lacks_room)
    for foreign in seen.foreign:
        places.find(foreign.need, foreign.name, seen.now, is_full=True)
    placed = []
    for demand in demands:
        kind, found = demand.job_kind, len(demand.tasks)
        places.leave(demand.replaces, kind)
        if need := seen.needs.get(kind):
            found = sum(
                places.find(need, kind, demand.at, demand.begin, is_full=kind in full) for _ in demand.tasks
            )
        if demand.must_come or found:
            placed.append(demand if demand.must_come else replace(demand, tasks=demand.tasks[-found:]))
    return tuple(places.leaving), placed


def _free_room(seen: Situation) -> dict[str, Node]:
    """Return what the user's own jobs leave of the nodes; of nodes that are not known only that workers are
    there."""
    workers = [w for w in seen.crew.workers if w.job_kind in seen.needs]
    held = [Held(node, seen.needs[w.job_kind]) for w in workers for node in w.nodes]
    known = {node.name for node in seen.nodes}
    unknown = {
        one.node: Node(one.node, one.need.partitions, 0, 0, 0) for one in held if one.node not in known
    }
    return {**unknown, **room_of(seen.nodes, [*held, *seen.others])}


def _candidates(seen: Situation) -> list[Candidate]:
    """Return the workers that leave, then those that have nothing to do, then those that are at work: of each
    first those whose next task is furthest away, and those whose start was not in vain."""
    order = {Doing.LEAVING: 0, Doing.WAITING: 1, Doing.BUSY: 2}
    found = [w for w in seen.crew.workers if w.job_kind in seen.needs and w.doing in order]
    found.sort(key=lambda w: (order[w.doing], -seen.next_input(w.job_kind), not w.has_worked, w.name))
    return [Candidate(w.name, w.nodes, seen.needs[w.job_kind]) for w in found]
