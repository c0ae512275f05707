"""``python -m tests.support.light_worker RUN_DIR TOO_EARLY``: one worker that is given every task of a run.

The first TOO_EARLY tasks that it is given are updates whose inputs are not there. It prints a line of JSON
for each attempt: task, exit code, process, and its memory afterwards.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from pipeline.run.directory import Run, load_run
from pipeline.run.tasks import PREPARE, Stage, Task, task_key
from stages.attempts.arguments import Arguments
from stages.workers.loop import resident_bytes, work


class Scripted:
    """Gives the tasks that it was told, in their order."""

    def __init__(self, run: Run, tasks: Iterable[Task]) -> None:
        self._run = run
        self._tasks = iter(tasks)

    def next(self):
        task = next(self._tasks, None)
        if task is None:
            return None
        attempt, failure = f"1-{os.urandom(4).hex()}", self._run.paths.task(task).failure(1)
        return Arguments(task, self._run.paths.root, attempt, failure, stays=True)

    def ended(self, arguments, exit_code):
        said = {"task": task_key(arguments.task), "code": exit_code, "pid": os.getpid()}
        print(json.dumps(said | {"bytes": resident_bytes()}), flush=True)

    def leave(self, reason):
        self._tasks = iter(())

    def left(self):
        pass


def every_task(run: Run, too_early: int) -> Iterator[Task]:
    yield from [Task(1, Stage.UPDATE)] * too_early
    yield PREPARE
    for iteration in range(1, run.plan.iterations + 1):
        yield from run.plan.tasks(iteration)


if __name__ == "__main__":
    run = load_run(Path(sys.argv[1]))
    sys.exit(work(Scripted(run, every_task(run, int(sys.argv[2])))))
