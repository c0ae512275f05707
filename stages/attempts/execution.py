"""One attempt at a task: compute, and commit."""

import contextlib
import importlib
import os
import resource
import socket
import time
from dataclasses import replace

from pipeline.config.scheduler import resources_of
from pipeline.config.schema import Config
from pipeline.decide.budgets import budget_in_words, halved
from pipeline.plugins.load import make_importable
from pipeline.run.commits import Record, is_of_the_past, opened_history, publish
from pipeline.run.directory import Run, load_run
from pipeline.run.engine_use import engines_of
from pipeline.run.environment import COMMITTED, RELEASED
from pipeline.run.held import num_threads
from pipeline.run.identity import RunError
from pipeline.run.plan import state_of
from pipeline.run.records import find_frontier, recorded
from pipeline.run.seeds import derive_seed
from pipeline.run.states import longest_replay
from pipeline.run.tasks import Stage, Task, task_key
from stages.attempts.arguments import Arguments
from stages.context import Context, CopyingWriter, StageResult, StateWriter
from stages.engines import engines_closed, needs_torch, take_facts
from stages.logs import log
from stages.models.numerics import forget_peaks, peak_gpu_memory, set_up_chance, set_up_torch
from stages.models.passes import counted_passes, forget_passes
from stages.process import background
from stages.process.heap import give_back_freed
from stages.process.parent import notify_parent, policy_is_there
from stages.training import publish_state

_POLL_SECONDS = 0.5


def execute(arguments: Arguments, started: float) -> None:
    """Run one attempt: compute the task's result, and commit it.

    Args:
        started: unix time at which the attempt began.
    """
    run = load_run(arguments.run_dir, arguments.settings)
    check_is_planned(run, arguments.task)
    make_importable(run.identity.folder)
    task = arguments.task
    with contextlib.ExitStack() as stack:
        history = stack.enter_context(opened_history(run.paths, task))
        of_state = history
        if task.stage is Stage.UPDATE:
            of_state = stack.enter_context(opened_history(run.paths, state_of(task.iteration)))
        wait_for_inputs(run, task, arguments.patience)
        if not arguments.stays:
            stack.enter_context(engines_closed())
        compute_and_commit(run, arguments, started, history, of_state)
    give_back_freed()  # for the tasks of other processes, while this one waits


def load(arguments: Arguments) -> None:
    """Load what a task will compute with into what the process keeps, as far as that is known before the
    task's inputs are there. Stages whose tasks load little have nothing for it."""
    run, task = load_run(arguments.run_dir, arguments.settings), arguments.task
    make_importable(run.identity.folder)
    stage = importlib.import_module(f"stages.tasks.{task.stage}")
    wanted = run.plan.policy_of(task.iteration) if task.stage is Stage.ROLLOUT else task.iteration - 1
    newest = min(find_frontier(run.plan, run.paths).updated, wanted)
    if newest >= 0 and hasattr(stage, "load"):
        set_up(run.config, task)
        stage.load(Context(run.paths, run.config, task, arguments.attempt, stays=True), newest)


def set_up(config: Config, task: Task) -> int:
    """Set up all that a task's result depends on beside its inputs. Returns its seed."""
    names = (task.stage, task.pool) if task.pool else (task.stage,)
    seed = derive_seed(config.seed, task.iteration, *names, task.shard)
    set_up_chance(seed)
    if uses_torch(config, task):
        set_up_torch(num_threads(config, task.stage), seed)
    return seed


def uses_torch(config: Config, task: Task) -> bool:
    return any(needs_torch(key, name) for key, name in engines_of(config, task.stage, task.pool))


def compute_and_commit(
    run: Run, arguments: Arguments, started: float, history: int, state_history: int
) -> None:
    """Compute and publish. ``history`` and ``state_history`` are the folders of the task and of the state
    behind it, from :func:`opened_history`."""
    config, task = halved(run.config, arguments.halvings), arguments.task
    if arguments.halvings:
        words = budget_in_words(run.config, task.stage, arguments.halvings)
        log.info(f"{task} is tried with {words}, as an attempt before ran out of GPU memory")
    context = Context(run.paths, config, task, arguments.attempt, arguments.stays)
    forget_peaks()
    forget_passes()
    seed = set_up(config, task)
    result = importlib.import_module(f"stages.tasks.{task.stage}").run(arguments.task, context)
    record = None
    if result is not None:  # else another rank has it, and publishes
        metrics = {**result.metrics, **measured(context, started, uses_torch(config, task))}
        record = record_of(context, result, started, seed)
        if task.stage is Stage.UPDATE:
            metrics |= background.take_seconds()
        record = replace(record, metrics=metrics, halvings=arguments.halvings)
        record = commit(context, record, history)
    if context.state_writer is not None:
        if record is not None:
            policy_is_there()
        commit_state(context, context.state_writer, record, state_history)


def record_of(context: Context, result: StageResult, started: float, seed: int) -> Record:
    return Record(
        task=context.task,
        attempt=context.attempt,
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
        promises_state=context.state_writer is not None,
        skips_state=context.skips_state,
    )


