"""Arguments of one attempt at a task, and the command line that gives them. Imports nothing heavy."""

import argparse
import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.run.commits import CorruptData, Record, read_record
from pipeline.run.durable import is_there
from pipeline.run.paths import RunPaths
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
    halvings: int = 0
    """Number of times that the batch budget is halved, as earlier attempts ran out of GPU memory."""
    settings: int | None = None
    """Number of changes of the run's settings that its worker began with; None: all there are."""

    def has_said_why(self) -> bool:
        """Whether the attempt has left a failure file."""
        with contextlib.suppress(OSError):
            return self.failure_file is not None and is_there(self.failure_file)
        return False

    def own_record(self, paths: RunPaths) -> Record | None:
        """Return the record of the task if this attempt committed it. One may also find it done, or lose a
        race for it."""
        with contextlib.suppress(CorruptData, OSError):
            record = read_record(paths, self.task)
            return record if record is not None and record.attempt == self.attempt else None
        return None


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
    parser.add_argument("--halvings", type=int, default=0, help="how often to halve the batch budget")
    given = parser.parse_args(argv)
    task = Task(given.iteration, Stage(given.stage), given.shard, given.pool)
    about = task, given.run_dir, given.attempt, given.failure_file, given.patience
    return Arguments(*about, halvings=given.halvings)
