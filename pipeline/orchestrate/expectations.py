"""What a pass expects of each job kind: when its next input comes, how long queue and start-up take. Pure."""

from collections.abc import Callable, Collection, Sequence

from pipeline.orchestrate.situation import Estimate
from pipeline.run.plan import Plan
from pipeline.run.tasks import Task
from pipeline.workers import estimates
from pipeline.workers.beats import Beat
from pipeline.workers.estimates import Passage


def estimates_of(
    plan: Plan,
    kinds: Sequence[str],
    early: Sequence[str],
    beats: Sequence[Beat],
    tasks: Sequence[Task],
    committed: Collection[Task],
    committed_at: Callable[[Task], float | None],
    seen: Sequence[Passage],
    now: float,
) -> dict[str, Estimate]:
    """Return an estimate for each job kind.

    Args:
        early: job kinds whose workers start early.
        beats: what workers have said, those that ended too.
        tasks: of the iteration at hand and of the next, by iteration.
        committed: at least those of these tasks and of what they read.
        committed_at: returns when a task was committed, None if it is not.
        seen: earlier iterations' passages through stages.
    """

    def next_input(job_kind: str) -> float | None:
        mine = (task for task in tasks if task.job_kind == job_kind and task not in committed)
        missing = (task for task in mine if any(source not in committed for source in plan.inputs(task)))
        task = next(missing, None)
        if task is None:
            return None
        return estimates.expected_ready(plan, task, committed_at, seen, now, early=early)

    return {job_kind: _estimate(beats, job_kind, next_input(job_kind)) for job_kind in kinds}


def _estimate(beats: Sequence[Beat], job_kind: str, next_input: float | None) -> Estimate:
    wait, start = estimates.queue_wait(beats, job_kind), estimates.startup(beats, job_kind)
    return Estimate(
        next_input,
        wait.late if wait else None,
        start.median if start else None,
        estimates.task_seconds(beats, job_kind),
        wait.least if wait else 0.0,
    )
