"""Findings that rows were the first to show, kept in events.jsonl: rules read the newest iterations alone,
and what they said of earlier ones would be gone."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.config.conversion import converted
from pipeline.metrics.advice_input import Advice
from pipeline.run import journal
from pipeline.run.paths import RunPaths
from pipeline.run.tasks import parse_task

NOTICED, _WENT_BACK = "noticed", "went_back"


@dataclass(frozen=True)
class Noticed:
    """A finding, and when there was reason for it first."""

    iteration: int
    """Iteration whose row was the first to show it."""
    time: float
    """Unix time."""
    advice: Advice


def note_noticed(paths: RunPaths, iteration: int, advice: Advice) -> None:
    """Write a finding into the journal. Raises OSError."""
    journal.event(paths.events, NOTICED, iteration=iteration, **asdict(advice))


def read_noticed(paths: RunPaths) -> list[Noticed]:
    """Return what was noticed in iterations that the run still has, oldest first."""
    return noticed_in(journal.read_named(paths.events, (NOTICED, _WENT_BACK)))


def noticed_in(events: Iterable[Mapping[str, Any]]) -> list[Noticed]:
    """Return what events say was noticed, without iterations that the run went back behind. Events that
    cannot be read are left out. Pure."""
    found: list[Noticed] = []
    for event in events:
        try:
            if event["event"] == NOTICED:
                found.append(converted(Noticed, {**event, "advice": event}))
            elif event["event"] == _WENT_BACK:
                first = min(parse_task(name).iteration for name in event["tasks"])
                found = [one for one in found if one.iteration < first]
        except (KeyError, TypeError, ValueError):  # written by another version, or a bit has flipped
            continue
    return found
