"""Reasons why array elements ended: failures, from what the queue and accounting show."""

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pipeline.orchestrate.jobs import Ended
from pipeline.run.accounting import note_accounting, read_accounting
from pipeline.run.control import Control, read_control
from pipeline.run.endings import Ending, Evidence
from pipeline.run.failures import DISK_EXIT, FailureKind, Said, read_said
from pipeline.run.paths import RunPaths
from pipeline.run.submissions import Submission
from pipeline.run.tasks import Task, task_key
from slurm.commands import SlurmError
from slurm.ended import NoAccounting, NoAnswer, read_ended
from slurm.query import Element
from slurm.setup_lines import SETUP_EXIT, failed_line
from slurm.sharedfiles import read_shared
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
_END_OF_LOG = 1 << 16
"""Bytes at the end of a log in which it is looked for which line of setup failed."""
_BEFORE_ITS_START = "cancelled by hand before it had started, as with scancel (CANCELLED)"
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
    attempt: str
    """Id of the attempt, without the restart where that is not known."""
    restart: int | None = None
    """Number of restarts of the element at the time; None for an element's only task, whose last start
    counts."""
    is_of_used: bool = False
    """Whether its worker had done other tasks before."""
    log: str = ""
    """Path, relative to the run, of the output of a worker that ended before it took any task; empty: the
    task's log."""
    invocation: int = 0
    """Number of the invocation of submit, run or resume that it belongs to."""
    is_mute: bool = False
    """Whether nothing was ever heard from inside the container that it was to run in."""

    @staticmethod
    def of(submission: Submission, index: int) -> "Gone":
        """Return an element's own task."""
        job, name = submission.state.job, submission.element_name(index)
        invocation = submission.invocation
        return Gone(submission.task(index), submission.number, job, index, name, invocation=invocation)


@dataclass(frozen=True)
class Signs:
    """What is known of an attempt that is over and left no commit."""

    gone: Gone
    element: Element | None = None
    """What Slurm shows of its job, if anything."""
    said: Said | None = None
    """Its own word."""
    is_taken_back: bool = False
    """Whether a commit of its task was taken back in this invocation."""
    is_emptied: bool = False
    """Whether all jobs of its invocation were cancelled, by slurm-ppo or by hand."""
    is_silenced: bool = False
    """Whether its worker was cancelled since it was not heard of."""
    failed_setup: str = ""
    """Phrase on the line of setup that failed, by the attempt's log."""
    slurm_log: str = "its output"
    """Path of the file that Slurm itself opens."""


class Verdict(NamedTuple):
    """Judgement on an attempt that left no commit."""

    kind: FailureKind
    message: str
    evidence: Evidence


def explain(
    paths: RunPaths,
    gone: Sequence[Gone],
    seen: Mapping[ElementKey, Element],
    control: Control,
    accounts: "Accounts",
    now: float,
    taken_back: Collection[Task] = (),
    silenced: Collection[str] = (),
) -> list[Ended]:
    """Say why attempts ended without a commit, in their order.

    Args:
        seen: what the queue shows of their elements; those that it does not show are looked up in accounting.
        control: says of which invocations all jobs were cancelled.
        now: unix time.
        taken_back: tasks of which commits were taken back in this invocation.
        silenced: elements like ``4711_3`` that were cancelled since nothing was heard of them.

    Raises:
        Unanswered: accounting is slow, and is to be asked between passes.
    """
    elements, found = evidence_of(gone, seen, accounts, paths), []
    for attempt in gone:
        element = elements.get((attempt.job or "", attempt.index))
        signs = Signs(
            gone=attempt,
            element=element,
            said=None if attempt.log else read_said(paths, attempt.task, attempt.number),
            is_taken_back=attempt.task in taken_back,
            is_emptied=0 < attempt.invocation <= control.emptied,
            is_silenced=f"{attempt.job}_{attempt.index}" in silenced,
            failed_setup=_failed_setup(paths, attempt, element),
            slurm_log=str(paths.slurm_log),
        )
        ending = ending_of(signs, judge(signs), now)
        found.append(Ended(ending.failure(paths), ending, signs.said.suspected if signs.said else None))
    return found


def _failed_setup(paths: RunPaths, gone: Gone, element: Element | None) -> str:
    """Return a phrase on the line of setup that failed, if one ended the job, by its log."""
    if element is None or element.exit_code != SETUP_EXIT:
        return ""
    with contextlib.suppress(OSError):
        log = paths.root / gone.log if gone.log else paths.task(gone.task).log(gone.number)
        return failed_line(read_shared(log)[-_END_OF_LOG:])
    return ""


def ending_of(signs: Signs, verdict: Verdict, now: float) -> Ending:
    """Return what the store keeps of an attempt. Pure.

    Args:
        now: unix time, for an attempt of which nothing says when it ended.
    """
    gone, element, said = signs.gone, signs.element, signs.said
    # The end of a worker's job may be another attempt's.
    ended = element.ended if element and gone.restart is None else None
    restarts = (element.restarts if element else None) or 0
    return Ending(
        attempt=f"{gone.attempt}r{restarts}" if gone.restart is None else gone.attempt,
        task=task_key(gone.task),
        number=gone.number,
        invocation=gone.invocation,
        **verdict._asdict(),
        node=element.node if element else "",
        job=f"{gone.job}_{gone.index}" if gone.job else "",
        started=said.started if said else None,
        time=(said.ended if said else None) or ended or now,
        log=gone.log,
    )


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


