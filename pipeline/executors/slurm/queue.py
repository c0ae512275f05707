"""A run's jobs in Slurm's queue: read, cancel, wait until they are gone."""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.run import journal
from pipeline.run.directory import Run
from pipeline.run.owner import Owner
from pipeline.run.paths import RunPaths
from pipeline.run.place import original_of
from pipeline.run.standpoint import Elsewhere, standpoint
from pipeline.run.submissions import SUBMITTED, is_job_of, run_id_of
from pipeline.workers.looking import PERSON_AGE, Look, look
from slurm.commands import SlurmError, SlurmMissing, on_cluster
from slurm.limits import hides_jobs
from slurm.query import Element, read_queue
from slurm.ringing import parse_worker
from slurm.states import Phase, SlurmState, UnknownState, phase_of
from slurm.submission import cancel

_GONE_SECONDS = 1.0

ElementsByName = dict[str, list[Element]]
"""Elements of the queue by job name."""

_HELD = frozenset({"launchfailedrequeuedheld", "jobholdmaxrequeue"})
"""Pending reasons, without spaces and underscores, of jobs that Slurm could not start and holds: they would
wait for ever. Jobs held by an administrator or the user are left to them."""


def jobs_of(run: Run) -> Callable[[str], bool]:
    """Return what says of a job's name whether it is a job of the run. A copy's are the original's."""
    run_id = "" if original_of(run) else run.identity.id
    return lambda name: is_job_of(run_id, name)


def run_queue(run: Run, seen: Look) -> ElementsByName:
    """Return the run's elements as a look shows them. Those that Slurm could not start, and holds, are
    cancelled and count as ended.
    """
    elements = seen.elements_of(jobs_of(run))
    queue: ElementsByName = {}
    for element in _without_held(elements):
        queue.setdefault(element.name, []).append(element)
    return queue


def _without_held(elements: Sequence[Element]) -> Iterator[Element]:
    held = {e for e in elements if is_pending(e) and is_held(e)}
    if held:
        cancel(sorted(e.job_id for e in held), only_pending=True)
    for element in elements:
        yield replace(element, state=SlurmState.LAUNCH_FAILED) if element in held else element


def is_held(element: Element) -> bool:
    """Whether Slurm could not start an element, and held it: then a pass cancels it, after which it shows the
    same reason."""
    return re.sub("[()_ ]", "", element.reason).lower() in _HELD


def is_live(element: Element) -> bool:
    return phase_of(element.state) is not Phase.ENDED


def is_pending(element: Element) -> bool:
    return phase_of(element.state) is Phase.PENDING


Starts = Mapping[tuple[str, int], int]
"""Number of restarts of the newest worker of each element, by array id and index."""


def newest_starts(workers: Iterable[str]) -> Starts:
    """Return the newest of the starts of elements whose workers were heard of. Pure."""
    newest: dict[tuple[str, int], int] = {}
    for name in filter(None, map(parse_worker, workers)):
        key = (name.array, name.index)
        newest[key] = max(name.restart, newest.get(key, 0))
    return newest


def as_heard_of(element: Element, heard_of: Starts) -> Element:
    """Return an element as running, with the number of restarts of the newest of its workers that was heard
    of, where the queue showed it as waiting for that start, or before it. Pure."""
    newest, shown = heard_of.get((element.array_id, element.index), -1), element.restarts or 0
    if newest < shown or (newest == shown and not is_pending(element)):
        return element
    return replace(element, state=SlurmState.RUNNING, restarts=newest)


def cancel_all(run: Run) -> int:
    """Cancel every job of a run, of any iteration. Returns how many arrays that were."""
    with on_cluster(run.cluster):
        return cancel_jobs([read_queue(jobs_of(run))], only_pending=False)


def cancel_of_id(run_id: str, cluster: str) -> int:
    """Cancel every job of the run that has an id, wherever it lies, on a cluster by its name (empty: the one
    of this machine). Returns how many arrays that were."""
    with on_cluster(cluster):
        return cancel_jobs([read_queue(lambda name: is_job_of(run_id, name))], only_pending=False)


def wait_until_gone(run: Run, seconds: float) -> int:
    """Wait for cancelled jobs to leave the queue. Returns how many are still there when the time is up.

    Raises:
        SlurmError: Slurm does not answer.
    """
    until = time.monotonic() + seconds
    while True:
        with on_cluster(run.cluster):
            elements = read_queue(jobs_of(run))
        left = sum(map(is_live, elements))
        if not left or time.monotonic() > until:
            return left
        time.sleep(_GONE_SECONDS)


