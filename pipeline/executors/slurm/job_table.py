"""A run's jobs at one moment: its submissions on disk, matched with Slurm's queue."""

import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.config.job_kinds import DRIVER, DRIVERS
from pipeline.executors.slurm.queue import ElementsByName, is_live, is_pending, run_queue
from pipeline.orchestrate.jobs import CommittedOf
from pipeline.run import journal
from pipeline.run.control import Control, read_control
from pipeline.run.directory import Run
from pipeline.run.endings import (
    NO_ENDINGS,
    Ending,
    Endings,
    Evidence,
    note_endings,
    read_endings,
)
from pipeline.run.failures import Failure
from pipeline.run.paths import RunPaths
from pipeline.run.submissions import SUBMITTED, Ledger, Submission, is_job_of, job_kind_of, note_submitted
from pipeline.run.tasks import Stage, Task, parse_task
from pipeline.workers.looking import PASS_AGE, Look, allowed_age
from slurm.ended import find_by_name
from slurm.query import Element
from slurm.states import SlurmState

_ARRIVAL_SECONDS = 30.0
"""A submission that the queue does not show counts as pending if it was made less than so long before squeue
was called, or since: by clocks of several nodes. One without a job id is looked for this long, before it is
taken never to have arrived."""


@dataclass(frozen=True)
class Snapshot:
    """People's requests and the queue at the moment that a pass looked: it decides by nothing newer."""

    time: float = 0.0
    control: Control = field(default_factory=Control)
    queue: ElementsByName = field(default_factory=dict)
    """Elements of the run as they were when squeue was called, and those expected since."""
    asked: float = 0.0
    """Unix time when squeue was called."""
    renewed: float = 0.0
    """Unix time from which on a pass that a worker asks for gets a newer look."""
    others: Sequence[Element] = ()
    """Elements of this user's that wait or run and are of no stage of the run."""
    is_fresh: bool = True
    """Whether that was in this pass, under its lease: then nothing that others submitted is missing."""

    def is_expected(self, submission: Submission) -> bool:
        """Whether it may yet show in the queue: sbatch has not answered, or its driver died before it noted
        the answer."""
        since = abs(self.time - submission.created)  # a clock that is ahead makes nobody wait for ever
        return _is_asked_for(submission) and since < _ARRIVAL_SECONDS

    def expecting(self, submissions: Sequence[Submission], endings: Endings = NO_ENDINGS) -> "Snapshot":
        """Return it with what was submitted since squeue was called, or just before, as pending, but for what
        has ended; of a look that was taken under the lease nothing is missing."""
        if self.is_fresh:
            return self
        missing = [s for s in submissions if s.state.job and s.name not in self.queue]
        near = [s for s in missing if abs(self.asked - s.created) < _ARRIVAL_SECONDS]
        expected = [s for s in near if not s.state.is_withdrawn]
        added = {s.name: elements for s in expected if (elements := list(_as_pending(s, endings)))}
        return replace(self, queue={**self.queue, **added}) if added else self

    def shows(self, element: tuple[str, int]) -> bool:
        """Whether the queue has an element, by array id and index, in whatever state."""
        return any(element == (e.array_id, e.index) for of_name in self.queue.values() for e in of_name)

    def live_elements(self, submission: Submission) -> dict[int, Element]:
        """Return its elements that wait or run, by array index."""
        return {e.index: e for e in self.queue.get(submission.name, ()) if is_live(e)}

    def count_pending(self, job_kind: str) -> int:
        """Count the jobs of a job kind that wait in the queue."""
        jobs = (elements for name, elements in self.queue.items() if job_kind_of(name) == job_kind)
        return sum(any(map(is_pending, elements)) for elements in jobs)


def _as_pending(submission: Submission, endings: Endings) -> Iterator[Element]:
    """Yield the elements of a submission that the queue does not show yet."""
    assert submission.state.job is not None
    for index in submission.indices:
        if not _is_over(submission, index, endings):
            yield Element(
                array_id=submission.state.job,
                index=index,
                name=submission.name,
                state=SlurmState.PENDING,
                reason="None",
                node="",
                partition="",
                submitted=submission.created,
                started=None,
                ended=None,
                exit_code=None,
                signal=None,
                restarts=0,
                time_limit=None,
            )


def _is_over(submission: Submission, index: int, endings: Endings) -> bool:
    """Whether it is known how an element ended, or will: slurm-ppo has cancelled it."""
    return endings.of_element(submission, index) is not None or index in submission.state.withdrawn