def commit(context: Context, record: Record, history: int) -> Record | None:
    """Publish the task's record. Returns it if it won, and the run has not gone back meanwhile."""
    task, has_won = record.task, publish(context.paths, record, history)
    outcome = "committed" if has_won else "another attempt was first"
    if is_of_the_past(context.paths, task, history):
        outcome = "the run has gone back meanwhile, and what this attempt made was moved aside"
        has_won = False
    elif has_won:
        notify_parent(COMMITTED)
    log.info(f"{task}: {outcome}: {describe(record)}")
    return record if has_won else None


def commit_state(context: Context, writer: StateWriter, update: Record | None, history: int) -> None:
    """Write and commit the trainer's state behind its policy: in a thread, where the process may go on with
    the next update and has room for a copy, else at once. A failure loses the state, not the update.

    Args:
        update: record of the update, on the first rank, if it was committed.
        history: descriptor of the state's folder from :func:`opened_history`.
    """
    try:
        if writer.detach():  # else the devices are free when the process ends, and not before
            notify_parent(RELEASED)
        begun = time.monotonic()
        background.finish()
        num_bytes = copied_bytes(context, writer)
        if num_bytes is None:
            if outcome := write_state(context, writer, update, history):
                log.info(f"{context.task}: {outcome}")
            background.forget_failure()
        else:
            write_behind(context, writer, update, history, num_bytes)
        background.note_held_up(time.monotonic() - begun)
    except Exception:  # whatever it is: the policy is committed, and what follows can make the state again
        log.exception(f"{context.task}: the trainer's state was not saved; the policy is committed:")


def copied_bytes(context: Context, writer: StateWriter) -> float | None:
    """Have a state copied for a thread to write. Returns the copy's bytes; None where there is none: no
    update follows in this process, there is no room, or the last state that a thread wrote was lost."""
    if not isinstance(writer, CopyingWriter):
        return None
    return writer.copied(goes_on(context) and not background.has_failed())


def goes_on(context: Context) -> bool:
    """Whether this process does the next update too, as far as the plan and the settings say."""
    slurm = context.config.slurm
    is_last = context.task.iteration == context.config.iterations
    has_own_job = slurm is not None and resources_of(slurm, context.task.job_kind).does_one_task
    return context.stays and not is_last and not has_own_job


def write_behind(
    context: Context, writer: StateWriter, update: Record | None, history: int, num_bytes: float
) -> None:
    """Have a thread write and commit a state that was copied. It says nothing of that: its lines would lie in
    the log of another task, and the next update's record has its seconds."""
    own = os.dup(history)
    task, patience = context.task, longest_replay(context.config)
    label = background.Label(
        context.paths.root, task.iteration, task_key(task), context.attempt, num_bytes, patience
    )

    def work() -> None:
        try:
            write_state(context, writer, update, own)
        finally:
            os.close(own)

    background.begin(label, work)


def write_state(context: Context, writer: StateWriter, update: Record | None, history: int) -> str | None:
    """Write and commit a state. Returns what came of it, in words; None on other ranks than the first, and
    where another attempt was first."""
    started = time.time()
    files = writer.write(is_wanted=update is not None)
    if update is None or not files:
        return None
    return publish_state(context, update, files, started, history)


def wait_for_inputs(run: Run, task: Task, seconds: float) -> None:
    """Wait until every input that is read has a commit record, but no longer than ``seconds``: another
    machine may have committed it a moment ago. What is still missing then is for the stage to find."""
    missing, until, is_said = set(run.plan.inputs(task)), time.monotonic() + seconds, False
    missing -= {run.plan.earlier(task)}
    while seconds and (missing := missing - set(recorded(run.paths, missing))):
        if (left := until - time.monotonic()) <= 0:
            return
        if not is_said:
            log.info(f"{task} waits up to {seconds:g} s for {min(missing)}")
            is_said = True
        time.sleep(min(left, _POLL_SECONDS))


def check_is_planned(run: Run, task: Task) -> None:
    """Raise RunError when the run has no such task."""
    plan = run.plan
    planned = (*plan.tasks(task.iteration), *plan.benchmark_of(task.iteration))
    if not 0 <= task.iteration <= plan.iterations or task not in planned:
        raise RunError(
            f"{run.paths.root} has no {task}: it has iterations {plan.start + 1} to {plan.iterations} of "
            f"shards 0 to {plan.num_shards - 1}, and evaluates iterations {list(plan.evaluations())}; pools: "
            f"{', '.join(plan.pools) or 'none'}"
        )


def describe(record: Record) -> str:
    seconds = record.seconds
    text = f"{record.rows} rows in {seconds:.2f} s, {record.metrics['compute_seconds']:.2f} s of it compute"
    tokens = record.metrics.get("response_tokens")
    return text + (f", {tokens:.0f} response tokens" if tokens else "")


def measured(context: Context, started: float, has_torch: bool) -> dict[str, float]:
    """Return seconds of model compute and from the task's start to the first of it; what went through models,
    and how engines computed; and the peak memory of this process and its engines' meanwhile, and of its GPU
    if it uses torch, in GiB."""
    metrics = {"compute_seconds": context.compute_seconds, **counted_passes().metrics()}
    if context.first_compute is not None:
        metrics["startup_seconds"] = context.first_compute - started
    facts = take_facts()
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    metrics |= {**facts.numbers, "peak_memory_gib": own + facts.memory_gib}
    gpu = peak_gpu_memory() if has_torch else {}
    return metrics | {name: max(value, facts.gpu_memory_gib) for name, value in gpu.items()}
