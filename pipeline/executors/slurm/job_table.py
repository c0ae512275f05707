"""A run's jobs at one moment: its submissions on disk, matched with Slurm's queue."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.executors.slurm.dependencies import ArrayElement, Waiting
from pipeline.executors.slurm.queue import ElementsByName, is_live, is_pending
from pipeline.orchestrate.jobs import CommittedOf
from pipeline.run.control import Control
from pipeline.run.failures import Failure, FailureKind
from pipeline.run.submissions import Ending, Ledger, Submission, age, job_kind_of
from pipeline.run.tasks import Task, parse_task
from slurm.query import Element, find_by_name

_ARRIVAL_SECONDS = 30.0
"""A submission without a job id is looked for this long, before it is taken never to have arrived."""


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

    What the pass itself submits, cancels or redirects is entered at once, so that the rest of the pass counts
    on it.
    """

    ledger: Ledger
    control: Control = field(default_factory=Control)
    queue: ElementsByName = field(default_factory=dict)
    submissions: list[Submission] = field(default_factory=list)
    live: dict[Task, Live] = field(default_factory=dict)
    failures: dict[Task, list[Failure]] = field(default_factory=dict)
    """Attempts that ended without a commit in this invocation, which has a budget of its own."""

    def load(self, iterations: Collection[int]) -> None:
        """Read the submissions of some iterations, and find their jobs."""
        self.submissions = self._with_job_ids(self.ledger.load({*iterations}))

    def _with_job_ids(self, submissions: Sequence[Submission]) -> list[Submission]:
        """Find the jobs of submissions whose answer was lost: by name, in the queue first."""
        nameless = {s.name for s in submissions if s.state.job is None and not s.state.ended}
        known = {name: self.queue[name][0].array_id for name in nameless if name in self.queue}
        if missing := nameless - known.keys():
            known |= find_by_name(missing)
        return [
            self.ledger.note(s, replace(s.state, job=known[s.name])) if s.name in known else s
            for s in submissions
        ]

    def match(self) -> None:
        """Find the elements that wait or run."""
        self.live = dict(self._find_live())

    def count_failures(self) -> None:
        """Collect the failures of this invocation, commits that were taken back included."""
        self.failures = {}
        for submission in self.submissions:
            if submission.invocation == self.control.invocation:
                for failure in submission.failures(self.ledger.paths):
                    self.failures.setdefault(failure.task, []).append(failure)
        for key, reason in self.control.retracted:
            task = parse_task(key)
            self.failures.setdefault(task, []).append(Failure(task, 0, FailureKind.INPUTS, reason))

    def _find_live(self) -> Iterator[tuple[Task, Live]]:
        for submission in self.submissions:
            elements = {e.index: e for e in self.queue.get(submission.name, ()) if is_live(e)}
            for index, task in submission.tasks():
                if element := elements.get(index):
                    yield task, Live(submission, ArrayElement(element.array_id, index), element)
                elif is_expected(submission) and not submission.state.ended:
                    yield task, Live(submission, ArrayElement("", index), None)

    def find_gone(self, committed_of: CommittedOf) -> list[tuple[Submission, int]]:
        """Elements that have ended without a commit and are not accounted for yet."""
        unsettled = list(self._find_unsettled())
        committed = committed_of([submission.task(index) for submission, index in unsettled])
        return [one for one in unsettled if one[0].task(one[1]) not in committed]

    def _find_unsettled(self) -> Iterator[tuple[Submission, int]]:
        """Elements that are not in the queue and are not accounted for."""
        for submission in self.submissions:
            if submission.state.is_withdrawn or is_expected(submission):
                continue
            here = {e.index for e in self.queue.get(submission.name, ()) if is_live(e)}
            for index, _ in submission.tasks():
                if index not in here and str(index) not in submission.state.ended:
                    yield submission, index

    @property
    def elements(self) -> dict[Task, ArrayElement]:
        """Elements of live tasks whose job ids are known."""
        return {task: live.carrier for task, live in self.live.items() if live.carrier.array}

    @property
    def is_unsure(self) -> bool:
        """Whether a job may have been submitted that the queue does not show yet."""
        return any(not live.carrier.array for live in self.live.values())

    def waiting(self) -> Iterator[Waiting]:
        """Live tasks that the queue shows as pending."""
        for task, live in self.live.items():
            if live.element is not None and live.is_pending:
                yield Waiting(task, live.carrier, live.element.reason, live.submission.state.waits_for)

    def count_pending(self, job_kind: str) -> int:
        """Jobs of a kind that wait in the queue."""
        jobs = (elements for name, elements in self.queue.items() if job_kind_of(name) == job_kind)
        return sum(any(map(is_pending, elements)) for elements in jobs)

    def pending_driver(self, iteration: int, job_kind: str) -> Submission | None:
        """The driver job of an iteration that waits in the queue."""
        for submission in self.submissions:
            is_asked_for = (submission.iteration, submission.job_kind) == (iteration, job_kind)
            if is_asked_for and any(map(is_pending, self.queue.get(submission.name, ()))):
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

    def note_endings(self, endings: Mapping[str, Mapping[str, Ending]]) -> None:
        """Write down how elements ended: submission name -> array index -> ending."""
        for submission in [s for s in self.submissions if s.name in endings]:
            self.note(submission, ended={**submission.state.ended, **endings[submission.name]})

    def drop(self, submission: Submission) -> None:
        """Forget the live elements of a submission that was cancelled."""
        self.live = {t: live for t, live in self.live.items() if live.submission.name != submission.name}


def is_expected(submission: Submission) -> bool:
    """Whether it may yet show in the queue: its driver died between submitting and noting that."""
    return submission.state.job is None and age(submission) < _ARRIVAL_SECONDS
