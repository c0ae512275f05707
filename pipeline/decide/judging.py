"""Why an attempt ended without a commit: its failure file against what Slurm or its process shows. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.decide.device_faults import diagnose
from pipeline.run.endings import Ending, Evidence
from pipeline.run.failures import DISK_EXIT, FailureKind, Said
from pipeline.run.submissions import Submission
from pipeline.run.tasks import Task, task_key
from pipeline.text import exit_in_words as process_in_words
from slurm.nodes import node_names
from slurm.query import Element
from slurm.setup_lines import SETUP_EXIT
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
"""Kinds of failure by Slurm's state. Any other state is KILLED: by a person, or for unknown reasons."""

_NOT_OPENED = 53
"""Signal by which Slurm says that a job ended whose output its node could not open (exit code 0:53)."""
_NO_CONTAINER = frozenset({125, 126, 127, 255})
"""Exit codes of container runtimes, and of a shell, that could not start what they should."""
_BEFORE_ITS_START = "cancelled by hand before it had started, as with scancel (CANCELLED)"
_ABORTED, _ABORTED_BELOW = -6, 134
"""SIGABRT, by which a process ends itself, as an exit code and as that of a shell or srun above it."""
_PLACE_TAKEN = frozenset({FailureKind.PREEMPTED, FailureKind.LOST})
_OF_ITS_JOB = _PLACE_TAKEN | {FailureKind.KILLED, FailureKind.TIMEOUT, FailureKind.PAUSED}
"""Ends that a cancellation makes, as they look from outside or to a task."""
_OF_THE_WORKER = frozenset({FailureKind.MEMORY, FailureKind.TIMEOUT})


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
    halvings: int = 0
    """Number of times that its batch budget was halved."""

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
    is_withdrawn: bool = False
    """Whether a pass has cancelled what waited of its invocation, at the run's end."""
    is_silenced: bool = False
    """Whether its worker was cancelled since it was not heard of."""
    failed_setup: str = ""
    """Phrase on the line of setup that failed, by the attempt's log."""
    log_end: str = ""
    """End of the log of a job that failed."""
    slurm_log: str = "its output"
    """Path of the file that Slurm itself opens."""


class Judgement(NamedTuple):
    """Judgement on an attempt that left no commit."""

    kind: FailureKind
    message: str
    evidence: Evidence


def judge(signs: Signs) -> Judgement:
    """Decide why an attempt ended. Pure, and the one place that does.

    The task's own failure file counts, except for what a task cannot know. What our own cancellation looks
    like, from outside or to a task, is no failure.
    """
    verdict = _of_both(signs, _from_outside(signs))
    element = signs.element
    if signs.is_taken_back and (element is None or element.state is SlurmState.COMPLETED):
        return Judgement(FailureKind.INPUTS, "its commit was retracted", Evidence.RETRACTION)
    is_gone = signs.is_withdrawn and (element is None or element.state is SlurmState.CANCELLED)
    if (signs.is_emptied or is_gone) and verdict.kind in _OF_ITS_JOB:
        return Judgement(FailureKind.CANCELLED, "cancelled with the run's jobs", Evidence.CANCELLATION)
    return verdict


def ending_of(signs: Signs, verdict: Judgement, now: float) -> Ending:
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
        node=node_at_fault(element, said),
        job=f"{gone.job}_{gone.index}" if gone.job else "",
        started=said.started if said else None,
        time=(said.ended if said else None) or ended or now,
        log=gone.log,
        halvings=gone.halvings,
    )


def node_at_fault(element: Element | None, said: Said | None) -> str:
    """Return the node of an attempt: of one on several that failed by a fault of a GPU the one whose rank
    says so, as the others may be as good as any."""
    if element is None:
        return said.host if said else ""
    if said and said.kind is FailureKind.DEVICE and said.node in node_names(element.node):
        return said.node
    return element.node


def _of_both(signs: Signs, outside: Judgement) -> Judgement:
    """Weigh a task's own word against what Slurm shows.

    A task that used too much memory is killed without warning. And the warning signal does not say whether
    the time was up or the job was preempted, against which more time would not help.
    """
    element = signs.element
    if outside.kind is FailureKind.MEMORY or signs.said is None:
        return outside
    said = Judgement(signs.said.kind, signs.said.message, Evidence.FAILURE_FILE)
    if said.kind is not FailureKind.TIMEOUT:
        return said
    if outside.kind in _PLACE_TAKEN or (element and element.state is SlurmState.CANCELLED):
        return outside
    if element and element.state is SlurmState.COMPLETING and _had_time(element):
        # Its end is a moment old: Slurm does not say yet whether it was preempted or cancelled.
        return Judgement(FailureKind.PREEMPTED, "it was ended with most of its time left", Evidence.SLURM)
    return said


