"""Orchestration as one pure function: from committed, live and failed tasks to the actions of one pass.

1. A commit that does not verify, or that was computed from inputs which have since changed, is retracted,
   if anything still to be done needs it. What a fork begins with is given up instead: no task of the run
   can make it again.
2. A task that is committed or live is left alone.
3. A task whose budget of attempts is spent is given up; some kinds of failure are free.
4. A task whose inputs are all committed is launched, an update only once no attempt at the one before is
   live.
5. A trainer's state is a cache: it is retracted where it does not verify or belongs to another policy
   than there is, and nothing is launched or given up for it.
6. An expendable task never stops the run, nor has anything made again for it: where its budget is spent,
   or an input is gone that nothing else needs, it is left out.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pipeline.run.failures import FREE_KINDS, Failure, FailureKind
from pipeline.run.plan import Plan, policy_maker
from pipeline.run.records import Committed, stale_because
from pipeline.run.tasks import URGENCY, Stage, Task


@dataclass(frozen=True)
class Launch:
    """Start an attempt of ``task``."""

    task: Task
    reason: str


@dataclass(frozen=True)
class Retract:
    """Move the commit of ``task`` aside: it does not verify, or its inputs have changed."""

    task: Task
    reason: str


@dataclass(frozen=True)
class Actions:
    """Decisions of one pass. None at all means: wait for the live attempts."""

    launch: tuple[Launch, ...] = ()
    retract: tuple[Retract, ...] = ()
    give_up: tuple[Failure, ...] = ()
    """Last failures of the tasks that cannot be done, so that the run stops."""
    leave_out: tuple[Failure, ...] = ()
    """Last failures of expendable tasks that cannot be done, and that the run goes on without."""

    @property
    def needs_another_pass(self) -> bool:
        """Whether more can be done at once after this: it takes back a commit, or leaves out a task."""
        return bool(self.retract or self.leave_out)


@dataclass(frozen=True)
class Lost:
    """Weights that are gone, and that the next update needs."""

    updates: Sequence[Task]
    """Updates since the newest from which the run can go on, newest first."""
    why: str
    """What is gone, and what is left, in words."""
    is_of_all: bool = False
    """Whether nothing that was learnt is left: to begin again is for people to decide."""


@dataclass(frozen=True)
class Observation:
    """State of the disk and the executor as one pass sees it."""

    tasks: Sequence[Task]
    """Window of tasks that are considered, each after those whose output it reads."""
    committed: Mapping[Task, Committed]
    """Commits of the window's tasks and of those whose output they read."""
    corrupt: Mapping[Task, str]
    """Committed tasks that do not verify, with the reason in words."""
    live: Collection[Task]
    """Tasks with an attempt that is queued or running."""
    failures: Mapping[Task, Sequence[Failure]]
    """Attempts that ended without a commit, oldest first."""
    lost: Lost | None = None
    passed: Collection[Task] = ()
    """Those that only come before others and are counted as committed, even if their records are gone."""

    def is_done(self, task: Task) -> bool:
        return task in self.done

    @cached_property
    def done(self) -> Collection[Task]:
        """Return the tasks that are committed and verify. Of an expendable one nothing is read, so that it
        need not verify."""
        expendable = (task for task in self.corrupt if task.stage.is_expendable)
        return frozenset(self.committed.keys() - self.corrupt.keys()).union(expendable, self.passed)

    @cached_property
    def states(self) -> Sequence[Task]:
        """Return the trainer's states that were looked at."""
        return [task for task in (*self.committed, *self.corrupt) if task.stage is Stage.STATE]


_FREE_FACTOR = 5
MOST_UNSTARTED = 50
"""Starts that Slurm could not make after which a task is given up: their waits come to about a day."""
MANY_NODES = 3
MOST_SETUPS = {True: 5, False: 8}
"""Failures in setup after which a task is given up, by whether they were on many nodes: then it is no
fault of a node, which the next attempt would avoid. Their waits come to half a minute, and to four."""


