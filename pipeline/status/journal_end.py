"""State of a run in a word, and what the end of its journal says of its drivers. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.run.troubles import LOST, Trouble, outstanding
from pipeline.text import moment, printable

if TYPE_CHECKING:
    from pipeline.run.control import Control

Event = Mapping[str, Any]
_FAILS = {
    Trouble.PACK: "old iterations cannot be packed, while training goes on",
    Trouble.PASS: "a driver's pass failed",
    Trouble.ROWS: "rows cannot be written, while training goes on",
    Trouble.WANDB: "W&B does not get all rows, while training goes on",
    Trouble.TENSORBOARD: "TensorBoard's files do not get all rows, while training goes on",
    Trouble.MLFLOW: "MLflow does not get all rows, while training goes on",
}


def troubles_in_words(events: Sequence[Event]) -> Iterator[str]:
    """Yield failures of drivers that are not overcome yet, in words."""
    for trouble, event in outstanding(events).items():
        yield f"{_FAILS[trouble]}, last {moment(event['time'])}: {printable(event.get('message', ''))}"


def states_lost(events: Sequence[Event]) -> Iterator[int]:
    """Yield the iterations whose trainer's state was lost since the run last went back."""
    moves = [index for index, event in enumerate(events) if event["event"] == "went_back"]
    for event in events[moves[-1] if moves else 0 :]:
        if event["event"] == LOST and isinstance(event.get("iteration"), int):
            yield event["iteration"]


def machine_state(is_complete: bool, holder: str | None, events: Sequence[Event]) -> str:
    """Return the state of a run of this machine. ``events`` are the journal's end."""
    if is_complete or holder:
        return "complete" if is_complete else "running"
    return "failed" if _last_end(events).get("outcome") == "failed" else "incomplete"


def slurm_state(is_complete: bool, control: "Control", has_jobs: bool | None) -> str:
    """Return the state of a run on Slurm.

    Args:
        has_jobs: whether some of it are in the queue; None where Slurm did not answer (yet), or does not show
            another user's jobs.
    """
    if is_complete:
        return "complete"
    if control.cancelled or control.has_failed:
        return "paused" if control.paused else "cancelled" if control.cancelled else "failed"
    return "unknown" if has_jobs is None else "running" if has_jobs else "stopped"


def how_it_stopped(events: Sequence[Event]) -> str | None:
    """Describe from the journal's end the outcome that the last driver wrote, or that it wrote none."""
    if not events:
        return None
    end = _last_end(events)
    outcome = end.get("outcome", "killed, or the machine went down, after")
    return f"{outcome} {moment((end or events[-1])['time'])}"


def _last_end(events: Sequence[Event]) -> Event:
    """Find the event with which the last driver ended; empty without one, or if the run went back since."""
    moves = [e for e in events if e.get("event") in ("driver_started", "driver_ended", "went_back")]
    return moves[-1] if moves and moves[-1]["event"] == "driver_ended" else {}
