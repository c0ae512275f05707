"""A worker in simulated time, from its element's submission to the end of its job: what it is."""

from dataclasses import dataclass, field, replace
from typing import Protocol

from pipeline.decide import choosing
from pipeline.decide.staying import Wait
from pipeline.run.tasks import Task
from pipeline.simulate.cluster import SimulatedJob
from pipeline.workers.beats import Beat, Doing, Reason
from pipeline.workers.claims import Claim

_SUMS = {Doing.STARTING: "startup", Doing.BUSY: "busy", Doing.WAITING: "waiting", Doing.LEAVING: "waiting"}
SUMS = ("startup", "busy", "waiting", "lost")


@dataclass(eq=False)
class SimulatedWorker:
    """An element of an array, and the worker that it is while it runs."""

    element: str
    """Array job and index, like ``4711_3``."""
    first: Task
    """Task that it was submitted for."""
    job: SimulatedJob
    begin: float | None
    """Time before which it does not start; None: as soon as there is room."""
    wanted: float
    """Time from which it waits in the queue, as far as the run is concerned."""
    known: int = 0
    """Number of the newest claim on its first task that the pass knew of."""
    restart: int = 0
    doing: Doing | None = None
    """None while it waits in the queue."""
    since: float = 0.0
    claim: Claim | None = None
    """What it is at."""
    last: Claim | None = None
    """What it was at last, or is."""
    computes: float = 0.0
    """Time at which it has loaded what its task needs."""
    has_first: bool = True
    """Whether its first task is still to be taken."""
    loaded: int = -1
    """Version of the policy that it has read last."""
    unsaved: Claim | None = None
    """Update whose state it alone has."""
    writes_until: float = 0.0
    """Time at which it has written the state of an update beside what it does."""
    failed: int = 0
    """Tasks that have failed in a row."""
    is_warned: bool = False
    measures: bool = True
    """Whether it has time to measure policies besides."""
    wait: Wait | None = None
    awaited: Task | None = None
    reason: Reason | None = None
    beat: Beat = field(default_factory=lambda: Beat("", "", "", 0, 0.0))
    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SUMS, 0.0))
    job_kind: str = field(init=False)

    def __post_init__(self) -> None:
        self.job_kind = self.first.job_kind

    @property
    def name(self) -> str:
        return f"{self.element}r{self.restart}"

    @property
    def array(self) -> str:
        return self.element.partition("_")[0]

    def change(self, doing: Doing | None, now: float, sum_of: str = "") -> None:
        """Begin to do something else; what it did until now counts as what it was, or as ``sum_of``."""
        if self.doing is not None:
            self.spent[sum_of or _SUMS[self.doing]] += now - self.since
        self.doing, self.since = doing, now

    def count_task(self, task: Task, now: float, is_new: bool) -> None:
        """Note that it has done a task, and how long that took."""
        beat, is_own = self.beat, task.job_kind == self.job_kind
        loaded = 0.0 if beat.tasks else self.computes - self.since  # by its first task: it started up
        seconds = now - self.since - loaded
        self.failed = 0
        self.beat = replace(
            beat,
            tasks=beat.tasks + is_new,
            startup_seconds=beat.startup_seconds + loaded,
            busy_seconds=beat.busy_seconds + seconds,
            measured=beat.measured + (is_new and not is_own),
            measuring_seconds=beat.measuring_seconds + (0.0 if is_own else seconds),
        )

    def chooser(self, takes_over: bool) -> choosing.Chooser:
        """Return what of it its choice depends on."""
        first = self.first if self.has_first else None
        return choosing.Chooser(
            self.job_kind, self.first.shard, first, self.known, self.element, takes_over=takes_over
        )

    def start_again(self, eligible: float) -> None:
        """Go back into the queue, as a job that Slurm has put back."""
        self.restart += 1
        self.begin, self.wanted, self.job.eligible = None, eligible, eligible
        self.claim, self.wait, self.unsaved, self.reason = None, None, None, None
        self.writes_until = 0.0
        self.has_first, self.loaded, self.failed, self.is_warned = True, -1, 0, False
        self.measures = True
        self.beat = replace(self.beat, tasks=0, measured=0)
        self.spent = dict.fromkeys(SUMS, 0.0)


class Surroundings(Protocol):
    """What the workers of a run have others do."""

    def try_jobs(self) -> None:
        """Have Slurm try what waits, as something has ended."""

    def request_pass(self) -> None: ...

    def is_starting(self, worker: SimulatedWorker) -> None:
        """Have a worker start up, beside others of its node."""

    def is_gone(self, worker: SimulatedWorker) -> None:
        """Note that a worker's job no longer runs."""

    def has_ended(self, worker: SimulatedWorker) -> None:
        """Note that no job of an element is left."""
