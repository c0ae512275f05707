"""Reasons why array elements ended: failures, from what the queue and accounting show."""

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.orchestrate.jobs import Ended
from pipeline.run.accounting import note_accounting, read_accounting
from pipeline.run.control import Control, read_control
from pipeline.run.failures import DISK_EXIT, Failure, FailureKind, explain_failure
from pipeline.run.paths import RunPaths
from pipeline.run.submissions import Submission
from pipeline.run.tasks import Task, task_key
from slurm.commands import SlurmError
from slurm.ended import NoAccounting, NoAnswer, read_ended
from slurm.query import Element
from slurm.states import Phase, SlurmState, exit_in_words, phase_of

KINDS: Mapping[SlurmState, FailureKind] = {
    SlurmState.PREEMPTED: FailureKind.PREEMPTED,
    SlurmState.NODE_FAIL: FailureKind.LOST,
    SlurmState.BOOT_FAIL: FailureKind.UNSTARTED,
    SlurmState.LAUNCH_FAILED: FailureKind.UNSTARTED,
    SlurmState.RECONFIG_FAIL: FailureKind.LOST,
    SlurmState.REVOKED: FailureKind.LOST,
    SlurmState.OUT_OF_MEMORY: FailureKind.MEMORY,
    SlurmState.TIMEOUT: FailureKind.TIMEOUT,
    SlurmState.DEADLINE: FailureKind.TIMEOUT,
}
"""Kinds of failure by Slurm's state. Any other state is KILLED: somebody's doing, or for unknown reasons."""

_NOT_OPENED = 53
"""Signal by which Slurm says that a job ended whose output its node could not open (exit code 0:53)."""
_NO_CONTAINER = frozenset({125, 126, 127, 255})
"""Exit codes of container runtimes, and of a shell, that could not start what they should."""
_MOMENT = 3.0
"""Seconds that a pass waits for accounting."""
_PLACE_TAKEN = frozenset({FailureKind.PREEMPTED, FailureKind.LOST})
_OF_ITS_JOB = _PLACE_TAKEN | {FailureKind.KILLED, FailureKind.TIMEOUT, FailureKind.PAUSED}
"""Ends that a cancellation makes, as they look from outside or to a task."""
_OF_THE_WORKER = frozenset({FailureKind.MEMORY, FailureKind.TIMEOUT})

ElementKey = tuple[str, int]
"""Array id and index of an element."""


@dataclass(frozen=True)
class Gone:
    """An attempt that is over and left no commit."""

    task: Task
    number: int
    """Number that its log and failure file are named by."""
    job: str | None
    """Id of the array that it was part of; None where that never arrived in the queue."""
    index: int
    restart: int | None = None
    """Number of restarts of the element at the time; None for an element's only task, whose last start
    counts."""
    is_of_used: bool = False
    """Whether its worker had done other tasks before."""
    log: str = ""
    """Path of the output of a worker that ended before it took any task; empty: the task's log."""
    invocation: int = 0
    """Number of the invocation of submit, run or resume that it belongs to."""
    is_mute: bool = False
    """Whether nothing was ever heard from inside the container that it was to run in."""

    @staticmethod
    def of(submission: Submission, index: int) -> "Gone":
        """Return an element's own task."""
        state, invocation = submission.state, submission.invocation
        return Gone(submission.task(index), submission.number, state.job, index, invocation=invocation)


def explain(
    paths: RunPaths,
    gone: Sequence[Gone],
    seen: Mapping[ElementKey, Element],
    control: Control,
    accounts: "Accounts",
) -> list[Ended]:
    """Say why attempts ended without a commit, in their order.

    Args:
        seen: what the queue shows of their elements; those that it does not show are looked up in accounting.
        control: says which commits were taken back, and of which invocations all jobs were cancelled.

    Raises:
        Unanswered: accounting is slow, and is to be asked between passes.
    """
    evidence, retracted = evidence_of(gone, seen, accounts, paths), dict(control.retracted)
    found = []
    for attempt in gone:
        element = evidence.get((attempt.job or "", attempt.index))
        outside = as_seen(paths, attempt, element)
        said, suspect = (outside, None) if attempt.log else explain_failure(paths, outside)
        failure = verdict_of(outside, said, element)
        if task_key(failure.task) in retracted and (not element or element.state is SlurmState.COMPLETED):
            failure = replace(failure, kind=FailureKind.INPUTS, message="its commit was taken back")
        if 0 < attempt.invocation <= control.emptied and failure.kind in _OF_ITS_JOB:
            failure = replace(failure, kind=FailureKind.CANCELLED, message="cancelled with the run's jobs")
        found.append(Ended(failure, suspect))
    return found


class Unanswered(Exception):
    """Missing answer of accounting: a pass, which holds the lease, does not wait for it."""


