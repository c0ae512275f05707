"""Benchmark: a program of the user's (evaluate.command) measures a policy and writes numbers.

Nothing reads them but people, rows of the report and the choice of the best policy.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from pipeline.config.evaluate import COMMAND_PREFIX, filled_in
from pipeline.run.benchmarks import SCHEMA, Measured, write_outcome
from pipeline.run.directory import load_run
from pipeline.run.durable import make_folder
from pipeline.run.failures import FailureKind
from pipeline.run.tasks import PREPARE, Task
from stages.context import Context, StageResult
from stages.evaluation.program import ProgramFailed, read_numbers, run_program
from stages.files.node_folders import remove_node_folder
from stages.logs import log
from stages.process.preemption import warned


class ProgramStopped(ProgramFailed):
    """The task was warned, and ended the program. Slurm knows whether time was up or another job came."""

    failure_kind = FailureKind.TIMEOUT


def run(task: Task, context: Context) -> StageResult:
    context.read(PREPARE)
    version, given = task.iteration, context.config.evaluate
    assert given.command is not None
    written = context.files.data(context.attempt, "written", "json")
    make_folder(written.parent, context.paths.root)
    with whole_policy(context, version) as policy:
        values = {"policy": str(policy), "output": str(written), "iteration": str(version)}
        words = filled_in(given.command, values | {"seed": str(context.config.seed)})
        log.info(f"{task}: {' '.join(words)}")
        try:
            with context.computing():
                run_program(words, folder_of(context), given.command_seconds, warned)
            numbers = read_numbers(written)
        except ProgramFailed as error:
            raise (ProgramStopped(str(error)) if warned() else error) from None
        finally:
            remove(written)
    metrics = {f"{COMMAND_PREFIX}{name}": numbers[name] for name in sorted(numbers)}
    path = context.files.data(context.attempt, suffix="json")
    output = write_outcome(context.paths, path, Measured(version, metrics))
    return StageResult((output,), len(metrics), SCHEMA, version, metrics)


def folder_of(context: Context) -> Path:
    """Return the folder that the program runs in: where the run was started, if that is there."""
    folder = Path(load_run(context.paths.root).identity.folder or context.paths.root)
    return folder if folder.is_dir() else context.paths.root


def remove(path: Path) -> None:
    """Remove what a program has written; a folder, or what is in the way of it, stays."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_policy(context: Context, version: int) -> Iterator[Path]:
    """Return the model directory of a policy, verified. An adapter is merged into its model, in the node's
    temporary folder, for as long as the block lasts."""
    files = context.policy_files(version)
    if files.adapter is None:
        yield files.base
        return
    from stages.models.merging import merged_folder  # torch

    folder = merged_folder(context.config, files.base, files.adapter)
    try:
        yield folder
    finally:
        remove_node_folder(folder)
