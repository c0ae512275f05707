"""Start-ups of jobs on one node, which slow each other down."""

from collections.abc import Callable
from dataclasses import dataclass, field

from pipeline.simulate.clock import SimulatedClock
from pipeline.simulate.cluster import SimulatedJob

_NONE_LEFT = 1e-9


@dataclass(eq=False)
class StartUps:
    """Jobs that start up on a node."""

    clock: SimulatedClock
    crowding: float
    """How much one slows another: 0 not at all, 1 as if they shared one core."""
    _left: dict[SimulatedJob, float] = field(default_factory=dict)
    """Seconds of starting up that are left, were each alone."""
    _ends: dict[SimulatedJob, Callable[[], None]] = field(default_factory=dict)
    _since: float = 0.0
    _change: int = 0

    def add(self, job: SimulatedJob, seconds: float, ended: Callable[[], None]) -> None:
        """Begin a start-up; ``ended`` is called at its end."""
        self._advance()
        self._left[job], self._ends[job] = seconds, ended
        self._go_on()

    def remove(self, job: SimulatedJob) -> None:
        """A job is killed that may be starting up."""
        if job in self._left:
            self._advance()
            del self._left[job], self._ends[job]
            self._go_on()

    def _advance(self) -> None:
        passed = (self.clock.now - self._since) / self._slowness
        self._left = {job: left - passed for job, left in self._left.items()}
        self._since = self.clock.now

    @property
    def _slowness(self) -> float:
        return 1 + self.crowding * max(0, len(self._left) - 1)

    def _go_on(self) -> None:
        self._change += 1
        if self._left:
            self.clock.after(max(0.0, min(self._left.values())) * self._slowness, self._end, self._change)

    def _end(self, change: int) -> None:
        """The next start-up ends, unless others have begun or ended since this was foreseen."""
        if change != self._change:
            return
        self._advance()
        least = max(_NONE_LEFT, min(self._left.values()) + _NONE_LEFT)
        over = [job for job, left in self._left.items() if left <= least]
        ended = [self._ends[job] for job in over]
        for job in over:
            del self._left[job], self._ends[job]
        self._go_on()
        for call in ended:
            call()
