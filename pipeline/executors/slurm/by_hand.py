"""Jobs of a run that a person cancelled with Slurm's own commands, all at once: then the run pauses.

``scancel -u USER``, by an administrator perhaps, means that the jobs shall be gone. Watchdogs tell that
from the repair of single elements, which leaves them alone.
"""

from collections.abc import Callable, Iterable, Sequence

from pipeline.executors.slurm.queue import is_held, is_live, is_pending
from pipeline.executors.slurm.silence import read_silences
from pipeline.run.control import ByHand, Control
from pipeline.run.submissions import Ledger, Submission, is_driver_job
from slurm.query import Element
from slurm.states import SlurmState

_TOGETHER_SECONDS = 30.0
"""Seconds before the newest cancellation in which others count as the same act."""
_NEARLY_ALL = 0.8
_FEWEST = 2


class Paused(Exception):
    """Cancellation of a run's jobs by hand, which a pass has found: it submits nothing."""

    def __init__(self, by_hand: ByHand) -> None:
        super().__init__(by_hand.in_words)
        self.by_hand = by_hand


def find_by_hand(elements: Iterable[Element], is_by_hand: Callable[[Element], bool]) -> ByHand | None:
    """Return how many jobs of a run were cancelled by hand, if these were nearly all that it had; else None.
    Pure. Preempted jobs and those of lost nodes were not cancelled. Of jobs that are about to end Slurm does
    not say why: where others were cancelled they count with these.

    Args:
        elements: the run's, as the queue shows them, those too that have ended.
        is_by_hand: whether a cancelled one was, and not by slurm-ppo.
    """
    elements = list(elements)
    cancelled = [e for e in elements if e.state is SlurmState.CANCELLED and is_by_hand(e)]
    last = max((e.ended or 0.0 for e in cancelled), default=0.0)
    act = [e for e in cancelled if (e.ended or 0.0) >= last - _TOGETHER_SECONDS]
    since = min((e.ended or 0.0 for e in act), default=0.0)
    spared = [e for e in elements if _was_there(e, since, last)]
    if any(is_driver_job(e.name) and _waited(e, last) for e in spared):
        return None
    others = [e for e in spared if not is_driver_job(e.name)]
    ending = sum(e.state is SlurmState.COMPLETING for e in others)
    total = len(act) + len(others)
    if len(act) < _FEWEST or len(act) + ending < _NEARLY_ALL * total:
        return None
    return ByHand(len(act) + ending, total, last)


def _was_there(element: Element, since: float, last: float) -> bool:
    """Whether an element was in the queue when others were cancelled, between two moments (unix times; 0:
    that is unknown), and outlived that. What has ended since is shown for longer than these: so
    every pass says the same of them."""
    if not since:
        return is_live(element)
    # What was put back into the queue shows when that was.
    was_submitted = element.submitted is None or element.submitted < since or bool(element.restarts)
    outlived = element.state is not SlurmState.CANCELLED and (element.ended or 0.0) > last
    return was_submitted and (is_live(element) or outlived)


def _waited(element: Element, last: float) -> bool:
    """Whether an element waited when others were cancelled, until a moment (unix time; 0: not known)."""
    return is_pending(element) or (last > 0.0 and (element.started or 0.0) >= last)


def is_of_people(ledger: Ledger, cancelled: Iterable[Element], control: Control) -> Callable[[Element], bool]:
    """Return a function that says of elements, which were cancelled, whether that was by hand in the present
    invocation, and not by slurm-ppo. Jobs of former invocations that live on belong to it too."""
    own = max(control.emptied, control.withdrawn)
    names = {element.name for element in cancelled}
    known = {s.name: s for s in ledger.named(names) if s.invocation > own}
    silenced = {name for name, silence in read_silences(ledger.paths).items() if silence.is_cancelled}

    def is_by_hand(element: Element) -> bool:
        submission = known.get(element.name)
        if submission is None or _is_withdrawn(submission, element.index):
            return False
        if is_held(element) or element.job_id in silenced:
            return False
        return submission.invocation == control.invocation or (element.ended or 0.0) > control.begun

    return is_by_hand


def _is_withdrawn(submission: Submission, index: int) -> bool:
    return submission.state.is_withdrawn or index in submission.state.withdrawn


def look_for_act(ledger: Ledger, elements: Sequence[Element], control: Control) -> ByHand | None:
    """Return what :func:`find_by_hand` finds of a run in its present invocation: nothing where a pass has
    cancelled itself what waited, at the run's end."""
    cancelled = [element for element in elements if element.state is SlurmState.CANCELLED]
    if len(cancelled) < _FEWEST:
        return None
    return find_by_hand(elements, is_of_people(ledger, cancelled, control))
