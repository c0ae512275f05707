"""The live view where there is no terminal: a line for each change. Pure."""

import time
from collections.abc import Iterator

from pipeline.metrics.advice import worst
from pipeline.watch.event_lines import event_lines
from pipeline.watch.look import Lane, Look


def changes(before: Look | None, after: Look) -> list[str]:
    """Return lines on what has changed between two looks; none where nothing has."""
    clock = time.strftime("%H:%M:%S", time.localtime(after.time))
    said = [f"{clock} {line}" for line in _states(before, after)]
    said += [str(one) for one in _news(before, after)]
    return said + [f"{clock} {line}" for line in _lanes(before, after)]


def _states(before: Look | None, after: Look) -> Iterator[str]:
    if before is None or before.state != after.state:
        yield (
            f"{after.run}: {after.state}, {after.iterations_done}/{after.iterations} iterations"
            if before is None
            else f"the run is {after.state}"
        )
    silent = [look.slurm.unanswered if look and look.slurm else None for look in (before, after)]
    if silent[0] != silent[1]:
        words = " ".join((silent[1] or "").split())
        yield f"Slurm does not answer: {words}" if silent[1] else "Slurm answers again"
    known = {(one.rule, one.title) for one in before.advice} if before else set()
    for one in worst(after.advice, len(after.advice)):
        if (one.rule, one.title) not in known:
            yield f"{one.severity}: {one.title} ({one.rule}): {one.what}"


def _news(before: Look | None, after: Look) -> Iterator[object]:
    """Yield events and rows since the look before; at first none, for the past is in the run directory."""
    if before is None:
        return
    last = max((event.get("time", 0.0) for event in before.events), default=0.0)
    events = [event for event in after.events if event.get("time", 0.0) > last]
    known = max((row.get("iteration", 0) for row in before.rows), default=0)
    rows = [row for row in after.rows if row.get("iteration", 0) > known]
    yield from event_lines(events, rows, after.created, after.iterations)


def _lanes(before: Look | None, after: Look) -> Iterator[str]:
    known = {lane.key: _in_words(lane) for lane in before.lanes} if before else {}
    for lane in after.lanes:
        words = _in_words(lane)
        if known.get(lane.key, "") != words:
            iteration, stage = lane.key
            where = f"iteration {iteration} {stage}" if iteration else stage
            yield f"{where}: {words}"


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
    return f"{words} ({progress.reason})" if progress.waiting and progress.reason else words