def _had_time(element: Element) -> bool:
    """Whether an element was far from its time limit: warnings of that come near its end."""
    if element.elapsed is None:
        return False
    return element.time_limit is None or element.elapsed < element.time_limit / 2


def _from_outside(signs: Signs) -> Judgement:
    """Judge by what Slurm shows, without the attempt's own word."""
    gone, element = signs.gone, signs.element
    if element is None:
        return _of_none(gone)
    if gone.restart is not None and (element.restarts or 0) > gone.restart:
        return Judgement(FailureKind.PREEMPTED, "its job was put back into the queue", Evidence.SLURM)
    if phase_of(element.state) is not Phase.ENDED:
        return Judgement(FailureKind.KILLED, "its worker went on without a commit", Evidence.BEAT)
    if element.state is SlurmState.FAILED:
        return _of_exit(signs, element)
    if element.state is SlurmState.COMPLETED:
        words = "Slurm says COMPLETED, but nothing was committed"
        return Judgement(FailureKind.KILLED, words, Evidence.SLURM)
    if element.state is SlurmState.CANCELLED and signs.is_silenced:
        words = "its worker sent no heartbeat for minutes, and was cancelled"
        return Judgement(FailureKind.KILLED, words, Evidence.SILENCE)
    if element.state is SlurmState.CANCELLED and not element.node:
        return Judgement(FailureKind.LOST, _BEFORE_ITS_START, Evidence.SLURM)
    kind, words = KINDS.get(element.state, FailureKind.KILLED), _in_words(element)
    if element.state is SlurmState.CANCELLED:
        words = "cancelled by hand, as with scancel (CANCELLED)"
    if gone.is_of_used and kind in _OF_THE_WORKER:
        # How much of it was the tasks' before is not known: it says nothing about what this one needs.
        kind, words = FailureKind.PREEMPTED, f"{words}, in a worker that had done other tasks before"
    return Judgement(kind, words, Evidence.SLURM)


def _of_none(gone: Gone) -> Judgement:
    """Judge an attempt of whose job Slurm shows nothing."""
    if gone.job is None:
        return Judgement(FailureKind.LOST, "its job never arrived in Slurm's queue", Evidence.MISSING)
    words = "Slurm no longer knows the job, so why it ended is unknown"
    return Judgement(FailureKind.KILLED, words, Evidence.MISSING)


def _of_exit(signs: Signs, element: Element) -> Judgement:
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
        has_aborted = element.signal == -_ABORTED or element.exit_code == _ABORTED_BELOW
        by_log = _of_log(signs.log_end, signs.gone.task, words) if has_aborted else None
        return by_log or Judgement(kind, words, Evidence.EXIT_CODE)
    return Judgement(kind, words, Evidence.EXIT_CODE)


def _of_log(log_end: str, task: Task, words: str) -> Judgement | None:
    """Judge a process that aborted by the fault of a GPU that its log ends with, as NCCL's watchdog leaves
    it; None where there is none."""
    if not (found := diagnose(log_end)):
        return None
    return Judgement(found.kind(task.stage), f"{found.in_words(task.stage)} ({words})", Evidence.LOG)


def _in_words(element: Element) -> str:
    return exit_in_words(element.state, element.exit_code or 0, element.signal or 0)


def was_killed(exit_code: int | None) -> bool:
    """Whether a signal from outside ended a process; ``exit_code`` is minus the signal."""
    return exit_code is not None and exit_code < 0 and exit_code != _ABORTED


def judge_process(
    task: Task, said: Said | None, exit_code: int, note: str, ranks: int, log_end: str = ""
) -> Judgement:
    """Decide why an attempt ended that was one or several processes of this machine or of a job step.

    Args:
        said: its failure file. A rank that was killed leaves none: of several ranks the file is then
            another's, which only found its peer gone.
        exit_code: minus the signal that ended the process; of several, that of the first that failed.
        note: further facts in words; empty if there are none.
        ranks: number of its processes.
        log_end: end of the log of the one that failed first.
    """
    why = note or process_in_words(exit_code) + (" and said nothing" if exit_code >= 0 else "")
    if said is None or (ranks > 1 and was_killed(exit_code)):
        kind = FailureKind.DISK if exit_code == DISK_EXIT else FailureKind.KILLED
        has_aborted = exit_code in (_ABORTED, _ABORTED_BELOW)
        by_log = _of_log(log_end, task, why) if has_aborted else None
        return by_log or Judgement(kind, why, Evidence.EXIT_CODE)
    message = f"{said.message} ({why})" if ranks > 1 else said.message
    return Judgement(said.kind, message, Evidence.FAILURE_FILE)
