"""Checks of a run's ended attempts: how those at what is at hand ended, and whether that can be read."""

from collections import Counter
from collections.abc import Sequence

from pipeline.doctor.findings import Finding, ok, warning
from pipeline.run.directory import Run
from pipeline.run.endings import BY_EVIDENCE, Ending, read_endings, spoilt_endings
from pipeline.run.records import find_frontier
from pipeline.run.tasks import parse_task
from pipeline.text import printable


def look_at_attempts(run: Run) -> Finding:
    """Look at attempts that failed at the tasks at hand."""
    iterations = {task.iteration for task in find_frontier(run.plan, run.paths).window(run.plan)}
    if spoilt := spoilt_endings(run.paths, iterations):
        advice = "nothing to do: the next driver writes it again, or looks again at why attempts ended"
        return warning("attempts", spoilt, advice)
    endings = read_endings(run.paths, iterations).values()
    return judge_attempts([ending for ending in endings if ending.is_failure])


def judge_attempts(failed: Sequence[Ending]) -> Finding:
    """Say how attempts at the tasks at hand failed. Pure."""
    if not failed:
        return ok("attempts", "of what is at hand none is known to have failed")
    counts = ", ".join(
        f"{count} {kind}" for kind, count in Counter(str(e.kind) for e in failed).most_common()
    )
    last = max(failed, key=lambda ending: ending.time)
    by = f", {BY_EVIDENCE[last.evidence]}" if last.evidence else ""
    task = f"{parse_task(last.task)}, attempt {last.number} ({last.kind}{by})"
    said = printable(" ".join(last.message.split()))
    return ok("attempts", f"{len(failed)} at what is at hand failed: {counts}; the last: {task}: {said}")