def judge(signs: Signs) -> Verdict:
    """Decide why an attempt ended. Pure: the one place that does, whoever asks.

    The task's own failure file counts, except for what a task cannot know. What our own cancellation of all
    jobs looks like, from outside or to a task, is no failure.
    """
    verdict = _of_both(signs, _from_outside(signs))
    element = signs.element
    if signs.is_taken_back and (element is None or element.state is SlurmState.COMPLETED):
        return Verdict(FailureKind.INPUTS, "its commit was taken back", Evidence.RETRACTION)
    if signs.is_emptied and verdict.kind in _OF_ITS_JOB:
        return Verdict(FailureKind.CANCELLED, "cancelled with the run's jobs", Evidence.CANCELLATION)
    return verdict


def _of_both(signs: Signs, outside: Verdict) -> Verdict:
    """Weigh a task's own word against what Slurm shows.

    A task that used too much memory is killed without warning. And the warning signal does not say whether
    the time was up or the job was preempted, against which more time would not help.
    """
    element = signs.element
    if outside.kind is FailureKind.MEMORY or signs.said is None:
        return outside
    said = Verdict(signs.said.kind, signs.said.message, Evidence.FAILURE_FILE)
    if said.kind is not FailureKind.TIMEOUT:
        return said
    if outside.kind in _PLACE_TAKEN or (element and element.state is SlurmState.CANCELLED):
        return outside
    if element and element.state is SlurmState.COMPLETING and _had_time(element):
        # Its end is a moment old: Slurm does not say yet whether it was preempted or cancelled.
        return Verdict(FailureKind.PREEMPTED, "it was ended with most of its time left", Evidence.SLURM)
    return said


def _had_time(element: Element) -> bool:
    """Whether an element was far from its time limit: warnings of that come near its end."""
    if element.elapsed is None:
        return False
    return element.time_limit is None or element.elapsed < element.time_limit / 2


def _from_outside(signs: Signs) -> Verdict:
    """Judge by what Slurm shows, without the attempt's own word."""
    gone, element = signs.gone, signs.element
    if element is None:
        return _of_none(gone)
    if gone.restart is not None and (element.restarts or 0) > gone.restart:
        return Verdict(FailureKind.PREEMPTED, "its job was put back into the queue", Evidence.SLURM)
    if phase_of(element.state) is not Phase.ENDED:
        return Verdict(FailureKind.KILLED, "its worker went on without a commit", Evidence.BEAT)
    if element.state is SlurmState.FAILED:
        return _of_exit(signs, element)
    if element.state is SlurmState.COMPLETED:
        words = "Slurm says COMPLETED, but nothing was committed"
        return Verdict(FailureKind.KILLED, words, Evidence.SLURM)
    if element.state is SlurmState.CANCELLED and signs.is_silenced:
        words = "its worker was not heard of for minutes, and was cancelled"
        return Verdict(FailureKind.KILLED, words, Evidence.SILENCE)
    if element.state is SlurmState.CANCELLED and not element.node:
        return Verdict(FailureKind.LOST, _BEFORE_ITS_START, Evidence.SLURM)
    kind, words = KINDS.get(element.state, FailureKind.KILLED), _in_words(element)
    if element.state is SlurmState.CANCELLED:
        words = "cancelled by hand, as with scancel (CANCELLED)"
    if gone.is_of_used and kind in _OF_THE_WORKER:
        # How much of it was the tasks' before is not known: it says nothing about what this one needs.
        kind, words = FailureKind.PREEMPTED, f"{words}, in a worker that had done other tasks before"
    return Verdict(kind, words, Evidence.SLURM)


def _of_none(gone: Gone) -> Verdict:
    """Judge an attempt of whose job Slurm shows nothing."""
    if gone.job is None:
        return Verdict(FailureKind.LOST, "its job never arrived in Slurm's queue", Evidence.MISSING)
    words = "Slurm no longer knows the job, so why it ended is unknown"
    return Verdict(FailureKind.KILLED, words, Evidence.MISSING)


def _of_exit(signs: Signs, element: Element) -> Verdict:
    """Judge a job that FAILED by its exit code, also one whose first line did not run."""
    kind = FailureKind.UNSTARTED
    if element.signal == _NOT_OPENED:
        words = (
            f"its node could not open {signs.slurm_log} (exit code 0:53): not mounted, full, read-only "
            "or forbidden there; slurmd's log says which"
        )
    elif signs.gone.is_mute and element.exit_code in _NO_CONTAINER:
        words = (
            f"its container did not start (exit code {element.exit_code}): its log says why; image and "
            "runtime must be there on the node"
        )
    elif element.exit_code == SETUP_EXIT:
        kind = FailureKind.SETUP
        which = signs.failed_setup or f"a line of setup failed on node {element.node}"
        words = f"{which}; its log says more. A line that may fail ends with || true"
    elif element.exit_code == DISK_EXIT:
        kind, words = FailureKind.DISK, "the shared filesystem was full, read-only or away"
    else:
        kind, words = FailureKind.KILLED, _in_words(element)
    return Verdict(kind, words, Evidence.EXIT_CODE)


def _in_words(element: Element) -> str:
    return exit_in_words(element.state, element.exit_code or 0, element.signal or 0)
