"""Which task a worker takes next. Pure.

A worker never waits for a pass: commits, claims and beats say all. What it must not do is to spend a task's
budget of attempts on its own. So it counts the claims of this invocation that ended without a commit: while
they are fewer than ``max_attempts``, any worker may take the task again. After that, and after failures that
need a decision (other resources, an input to be examined, settings that cannot work), the task is left to
passes: a pass counts failures by their kinds, and submits an element with the task as its first, or gives the
task up and says so in control.json. An element may take its first task whatever the pass has
counted that submitted it; of what another has tried since, that pass knew nothing.

A worker of rollouts that would wait measures a policy meanwhile, where passes say that it may
(:class:`Measuring`). Training does not wait for that, and an evaluation of which a first try came to nothing
is left to a worker of its own.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

from pipeline.config.job_kinds import parts_of
from pipeline.run.failures import FREE_KINDS, FailureKind
from pipeline.run.plan import Plan
from pipeline.run.records import Frontier
from pipeline.run.tasks import PREPARE, URGENCY, Stage, Task, task_of
from pipeline.workers.claims import Attempt

ONLY_BY_PASS = frozenset(
    {
        *(FailureKind.CONFIG, FailureKind.NUMERICS, FailureKind.MEMORY, FailureKind.TIMEOUT),
        *(FailureKind.INPUTS, FailureKind.DISK, FailureKind.DEVICE),
    }
)
"""Failures after which no worker takes a task by itself: the same would happen again at once."""
SLOW_FACTOR = 2
"""Medians after which a worker without anything to do takes a task over from one that shows no progress."""
PATIENCE = 10
"""What is measured of policies takes time of the chain of iterations once it has waited so many times what
that costs: a tenth of the time is lost by it at most."""


class Step(StrEnum):
    """What a worker does next."""

    TAKE = "take"
    WAIT = "wait"
    DONE = "done"
    """Nothing is left in the run that it could ever do."""


@dataclass(frozen=True)
class Chosen:
    """A worker's next step."""

    step: Step
    task: Task | None = None
    """The task to take, or whose inputs it waits for."""
    awaited: tuple[frozenset[Task], ...] = ()
    """Groups of commits of which one must be complete for a task to be ready."""

    def is_due(self, committed: Collection[Task]) -> bool:
        """Whether a task that it waits for is ready now."""
        return any(group.issubset(committed) for group in self.awaited)

    @property
    def all_awaited(self) -> frozenset[Task]:
        return frozenset().union(*self.awaited)


@dataclass(frozen=True)
class Chooser:
    """What of a worker its choice depends on."""

    job_kind: str
    shard: int = 0
    """Shard of its first task: it takes the same one of each iteration if it can."""
    first: Task | None = None
    """Task that a pass has given it and that it has not taken yet."""
    known: int = 0
    """Number of the newest claim on that task that the pass knew of."""
    element: str = ""
    """What its name and those of its other starts begin with."""
    takes_over: bool = False
    """Whether it may do a task once more that another worker is slow at."""


@dataclass(frozen=True)
class Measuring:
    """What a worker of rollouts knows that may measure policies; None where something is not known."""

    seconds: float | None = None
    """Seconds that an evaluation takes."""
    own_seconds: float | None = None
    """Seconds that a rollout takes."""
    input_at: float | None = None
    """Unix time at which its next rollout's input is expected at the earliest."""
    others: int = 0
    """Other workers of rollouts that are there for that."""
    is_last: bool = False
    """Whether it is the one that stays for evaluations when no rollout is left."""
    ready_at: Mapping[Task, float] = field(default_factory=dict)
    """Unix times at which the inputs of evaluations were there."""


@dataclass(frozen=True)
class View:
    """What a worker sees of a run."""

    plan: Plan
    frontier: Frontier
    committed: Collection[Task]
    """Those of :func:`relevant` tasks that have a commit record."""
    attempts: Mapping[Task, Sequence[Attempt]]
    """Attempts at tasks that are not committed, in this invocation of submit, run or resume."""
    max_attempts: int
    now: float = 0.0
    """Unix time."""
    median_seconds: float | None = None
    """Median of the seconds that a task of this kind takes; None if unknown."""
    measuring: Measuring | None = None
    """None: the worker measures no policies."""

    def usual_seconds(self, of_own: bool) -> float | None:
        """Return what a task of the worker's own kind takes, or what an evaluation does; None if unknown."""
        if of_own:
            return self.median_seconds
        return self.measuring.seconds if self.measuring else None