@dataclass
class Accounts:
    """What accounting says of ended elements: a pass asks for a moment, and whoever makes it with patience
    before he makes it again."""

    known: dict[ElementKey, Element] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    """Ids of arrays that it was asked for with patience, whether or not it answered."""
    unanswered: set[str] = field(default_factory=set)
    is_absent: bool = False
    """Whether the cluster has said that it has none."""

    def of(self, jobs: Collection[str]) -> Mapping[ElementKey, Element]:
        """Return what is known of elements of some arrays. Raises :class:`Unanswered`."""
        wanted = set(jobs) - self.asked
        try:
            return {**self.known, **(read_ended(wanted, _MOMENT) if wanted else {})}
        except NoAnswer as error:
            self.unanswered |= wanted
            raise Unanswered(str(error)) from None
        except (NoAccounting, SlurmError) as error:
            self.is_absent = isinstance(error, NoAccounting) and error.is_absent
            return self.known  # why they ended stays unknown; that they ended the queue has said

    def ask(self) -> None:
        """Ask with patience for what was not answered in a pass. Not for the holder of a lease."""
        jobs, self.unanswered = self.unanswered, set()
        self.asked |= jobs
        with contextlib.suppress(NoAccounting, SlurmError):
            self.known |= read_ended(jobs)


def evidence_of(
    gone: Sequence[Gone], seen: Mapping[ElementKey, Element], accounts: Accounts, paths: RunPaths
) -> dict[ElementKey, Element]:
    """Look up ended elements: in ``seen``, the queue's, and the others in accounting, by one call. A cluster
    without is asked once in each invocation."""
    jobs = {attempt.job for attempt in gone if attempt.job and (attempt.job, attempt.index) not in seen}
    if not jobs or (known := read_accounting(paths, read_control(paths).invocation)).is_absent:
        return dict(seen)
    found = {**accounts.of(jobs), **seen}
    if accounts.is_absent:
        note_accounting(paths, replace(known, is_absent=True))
    return found


def as_seen(paths: RunPaths, gone: Gone, element: Element | None) -> Failure:
    """Return an attempt's failure as Slurm shows it, without the attempt's own failure file."""
    log = gone.log or str(paths.task(gone.task).log(gone.number))
    job = f"{gone.job}_{gone.index}" if gone.job else ""
    kind, message = _unstarted(paths, gone, element) or _verdict(gone, element)
    return Failure(gone.task, gone.number, kind, message, log, element.node if element else "", job)


def verdict_of(outside: Failure, said: Failure, element: Element | None) -> Failure:
    """Decide why an attempt ended: the task's own failure file counts, except for what a task cannot know.

    A task that used too much memory is killed without warning. And the warning signal does not say whether
    the time was up or the job was preempted, against which more time would not help.

    Args:
        outside: the failure as Slurm shows it.
        said: the failure by the task's own file; like ``outside`` where there is none.
        element: what Slurm shows of it, if anything.
    """
    if outside.kind is FailureKind.MEMORY:
        return outside
    if said.kind is not FailureKind.TIMEOUT:
        return said
    if outside.kind in _PLACE_TAKEN or (element and element.state is SlurmState.CANCELLED):
        return outside
    if element and element.state is SlurmState.COMPLETING and _had_time(element):
        # Its end is a moment old: Slurm does not say yet whether it was preempted or cancelled.
        return replace(outside, kind=FailureKind.PREEMPTED, message="it was ended with most of its time left")
    return said


def _had_time(element: Element) -> bool:
    """Whether an element was far from its time limit: warnings of that come near its end."""
    if element.elapsed is None:
        return False
    return element.time_limit is None or element.elapsed < element.time_limit / 2


def _unstarted(paths: RunPaths, gone: Gone, element: Element | None) -> tuple[FailureKind, str] | None:
    """Return the verdict on a job whose first line did not run; None on any other."""
    if element is None or element.state is not SlurmState.FAILED:
        return None
    if element.signal == _NOT_OPENED:
        return FailureKind.UNSTARTED, (
            f"its node could not open {paths.slurm_log} (exit code 0:53): not mounted, full, read-only or "
            "forbidden there; slurmd's log says which"
        )
    if gone.is_mute and element.exit_code in _NO_CONTAINER:
        return FailureKind.UNSTARTED, (
            f"its container did not start (exit code {element.exit_code}): its log says why; image and "
            "runtime must be there on the node"
        )
    return None


def _verdict(gone: Gone, element: Element | None) -> tuple[FailureKind, str]:
    if element is None and gone.job is None:
        return FailureKind.LOST, "its job never arrived in Slurm's queue"
    if element is None:
        return FailureKind.KILLED, "Slurm no longer knows the job, so why it ended is unknown"
    if gone.restart is not None and (element.restarts or 0) > gone.restart:
        return FailureKind.PREEMPTED, "its job was put back into the queue"
    if phase_of(element.state) is not Phase.ENDED:
        return FailureKind.KILLED, "its worker went on without a commit"
    if element.state is SlurmState.COMPLETED:
        return FailureKind.KILLED, "Slurm says COMPLETED, but nothing was committed"
    if element.state is SlurmState.CANCELLED and not element.node:
        return FailureKind.LOST, "cancelled before it had started (CANCELLED)"
    if element.state is SlurmState.FAILED and element.exit_code == DISK_EXIT:
        return FailureKind.DISK, "the shared filesystem was full, read-only or away"
    words = exit_in_words(element.state, element.exit_code or 0, element.signal or 0)
    kind = KINDS.get(element.state, FailureKind.KILLED)
    if gone.is_of_used and kind in _OF_THE_WORKER:
        # How much of it was the tasks' before is not known: it says nothing about what this one needs.
        return FailureKind.PREEMPTED, f"{words}, in a worker that had done other tasks before"
    return kind, words
