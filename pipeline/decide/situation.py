"""A run and its workers as one pass sees them, and what it may want of them. Pure: no clock, queue or disk is
read."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Protocol, TypeVar

from pipeline.decide.choosing import is_only_by_pass
from pipeline.decide.crew import Crew, Pending, Worker
from pipeline.decide.places import Held, Need
from pipeline.decide.staying import PASS_SECONDS
from pipeline.run.failures import NOT_BEGUN, Failure
from pipeline.run.plan import Plan, unique
from pipeline.run.tasks import PREPARE, Task
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
    """Seconds from a job's start until it can begin a task, where no other starts up beside it."""
    task: float | None = None
    """Seconds that a task takes."""
    least_queue_wait: float = 0.0
    """Seconds from submission to start where nothing is in a job's way: no worker need leave before."""
    startup_together: float | None = None
    """What ``startup`` was beside others that started up; None: as alone."""
    last_input: float | None = None
    """Unix time at which the inputs of all its tasks are expected, where each waits for one task of the stage
    before; None: as ``next_input``."""

    @property
    def coming_back(self) -> float | None:
        """Seconds until a worker is there that is submitted now."""
        return None if self.startup is None else self.startup + (self.queue_wait or 0.0)

    @property
    def turn(self) -> float | None:
        """Seconds that one takes at least to come back: what it waits for others to make place, who take
        turns with it, is not counted against turns."""
        return None if self.startup is None else self.startup + self.least_queue_wait + PASS_SECONDS

    def has_time(self, now: float) -> bool:
        """Whether a worker that is submitted later than now (unix time) can be there for the next input."""
        is_known = self.next_input is not None and self.turn is not None
        return is_known and (self.next_input or 0.0) - (self.turn or 0.0) > now

    def begin(self, of_last: bool = False) -> float | None:
        """Return the unix time at which to enter the queue, so as to be ready when the next input is there,
        or the last."""
        at = self.next_input if self.last_input is None or not of_last else self.last_input
        startup = self.startup if self.startup_together is None else self.startup_together
        if at is None or self.queue_wait is None or startup is None:
            return None
        return at - self.queue_wait - startup


@dataclass(frozen=True)
class Foreign:
    """A job of the same user, of another run or of none, that waits for room."""

    name: str
    need: Need
    is_limited: bool = False
    """Whether it waits for a limit of the user."""


