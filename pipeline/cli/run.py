"""Calls that start, continue, fork or cancel a run: they act, show progress, say how it ended."""

import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.config.issue import ConfigError
from pipeline.config.reward import RewardModelConfig
from pipeline.config.scheduler import LocalConfig, LocalStageConfig, SlurmConfig
from pipeline.config.schema import Config
from pipeline.executors.local import drive
from pipeline.executors.processes import LocalLimits, LocalScheduler
from pipeline.executors.scheduler import Scheduler
from pipeline.executors.slurm.advance import LEASE_PATIENCE, Pass, advance_run, follow
from pipeline.executors.slurm.queue import cancel_all, wait_until_gone
from pipeline.notify.events import breakdown, completion, failure, tell
from pipeline.orchestrate.driver import Outcome
from pipeline.orchestrate.publish import note_mended
from pipeline.orchestrate.rewind import Point, go_back, parse_point
from pipeline.orchestrate.row_writer import RowWriter
from pipeline.run import journal
from pipeline.run.control import Control, begin_invocation, read_control, write_control
from pipeline.run.directory import Run, RunError, claimed_run, resume_command, slurm_settings
from pipeline.run.engine_use import uses_torch, uses_vllm
from pipeline.run.environment import TASK_ENVIRONMENT
from pipeline.run.failures import FailureKind, GiveUp
from pipeline.run.lease import Lease, LeaseHeld, LeaseLost, hold_patiently
from pipeline.run.lineage import find_break, find_damage
from pipeline.run.records import find_frontier
from pipeline.run.tasks import PREPARE, Stage, Task
from pipeline.run.troubles import described
from pipeline.run.version_checks import version_warning
from pipeline.status.failure import failure_block
from pipeline.status.progress import Bars, Lines, watcher_for
from slurm.sharedfiles import is_there
from slurm.submission import Refused, requeue

_GONE_PATIENCE = 60.0
"""Seconds for jobs that were cancelled to end: Slurm gives them 30 to do so by themselves."""


def start(config: Config, watch: bool) -> int:
    """Make a run and carry it out, or submit it. Returns the exit code."""
    scheduler = local_scheduler(config) if isinstance(config.scheduler, LocalConfig) else None
    if scheduler and not watch:
        raise ConfigError("scheduler=local has no queue to submit to; type slurm-ppo run, or scheduler=slurm")
    # Driver jobs import this module too and need not wait for these.
    from pipeline.preflight.cluster import check_cluster
    from pipeline.preflight.inputs import validate_inputs

    for line in validate_inputs(config):
        print(line, file=sys.stderr)
    if scheduler is None:
        check_cluster(config)
    with claimed_run(config) as (run, lease):
        if scheduler is not None:
            return carry_on(run, scheduler, lease)
        write_control(run.paths, Control())  # from now on it is in the queue, or about to be
    try:
        return follow_run(run) if watch else submit_run(run)
    except Refused:
        if not is_there(run.paths.task(PREPARE).record):
            cancel_run(run)  # with other settings it is another run: what is queued belongs to none
        raise


def resume_run(run: Run, watch: bool, back_to: str | None = None) -> int:
    """Continue a run where it stands, or from an earlier point. Returns the exit code."""
    if told := version_warning(run):
        print(told, file=sys.stderr)
    scheduler = local_scheduler(run.config) if isinstance(run.config.scheduler, LocalConfig) else None
    if back_to is not None:
        point = parse_point(back_to)
        if scheduler is None:
            clear_queue(run)
        moved = go_back(run, point, patience=0.0 if scheduler else LEASE_PATIENCE)
        print(f"moved aside: {moved}" if moved else "nothing to move aside", file=sys.stderr)
    mend_chain(run, scheduler is None)
    mend_rows(run, patience=0.0 if scheduler else LEASE_PATIENCE)
    if scheduler is not None:
        return carry_on(run, scheduler)
    return follow_run(run) if watch else submit_run(run)


