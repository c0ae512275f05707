"""What a pass expects of each job kind: when its next input comes, how long queue and start-up take. Pure."""

from collections.abc import Callable, Collection, Sequence

from pipeline.decide import estimates, passages
from pipeline.decide.measuring import MEASURED
from pipeline.decide.passages import Passage
from pipeline.decide.situation import Estimate, by_kind
from pipeline.run.plan import Plan
from pipeline.run.tasks import Task
from pipeline.workers.beats import Beat


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
    undone, said = by_kind([task for task in tasks if task not in committed]), by_kind(beats)
    said[MEASURED] = [*said.get(MEASURED, ()), *(beat for beat in beats if beat.measured)]

    def input_at(job_kind: str, of_first: bool) -> float | None:
        mine = undone.get(job_kind, ())
        missing = (task for task in mine if any(source not in committed for source in plan.inputs(task)))
        task = next(missing, None)
        if task is None:
            return None
        return passages.expected_ready(plan, task, committed_at, seen, now, None, early, of_first)

    return {
        kind: _estimate(beats, said.get(kind, ()), kind, input_at(kind, True), input_at(kind, False))
        for kind in kinds
    }


def _estimate(
    beats: Sequence[Beat],
    own: Sequence[Beat],
    job_kind: str,
    next_input: float | None,
    last_input: float | None,
) -> Estimate:
    """Return what is expected of a job kind.

    Args:
        beats: what workers of all kinds have said.
        own: what those of this kind have said, and those that do its tasks besides.
    """
    wait, start = estimates.queue_wait(beats, job_kind), estimates.startup(beats, job_kind)
    return Estimate(
        next_input,
        wait.late if wait else None,
        start.median if start else None,
        estimates.task_seconds(own, job_kind),
        wait.least if wait else 0.0,
        estimates.startup_together(own, job_kind),
        last_input,
    )
