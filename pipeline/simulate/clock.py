"""Simulated time: what happens, in the order of its times. Nothing is done between two events."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any

_Event = tuple[float, int, Callable[..., None], tuple[Any, ...]]


@dataclass
class SimulatedClock:
    """Time of a simulation, and what is to happen."""

    now: float = 0.0
    """Seconds since the simulation began."""
    done: int = 0
    """Events that have happened."""
    _events: list[_Event] = field(default_factory=list)
    _order: Iterator[int] = field(default_factory=count)

    def at(self, time: float, what: Callable[..., None], *arguments: object) -> None:
        """Schedule an event, at once where its time is past. Events of one time keep their order."""
        heappush(self._events, (max(time, self.now), next(self._order), what, arguments))

    def after(self, seconds: float, what: Callable[..., None], *arguments: object) -> None:
        self.at(self.now + seconds, what, *arguments)

    def step(self) -> bool:
        """Go on to the next event. Returns whether there was one."""
        if not self._events:
            return False
        self.now, _, what, arguments = heappop(self._events)
        self.done += 1
        what(*arguments)
        return True
