"""The protocol around a stage: check, compute, commit; or say in a file why not.

Exit codes: 0 committed (by this attempt or another), 1 failed, 2 the user's input cannot work,
4 an input is not committed, corrupt or stale, 5 stopped on a warning.
"""

import argparse
import importlib
import json
import os
import resource
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.commits import (
    CorruptData,
    NotCommitted,
    Record,
    StaleData,
    link_once,
    publish,
    read_record,
)
from pipeline.compose import ConfigError
from pipeline.config import Config
from pipeline.data import PromptError
from pipeline.enginechecks import engines_of
from pipeline.environment import TASK_ENVIRONMENT
from pipeline.plugins import PluginError, make_importable
from pipeline.reconcile import FailureKind
from pipeline.runs import Run, RunError, load_run
from pipeline.schemas import SchemaError
from pipeline.seeds import derive_seed
from pipeline.tasks import Stage, Task, task_key
from stages.numerics import peak_gpu_memory, set_up_torch
from stages.warning import StoppedOnWarning, listen

if TYPE_CHECKING:
    from stages.context import Context

EXIT_CODES = {
    FailureKind.ERROR: 1,
    FailureKind.NUMERICS: 1,
    FailureKind.MEMORY: 1,
    FailureKind.CONFIG: 2,
    FailureKind.INPUTS: 4,
    FailureKind.TIMEOUT: 5,
    FailureKind.PAUSED: 5,
}

CAN_SAVE = frozenset({Stage.ROLLOUT, Stage.EVALUATE})
"""Stages that stop when they are warned, with their progress saved."""


@dataclass(frozen=True)
class Arguments:
    """The command line of one attempt."""

    task: Task
    run_dir: Path
    attempt: str
    failure_file: Path | None


def main(argv: Sequence[str]) -> int:
    """Run one attempt at a task; returns the exit code."""
    arguments = parse(argv)
    started = time.time()
    listen(can_save=arguments.task.stage in CAN_SAVE)  # before anything that takes time
    os.environ.update(TASK_ENVIRONMENT)  # no hub and no telemetry: compute nodes have no network
    if arguments.failure_file and os.environ.get("RANK", "0") == "0":
        arguments.failure_file.unlink(missing_ok=True)  # of an earlier start of this same attempt
    try:
        execute(arguments)
        return 0
    except Exception as error:  # the process ends here: whatever happened is reported, none is swallowed
        return report(error, arguments, started)


def parse(argv: Sequence[str]) -> Arguments:
    parser = argparse.ArgumentParser(prog="python -m stages", description="Run one task of a run.")
    parser.add_argument("stage", choices=[str(stage) for stage in Stage])
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--iteration", type=int, default=0)
    parser.add_argument("--shard", type=int, default=0)
    parser.add_argument("--pool", default="", help="of score: whose components")
    parser.add_argument("--attempt", default=f"0-{os.urandom(4).hex()}", help="id of this attempt")
    parser.add_argument("--failure-file", type=Path, help="where to say why the attempt failed")
    given = parser.parse_args(argv)
    task = Task(given.iteration, Stage(given.stage), given.shard, given.pool)
    return Arguments(task, given.run_dir, given.attempt, given.failure_file)


def execute(arguments: Arguments) -> None:
    """Compute and commit, unless the task is committed already."""
    started = time.time()
    run = load_run(arguments.run_dir)
    check_is_planned(run, arguments.task)
    make_importable(run.identity.folder)
    if read_record(run.paths, arguments.task) is not None:
        print(f"{arguments.task} is committed already; nothing to do", flush=True)
        return
    from stages.engines import engines_closed

    with engines_closed():
        compute_and_commit(run, arguments, started)


def compute_and_commit(run: Run, arguments: Arguments, started: float) -> None:
    from stages.context import Context
    from stages.engines import needs_torch

    config, task = run.config, arguments.task
    context = Context(run.paths, config, task, arguments.attempt)
    names = (task.stage, task.pool) if task.pool else (task.stage,)
    seed = derive_seed(config.seed, task.iteration, *names, task.shard)
    uses_torch = any(needs_torch(key, name) for key, name in engines_of(config, task.stage, task.pool))
    if uses_torch:
        set_up_torch(num_threads(config, task.stage), seed)
    result = importlib.import_module(f"stages.{arguments.task.stage}").run(arguments.task, context)
    if result is None:  # another rank has it, and publishes
        return
    record = Record(
        task=arguments.task,
        attempt=arguments.attempt,
        outputs=result.outputs,
        inputs=context.lineage,
        policy_version=result.policy_version,
        seed=seed,
        rows=result.rows,
        schema=result.schema,
        started=started,
        ended=time.time(),
        host=socket.gethostname(),
        pid=os.getpid(),
        job_id=os.environ.get("SLURM_JOB_ID", ""),
        metrics={**result.metrics, **time_metrics(context, started), **memory_metrics(uses_torch)},
    )
    won = publish(run.paths, record)
    print(
        f"{arguments.task}: {'committed' if won else 'another attempt was first'}: {describe(record)}",
        flush=True,
    )


