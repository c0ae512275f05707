"""A run's jobs at one moment: its submissions on disk, matched with Slurm's queue."""

import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.config.job_kinds import DRIVER, DRIVERS
from pipeline.executors.slurm.by_hand import Paused, look_for_act
from pipeline.executors.slurm.queue import ElementsByName, is_live, is_pending, run_queue
from pipeline.orchestrate.jobs import CommittedOf
from pipeline.run import journal
from pipeline.run.control import Control, read_control
from pipeline.run.directory import Run
from pipeline.run.endings import NO_ENDINGS, Endings, Evidence, read_endings
from pipeline.run.paths import RunPaths
from pipeline.run.submissions import SUBMITTED, Ledger, Submission, is_job_of, job_kind_of, note_submitted
from pipeline.run.tasks import Stage, Task, parse_task
from pipeline.workers.looking import PASS_AGE, Look, allowed_age, look
from slurm.commands import SlurmTimeout
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
        since = abs(self.time - submission.created)  # a clock that is ahead is not waited for for ever
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
                submitted=submission.created,
                restarts=0,
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


@dataclass
class JobTable:
    """Submissions of the current iterations, and which of their elements wait or run.

    What the pass itself submits or redirects is entered at once, so that the rest of the pass counts on it.
    """

    ledger: Ledger
    seen: Snapshot = Snapshot()
    submissions: list[Submission] = field(default_factory=list)
    endings: Endings = NO_ENDINGS
    """How attempts ended, of the iterations of the submissions."""

    @property
    def is_unsure(self) -> bool:
        """Whether a job may have been submitted that the queue does not show yet."""
        return any(s.is_of_stage and self.seen.is_expected(s) for s in self.submissions)

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

    def taken_back(self) -> set[Task]:
        """Return the tasks of which commits were taken back in this invocation."""
        own = (e for e in self.endings.values() if e.invocation == self.seen.control.invocation)
        return {parse_task(ending.task) for ending in own if ending.evidence is Evidence.RETRACTION}


def read_table(
    ledger: Ledger, seen: Snapshot, iterations: Collection[int], newest: Task | None = None
) -> JobTable:
    """Read the submissions of some iterations, and those of whatever iteration whose jobs the queue shows, or
    may not show yet; match them with it.

    Args:
        newest: the newest committed update; its attempt, which may live, is of interest too.
    """
    also = {newest.iteration} if newest else set()
    loaded = ledger.load({*iterations, *also})
    wanted = [s for s in loaded if s.iteration in iterations or s.job_kind == Stage.UPDATE]
    recent = recently_submitted(ledger.paths, seen.asked - _ARRIVAL_SECONDS)
    wanted += ledger.named({*seen.queue, *recent} - {s.name for s in wanted})
    known = _with_job_ids(ledger, seen, wanted)
    submissions = [_given_up(ledger, seen, one) for one in known]
    concerned = {*iterations, *(s.iteration for s in submissions)}
    endings = read_endings(ledger.paths, concerned)
    seen = seen.expecting(submissions, endings)
    return JobTable(ledger, seen, submissions, endings)


def _is_asked_for(submission: Submission) -> bool:
    """Whether it was handed to sbatch, and it is unknown whether Slurm took it."""
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
    """Take back a submission of which no job has come: its untried tasks are submitted again."""
    if not _is_asked_for(submission) or seen.is_expected(submission):
        return submission
    journal.event(ledger.paths.events, "never_arrived", array=submission.name)
    return ledger.note(submission, replace(submission.state, is_withdrawn=True))


# --- reading the queue -----------------------------------------------------------------------------------

# As one pass reads it: by a look from before its lease where that is enough, else by its own. Nothing is
# remembered between passes but what is on disk (pipeline.run.submissions) and in the queue.


SECOND_PATIENCE = 5.0
"""Seconds that squeue may take while the lease is held."""


@dataclass
class QueueReader:
    """The looks at the queue of one pass."""

    run: Run
    first_look: Look | None = None
    """Look at the queue from before the lease was taken; None: the pass looks itself."""
    is_alone: bool = False
    """Whether no other has held the lease since that was asked for."""
    second_look: Look | None = None
    """Look by which it was confirmed that elements are gone."""

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.run.paths)

    def snapshot(self) -> Snapshot:
        """Return the snapshot that the pass decides by."""
        seen, self.first_look = self.first_look, None
        snapshot = self._from_before(seen, self.ledger.load({0})) if seen else None
        if snapshot is None:
            now = look(self.run.paths, 0.0, SECOND_PATIENCE)
            snapshot = take_snapshot(self.run, now, is_fresh=True)
        return snapshot

    def again(self) -> Snapshot:
        """Return a snapshot of a look of now, once in a pass."""
        self.second_look = self.second_look or look(self.run.paths, 0.0, SECOND_PATIENCE)
        return take_snapshot(self.run, self.second_look, is_fresh=True).expecting(self.ledger.load({0}))

    def heed_people(self, elements: Sequence[Element], control: Control) -> None:
        """Stop the pass if a person has cancelled the run's jobs.

        Args:
            elements: the run's, as a look shows them.
            control: people's requests at the time of the snapshot.

        Raises:
            Paused: a person has.
        """
        if act := look_for_act(self.ledger, elements, control):
            raise Paused(act)

    def _from_before(self, seen: Look, submitted: Sequence[Submission]) -> Snapshot | None:
        """Return what a look shows that was taken before the lease was; None where it is to be taken again:
        after a pass which finds no driver job that waits, and none that was submitted since, there may be no
        other, so nothing is taken for granted."""
        snapshot = take_snapshot(self.run, seen, is_fresh=self.is_alone)
        since = (s for s in submitted if s.job_kind in DRIVERS and s.state.job and s.created > seen.asked)
        if self.is_alone or any(map(snapshot.count_pending, DRIVERS)) or any(since):
            return snapshot.expecting(submitted)
        return None

    def confirm_gone(self, elements: Iterable[tuple[str | None, int]], seen: Snapshot) -> None:
        """Look at the queue once more, before elements are judged as ended that this pass's look does not
        show: that was taken before the lease was, and may be older than they are.

        Args:
            elements: by array ids, None where that is not known, and indices.
            seen: what the pass decides by.

        Raises:
            SlurmTimeout: there is no answer, or one of them lives: nothing is judged in this pass.
            Paused: a person has cancelled the run's jobs.
        """
        unseen = {(job, index) for job, index in elements if job and not seen.shows((job, index))}
        if seen.is_fresh or not unseen:
            return
        self.second_look = self.second_look or look(self.run.paths, 0.0, SECOND_PATIENCE)
        if any((e.array_id, e.index) in unseen and is_live(e) for e in self.second_look.elements):
            raise SlurmTimeout(["squeue"], None, "it did not show a job that is there")
        own = self.second_look.elements_of(lambda name: is_job_of(self.run.identity.id, name))
        self.heed_people(own, seen.control)

    def still_running(self, elements: Collection[str], seen: Snapshot) -> list[str]:
        """Return those of some elements that run on with the workers which a pass saw there, by a look of
        now: one that is back in the queue by then is not to be cancelled."""
        if not elements or seen.is_fresh:
            return list(elements)
        known = {e.run_id for of_name in seen.queue.values() for e in of_name}
        self.second_look = self.second_look or look(self.run.paths, 0.0, SECOND_PATIENCE)
        running = [e for e in self.second_look.elements if is_live(e) and not is_pending(e)]
        return [e.job_id for e in running if e.job_id in elements and e.run_id in known]
