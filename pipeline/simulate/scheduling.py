"""When simulated Slurm tries its jobs: soon after something has changed, and by backfill now and then."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pipeline.simulate.backfill import backfill
from pipeline.simulate.clock import Clock
from pipeline.simulate.cluster import Cluster, Job
from pipeline.simulate.plant import Slurm


@dataclass(eq=False)
class Scheduling:
    """Slurm's own clockwork."""

    settings: Slurm
    clock: Clock
    cluster: Cluster
    starts: dict[Job, Callable[[Job], None]] = field(default_factory=dict)
    """What is done when a job starts, for jobs that live."""
    _is_due: bool = False
    _backfills: bool = False
    _has_changed: bool = False
    """Whether anything has come or ended since the last backfill: else that would find the same."""

    def submit(self, job: Job, starts: Callable[[Job], None]) -> None:
        self.starts[job] = starts
        self.cluster.submit(job)
        self.clock.at(job.eligible, self.try_jobs)

    def cancel(self, job: Job) -> None:
        """Take a job out of the queue."""
        self.cluster.cancel(job)
        del self.starts[job]

    def end(self, job: Job) -> None:
        """A job that ran ends."""
        self.cluster.end(job)
        del self.starts[job]
        self.try_jobs()

    def try_jobs(self) -> None:
        self._has_changed = True
        if not self._is_due:
            self._is_due = True
            self.clock.after(self.settings.tried_after, self._try_in_order)

    def try_now(self) -> None:
        """Start what has room."""
        self._tell(self.cluster.start_in_order(self.clock.now))

    def _try_in_order(self) -> None:
        self._is_due = False
        self.try_now()
        if not self._backfills and self._waits:
            self._backfills = True
            self.clock.after(self.settings.backfill, self._backfill)

    def _backfill(self) -> None:
        self._has_changed, self._backfills = False, False
        started = backfill(self.cluster, self.clock.now)
        self._tell(started)
        if self._waits and (started or self._has_changed):
            self._backfills = True
            self.clock.after(self.settings.backfill, self._backfill)

    @property
    def _waits(self) -> bool:
        return any(job.eligible <= self.clock.now for job in self.cluster.pending)

    def _tell(self, started: Sequence[Job]) -> None:
        for job in started:
            self.starts[job](job)
