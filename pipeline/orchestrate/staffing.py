"""Staffing: which tasks have somebody, and which workers to submit. Pure: no clock, queue or disk is read.

Where stages have workers, nothing is queued behind them. A worker finds its next task from records alone; a
pass submits elements where no live worker will do what is ready, or early, so that they have started up when
their input is expected.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from pipeline.run.plan import Plan
from pipeline.run.tasks import PREPARE, Stage, Task
from pipeline.workers.beats import Doing
from pipeline.workers.claims import Claim


@dataclass(frozen=True)
class Worker:
    """A worker whose job runs, as Slurm and its beat show it."""

    name: str
    """Array job, element and restart, like ``4711_3r0``."""
    first: Task
    """Task that its element was submitted for."""
    doing: Doing = Doing.STARTING
    """Also STARTING where it has not beaten yet."""
    task: Task | None = None
    """Task that it does, or waits for."""
    since: float = 0.0
    """Unix time, by the worker's own clock, at which it began to do that."""

    @property
    def job_kind(self) -> str:
        return self.first.job_kind

    @property
    def stays(self) -> bool:
        """Whether it may take another task."""
        return self.doing is not Doing.LEAVING

    def is_at(self, claim: Claim) -> bool:
        """Whether it works on what it claimed: the newest claim that it took.

        A claim that is newer than its state is of a task that it has just begun.
        """
        if self.doing is Doing.STARTING or claim.time > self.since:
            return True
        return self.doing is Doing.BUSY and self.task == claim.task


@dataclass(frozen=True)
class Pending:
    """An element that waits in the queue: a worker to be, or one that Slurm put back."""

    name: str
    """Array job and element, like ``4711_3``."""
    first: Task
    begin: float | None = None
    """Unix time before which it does not start; None: as soon as there is room."""

    @property
    def job_kind(self) -> str:
        return self.first.job_kind


@dataclass(frozen=True)
class Crew:
    """Workers of a run at one moment."""

    workers: Sequence[Worker] = ()
    pending: Sequence[Pending] = ()

    def count(self, job_kind: str) -> int:
        """Count those that may do a task of a job kind."""
        staying = sum(worker.job_kind == job_kind and worker.stays for worker in self.workers)
        return staying + sum(element.job_kind == job_kind for element in self.pending)

    def without(self, names: Collection[str]) -> "Crew":
        """Return the crew without some pending elements."""
        return replace(self, pending=[element for element in self.pending if element.name not in names])


def held_tasks(claims: Iterable[Claim], crew: Crew, is_committed: Collection[Task]) -> dict[Task, str]:
    """Return the tasks that somebody does or begins with, each with the name of its worker or element.

    A task that is committed is held only by a worker that is still at it: an update writes the trainer's
    state behind its policy. What a claim says goes before what an element was submitted for.
    """
    workers = {worker.name: worker for worker in crew.workers}
    newest = _newest_claims(claims)
    held = {claim.task: name for name, claim in newest.items() if _is_held(workers.get(name), claim)}
    starting = [w for w in crew.workers if w.doing is Doing.STARTING and w.name not in newest]
    beginning: list[Worker | Pending] = [*starting, *crew.pending]
    for one in beginning:
        if one.first not in is_committed:
            held.setdefault(one.first, one.name)
    return held


def _newest_claims(claims: Iterable[Claim]) -> dict[str, Claim]:
    """Return each worker's newest claim: it does one task at a time."""
    newest: dict[str, Claim] = {}
    for claim in claims:
        known = newest.get(claim.worker)
        if known is None or (claim.time, claim.number) > (known.time, known.number):
            newest[claim.worker] = claim
    return newest


def _is_held(worker: Worker | None, claim: Claim) -> bool:
    return worker is not None and worker.is_at(claim)


def failed_claims(
    claims: Sequence[Claim],
    crew: Crew,
    committed: Collection[Task],
    judged: Collection[str],
    broken: Collection[str] = (),
) -> list[Claim]:
    """Return claims that came to nothing: not committed, and their worker is gone or does something else.

    Args:
        judged: ids of the attempts whose end is known already.
        broken: ids of attempts that failed at tasks which are committed now, by other attempts. Any other
            attempt at such a task was only too late.
    """
    workers, newest = {worker.name: worker for worker in crew.workers}, _newest_claims(claims)
    left_out = {c.attempt for name, c in newest.items() if _is_held(workers.get(name), c)}.union(judged)
    missing = (c for c in claims if c.task not in committed or c.attempt in broken)
    return [c for c in missing if c.attempt not in left_out]