@dataclass(frozen=True)
class Situation:
    """A run and its workers, as one pass sees them."""

    plan: Plan
    tasks: Sequence[Task]
    """Tasks at hand (:func:`at_hand`), by iteration."""
    crew: Crew
    held: Mapping[Task, str]
    """See :func:`pipeline.decide.crew.held_tasks`."""
    committed: Collection[Task]
    """At least those of these tasks and of what they read."""
    ready: Collection[Task]
    """Tasks that no worker holds, and whose inputs are committed."""
    wanted: Mapping[str, int]
    """Most workers by job kind, as the settings say."""
    now: float
    """Unix time."""
    estimates: Mapping[str, Estimate] = field(default_factory=dict)
    """What is expected of each job kind."""
    early: Collection[str] = ()
    """Job kinds whose workers start early."""
    submitted_for: Collection[Task] = ()
    """Tasks that elements have been submitted for: one that left without its task is not sent early again."""
    only_by_pass: Collection[Task] = ()
    """Tasks that failed in such a way that no worker takes them by itself: only an element that was submitted
    for one does it (:mod:`pipeline.decide.choosing`)."""
    needs: Mapping[str, Need] = field(default_factory=dict)
    """What jobs of each kind ask for."""
    nodes: Sequence[Node] = ()
    """Nodes of the run's partitions; none where they are not known."""
    others: Sequence[Held] = ()
    """What jobs of the same user hold that are not of the run's stages."""
    foreign: Sequence[Foreign] = ()
    """Jobs of the same user that wait for room, and are not of the run's stages."""
    promised: Sequence[Handover] = ()
    """What the pass before has decided on who makes place."""
    slots: int | None = None
    """Elements of stages that the run may have in the queue at once, those that run among them; None: any
    number."""
    most_running: int | None = None
    """Workers of stages that a limit of the user's lets run at once; None: any number."""
    measures: bool = False
    """Whether workers of rollouts are able to measure policies (:mod:`pipeline.decide.measuring`)."""
    tried: Collection[Task] = ()
    """Tasks that workers have claimed, whatever came of it."""
    of_one_task: Collection[str] = ()
    """Job kinds whose workers leave after one task."""

    @property
    def free_slots(self) -> float:
        """Return how many elements may be submitted now; infinite if any number."""
        if self.slots is None:
            return math.inf
        return max(0, self.slots - len(self.crew.workers) - len(self.crew.pending))

    @property
    def most_at_once(self) -> float:
        """Return how many workers may be there at once, by the queue and the user's limits; infinite if any
        number."""
        return min(
            (bound for bound in (self.slots, self.most_running) if bound is not None), default=math.inf
        )

    def idle(self, job_kind: str) -> Sequence[str]:
        """Return the names of workers, and those to be, that have no task; those that wait come first."""
        return self._idle.get(job_kind, ())

    @cached_property
    def _idle(self) -> Mapping[str, Sequence[str]]:
        busy = set(self.held.values())
        staying = sorted(
            (w for w in self.crew.workers if w.stays and w.doing is not Doing.BUSY),
            key=lambda worker: worker.doing is not Doing.WAITING,
        )
        crew: list[Worker | Pending] = [*staying, *self.crew.pending]
        free = by_kind(one for one in crew if one.name not in busy)
        return {job_kind: [one.name for one in found] for job_kind, found in free.items()}

    @cached_property
    def ready_by_kind(self) -> Mapping[str, Sequence[Task]]:
        """Return the tasks that no worker holds, and whose inputs are committed."""
        return by_kind(self.ready)

    def is_ready(self, task: Task) -> bool:
        """Whether a task of those at hand could be done now."""
        return task not in self._done and self._done.issuperset(self.plan.inputs(task))

    @cached_property
    def _done(self) -> frozenset[Task]:
        return frozenset(self.committed)

    def open_tasks(self, job_kind: str) -> Sequence[Task]:
        """Return the tasks of a kind that are ready and that no worker is at, even if one was submitted
        for them; without those that workers leave alone."""
        return self._open.get(job_kind, ())

    @cached_property
    def _open(self) -> Mapping[str, Sequence[Task]]:
        begun = self.begun
        taken = begun.union(self.only_by_pass)
        free = (t for t in self.undone if t not in taken and self.plan.must_have_ended(t) not in begun)
        return by_kind(task for task in free if self.is_ready(task))

    @cached_property
    def begun(self) -> frozenset[Task]:
        """Return the tasks that workers are at."""
        at_work = {w.name for w in self.crew.workers if w.doing is Doing.BUSY}
        return frozenset(task for task, name in self.held.items() if name in at_work)

    def left_over(self, job_kind: str, seconds: float | None) -> int:
        """Count the open tasks of a kind that its live workers will not have begun with in so many seconds;
        None: now, as it is not known how long anything takes."""
        mine = self.crew.staying.get(job_kind, ())
        idle = sum(worker.doing is not Doing.BUSY for worker in mine)
        each = self.estimates.get(job_kind, Estimate()).task
        go_on = 0 if job_kind in self.of_one_task else len(mine)
        meanwhile = go_on * seconds / each if each and seconds is not None else 0.0
        return max(0, math.ceil(len(self.open_tasks(job_kind)) - idle - meanwhile))

    def next_use(self, job_kind: str) -> float:
        """Return when there is a task for a worker of a kind that waits (unix time); infinite if that is not
        known."""
        return self.now if self.open_tasks(job_kind) else self.next_input(job_kind)

    def next_input(self, job_kind: str) -> float:
        """Return when the next inputs of a kind that are not there are expected (unix time); infinite if that
        is not known, or there are none to come."""
        expected = self.estimates.get(job_kind, Estimate()).next_input
        is_to_come = expected is not None and job_kind in self._waiting
        return max(expected or 0.0, self.now) if is_to_come else math.inf

    @cached_property
    def undone(self) -> Sequence[Task]:
        """Return the tasks at hand that are not committed."""
        return [task for task in self.tasks if task not in self._done]

    @cached_property
    def _undone_by_kind(self) -> Mapping[str, Sequence[Task]]:
        return by_kind(self.undone)

    @cached_property
    def _waiting(self) -> Mapping[str, Task]:
        """Return the first task of each kind whose inputs are not all there."""
        first = {
            kind: next((task for task in tasks if not self.is_ready(task)), None)
            for kind, tasks in self._undone_by_kind.items()
        }
        return {kind: task for kind, task in first.items() if task is not None}

    def waits_for(self, job_kind: str, other: str) -> bool:
        """Whether the next inputs of a kind can only come after something that another kind could do now."""
        task, first = self._waiting.get(job_kind), self.open_tasks(other)[:1]
        return task is not None and bool(first) and self.plan.comes_before(first[0], task)

    def is_ahead_of(self, job_kind: str, other: str) -> bool:
        """Whether all that workers of a kind could begin with is of later iterations than what another has to
        do first, as with staleness it may be."""
        first = self._undone_by_kind.get(other, ())[:1]
        if not (self.plan.staleness and first and other not in self.aside):
            return False
        left = (task for task in self._undone_by_kind.get(job_kind, ()) if task not in self.begun)
        following = next(left, None)
        return following is not None and following.iteration > first[0].iteration

    def kinds_before(self, task: Task) -> set[str]:
        """Return the other job kinds that have something to do before a task."""
        first = {kind: tasks[0] for kind, tasks in self._undone_by_kind.items()}
        return {kind for kind, one in first.items() if self.plan.comes_before(one, task)} - {task.job_kind}

    def coming(self, job_kind: str) -> Sequence[Task]:
        """Return the tasks of a job kind that are neither done, held nor ready, in the next iteration that
        has any."""
        known = self._held_or_ready
        coming = [task for task in self._undone_by_kind.get(job_kind, ()) if task not in known]
        return [task for task in coming if task.iteration == coming[0].iteration]

    @cached_property
    def _held_or_ready(self) -> Collection[Task]:
        return {*self.held, *self.ready}

    def done_by(self, job_kind: str) -> float:
        """Return when workers of a kind will have begun with all that is ready (unix time)."""
        if not (tasks := self.open_tasks(job_kind)):
            return self.now
        seconds = self.estimates.get(job_kind, Estimate()).task
        workers = len(self.crew.staying.get(job_kind, ()))
        return self.now + len(tasks) * seconds / workers if seconds is not None and workers else math.inf

    def rest(self, job_kind: str) -> float:
        """Return the seconds that live workers of a kind need for what they have not begun of its earliest
        iteration, as if all of it were ready; infinite if that is not known, or there are none."""
        undone, mine = self._undone_by_kind.get(job_kind, ()), self.crew.staying.get(job_kind, ())
        seconds = self.estimates.get(job_kind, Estimate()).task
        if not mine or seconds is None:
            return math.inf
        left = sum(one.iteration == undone[0].iteration and one not in self.begun for one in undone)
        return left * seconds / len(mine)

    @cached_property
    def aside(self) -> Collection[str]:
        """Return the job kinds that nothing waits for: what is measured of policies."""
        return frozenset(self.wanted) - {PREPARE.job_kind, *self.plan.job_kinds}

    def may_share(self, job_kind: str, other: str) -> bool:
        """Whether a place of a job kind could be one of another kind's."""
        mine, theirs = self.needs.get(job_kind), self.needs.get(other)
        return bool(mine and theirs and not mine.partitions.isdisjoint(theirs.partitions))

    def has_task(self, element: Pending) -> bool:
        """Whether a pending element has something to do: the task that it was submitted for or, where that is
        done, as of one that was put back into the queue, another that is ready."""
        return self.is_undone(element.first) or bool(self.open_tasks(element.job_kind))

    def is_undone(self, task: Task) -> bool:
        """Whether a task of those at hand is not committed."""
        return task in self._all_undone

    @cached_property
    def _all_undone(self) -> Collection[Task]:
        return frozenset(self.undone)

    def without_ready(self, tasks: Collection[Task]) -> "Situation":
        """Return what there is, as if nothing were to be done about some tasks that are ready."""
        return replace(self, ready=[task for task in self.ready if task not in tasks]) if tasks else self

    def without(self, pending: Collection[str]) -> "Situation":
        """Return what there is without some pending elements."""
        return replace(self, crew=self.crew.without(pending)) if pending else self


