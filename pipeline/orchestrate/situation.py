"""A run and its workers as one pass sees them, and what it may want of them. Pure: no clock, queue or disk is
read."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

from pipeline.orchestrate.crew import Crew, Pending, Worker
from pipeline.orchestrate.places import Held, Need
from pipeline.run.plan import Plan
from pipeline.run.tasks import Stage, Task
from pipeline.workers.beats import Doing
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
    least_queue_wait: float = 0.0
    """Seconds from submission to start where nothing is in a job's way: nobody need leave before."""

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
class Foreign:
    """A job of the same user, of another run or of none, that waits for room."""

    name: str
    need: Need


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
    def undone(self) -> Sequence[Task]:
        """Return the tasks at hand that are not committed."""
        return [task for task in self.tasks if task not in self.committed]

    def waits_for(self, job_kind: str, other: str) -> bool:
        """Whether the next inputs of a kind can only come after something that another kind could do now."""
        task = next((t for t in self.undone if t.job_kind == job_kind and not self.is_ready(t)), None)
        return task is not None and any(comes_before(first, task) for first in self.open_tasks(other))

    def kinds_before(self, task: Task) -> set[str]:
        """Return the other job kinds that have something to do before a task."""
        return {t.job_kind for t in self.undone if comes_before(t, task)} - {task.job_kind}

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

    def may_share(self, job_kind: str, other: str) -> bool:
        """Whether a place of a job kind could be one of another kind's."""
        mine, theirs = self.needs.get(job_kind), self.needs.get(other)
        return bool(mine and theirs and not mine.partitions.isdisjoint(theirs.partitions))

    def has_task(self, element: Pending) -> bool:
        """Whether the task that a pending element was submitted for is still to be done."""
        return element.first in self.tasks and element.first not in self.committed


def comes_before(one: Task, other: Task) -> bool:
    """Whether a task can only be done once another is, in the chain of iterations: what is measured of
    policies keeps nothing waiting."""
    is_earlier = (one.iteration, one.stage.position) < (other.iteration, other.stage.position)
    return is_earlier and one.stage not in (Stage.EVALUATE, Stage.BENCHMARK)


@dataclass(frozen=True)
class Order:
    """An array to submit."""

    tasks: tuple[Task, ...]
    """Tasks of one job kind and iteration; each element begins with one."""
    begin: float | None = None
    """Unix time before which it need not start; None: now."""


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


def _by_iteration(tasks: Iterable[Task]) -> Iterator[tuple[Task, ...]]:
    for _, group in groupby(sorted(tasks), key=lambda task: task.iteration):
        yield tuple(group)
