"""events.jsonl and metrics.jsonl as lines for a person, with clock times. Pure."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.config.job_kinds import DRIVERS
from pipeline.metrics.terminal import Row
from pipeline.run.attempts import AttemptId
from pipeline.run.submissions import job_kind_of
from pipeline.run.tasks import parse_task
from pipeline.status.text import describe_row
from pipeline.text import printable

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Happening:
    """Event or row, in words. Equal ones of the same ``group`` that follow each other are counted as one."""

    time: float
    text: str
    group: str = ""
    is_bad: bool = False

    def __str__(self) -> str:
        return f"{time.strftime('%H:%M:%S', time.localtime(self.time))} {printable(self.text)}"


def event_lines(
    events: Sequence[Event], rows: Sequence[Row], created: float, iterations: int
) -> list[Happening]:
    """Describe events and rows, oldest first; what many shards did alike is one line."""
    found = [_of_event(event) for event in events if _is_event(event)]
    found += [_of_row(row, created, iterations) for row in rows if _is_whole(row)]
    return _merged(sorted(found, key=lambda happening: happening.time))


def _is_event(event: Event) -> bool:
    return isinstance(event.get("time"), int | float) and isinstance(event.get("event"), str)


def _is_whole(row: Row) -> bool:
    needed = ("iteration", "reward/mean", "response_length/mean", "seconds/iteration")
    return all(name in row for name in (*needed, "seconds/remaining", "seconds/elapsed"))


def _of_row(row: Row, created: float, iterations: int) -> Happening:
    return Happening(created + row["seconds/elapsed"], describe_row(row, iterations))


def _of_event(event: Event) -> Happening:
    describe = _WORDS.get(event["event"])
    try:
        return describe(event) if describe else _unknown(event)
    except (KeyError, TypeError, ValueError, IndexError):  # written by another version, or by hand
        return _unknown(event)


def _unknown(event: Event) -> Happening:
    fields = (f"{key}={value}" for key, value in event.items() if key not in ("time", "event"))
    return Happening(event["time"], " ".join([event["event"].replace("_", " "), *fields]))


def _launched(event: Event) -> Happening:
    task = parse_task(event["task"])
    where = f"iteration {task.iteration} {task.job_kind}" if task.iteration else task.job_kind
    number = AttemptId.parse(event["attempt"]).number
    again = f", attempt {number}" if number > 1 else ""
    return Happening(event["time"], f"launched {where}{again}", group="task")


def _submitted(event: Event) -> Happening:
    name, job = str(event["array"]), event["job"]
    job_kind, iteration = job_kind_of(name), name.rsplit(".", 4)[1]
    if job_kind in DRIVERS:
        return Happening(event["time"], f"driver job {job} submitted")
    of = f"iteration {iteration} {job_kind}" if int(iteration) else job_kind
    count = int(event["elements"])
    jobs = "1 element" if count == 1 else f"{count} elements"
    return Happening(event["time"], f"submitted {of}: job {job}, {jobs}")


def _failed(event: Event) -> Happening:
    task = parse_task(event["task"])
    place = " ".join(
        f"{word} {event[key]}" for key, word in (("job", "job"), ("node", "on")) if event.get(key)
    )
    attempt = f"attempt {event['attempt']}" + (f" ({place})" if place else "")
    return Happening(event["time"], f"{task}, {attempt} failed: {event['message']}", is_bad=True)


def _retracted(event: Event) -> Happening:
    text = f"{parse_task(event['task'])} will be computed again: {event['reason']}"
    return Happening(event["time"], text, is_bad=True)


def _refused(event: Event) -> Happening:
    return Happening(event["time"], f"Slurm refused {event['array']}: {event['message']}", is_bad=True)


def _gave_up(event: Event) -> Happening:
    tasks = event["tasks"]
    more = f" and {len(tasks) - 1} more" if len(tasks) > 1 else ""
    return Happening(event["time"], f"gave up {tasks[0]}{more}", is_bad=True)


def _plain(words: str) -> Callable[[Event], Happening]:
    return lambda event: Happening(event["time"], words.format(**event))


_WORDS: Mapping[str, Callable[[Event], Happening]] = {
    "launched": _launched,
    "submitted": _submitted,
    "failed": _failed,
    "retracted": _retracted,
    "refused": _refused,
    "gave_up": _gave_up,
    "driver_started": _plain("driver started on {host}, process {pid}"),
    "driver_ended": _plain("driver ended: {outcome}"),
    "cancelled": _plain("cancelled by a person: {arrays} jobs"),
    "rewired": _plain("{elements} now waits for {waits_for}"),
    "row_without": lambda event: Happening(
        event["time"], f"row {event['iteration']} lacks a lost record: {event['message']}", is_bad=True
    ),
    "rows_failed": lambda event: Happening(
        event["time"], f"rows cannot be written: {event['message']}", is_bad=True
    ),
    "no_accounting": _plain("accounting does not answer: rows lack slurm/* numbers"),
    "rows_recovered": _plain("rows are written again"),
    "pass_failed": lambda event: Happening(
        event["time"], f"a driver's pass failed: {event['message']}", is_bad=True
    ),
    "pass_recovered": _plain("drivers' passes succeed again"),
    "thinned": lambda event: Happening(
        event["time"], f"removed {len(event['folders'])} old folders of weights"
    ),
    "went_back": lambda event: Happening(
        event["time"], f"went back: {len(event['tasks'])} commits moved aside"
    ),
}


def _merged(found: Sequence[Happening]) -> list[Happening]:
    """Merge neighbours of one group with the same words into one, with their number."""
    merged: list[tuple[Happening, int]] = []
    for one in found:
        last = merged[-1] if merged else None
        if last and one.group and (last[0].group, last[0].text) == (one.group, one.text):
            merged[-1] = (one, last[1] + 1)
        else:
            merged.append((one, 1))
    return [_counted(one, count) for one, count in merged]


def _counted(one: Happening, count: int) -> Happening:
    text = f"{one.text}: {count} {one.group}s" if count > 1 else one.text
    return Happening(one.time, text, one.group, one.is_bad)
