"""What the end of a run's journal says of its drivers: how the last one ended, what none could do. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.orchestrate.lost_states import LOST
from pipeline.run.troubles import Trouble, outstanding
from pipeline.status.text import moment
from pipeline.text import printable

_FAILS = {
    Trouble.PACK: "old iterations cannot be packed, while training goes on",
    Trouble.PASS: "a driver's pass failed",
    Trouble.ROWS: "rows cannot be written, while training goes on",
}


def troubles_in_words(events: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield failures of drivers that are not overcome yet, in words."""
    for trouble, event in outstanding(events).items():
        yield f"{_FAILS[trouble]}, last {moment(event['time'])}: {printable(event.get('message', ''))}"


def states_lost(events: Sequence[Mapping[str, Any]]) -> Iterator[int]:
    """Yield the iterations whose trainer's state was lost since the run last went back."""
    moves = [index for index, event in enumerate(events) if event["event"] == "went_back"]
    for event in events[moves[-1] if moves else 0 :]:
        if event["event"] == LOST and isinstance(event.get("iteration"), int):
            yield event["iteration"]


def machine_state(is_complete: bool, holder: str | None, events: Sequence[Mapping[str, Any]]) -> str:
    """Return the state of a run of this machine. ``events`` are the journal's end."""
    if is_complete or holder:
        return "complete" if is_complete else "running"
    return "failed" if _last_end(events).get("outcome") == "failed" else "incomplete"


def how_it_stopped(events: Sequence[Mapping[str, Any]]) -> str | None:
    """Describe from the journal's end the outcome that the last driver wrote, or that it wrote none."""
    if not events:
        return None
    end = _last_end(events)
    outcome = end.get("outcome", "killed, or the machine went down, after")
    return f"{outcome} {moment((end or events[-1])['time'])}"


def _last_end(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Find the event with which the last driver ended; empty without one, or if the run went back since."""
    moves = [e for e in events if e.get("event") in ("driver_started", "driver_ended", "went_back")]
    return moves[-1] if moves and moves[-1]["event"] == "driver_ended" else {}