def cancel_jobs(queue: Iterable[Sequence[Element]], only_pending: bool) -> int:
    """Cancel the live elements, or only the pending ones. Returns how many arrays that were."""
    ids = arrays_of(queue, only_pending)
    if ids:
        cancel(ids, only_pending)
    return len(ids)


def arrays_of(queue: Iterable[Sequence[Element]], only_pending: bool) -> list[str]:
    """Return the ids of the arrays with elements that live, or that wait."""
    elements = [e for of_name in queue for e in of_name if (is_pending(e) if only_pending else is_live(e))]
    return sorted({e.array_id for e in elements}, key=int)


_PATIENCE = 15.0
"""Seconds that a command which shows the queue to a person waits for squeue."""


@dataclass(frozen=True)
class RunQueue:
    """Elements of the run's jobs, or the reason why they are not known."""

    elements: Sequence[Element] = ()
    unanswered: str | None = None
    asked: float | None = None
    """Unix time when squeue was called; None where it did not answer, or was not asked."""
    elsewhere: Elsewhere | None = None
    """Whose jobs they are, where another user looks, or from another cluster; None: one's own."""
    is_hidden: bool = False
    """Whether Slurm does not show them from there, so that there may be some."""

    @property
    def live(self) -> list[Element]:
        return [element for element in self.elements if is_live(element)]

    @property
    def has_jobs(self) -> bool | None:
        """Whether jobs of the run wait or run; None where that is not known."""
        return None if self.unanswered or self.is_hidden else bool(self.live)

    def with_heard(self, workers: Iterable[str]) -> "RunQueue":
        """Return it with elements as their workers were heard of since (:func:`as_heard_of`)."""
        heard_of = newest_starts(workers)
        return replace(self, elements=[as_heard_of(element, heard_of) for element in self.elements])


def look_at_queue(
    run: Run, max_age: float = PERSON_AGE, patience: float = _PATIENCE, who: Callable[[], Owner] | None = None
) -> RunQueue:
    """Look at the queue as :func:`ask_for_queue`; a missing answer is returned as ``unanswered``."""
    try:
        return ask_for_queue(run, max_age, patience, who)
    except (SlurmError, SlurmMissing, UnknownState) as error:
        return RunQueue(unanswered=str(error))


def ask_for_queue(
    run: Run, max_age: float, patience: float, who: Callable[[], Owner] | None = None
) -> RunQueue:
    """Look at the queue for a person: of another user's run at its owner's jobs, where Slurm shows them.

    Args:
        max_age: seconds that the answer may be old, which in any case is from after the newest submission.
        patience: seconds to wait for it.
        who: says who looks, and from which cluster. Default: Slurm is asked for that.

    Raises:
        SlurmError, SlurmMissing, UnknownState: there is no answer that is understood.
    """
    if original_of(run):  # what is in the queue, and who its owner is, is the original's
        return RunQueue(asked=time.time())
    with on_cluster(run.cluster):
        if (elsewhere := standpoint(run.paths, who or run.who_acts)) is not None:
            return _look_from(elsewhere, run, patience)
        seen = look(run.paths, max_age, patience, newest_submission(run.paths), is_view=True)
    return RunQueue(seen.elements_of(jobs_of(run)), asked=seen.asked)


def _look_from(elsewhere: Elsewhere, run: Run, patience: float) -> RunQueue:
    """Look at the jobs of a run's owner, about which no answer is kept for other users."""
    if elsewhere.is_on_another_cluster:
        return RunQueue(elsewhere=elsewhere, is_hidden=True)
    elements = read_queue(lambda name: is_job_of(run.identity.id, name), patience, user=elsewhere.owner.uid)
    is_hidden = not any(map(is_live, elements)) and hides_jobs()
    return RunQueue(elements, asked=time.time(), elsewhere=elsewhere, is_hidden=is_hidden)


def newest_submission(paths: RunPaths) -> float:
    """Return the unix time of the newest submission in the journal's end; 0 where there is none."""
    events = journal.read_events(paths.events)
    return max((e["time"] for e in events if e["event"] == SUBMITTED), default=0.0)


_PATIENCE_OF_A_LIST = 5.0
"""The same of a command that lists runs."""


def live_run_ids(cluster: str) -> frozenset[str] | None:
    """Return the ids of all runs of this user that have jobs in a cluster's queue, by one call of squeue;
    None where it does not answer."""
    try:
        with on_cluster(cluster):
            elements = read_queue(lambda name: bool(run_id_of(name)), _PATIENCE_OF_A_LIST)
    except (SlurmError, SlurmMissing, UnknownState):
        return None
    return frozenset(run_id_of(element.name) for element in elements if is_live(element))