def candidates(plan: Plan, frontier: Frontier, worker: Chooser) -> tuple[Task, ...]:
    """Return the tasks that a worker may do or wait for: of its kind, of the iteration at hand and the next,
    with staleness of as many more, earlier iterations first, its own shard first in each."""
    stage = task_of(0, worker.job_kind).stage
    if stage is Stage.PREPARE:
        return (PREPARE,)
    if stage is Stage.EVALUATE:
        due = to_measure(plan, frontier)
        given = (
            worker.first
        )  # of a policy that was made again: its row, which the pass goes behind, counts it as done
        return due if given is None or given in due else (given, *due)
    if stage is Stage.BENCHMARK:
        return plan.benchmark_tasks()[frontier.benchmarked : frontier.benchmarked + 2]
    at_hand = max(frontier.updated, plan.start) + 1
    number, pool = plan.num_shards if stage.is_sharded else 1, parts_of(worker.job_kind)[1]
    last = min(at_hand + 1 + (plan.staleness if stage.is_sharded else 0), plan.iterations)
    return _own_shard_first(at_hand, last, stage, pool, number, worker.shard)


def to_measure(plan: Plan, frontier: Frontier) -> tuple[Task, ...]:
    """Return the next evaluation and the one that waits for it."""
    return plan.evaluation_tasks()[frontier.evaluated : frontier.evaluated + 2]


@lru_cache(maxsize=1024)
def _own_shard_first(
    first: int, last: int, stage: Stage, pool: str, number: int, own: int
) -> tuple[Task, ...]:
    """Return a stage's tasks of some iterations; kept, as a worker looks again and again while it waits."""
    turned = [*range(own, number), *range(min(own, number))]
    iterations = range(first, last + 1)
    return tuple(Task(iteration, stage, shard, pool) for iteration in iterations for shard in turned)


def relevant(plan: Plan, tasks: Iterable[Task]) -> frozenset[Task]:
    """Return the tasks whose commits decide about ``tasks``: themselves and their inputs."""
    found = set(tasks)
    return frozenset(found.union(*(plan.inputs(task) for task in found)))


def claimed(plan: Plan, tasks: Iterable[Task]) -> frozenset[Task]:
    """Return the tasks whose claims decide about ``tasks``: themselves, and those whose attempts must have
    ended before."""
    found = set(tasks)
    return frozenset(found | {before for task in found if (before := plan.must_have_ended(task))})


def choose(view: View, worker: Chooser) -> Chosen:
    """Decide what a worker does next: its own shard, else any that is ready and free, of the earliest
    iteration, and of those one that has failed last; else a task that another is slow at; else measure a
    policy, if it may; else wait for the inputs of the next."""
    own = _choose_own(view, worker)
    if own.step is Step.TAKE or view.measuring is None:
        return own
    return _measure(view, view.measuring, own)


def _measure(view: View, known: Measuring, own: Chosen) -> Chosen:
    """Decide whether a worker of rollouts that would wait measures a policy instead; or, where no rollout is
    left for it, waits for one to measure. What has been tried in vain is for a worker of its own."""
    undone = [task for task in to_measure(view.plan, view.frontier) if task not in view.committed]
    is_over, first = own.step is Step.DONE, next(iter(undone), None)
    if first is None:
        return own
    if is_ready(view, first):
        may = not view.attempts.get(first) and (is_over or has_time_to_measure(view, known, first))
        return Chosen(Step.TAKE, first) if may else own
    if is_over and known.is_last:
        return Chosen(Step.WAIT, first, (frozenset(missing(view, first)),))
    return own


def has_time_to_measure(view: View, known: Measuring, task: Task) -> bool:
    """Whether an evaluation keeps no rollout waiting: it is over before the next one's input comes; or, where
    that is not known, another worker is there for it; or the others need no more rounds without this one. One
    that has waited for long is done all the same."""
    if known.seconds is None or known.input_at is None:
        has_time = known.others > 0
    else:
        is_over = view.now + known.seconds <= known.input_at
        has_time = is_over or can_be_missed(view.plan.num_shards, known.others)
    cost, ready = known.seconds or known.own_seconds, known.ready_at.get(task)
    is_late = cost is not None and ready is not None and view.now - ready >= PATIENCE * cost
    return has_time or is_late


def can_be_missed(tasks: int, others: int) -> bool:
    """Whether workers do so many tasks in as many rounds without one more beside them."""
    return others > 0 and math.ceil(tasks / others) == math.ceil(tasks / (others + 1))


