"""What came of a simulation: what iterations took, and what its jobs held and for what."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.workers.beats import Reason

_EXACT = 1e-6


@dataclass(frozen=True)
class JobRecord:
    """A job that has ended, or one start of it that was preempted."""

    name: str
    job_kind: str
    gpus: int
    began: float
    ended: float
    spent: Mapping[str, float]
    """Seconds of start-up, busy, waiting and lost, as the worker counts them."""
    tasks: int
    """Tasks that it committed."""
    reason: Reason | None
    """Why it left; None: it was killed."""

    @property
    def held(self) -> float:
        """Seconds for which the cluster had given it its place."""
        return self.ended - self.began

    @property
    def adds_up(self) -> bool:
        return math.isclose(sum(self.spent.values()), self.held, rel_tol=_EXACT, abs_tol=_EXACT)


@dataclass
class SimulationResult:
    """A simulated run."""

    iterations: list[float] = field(default_factory=list)
    """Seconds from one policy to the next, from the first on."""
    seconds: float = math.inf
    """From the submission to the last commit; infinite where the run did not end."""
    why: str = ""
    """Why it did not end."""
    jobs: list[JobRecord] = field(default_factory=list)
    passes: int = 0
    events: int = 0

    @property
    def is_complete(self) -> bool:
        return not self.why

    @property
    def starts(self) -> int:
        return len(self.jobs)

    @property
    def without_task(self) -> int:
        """Count the starts that did no task, but for those that were killed."""
        return sum(not job.tasks and job.reason is not None and not job.spent["busy"] for job in self.jobs)

    @property
    def reasons(self) -> Counter[Reason | None]:
        return Counter(job.reason for job in self.jobs)

    @property
    def evictions(self) -> int:
        return self.reasons[Reason.NEEDED]

    @property
    def adds_up(self) -> bool:
        return all(job.adds_up for job in self.jobs)

    def spent(self, what: str, job_kind: str | None = None) -> float:
        """Return the seconds that jobs spent with something."""
        return sum(job.spent[what] for job in self.jobs if job_kind in (None, job.job_kind))

    def gpu_seconds(self) -> float:
        return sum(job.gpus * job.held for job in self.jobs)
