"""Looks at the simulated queue: one answer for all runs of the user, and as many questions as the program's
own rules allow (:mod:`pipeline.workers.looking`)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.simulate.clock import SimulatedClock
from pipeline.simulate.cluster import SimulatedCluster, SimulatedJob
from pipeline.simulate.run import SimulatedRun
from pipeline.workers.looking import PASS_AGE, Look, allowed_age, is_usable, resting, within_a_minute


@dataclass(eq=False)
class QueueLooks:
    """The answer that is kept, and the claim on the next question."""

    clock: SimulatedClock
    cluster: SimulatedCluster
    runs: Sequence[SimulatedRun]
    kept: Look = field(default_factory=lambda: Look(-math.inf, ""))
    lacking: Mapping[SimulatedJob, bool] = field(default_factory=dict)
    """The user's jobs that waited for room when that was asked, and whether at a limit of the user."""
    questions: int = 0

    def look(self, max_age: float, since: float = -math.inf) -> Look:
        """Return the kept answer, or a new one where that is too old.

        Args:
            max_age: seconds that it may be old, where not much has been asked.
            since: time; an answer from before is too old in any case.
        """
        if not is_usable(self.kept, max_age, since, self.clock.now):
            self._ask()
        return self.kept

    def rest(self) -> float:
        """Return the seconds until one may ask that needs an answer of now."""
        return resting(self.kept.recent, self.clock.now, self.kept.runs)

    @property
    def renewed(self) -> float:
        """Time from which on a pass gets a newer answer."""
        kept = self.kept
        return kept.asked + allowed_age(PASS_AGE, kept.recent, kept.asked, kept.runs)

    def _ask(self) -> None:
        now, self.questions = self.clock.now, self.questions + 1
        runs = max(1, sum(bool(run.workers) for run in self.runs))
        self.kept = Look(now, "", (*within_a_minute(self.kept.recent, now), now), runs)
        waiting = (job for job in self.cluster.pending if job.is_mine and job.lacks_room)
        self.lacking = {job: job.is_limited for job in waiting}