def _choose_own(view: View, worker: Chooser) -> Chosen:
    """Decide what a worker does next of the tasks of its kind."""
    ready: list[Task] = []
    waiting: list[Task] = []
    again: Task | None = None
    for task in candidates(view.plan, view.frontier, worker):
        if task in view.committed:
            continue
        if again and task.iteration > again.iteration:
            break
        if not is_ready(view, task):
            waiting.append(task)
            continue
        ready.append(task)
        attempts = view.attempts.get(task, ())
        if is_free(attempts, view.max_attempts, is_given=is_given(task, attempts, worker)):
            if not _has_failed(attempts):
                return Chosen(Step.TAKE, task)
            again = again or task
    if again:
        return Chosen(Step.TAKE, again)
    for task in ready:
        if worker.takes_over and is_slow(view, task):
            return Chosen(Step.TAKE, task)
    if not waiting:
        return Chosen(Step.DONE)
    at_hand = [task for task in waiting if task.iteration == waiting[0].iteration]
    return Chosen(Step.WAIT, waiting[0], tuple(frozenset(missing(view, task)) for task in at_hand))


def _has_failed(attempts: Sequence[Attempt]) -> bool:
    """Whether a task has used up a part of its budget. Spending the rest stops the run: untried tasks go
    first."""
    return any(a.failure is not None and a.failure not in FREE_KINDS for a in attempts if not a.is_running)


def missing(view: View, task: Task) -> set[Task]:
    """Return the inputs of a task that are not committed."""
    committed = view.committed
    return {source for source in view.plan.inputs(task) if source not in committed}


def is_ready(view: View, task: Task) -> bool:
    """Whether a task's inputs are committed, and nothing must end before it that still runs."""
    committed = view.committed
    for source in view.plan.inputs(task):
        if source not in committed:
            return False
    before = view.plan.must_have_ended(task)
    return before is None or not any(attempt.is_running for attempt in view.attempts.get(before, ()))


def is_given(task: Task, attempts: Sequence[Attempt], worker: Chooser) -> bool:
    """Whether a pass has given a task to a worker, and no other has tried it since. Numbers tell that, as
    clocks of nodes differ and a pass takes time."""
    others = (a.claim for a in attempts if a.claim.worker.rpartition("r")[0] != worker.element)
    return task == worker.first and not any(claim.number > worker.known for claim in others)


def is_free(attempts: Sequence[Attempt], max_attempts: int, is_given: bool = False) -> bool:
    """Whether a worker may take a task that is not committed.

    Args:
        is_given: whether a pass has given it to this worker, whatever was counted before.
    """
    if any(attempt.is_running for attempt in attempts):
        return False
    return is_given or not is_only_by_pass([attempt.failure for attempt in attempts], max_attempts)


def is_only_by_pass(failures: Sequence[FailureKind | None], max_attempts: int) -> bool:
    """Whether no worker takes a task by itself any more: a pass must submit an element for it, or give up.

    Args:
        failures: kinds of its failed attempts; None for one that did not say why.
    """
    return len(failures) >= max_attempts or any(kind in ONLY_BY_PASS for kind in failures)


def urgency(plan: Plan, frontier: Frontier, task: Task) -> int:
    """Return the order in which tasks get slots where these are few, lowest first: an evaluation after the
    rollouts with the same policy, and before those with a later one; what staleness lets go on early after
    all of the iterations before."""
    late = -1 if frontier.updated > task.iteration else 1
    ahead = _ahead(plan, frontier, task) * 2 * (max(URGENCY.values()) + 1)
    return 2 * URGENCY[task.stage] + (late if task.stage is Stage.EVALUATE else 0) + ahead


def is_ahead(plan: Plan, frontier: Frontier, task: Task) -> bool:
    """Whether a task is of a later iteration than the one that is learned from next, as with staleness it may
    be: who is to make place for others leaves before it takes such a task, as there may always be another."""
    return _ahead(plan, frontier, task) > 0


def _ahead(plan: Plan, frontier: Frontier, task: Task) -> int:
    """Return by how many iterations a sharded task is ahead of the one that is learned from next."""
    if not (plan.staleness and task.stage.is_sharded):
        return 0
    return max(0, task.iteration - max(frontier.updated, plan.start) - 1)


def is_slow(view: View, task: Task) -> bool:
    """Whether one worker, and no other, is at a sharded task, has been for twice the time that one takes, and
    has shown no progress for as long as one takes."""
    running = [attempt for attempt in view.attempts.get(task, ()) if attempt.is_running]
    if not task.stage.is_sharded or len(running) != 1 or view.median_seconds is None:
        return False
    age, silence = view.now - running[0].taken, view.now - running[0].saved
    return age > SLOW_FACTOR * view.median_seconds and silence > view.median_seconds
