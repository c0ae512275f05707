"""Which attempts failed, by claims, beats and elements; and when a look is too old to say so. Pure."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from pipeline.run.submissions import Submission
from pipeline.run.tasks import Task
from pipeline.workers.beats import Beat, Doing, Reason
from pipeline.workers.claims import Claim
from slurm.ringing import parse_worker

BLAMELESS = frozenset(
    {Reason.DONE, Reason.ONE, Reason.FAR, Reason.LONG, Reason.NEEDED, Reason.TIME, Reason.WARNED}
    | {Reason.CHANGED, Reason.TURNED}
)
"""Reasons to leave without having done a task that are no failure of it."""

Beats = Mapping[str, Beat]
"""Newest beats by the workers' names."""


def broken_attempts(
    claims: Iterable[Claim],
    beats: Beats,
    winners: Mapping[Task, str],
    has_said_why: Callable[[Claim], bool],
) -> set[str]:
    """Return the ids of attempts at committed tasks that failed all the same: they said why, or their worker
    said to its end that it is at them. One that was just too late goes on, and says something else. Pure.

    Args:
        winners: ids of the attempts that committed, by their tasks.
        has_said_why: whether an attempt left a failure file.
    """
    beaten = [c for c in claims if c.attempt and c.task in winners and c.attempt != winners[c.task]]
    return {c.attempt for c in beaten if _is_last_word(beats.get(c.worker), c) or has_said_why(c)}


def _is_last_word(beat: Beat | None, claim: Claim) -> bool:
    return beat is not None and beat.attempt == claim.attempt


def are_in_doubt(
    claims: Sequence[Claim], shown: Collection[str], beats: Beats, committed: Collection[Task]
) -> bool:
    """Whether a pass may have to judge the end of a worker that its look shows as running. Pure.

    A worker last heard of at a task that another has done may have been killed since, and with the
    iteration's row its claim goes. Why a worker was warned, with its task undone or done by another, Slurm
    alone knows.

    Args:
        claims: all claims on the tasks at hand.
        shown: names of the workers that the look shows as running.
    """
    at_work = {beat.attempt for beat in beats.values() if beat.doing is Doing.BUSY}
    warned = {beat.worker for beat in beats.values() if beat.reason is Reason.WARNED}
    tried = Counter(claim.task for claim in claims)

    def is_doubtful(claim: Claim) -> bool:
        is_done = claim.task in committed
        if is_done and tried[claim.task] == 1:
            return False
        return claim.worker in warned or (is_done and claim.attempt in at_work)

    return any(is_doubtful(claim) for claim in claims if claim.worker in shown)


def are_several_warned(shown: Collection[str], beats: Beats) -> bool:
    """Whether several workers that a look shows as running were warned: all jobs may have been cancelled
    since, and then nothing is submitted. Pure.

    Args:
        shown: names of the workers that the look shows as running.
    """
    return sum(name in beats and beats[name].reason is Reason.WARNED for name in shown) > 1


def split_unclaimed(
    ended: Iterable[tuple[Submission, int]], claims: Iterable[Claim], beats: Beats
) -> tuple[list[tuple[Submission, int]], list[tuple[Submission, int]]]:
    """Divide ended elements whose own task is not committed into those that failed and those that just left.

    A worker that claimed something is judged by its claims.
    """
    claimed = {name.element for claim in claims if (name := parse_worker(claim.worker))}
    failed: list[tuple[Submission, int]] = []
    left: list[tuple[Submission, int]] = []
    for submission, index in ended:
        element = f"{submission.state.job}_{index}"
        is_blameless = element in claimed or any(_has_left(beats[b]) for b in beats if is_of(b, element))
        (left if is_blameless else failed).append((submission, index))
    return failed, left


def is_of(worker: str, element: str) -> bool:
    """Whether a worker is an element's, in whichever of its starts. Pure."""
    return worker.rpartition("r")[0] == element


def _has_left(beat: Beat) -> bool:
    return beat.tasks > 0 or (beat.doing is Doing.LEAVING and beat.reason in BLAMELESS)
