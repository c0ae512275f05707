"""Command line of a stage for one attempt."""

from pipeline.run.directory import Run
from pipeline.run.tasks import Task


def stage_arguments(run: Run, task: Task, number: int, attempt: str) -> tuple[str, ...]:
    """Return the arguments after ``python -m stages`` for one attempt."""
    return (*common_arguments(run, task, attempt), *own_arguments(run, task, number))


def common_arguments(run: Run, task: Task, attempt: str) -> tuple[str, ...]:
    """Return the arguments that all tasks of a job kind and an iteration share."""
    return (
        task.stage,
        *(("--pool", task.pool) if task.pool else ()),
        *("--run-dir", str(run.paths.root)),
        *("--iteration", str(task.iteration)),
        *("--attempt", attempt),
    )


def own_arguments(run: Run, task: Task, number: int) -> tuple[str, ...]:
    """Return the arguments of one shard alone."""
    return ("--shard", str(task.shard), "--failure-file", str(run.paths.task(task).failure(number)))


def worker_arguments(run: Run, task: Task) -> tuple[str, ...]:
    """Return the arguments after ``python -m stages.workers`` for a worker that begins with a task."""
    return (*common_arguments(run, task, ""), "--shard", str(task.shard))