class _OfKind(Protocol):
    """What is of one job kind."""

    @property
    def job_kind(self) -> str: ...


_Any = TypeVar("_Any", bound=_OfKind)


def by_kind(found: Iterable[_Any]) -> dict[str, list[_Any]]:
    """Divide tasks, workers or elements by job kind; of each kind they keep their order."""
    kinds = defaultdict[str, list[_Any]](list)
    for one in found:
        kinds[one.job_kind].append(one)
    return dict(kinds)


def at_hand(plan: Plan, window: Sequence[Task]) -> tuple[Task, ...]:
    """Return the tasks of a window and those that come into it with the next update, by iteration: workers
    may be ahead of the passes."""
    newest = max((plan.start, *(task.iteration for task in window if not task.stage.is_sharded)))
    is_over = not window or newest >= plan.iterations
    after = () if is_over else (*plan.tasks(newest + 1), *plan.ahead_of(newest + 1))
    return tuple(sorted(unique(*window, *after), key=lambda task: task.iteration))


def tasks_only_by_pass(
    failures: Mapping[Task, Sequence[Failure]], attempts_of: Callable[[str], int]
) -> frozenset[Task]:
    """Return the tasks that no worker takes by itself any more.

    Args:
        attempts_of: returns how often tasks of a job kind may be tried.
    """
    kinds = {
        task: [failure.kind for failure in found if failure.kind not in NOT_BEGUN]
        for task, found in failures.items()
    }
    return frozenset(t for t, found in kinds.items() if is_only_by_pass(found, attempts_of(t.job_kind)))


@dataclass(frozen=True)
class WorkerRequest:
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
    def requests(self) -> list[WorkerRequest]:
        return [WorkerRequest(tasks, self.begin) for tasks in _by_iteration(self.tasks)]


def _by_iteration(tasks: Iterable[Task]) -> Iterator[tuple[Task, ...]]:
    for _, group in groupby(sorted(tasks), key=lambda task: task.iteration):
        yield tuple(group)