def reconcile(
    plan: Plan, seen: Observation, max_attempts: int, command_attempts: int | None = None
) -> Actions:
    """Decide what to launch, retract, give up or leave out, by the rules above.

    Args:
        command_attempts: budget of attempts of an expendable task. Default: ``max_attempts``.
    """
    if seen.lost:
        return _after_loss(seen.lost)
    needed = needed_by(plan, seen)
    retracted = {task: reason for task, reason in seen.corrupt.items() if task in needed}
    retracted |= _stale_states(needed, seen)
    lost = [task for task in needed if plan.is_given(task) and task not in seen.committed]
    given_up = [_give_up_given(task, retracted.pop(task, None)) for task in lost]
    launches: list[Launch] = []
    left_out: list[Failure] = []
    there = set(seen.done) - retracted.keys()
    for task in seen.tasks:
        inputs = plan.inputs(task)
        if task in there:
            if reason := stale_because(task, inputs, seen.committed):
                retracted[task] = reason
                there.remove(task)
            continue
        if task in seen.live or task in retracted:
            continue
        failures = seen.failures.get(task, ())
        if task.stage.is_expendable and (why := _why_left_out(task, inputs, seen, retracted)):
            left_out.append(why)
        elif is_hopeless(failures, _budget(task, max_attempts, command_attempts)):
            (left_out if task.stage.is_expendable else given_up).append(failures[-1])
        elif there.issuperset(inputs) and plan.must_have_ended(task) not in seen.live:
            launches.append(Launch(task, reason_to_launch(failures)))
    launch = sorted(launches, key=_launch_order)
    retract = tuple(Retract(task, reason) for task, reason in sorted(retracted.items()))
    return Actions(() if given_up else tuple(launch), retract, tuple(given_up), tuple(left_out))


def _after_loss(lost: Lost) -> Actions:
    if lost.is_of_all:
        return Actions(give_up=(Failure(lost.updates[0], 0, FailureKind.CONFIG, lost.why),))
    return Actions(retract=tuple(Retract(task, lost.why) for task in lost.updates))


def _budget(task: Task, max_attempts: int, command_attempts: int | None) -> int:
    is_own = task.stage.is_expendable and command_attempts is not None
    return command_attempts if is_own and command_attempts else max_attempts


def _why_left_out(
    task: Task, inputs: Sequence[Task], seen: Observation, retracted: Collection[Task]
) -> Failure | None:
    """Return why an expendable task can never begin: an input is gone or spoilt, and is not made again."""
    known = {*seen.tasks, *seen.live, *retracted}
    gone = next((source for source in inputs if not (source in known or source in seen.done)), None)
    if gone is None:
        return None
    why = seen.corrupt.get(gone, f"{gone} has no commit record any more")
    return Failure(task, 0, FailureKind.INPUTS, why)


def _stale_states(needed: Collection[Task], seen: Observation) -> dict[Task, str]:
    """Find states that were made with another policy than there is now, with reasons."""
    found: dict[Task, str] = {}
    for task in seen.states:
        if task in seen.committed and task in needed:
            reason = stale_because(task, [policy_maker(task.iteration)], seen.committed)
            found |= {task: reason} if reason else {}
    return found


def _give_up_given(task: Task, damage: str | None) -> Failure:
    why = damage or "its commit record is gone"
    message = f"{why}; the run was forked with it: put it back from the parent, or fork again"
    return Failure(task, 0, FailureKind.CONFIG, message)


def needed_by(plan: Plan, seen: Observation) -> set[Task]:
    """Return the window, the tasks whose output its uncommitted tasks read, and the states that were looked
    at because one of its uncommitted updates begins with one. Nothing is needed for an expendable task."""
    undone = [task for task in seen.tasks if task not in seen.committed and not task.stage.is_expendable]
    read = {source for task in undone for source in plan.inputs(task)}
    updates = [task.iteration for task in undone if task.stage is Stage.UPDATE]
    newest = max(updates, default=0)
    return {*seen.tasks, *read, *(state for state in seen.states if state.iteration < newest)}


def _launch_order(launch: Launch) -> tuple[int, bool, Task]:
    stage = launch.task.stage
    return URGENCY[stage], stage in (Stage.EVALUATE, Stage.BENCHMARK), launch.task


def is_hopeless(failures: Sequence[Failure], max_attempts: int) -> bool:
    """Whether to stop trying: it would fail the same way again, or the budget is spent.

    Free kinds of failure have a bound too: it ends a disk that rots faster than it is repaired, and a
    partition that preempts faster than a task can save.
    """
    if not failures:
        return False
    if any(failure.kind in (FailureKind.CONFIG, FailureKind.NUMERICS) for failure in failures):
        return True
    counted = [failure for failure in failures if failure.kind not in FREE_KINDS]
    unstarted = sum(failure.kind is FailureKind.UNSTARTED for failure in failures)
    setups = [failure.node for failure in failures if failure.kind is FailureKind.SETUP]
    # A pause is progress, and so has an end of its own.
    paused = sum(failure.kind is FailureKind.PAUSED for failure in failures)
    others = len(failures) - paused - unstarted - len(setups)
    is_spent = len(counted) >= max_attempts or others >= _FREE_FACTOR * max_attempts
    is_in_vain = len(setups) >= MOST_SETUPS[len(set(setups)) >= MANY_NODES]
    return is_spent or is_in_vain or unstarted >= MOST_UNSTARTED


def reason_to_launch(failures: Sequence[Failure]) -> str:
    if not failures:
        return "not committed"
    last = failures[-1]
    if last.attempt == 0:
        return f"its commit was retracted: {last.message}"
    return f"attempt {last.attempt} ended without a commit ({last.kind}: {last.message})"