@dataclass(frozen=True)
class Estimate:
    """Expectations for one job kind, in seconds; None where nothing is known yet."""

    next_input: float | None = None
    """Unix time at which the inputs of its next task are expected to be committed."""
    queue_wait: float | None = None
    """A later quantile of the time from submission to start."""
    startup: float | None = None
    """Seconds from a job's start until it can begin a task."""

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
class Staffing:
    """Decisions of one pass about workers."""

    orders: tuple[Order, ...] = ()
    hurried: tuple[str, ...] = ()
    """Names of pending elements whose input came before their begin time."""
    dismissed: tuple[str, ...] = ()
    """Names of idle workers that make room for one that will do what they leave alone."""
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
    """See :func:`held_tasks`."""
    committed: Collection[Task]
    """At least those of these tasks and of what they read."""
    ready: Collection[Task]
    """Tasks that nobody holds, and whose inputs are committed."""
    wanted: Mapping[str, int]
    """Number of workers by job kind."""
    now: float
    """Unix time."""
    estimates: Mapping[str, Estimate] = field(default_factory=dict)
    """What is expected of each job kind whose workers start early."""
    begun_with: Collection[Task] = ()
    """Tasks that elements have been submitted for: one that left without its task is not sent early again."""
    left: Collection[Task] = ()
    """Tasks that failed in such a way that no worker takes them by itself: only an element that was submitted
    for one does it (:mod:`pipeline.workers.choosing`)."""
    places: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Partitions by job kind: kinds that have one in common may need the same place."""

    def idle(self, job_kind: str) -> list[str]:
        """Return the names of workers, and those to be, that have no task; those that wait come first."""
        busy = set(self.held.values())
        staying = sorted(
            (w for w in self.crew.workers if w.stays and w.doing is not Doing.BUSY),
            key=lambda worker: worker.doing is not Doing.WAITING,
        )
        crew: list[Worker | Pending] = [*staying, *self.crew.pending]
        return [one.name for one in crew if one.job_kind == job_kind and one.name not in busy]


def staff(seen: Situation) -> Staffing:
    """Decide which workers to submit.

    1. Never more than wanted: live workers that stay and pending elements count.
    2. A task that workers leave alone gets an element; where there is no place, an idle worker makes room.
    3. What else is ready, and more than idle workers can take, gets elements for the highest shards, as
       workers begin with their own, lower ones.
    4. Places that are left are filled early where it is known when the next input comes, once for a task;
       in the first iteration, rollouts start up beside prepare.
    5. A pending element whose input is there does not wait for its begin time.
    6. A pending element that has nothing to do would only start up before those of other stages that have:
       it is withdrawn where they may need the same place.
    """
    withdrawn = _withdrawn(seen)
    seen = replace(seen, crew=seen.crew.without(withdrawn))
    orders: list[Order] = []
    dismissed: list[str] = []
    for job_kind, wanted in seen.wanted.items():
        free = max(0, wanted - seen.crew.count(job_kind))
        left = _sorted(task for task in seen.ready if task.job_kind == job_kind and task in seen.left)
        ended = _dismissed(seen, job_kind, len(left) - free)
        chosen = left[: free + len(ended)]
        free = max(0, free - len(chosen))
        chosen += _chosen(seen, job_kind, free, len(ended))
        orders += (Order(tasks) for tasks in _by_iteration(chosen))
        orders += _early(seen, job_kind, wanted - seen.crew.count(job_kind) - len(chosen), chosen)
        dismissed += ended
    return Staffing(tuple(orders), tuple(_hurried(seen)), tuple(dismissed), withdrawn)


def _sorted(tasks: Iterable[Task]) -> list[Task]:
    """Sort tasks: earlier iterations, and in each the highest shards, first."""
    return sorted(tasks, key=lambda task: (task.iteration, -task.shard))


def _dismissed(seen: Situation, job_kind: str, number: int) -> list[str]:
    """Return so many idle workers; one that waits in the queue is not worth ending."""
    running = {worker.name for worker in seen.crew.workers if worker.doing is Doing.WAITING}
    return [name for name in seen.idle(job_kind) if name in running][: max(0, number)]


def _chosen(seen: Situation, job_kind: str, free: int, ended: int) -> list[Task]:
    """Return the ready tasks, but for those that workers leave alone, that get a worker now.

    Args:
        ended: number of idle workers that are dismissed.
    """
    ready = [task for task in seen.ready if task.job_kind == job_kind and task not in seen.left]
    idle = len(seen.idle(job_kind)) - ended
    return _sorted(ready)[: max(0, min(free, len(ready) - idle))]


def _by_iteration(tasks: Iterable[Task]) -> Iterator[tuple[Task, ...]]:
    for _, group in groupby(sorted(tasks), key=lambda task: task.iteration):
        yield tuple(group)


def _early(seen: Situation, job_kind: str, most: int, now: Collection[Task]) -> list[Order]:
    """Return the order for the next tasks of a job kind, whose inputs are not there yet."""
    if job_kind not in seen.estimates or most <= 0:
        return []
    is_first = job_kind == Stage.ROLLOUT and PREPARE not in seen.committed
    begin = seen.now if is_first else seen.estimates[job_kind].begin
    coming = [task for task in _coming(seen, job_kind) if task not in now]
    number = min(most, len(coming) - len(seen.idle(job_kind)))
    if begin is None or number <= 0:
        return []
    chosen = tuple(task for task in coming[-number:] if task not in seen.begun_with)
    return [Order(chosen, begin if begin > seen.now else None)] if chosen else []


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


def _withdrawn(seen: Situation) -> tuple[str, ...]:
    """Return the pending elements that have no task any more, where others wait for such a place."""
    ready = {task.job_kind for task in seen.ready}
    due = (e for e in seen.crew.pending if _has_task(seen, e) and (e.begin or 0.0) <= seen.now)
    wanting = ready.union(element.job_kind for element in due)
    spare = (e for e in seen.crew.pending if not _has_task(seen, e) and e.job_kind not in ready)
    return tuple(element.name for element in spare if _is_in_the_way(seen, element.job_kind, wanting))


def _has_task(seen: Situation, element: Pending) -> bool:
    return element.first in seen.tasks and element.first not in seen.committed


def _is_in_the_way(seen: Situation, job_kind: str, wanting: Collection[str]) -> bool:
    """Whether a place of a job kind could be one of another kind's."""
    mine = set(seen.places.get(job_kind, ()))
    return any(kind != job_kind and not mine.isdisjoint(seen.places.get(kind, ())) for kind in wanting)
