"""Arguments of one attempt at a task, and the command line that gives them. Imports nothing heavy."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.run.tasks import WORK_STAGES, Stage, Task


@dataclass(frozen=True)
class Arguments:
    """The command line of one attempt."""

    task: Task
    run_dir: Path
    attempt: str
    failure_file: Path | None
    patience: float = 0.0
    """Seconds to wait for inputs that are not committed yet."""
    stays: bool = False
    """Whether this process may get another task of its stage afterwards, so that it keeps what it has
    loaded."""
    loads: bool = False
    """Whether to load only what the task will compute with: a worker does that before it takes a task."""


def parse(argv: Sequence[str]) -> Arguments:
    parser = argparse.ArgumentParser(prog="python -m stages", description="Run one task of a run.")
    parser.add_argument("stage", choices=[str(stage) for stage in WORK_STAGES])
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--iteration", type=int, default=0)
    parser.add_argument("--shard", type=int, default=0)
    parser.add_argument("--pool", default="", help="of score: whose components")
    parser.add_argument("--attempt", default=f"0-{os.urandom(4).hex()}", help="id of this attempt")
    parser.add_argument("--failure-file", type=Path, help="where to say why the attempt failed")
    parser.add_argument("--patience", type=float, default=0.0, help="seconds to wait for missing inputs")
    given = parser.parse_args(argv)
    task = Task(given.iteration, Stage(given.stage), given.shard, given.pool)
    return Arguments(task, given.run_dir, given.attempt, given.failure_file, given.patience)
