"""events.jsonl and metrics.jsonl as lines for a person, with clock times. Pure."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from pipeline.config.job_kinds import DRIVERS
from pipeline.metrics.terminal import Row
from pipeline.run.attempts import AttemptId
from pipeline.run.submissions import parse_job_name
from pipeline.run.tasks import Stage, parse_task
from pipeline.status.journal_end import Event
from pipeline.status.text import attempt_in_words, describe_row
from pipeline.status.trainer_state import replay_in_words
from pipeline.text import clock, printable


@dataclass(frozen=True)
class Happening:
    """Event or row, in words."""

    time: float
    text: str
    is_bad: bool = False
    is_of_task: bool = False
    """Whether neighbours with the same words are counted as one."""

    def __str__(self) -> str:
        return f"{clock(self.time)} {printable(self.text)}"


def event_lines(
    events: Sequence[Event], rows: Sequence[Row], created: float, iterations: int
) -> list[Happening]:
    """Describe events and rows, oldest first; what many shards did alike is one line."""
    found = [_of_event(event) for event in events]
    for row in rows:
        with contextlib.suppress(KeyError):  # its records were lost
            found.append(Happening(created + row["seconds/elapsed"], describe_row(row, iterations)))
    return list(_merged(sorted(found, key=lambda happening: happening.time)))


def _of_event(event: Event) -> Happening:
    kind = event["event"]
    try:
        words = _WORDS[kind]
        text = words.format(**event) if isinstance(words, str) else words(event)
    except (KeyError, TypeError, ValueError, IndexError):  # written by another version, or by hand
        fields = (f"{key}={value}" for key, value in event.items() if key not in ("time", "event"))
        return Happening(event["time"], " ".join([kind.replace("_", " "), *fields]))
    is_bad = kind in _BAD or event.get("level", "info") != "info"
    return Happening(event["time"], text, is_bad, kind == "launched")


def _launched(event: Event) -> str:
    task = parse_task(event["task"])
    where = f"iteration {task.iteration} {task.job_kind}" if task.iteration else task.job_kind
    number = AttemptId.parse(event["attempt"]).number
    again = f", attempt {number}" if number > 1 else ""
    return f"launched {where}{again}"


def _submitted(event: Event) -> str:
    name, job = parse_job_name(str(event["array"])), event["job"]
    if name is None:
        return f"submitted job {job}"
    if name.job_kind in DRIVERS:
        return f"driver job {job} submitted"
    of = f"iteration {name.iteration} {name.job_kind}" if name.iteration else name.job_kind
    count = int(event["elements"])
    return f"submitted {of}: job {job}, {'1 element' if count == 1 else f'{count} elements'}"


def _gave_up(event: Event) -> str:
    tasks = event["tasks"]
    return f"gave up {tasks[0]}" + (f" and {len(tasks) - 1} more" if len(tasks) > 1 else "")


def _retracted(event: Event) -> str:
    task = parse_task(event["task"])
    fate = "is moved aside" if task.stage is Stage.STATE else "will be computed again"
    return f"{task} {fate}: {event['reason']}"


_WORDS: Mapping[str, str | Callable[[Event], str]] = {
    "launched": _launched,
    "submitted": _submitted,
    "failed": lambda event: f"{attempt_in_words(event)} failed: {event['message']}",
    "retracted": _retracted,
    "state_lost": "{message}",
    "learned_again": replay_in_words,
    "refused": "Slurm refused {array}: {message}",
    "queue_full": "the queue accepts no more jobs of this run now: {message}",
    "never_arrived": "{array} did not arrive in Slurm's queue; its tasks are submitted again",
    "gave_up": _gave_up,
    "driver_started": "driver started on {host}, process {pid}",
    "driver_ended": "driver ended: {outcome}",
    "cancelled": "cancelled by a person: {arrays} jobs",
    "paused": "{cancelled} of {jobs} jobs were cancelled by hand (scancel): the run pauses",
    "row_without": "row {iteration} lacks a lost record: {message}",
    "rows_failed": "rows cannot be written: {message}",
    "no_accounting": "accounting does not answer: rows lack slurm/* numbers",
    "rows_recovered": "rows are written again",
    "pass_failed": "a driver's pass failed: {message}",
    "pass_recovered": "drivers' passes succeed again",
    "thinned": lambda event: f"removed {len(event['folders'])} old folders of weights",
    "noticed": "{severity} at iteration {iteration}: {title} ({rule})",
    "identity_kept": lambda event: f"{' and '.join(event['files'])}: gone, and written again",
    "copied": "a copy of {original}, with an id of its own since: {own_id}",
    "went_back": lambda event: f"went back: {len(event['tasks'])} commits moved aside",
}
_BAD = {
    "failed",
    "state_lost",
    "retracted",
    "refused",
    "gave_up",
    "noticed",
    "row_without",
    "rows_failed",
    "pass_failed",
}


def _merged(found: Sequence[Happening]) -> Iterator[Happening]:
    """Merge neighbours that tell the same of several tasks into one, with their number."""
    for _, group in groupby(found, lambda one: one.text if one.is_of_task else id(one)):
        same = list(group)
        more = f": {len(same)} tasks" if len(same) > 1 else ""
        yield replace(same[-1], text=f"{same[-1].text}{more}")