def mend_chain(run: Run, is_on_slurm: bool) -> None:
    """Take back what was made from a policy that has been made again since, with another result.

    Take back the last policy too if it is damaged: no later task reads it, and so nobody else would see.
    """
    updated = find_frontier(run.plan, run.paths).updated
    if updated >= run.plan.iterations > run.plan.start:
        print(
            f"the run is trained; hashing policy {updated}, which no task reads", file=sys.stderr, flush=True
        )
    found = find_break(run.plan, run.paths, updated) or find_damage(run.plan, run.paths, updated)
    if found is None:
        return
    print(f"{found.why}; it is moved aside, with all that came of it, and made again", file=sys.stderr)
    if is_on_slurm:
        clear_queue(run)
    go_back(run, Point(Stage.UPDATE, found.iteration), LEASE_PATIENCE if is_on_slurm else 0.0)


def mend_rows(run: Run, patience: float) -> None:
    """Restore lines of metrics.jsonl in which a bit has flipped. Drivers compare the newest ones only."""
    try:
        with hold_patiently(run.paths.locks, patience):
            book = RowWriter.open(run.paths, run.plan.start + 1, compared=sys.maxsize)
            book.close()
            note_mended(run, book.mended)
    except OSError as error:  # what people see never stops what trains; the driver tells more
        print(f"rows cannot be compared: {described(error)}", file=sys.stderr)
        return
    if book.mended is not None:
        why = f"row {book.mended} was not what was published; it is written again"
        print(f"{run.paths.metrics}: {why}", file=sys.stderr)


def clear_queue(run: Run) -> None:
    """Cancel jobs that would compute what is being taken back.

    What is left on a node that is cut off commits to the history that was taken back, whenever it ends.
    """
    cancel_run(run)
    if left := wait_until_gone(run, _GONE_PATIENCE):
        print(f"{left} cancelled jobs have not ended; what they still make is moved aside", file=sys.stderr)


def fork_run(source: str, root: Path, overrides: Sequence[str], config_dir: Path | None) -> str:
    """Make a run that goes on from a policy of another. Returns what to say."""
    from pipeline.orchestrate.fork import find_parent, fork, fork_config
    from pipeline.preflight.cluster import check_cluster
    from pipeline.preflight.inputs import validate_inputs
    from pipeline.run.copies import check_is_vacant

    check_is_vacant(root)
    parent = find_parent(source)
    config = fork_config(parent, root, overrides, config_dir)
    for line in validate_inputs(config, Path(parent.run.identity.folder), parent.number):
        print(line, file=sys.stderr)
    is_on_slurm = isinstance(config.scheduler, SlurmConfig)
    if is_on_slurm:
        check_cluster(config)
    run = fork(parent, config)
    word = "submit" if is_on_slurm else "resume"
    return (
        f"forked from {parent}; the fork begins with iteration {parent.number + 1} of {config.iterations}\n"
        f"  start it:  slurm-ppo {word} {shlex.quote(str(run.paths.root))}"
    )


def cancel_run(run: Run) -> str:
    """Cancel every job of the run. Returns what to say."""
    from pipeline.status.snapshot import is_complete

    if isinstance(run.config.scheduler, LocalConfig):
        raise RunError("the run's tasks are processes of the command that started it: end that with Ctrl-C")
    with hold_patiently(run.paths.locks, LEASE_PATIENCE):
        has_ended = is_complete(run)
        write_control(run.paths, replace(read_control(run.paths), cancelled=True))
        count = cancel_all(run)
    journal.event(run.paths.events, "cancelled", arrays=count)
    if has_ended:
        left = f"cancelled {count} jobs that were left" if count else "there is nothing to cancel"
        return (
            f"the run is complete; {left}; its results: slurm-ppo report {shlex.quote(str(run.paths.root))}"
        )
    return f"cancelled {count} jobs; nothing that was committed is lost; to continue: {resume_command(run)}"


def carry_on(run: Run, scheduler: Scheduler, lease: Lease | None = None) -> int:
    """Drive the run on this machine until it ends. Returns the exit code.

    Args:
        lease: held since the run was made; None: it is taken now.
    """
    announce(run)
    watcher = watcher_for(sys.stderr, run.plan)
    begun = time.time()
    try:
        outcome, given_up = drive(run, scheduler, watcher, lease)
        tell_how_it_ended(run, outcome, given_up, begun, watcher.note)
    except (LeaseHeld, LeaseLost):
        raise  # another driver goes on
    except Exception as error:  # whatever it is, somebody wants to know that nothing goes on
        tell(run, breakdown(run, error, begun), watcher.note)
        raise
    finally:
        watcher.close()
    return say_how_it_ended(run, outcome, given_up, f"interrupted; to continue: {resume_command(run)}")