def take_snapshot(run: Run, seen: Look, is_fresh: bool) -> Snapshot:
    """Read people's requests, and what a look at the queue shows of the run."""
    queue = _corrected(run_queue(run, seen), os.environ)
    others = [e for e in seen.elements if is_live(e) and not _is_of_stage(run, e)]
    renewed = seen.asked + allowed_age(PASS_AGE, seen.recent, seen.asked, seen.runs)
    return Snapshot(time.time(), read_control(run.paths), queue, seen.asked, renewed, others, is_fresh)


def _is_of_stage(run: Run, element: Element) -> bool:
    return is_job_of(run.identity.id, element.name) and job_kind_of(element.name) not in DRIVERS


def _corrected(queue: ElementsByName, environment: Mapping[str, str]) -> ElementsByName:
    """Return the queue with the element that this process is part of as running, which it may be since."""
    job, index = (environment.get(f"SLURM_ARRAY_{part}_ID") for part in ("JOB", "TASK"))
    return {
        name: [
            replace(e, state=SlurmState.RUNNING)
            if (e.array_id, str(e.index)) == (job, index) and is_pending(e)
            else e
            for e in elements
        ]
        for name, elements in queue.items()
    }


def recently_submitted(paths: RunPaths, since: float) -> set[str]:
    """Return the names of what was submitted from a moment on (unix time), of whatever iteration."""
    events = journal.read_events(paths.events)
    return {e["array"] for e in events if e["event"] == SUBMITTED and e["time"] > since}


@dataclass(frozen=True)
class ArrayElement:
    """Array element that carries a live task."""

    array: str
    """Job id of the array."""
    index: int


@dataclass(frozen=True)
class Live:
    """An array element that waits or runs."""

    submission: Submission
    carrier: ArrayElement
    element: Element | None
    """None right after it was submitted."""

    @property
    def is_pending(self) -> bool:
        return self.element is None or is_pending(self.element)


@dataclass
class JobTable:
    """Submissions of the current iterations, and which of their elements wait or run.

    What the pass itself submits or redirects is entered at once, so that the rest of the pass counts on it.
    """

    ledger: Ledger
    seen: Snapshot = Snapshot()
    submissions: list[Submission] = field(default_factory=list)
    live: dict[Task, Live] = field(default_factory=dict)
    endings: Endings = NO_ENDINGS
    """How attempts ended, of the iterations of the submissions."""

    @property
    def is_unsure(self) -> bool:
        """Whether a job may have been submitted that the queue does not show yet."""
        return any(not live.carrier.array for live in self.live.values())

    def find_gone(self, committed_of: CommittedOf) -> list[tuple[Submission, int]]:
        """Find elements that have ended without a commit and are not accounted for yet."""
        unsettled = list(self.unsettled())
        committed = committed_of([submission.task(index) for submission, index in unsettled])
        return [one for one in unsettled if one[0].task(one[1]) not in committed]

    def unsettled(self) -> Iterator[tuple[Submission, int]]:
        """Elements that are not in the queue and are not accounted for."""
        for submission in self.submissions:
            if submission.state.is_withdrawn or self.seen.is_expected(submission):
                continue
            here = self.seen.live_elements(submission)
            for index, _ in submission.tasks():
                if index not in here and not _is_over(submission, index, self.endings):
                    yield submission, index

    def pending_driver(self) -> Submission | None:
        """Return the driver job that waits in the queue for the end of workers: the newest, as older ones may
        have started since squeue was called."""
        for submission in reversed(self.submissions):
            is_asked_for = (submission.iteration, submission.job_kind) == (0, DRIVER)
            if is_asked_for and any(map(is_pending, self.seen.queue.get(submission.name, ()))):
                return submission
        return None

    def enter(self, submission: Submission) -> None:
        """Add what was just submitted."""
        assert submission.state.job is not None
        self.submissions.append(submission)
        for index, task in submission.tasks():
            self.live[task] = Live(submission, ArrayElement(submission.state.job, index), None)

    def note(self, submission: Submission, **state: object) -> None:
        """Change what the ledger says of a submission."""
        noted = self.ledger.note(submission, replace(submission.state, **state))  # type: ignore[arg-type]
        self.submissions = [noted if s.name == noted.name else s for s in self.submissions]

    def files_in_use(self) -> set[str]:
        """Return the files, by paths relative to the run, that jobs which wait or run may read or write: of
        each its submission's, and its own log."""
        found = self.seen.queue.items()
        live = {name: {e.index for e in of if is_live(e)} for name, of in found if any(map(is_live, of))}
        known = [s for s in self.submissions if s.name in live]
        others = self.ledger.named(live.keys() - {s.name for s in known})
        return {path for s in (*known, *others) for path in self.ledger.files(s, live[s.name])}

    def learn_endings(self, iterations: Collection[int]) -> None:
        """Read how attempts at the tasks of further iterations ended."""
        self.endings = self.endings.adding(read_endings(self.ledger.paths, iterations).values())

    def note_endings(self, endings: Iterable[Ending]) -> None:
        """Write down how attempts ended."""
        endings = list(endings)
        note_endings(self.ledger.paths, endings)
        self.endings = self.endings.adding(endings)

    def failures(self) -> dict[Task, list[Failure]]:
        """Collect the failures of this invocation that count, commits that were taken back included."""
        found: dict[Task, list[Failure]] = {}
        for ending in self.of_invocation():
            if ending.kind is not None and not ending.is_redone:
                failure = ending.failure(self.ledger.paths)
                found.setdefault(failure.task, []).append(failure)
        return found

    def taken_back(self) -> set[Task]:
        """Return the tasks of which commits were taken back in this invocation."""
        return {parse_task(e.task) for e in self.of_invocation() if e.evidence is Evidence.RETRACTION}

    def of_invocation(self) -> Iterator[Ending]:
        """Yield how attempts of this invocation ended."""
        invocation = self.seen.control.invocation
        yield from (ending for ending in self.endings.values() if ending.invocation == invocation)


