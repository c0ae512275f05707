"""One attempt at a task: compute, and commit."""

import importlib
import os
import resource
import socket
import time

from pipeline.config.schema import Config
from pipeline.plugins.load import make_importable
from pipeline.run.commits import Record, is_of_the_past, opened_history, publish
from pipeline.run.directory import Run, RunError, load_run
from pipeline.run.engine_use import engines_of
from pipeline.run.seeds import derive_seed
from pipeline.run.tasks import Stage, Task
from stages.context import Context
from stages.engines import engines_closed, needs_torch
from stages.logs import log
from stages.numerics import peak_gpu_memory, set_up_torch
from stages.runner import Arguments


def execute(arguments: Arguments, started: float) -> None:
    """Run one attempt: compute the task's result, and commit it.

    Args:
        started: unix time at which the attempt began.
    """
    run = load_run(arguments.run_dir)
    check_is_planned(run, arguments.task)
    make_importable(run.identity.folder)
    with opened_history(run.paths, arguments.task) as history, engines_closed():
        compute_and_commit(run, arguments, started, history)


def compute_and_commit(run: Run, arguments: Arguments, started: float, history: int) -> None:
    config, task = run.config, arguments.task
    context = Context(run.paths, config, task, arguments.attempt)
    names = (task.stage, task.pool) if task.pool else (task.stage,)
    seed = derive_seed(config.seed, task.iteration, *names, task.shard)
    uses_torch = any(needs_torch(key, name) for key, name in engines_of(config, task.stage, task.pool))
    if uses_torch:
        set_up_torch(num_threads(config, task.stage), seed)
    result = importlib.import_module(f"stages.tasks.{task.stage}").run(arguments.task, context)
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
        metrics={**result.metrics, **measured(context, started, uses_torch)},
    )
    outcome = "committed" if publish(run.paths, record, history) else "another attempt was first"
    if is_of_the_past(run.paths, task, history):
        outcome = "the run has gone back meanwhile, and what this attempt made was moved aside"
    log.info(f"{task}: {outcome}: {describe(record)}")


def check_is_planned(run: Run, task: Task) -> None:
    """Raise RunError when the run has no such task."""
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
    """Return the number of a task's CPU threads, on which its result depends."""
    generating = {Stage.ROLLOUT: config.rollout.num_threads, Stage.EVALUATE: config.evaluate.num_threads}
    return {Stage.UPDATE: config.update.num_threads, **generating}.get(stage, config.reward.num_threads)


def measured(context: Context, started: float, uses_torch: bool) -> dict[str, float]:
    """Return seconds of model compute and from the task's start to the first of it; and the peak memory of
    this process, and of its GPU if it uses torch, in GiB."""
    metrics = {"compute_seconds": context.compute_seconds}
    if context.first_compute is not None:
        metrics["startup_seconds"] = context.first_compute - started
    metrics["peak_memory_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return metrics | (peak_gpu_memory() if uses_torch else {})
