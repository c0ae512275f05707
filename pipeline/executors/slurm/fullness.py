"""How many elements the queue has shown to take, where that is less than limits say that can be asked.

Other runs of the user count too, and there may be limits that are not shown, or that were lowered since.

sbatch alone knows, and says so by refusing. What it said is in the journal, where passes find it for a minute
and ``status`` for as long as nothing newer is known.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from pipeline.run import journal
from pipeline.run.paths import RunPaths
from pipeline.run.submissions import SUBMITTED, is_driver_job

Event = Mapping[str, Any]

QUEUE_FULL = "queue_full"
"""Name of the event that sbatch took no more."""
_KEPT_SECONDS = 60.0
"""Seconds for which no more is tried: then there may be room again, as other jobs have ended."""


def note_full(paths: RunPaths, elements: int, message: str) -> None:
    """Write into the journal that the queue takes no more than so many elements of the run's stages."""
    journal.event(paths.events, QUEUE_FULL, elements=elements, message=message)


def shown_to_fit(paths: RunPaths, now: float) -> int | None:
    """Return how many elements of the run's stages the queue takes, by what sbatch said within a minute;
    None where it has refused nothing.

    Args:
        now: unix time.
    """
    event = newest_refusal(journal.read_events(paths.events))
    return int(event["elements"]) if event and 0 <= now - event["time"] < _KEPT_SECONDS else None


def newest_refusal(events: Iterable[Event]) -> Event | None:
    """Return the newest event that the queue took no more. Pure."""
    return next((event for event in _newest_first(events) if event["event"] == QUEUE_FULL), None)


def standing_refusal(events: Iterable[Event]) -> Event | None:
    """Return the newest event that the queue took no more, unless it has taken jobs of stages since. Pure."""
    for event in _newest_first(events):
        if event["event"] == QUEUE_FULL:
            return event
        if event["event"] == SUBMITTED and not is_driver_job(str(event["array"])):
            return None
    return None


def _newest_first(events: Iterable[Event]) -> list[Event]:
    return list(events)[::-1]
