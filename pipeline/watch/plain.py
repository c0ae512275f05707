"""The live view where there is no terminal: a line for each change. Pure."""

from collections.abc import Iterator

from pipeline.metrics.advice import worst
from pipeline.status.lanes import Lane
from pipeline.status.state import Status
from pipeline.status.text import clock, standing, workers_in_words
from pipeline.status.whose import in_words as whose_in_words
from pipeline.watch.event_lines import event_lines
from pipeline.workers.summary import WorkersOf


def changes(before: Status | None, after: Status) -> list[str]:
    """Return lines on what has changed between two looks; none where nothing has."""
    now = clock(after.time)
    said = [f"{now} {line}" for line in _states(before, after)]
    said += [str(one) for one in _news(before, after)]
    lines = (*_lanes(before, after), *_workers(before, after))
    return said + [f"{now} {line}" for line in lines]


def _states(before: Status | None, after: Status) -> Iterator[str]:
    if before is None or before.state != after.state:
        yield standing(after) if before is None else f"the run is {after.state}"
    was, now = (look.slurm.unanswered if look and look.slurm else None for look in (before, after))
    if was != now:
        yield f"Slurm does not answer: {' '.join(now.split())}" if now else "Slurm answers again"
    before_whose, whose = (look.slurm.whose if look and look.slurm else None for look in (before, after))
    if whose and not before_whose and after.state != "complete":
        yield whose_in_words(whose, after.state, after.time)
    if after.awaited and not (before and before.awaited):
        yield f"waiting: {after.awaited}"
    held = (after.paused, *after.held_back)
    yield from (text for text in held if text and not (before and text in (before.paused, *before.held_back)))
    known = {(one.rule, one.title) for one in before.advice} if before else set()
    for one in worst(after.advice, len(after.advice)):
        if (one.rule, one.title) not in known:
            yield f"{one.severity}: {one.title} ({one.rule}): {one.what}"


def _news(before: Status | None, after: Status) -> Iterator[object]:
    """Yield events and rows since the look before; at first none, for the past is in the run directory."""
    if before is None:
        return
    last = max((event["time"] for event in before.events), default=0.0)
    events = [event for event in after.events if event["time"] > last]
    known = max((row.get("iteration", 0) for row in before.rows), default=0)
    rows = [row for row in after.rows if row.get("iteration", 0) > known]
    yield from event_lines(events, rows, after.created, after.iterations)


def _lanes(before: Status | None, after: Status) -> Iterator[str]:
    known = {lane.key: _in_words(lane) for lane in before.lanes} if before else {}
    for lane in after.lanes:
        words = _in_words(lane)
        if known.get(lane.key, "") != words:
            iteration, stage = lane.key
            where = f"iteration {iteration} {stage}" if iteration else stage
            yield f"{where}: {words}"


def _workers(before: Status | None, after: Status) -> Iterator[str]:
    """Yield what workers do, where that is not what they did before; how long they wait is no change."""
    known = {one.job_kind: _doing(one) for one in before.workers} if before else {}
    for one in after.workers:
        if one.live + one.silent and known.get(one.job_kind) != _doing(one):
            yield workers_in_words(one)


def _doing(workers: WorkersOf) -> tuple[object, ...]:
    return workers.starting, workers.busy, workers.waiting, workers.silent, workers.waits_for


def _in_words(lane: Lane) -> str:
    """Describe a lane; empty for one that has not begun: nobody asks for that."""
    progress = lane.progress
    told = (
        (progress.done, f"{progress.done}/{progress.total} done"),
        (progress.running, f"{progress.running} running"),
        (progress.waiting, f"{progress.waiting} waiting"),
        (progress.failed, f"{progress.failed} failed"),
    )
    words = ", ".join(text for count, text in told if count)
    why = f"{progress.reason}; {progress.helps}" if progress.helps else progress.reason
    return f"{words} ({why})" if progress.waiting and why else words