def announce(run: Run) -> None:
    """Say what begins, and where to look on: the first iteration may take long."""
    left = run.plan.iterations - max(find_frontier(run.plan, run.paths).updated, run.plan.start)
    print(f"run directory: {run.paths.root}", file=sys.stderr)
    size = f"{run.config.responses_per_iteration} responses"
    work = f"to do: {left} of {run.plan.iterations} iterations of {size}, a line for each"
    print(f"{work}; logs: {run.paths.log_root}", file=sys.stderr, flush=True)


def tell_how_it_ended(
    run: Run, outcome: Outcome, given_up: Sequence[GiveUp], begun: float, note: Callable[[str], None]
) -> None:
    """Notify people that a run is complete or has failed. Whoever interrupts one knows."""
    if outcome is Outcome.COMPLETE:
        tell(run, completion(run), note)
    elif outcome is Outcome.FAILED:
        tell(run, failure(run, given_up, begun), note)


def submit_run(run: Run) -> int:
    """Enqueue what is due, and return: the run goes on by its driver jobs. Returns the exit code."""
    done = in_call(run, lambda watcher: advance_run(run, watcher))
    if done.outcome is None and not done.is_watched:
        print(
            f"the queue is full: nothing of the run waits in it. Later: slurm-ppo submit {run.paths.root}",
            file=sys.stderr,
        )
        return 3
    if done.outcome is None:
        print(next_commands(run))
        return 0
    return say_how_it_ended(run, done.outcome, done.given_up, "")


def follow_run(run: Run) -> int:
    """Enqueue what is due and watch until the run has ended. Returns the exit code."""
    poll_seconds = slurm_settings(run).poll_seconds
    done = in_call(run, lambda watcher: follow(run, watcher, poll_seconds))
    assert done.outcome is not None
    command = shlex.quote(str(run.paths.root))
    left = (
        f"no longer watching; the jobs go on without this command. To stop them: slurm-ppo cancel {command}"
    )
    return say_how_it_ended(run, done.outcome, done.given_up, left)


def advance_once(run: Run) -> int:
    """Make one pass, as a driver job. Returns the exit code.

    A job whose pass fails asks Slurm to start it again later: that needs no file of ours, so that a disk
    which is full for hours, or folders that cannot be written, do not empty the queue.
    """
    slurm_settings(run)  # a run of this machine has no driver jobs
    watcher = Lines(run.plan, sys.stderr)
    try:
        done = advance_run(run, watcher)
    except (LeaseHeld, LeaseLost, RunError):
        raise  # another driver is at it, or a person has to act
    except Exception:  # whatever it is, this job must not be the last that advances the run
        with contextlib.suppress(OSError):  # its log may be on the disk that is full
            traceback.print_exc()
        wait_once_more("this job waits in the queue once more, and tries again", watcher)
        return 1
    if done.outcome is Outcome.FAILED:
        return say_how_it_ended(run, done.outcome, done.given_up, "")
    watcher.note(f"the run is {done.outcome}" if done.outcome else "done; the run goes on")
    if done.outcome is None and not done.is_watched:
        wait_once_more("the queue is full, so this job waits in it once more", watcher)
    return 0


def wait_once_more(why: str, watcher: Lines) -> None:
    """Put this job back into the queue; outside of one, where a person types, do nothing."""
    if job := os.environ.get("SLURM_JOB_ID"):
        with contextlib.suppress(OSError):
            watcher.note(why)
        requeue(job)


def in_call(run: Run, act: Callable[["Lines | Bars"], Pass]) -> Pass:
    """Begin a call of a person's, with a new budget of attempts, and show progress during it."""
    with hold_patiently(run.paths.locks, LEASE_PATIENCE):
        begin_invocation(run.paths)
    announce(run)
    watcher = watcher_for(sys.stderr, run.plan)
    try:
        return act(watcher)
    finally:
        watcher.close()


