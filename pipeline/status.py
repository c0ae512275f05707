"""Where a run stands, from the disk alone."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline import journal
from pipeline.lease import holder_of
from pipeline.observe import Frontier, Records, find_frontier
from pipeline.runs import Run
from pipeline.tasks import Stage
from pipeline.views import duration


@dataclass(frozen=True)
class StageStatus:
    """One stage of the iteration at hand."""

    stage: Stage
    done: int
    total: int


@dataclass(frozen=True)
class Status:
    """What ``slurm-ppo status`` answers; ``--json`` prints exactly these keys."""

    schema: int
    run: str
    state: str
    """complete, running (a driver is at work) or incomplete."""
    iterations_done: int
    iterations: int
    evaluations_done: int
    evaluations: int
    current: tuple[StageStatus, ...]
    """Stages of the first iteration that is not done."""
    driver: str | None
    """Who is at work, in words."""
    stopped: str | None
    """How the last driver ended, and when; None while one is at work or when none was."""
    last_row: dict[str, Any] | None
    last_failure: dict[str, Any] | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_status(run: Run) -> Status:
    """Look at the current iteration's records, the lease, and the ends of the journals."""
    plan, paths = run.plan, run.paths
    frontier = find_frontier(plan, paths)
    holder = holder_of(paths.locks)
    total_evaluations = len(plan.evaluations())
    is_complete = frontier.updated == plan.iterations and frontier.evaluated == total_evaluations
    rows = journal.read_tail(paths.metrics)
    events = journal.read_tail(paths.events)
    failures = [e for e in events if e.get("event") == "failed"]
    return Status(
        schema=1,
        run=str(paths.root),
        state="complete" if is_complete else "running" if holder else "incomplete",
        iterations_done=max(frontier.updated, 0),
        iterations=plan.iterations,
        evaluations_done=frontier.evaluated,
        evaluations=total_evaluations,
        current=current_stages(run, frontier),
        driver=holder,
        stopped=None if holder else how_it_stopped(events),
        last_row=rows[-1] if rows else None,
        last_failure=failures[-1] if failures else None,
    )


def how_it_stopped(events: Sequence[Mapping[str, Any]]) -> str | None:
    """From the journal's end: the outcome that the last driver wrote, or that it wrote none."""
    if not events:
        return None
    last = events[-1]
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last["time"]))
    how = (
        last["outcome"] if last.get("event") == "driver_ended" else "killed, or the machine went down, after"
    )
    return f"{how} {when}"


def current_stages(run: Run, frontier: Frontier) -> tuple[StageStatus, ...]:
    records = Records(run.paths)
    tasks = run.plan.tasks(min(frontier.updated + 1, run.plan.iterations))
    records.refresh(tasks)
    stages = dict.fromkeys(task.stage for task in tasks)
    return tuple(
        StageStatus(
            stage,
            sum(task in records.known for task in tasks if task.stage is stage),
            sum(task.stage is stage for task in tasks),
        )
        for stage in stages
    )


def describe(status: Status) -> str:
    """For a person, ending in the next command."""
    lines = [f"{status.run}: {status.state}, {status.iterations_done}/{status.iterations} iterations"]
    if status.evaluations:
        lines[0] += f", {status.evaluations_done}/{status.evaluations} evaluations"
    if status.driver:
        lines.append(status.driver)
    elif status.state != "complete" and status.stopped:
        lines.append(f"last driver: {status.stopped}")
    if status.state != "complete":
        stages = ", ".join(f"{s.stage} {s.done}/{s.total}" for s in status.current)
        lines.append(f"at hand: {stages}")
    if row := status.last_row:
        lines.append(
            f"last row: iteration {row['iteration']}, reward {row['reward/mean']:+.4f}, "
            f"{duration(row['seconds/elapsed'])} elapsed, {duration(row['seconds/remaining'])} remaining"
        )
    if (failure := status.last_failure) and status.state != "complete":
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(failure["time"]))
        lines.append(
            f"last failure: {when} {failure['task']} attempt {failure['attempt']}: {failure['message']}"
        )
    follow = {"complete": "report", "running": "report", "incomplete": "resume"}[status.state]
    lines.append(f"next: slurm-ppo {follow} {status.run}")
    return "\n".join(lines)