def check_is_planned(run: Run, task: Task) -> None:
    """Raises RunError when the run has no such task."""
    plan = run.plan
    if not 0 <= task.iteration <= plan.iterations or task not in plan.tasks(task.iteration):
        raise RunError(
            f"{run.paths.root} has no {task}: it has iterations {plan.start + 1} to {plan.iterations} of "
            f"shards 0 to {plan.num_shards - 1}, and evaluates iterations {list(plan.evaluations())}; pools: "
            f"{', '.join(plan.pools) or 'none'}"
        )


def describe(record: Record) -> str:
    seconds = record.ended - record.started
    text = f"{record.rows} rows in {seconds:.2f} s, {record.metrics['compute_seconds']:.2f} s of it compute"
    tokens = record.metrics.get("response_tokens")
    return text + (f", {tokens:.0f} response tokens" if tokens else "")


def num_threads(config: Config, stage: Stage) -> int:
    """CPU threads of a task; part of its result."""
    sections: Mapping[Stage, int] = {
        Stage.PREPARE: config.reward.num_threads,
        Stage.ROLLOUT: config.rollout.num_threads,
        Stage.SCORE: config.reward.num_threads,
        Stage.REWARD: config.reward.num_threads,
        Stage.UPDATE: config.update.num_threads,
        Stage.EVALUATE: config.evaluate.num_threads,
    }
    return sections[stage]


def time_metrics(context: "Context", started: float) -> dict[str, float]:
    """Seconds of model compute, and from the task's start to the first of them."""
    metrics = {"compute_seconds": context.compute_seconds}
    if context.first_compute is not None:
        metrics["startup_seconds"] = context.first_compute - started
    return metrics


def memory_metrics(uses_torch: bool) -> dict[str, float]:
    """Peak memory of this process, in GiB."""
    own = {"peak_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    return own | (peak_gpu_memory() if uses_torch else {})


def report(error: Exception, arguments: Arguments, started: float) -> int:
    """Explain the failure in the log and, for the driver and the report's timeline, in the failure file."""
    kind, suspect = classify(error)
    is_explained = kind not in (FailureKind.ERROR, FailureKind.NUMERICS, FailureKind.MEMORY)
    if not is_explained:
        traceback.print_exception(error)
    message = str(error) if is_explained else f"{type(error).__name__}: {error}"
    outcome = "paused" if kind is FailureKind.PAUSED else "failed"
    print(f"{arguments.task} {outcome}: {message}", file=sys.stderr, flush=True)
    if arguments.failure_file:
        arguments.failure_file.parent.mkdir(parents=True, exist_ok=True)
        said = {"kind": kind, "message": message, "suspect": suspect and task_key(suspect)}
        said |= {"started": started, "ended": time.time(), "host": socket.gethostname()}
        link_once(arguments.failure_file, json.dumps(said) + "\n")  # of several ranks the first knows why
    return EXIT_CODES[kind]


def classify(error: Exception) -> tuple[FailureKind, Task | None]:
    """Whose fault it was, and the input to look at, if it was an input's."""
    from stages.context import NumericalError, OutOfMemory, UserError

    if isinstance(error, NotCommitted | CorruptData | StaleData):
        return FailureKind.INPUTS, error.task
    if isinstance(error, StoppedOnWarning):
        return (FailureKind.PAUSED if error.has_progress else FailureKind.TIMEOUT), None
    if isinstance(error, OutOfMemory):
        return (FailureKind.CONFIG if error.on_device else FailureKind.MEMORY), None
    if isinstance(error, ConfigError | RunError | PromptError | PluginError | SchemaError | UserError):
        return FailureKind.CONFIG, None
    return (FailureKind.NUMERICS if isinstance(error, NumericalError) else FailureKind.ERROR), None