def say_how_it_ended(run: Run, outcome: Outcome, given_up: tuple[GiveUp, ...], otherwise: str) -> int:
    """Print the summary, the failure block, or what to do next. Returns the exit code."""
    if outcome is Outcome.COMPLETE:
        print(summary(run))
        return 0
    if outcome is Outcome.FAILED:
        print(failure_block(run, given_up), file=sys.stderr)
        return 2 if any(item.failure.kind is FailureKind.CONFIG for item in given_up) else 1
    if outcome is Outcome.CANCELLED:
        otherwise = f"the run was cancelled; to continue: {resume_command(run)}"
    print(otherwise, file=sys.stderr)
    return 3


def next_commands(run: Run) -> str:
    """Return the commands that a person will want after submitting."""
    root = shlex.quote(str(run.paths.root))
    return "\n".join(
        (
            "submitted; the run goes on by itself, you may log out",
            f"  where it stands:  slurm-ppo status {root}",
            f"  look on:          slurm-ppo watch {root}",
            f"  logs:             slurm-ppo logs {root} --follow",
            f"  stop its jobs:    slurm-ppo cancel {root}",
            f"  continue:         {resume_command(run)}",
        )
    )


def local_scheduler(config: Config) -> LocalScheduler:
    """Make a scheduler of processes of this machine, which run ``python -m stages``'s entry.

    Raises:
        ConfigError: the training libraries are not installed.
    """
    has_models = uses_torch(config)
    needed = [*["torch", "transformers", "deepspeed"] * has_models, *["vllm"] * uses_vllm(config)]
    missing = [name for name in needed if not importlib.util.find_spec(name)]
    if missing:
        raise ConfigError(
            f"scheduler.kind=local runs tasks on this machine, which lacks {', '.join(missing)}; "
            "install them with: pip install 'slurm-ppo[train]'"
        )
    os.environ.update(TASK_ENVIRONMENT)
    given = config.scheduler
    assert isinstance(given, LocalConfig)
    pools = {
        "prepare": 1,
        "rollout": given.rollout.slots,
        "reward": given.reward.slots,
        "update": given.update.slots,
        "evaluate": given.evaluate.slots,
    }
    for pool in config.reward.pools:
        pools[Task(0, Stage.SCORE, pool=pool).job_kind] = given.pools.get(pool, LocalStageConfig()).slots
    limits = LocalLimits(given.slots, pools, given.time_limit)
    preload = ["stages.preload"]
    if has_models:
        preload += ["stages.preload_models", *model_modules(config)]
    if uses_vllm(config):
        preload.append("stages.preload_vllm")
    return LocalScheduler("stages.runner:main", preload, limits)


def model_modules(config: Config) -> list[str]:
    """Return the modules that define the run's models, to be imported once instead of in every task."""
    rewards = [c.path for c in config.reward.components.values() if isinstance(c, RewardModelConfig)]
    kinds = set()
    for directory in (config.model.policy, *rewards):
        kind = json.loads((Path(directory) / "config.json").read_text()).get("model_type", "")
        if kind.isidentifier():
            kinds.add(kind)
    return [f"transformers.models.{kind}.modeling_{kind}" for kind in sorted(kinds)]


def summary(run: Run) -> str:
    """Write a complete run's report, and sum the run up: table, curve, where things are."""
    from pipeline.metrics.advice import Evidence, advise, in_a_line
    from pipeline.metrics.terminal import iteration_table, reward_curve
    from pipeline.report import write_report

    width = min(shutil.get_terminal_size((80, 24)).columns, 120)
    rows = journal.read(run.paths.metrics)
    report = write_report(run)
    return "\n".join(
        (
            iteration_table(rows, width),
            "",
            reward_curve(rows, width, height=15),
            "",
            *(in_a_line(advice) for advice in advise(Evidence(rows, run.config))),
            f"run directory: {run.paths.root}",
            f"policy:        {run.paths.policies / f'{run.plan.iterations:05d}'}",
            f"report:        {report}",
        )
    )