def read_table(
    ledger: Ledger,
    seen: Snapshot,
    iterations: Collection[int],
    newest: Task | None = None,
    names: Collection[str] | None = None,
) -> JobTable:
    """Read the submissions of some iterations, and match them with the queue.

    Args:
        newest: the newest committed update; its attempt, which may live, is of interest too.
        names: names of jobs that are of interest whatever iteration they were submitted for, and with them
            those that the queue may not show yet.
    """
    also = {newest.iteration} if newest else set()
    loaded = ledger.load({*iterations, *also})
    wanted = [s for s in loaded if s.iteration in iterations or s.job_kind == Stage.UPDATE]
    if names is not None:
        recent = recently_submitted(ledger.paths, seen.asked - _ARRIVAL_SECONDS)
        wanted += ledger.named({*names, *recent} - {s.name for s in wanted})
    known = _with_job_ids(ledger, seen, wanted)
    submissions = [_given_up(ledger, seen, one) for one in known]
    concerned = {*iterations, *(s.iteration for s in submissions)}
    endings = read_endings(ledger.paths, concerned)
    seen = seen.expecting(submissions, endings)
    return JobTable(ledger, seen, submissions, dict(_find_live(seen, submissions)), endings)


def _is_asked_for(submission: Submission) -> bool:
    """Whether it was handed to sbatch, and nobody knows whether Slurm took it."""
    return submission.state.job is None and not submission.state.is_withdrawn


def _with_job_ids(ledger: Ledger, seen: Snapshot, submissions: Sequence[Submission]) -> list[Submission]:
    """Find the jobs of submissions whose answer was lost: by name, in the queue first, where one that was
    given up may come late."""
    nameless = {s.name for s in submissions if s.state.job is None}
    known = {name: seen.queue[name][0].array_id for name in nameless if name in seen.queue}
    if missing := {s.name for s in submissions if _is_asked_for(s)} & nameless - known.keys():
        known |= find_by_name(missing)
    return [_arrived(ledger, s, known[s.name]) if s.name in known else s for s in submissions]


def _arrived(ledger: Ledger, submission: Submission, job: str) -> Submission:
    note_submitted(ledger.paths, submission, job, ",".join(submission.state.waits_for))
    return ledger.note(submission, replace(submission.state, job=job))


def _given_up(ledger: Ledger, seen: Snapshot, submission: Submission) -> Submission:
    """Take back a submission of which no job has come: its tasks are submitted again. Nobody tried them."""
    if not _is_asked_for(submission) or seen.is_expected(submission):
        return submission
    journal.event(ledger.paths.events, "never_arrived", array=submission.name)
    return ledger.note(submission, replace(submission.state, is_withdrawn=True))


def _find_live(seen: Snapshot, submissions: Sequence[Submission]) -> Iterator[tuple[Task, Live]]:
    for submission in submissions:
        elements = seen.live_elements(submission)
        for index, task in submission.tasks():
            if element := elements.get(index):
                yield task, Live(submission, ArrayElement(element.array_id, index), element)
            elif seen.is_expected(submission):
                yield task, Live(submission, ArrayElement("", index), None)
