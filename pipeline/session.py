"""One call of ``run`` or ``resume``: drive the run on this machine, show progress, say how it ended."""

import importlib.util
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline import journal
from pipeline.advance import LEASE_PATIENCE, Pass, advance_run, follow
from pipeline.compose import ConfigError
from pipeline.config import Config
from pipeline.driver import Outcome, drive
from pipeline.enginechecks import uses_torch, uses_vllm
from pipeline.environment import TASK_ENVIRONMENT
from pipeline.failureblock import failure_block, resume_command
from pipeline.goback import go_back, parse_point
from pipeline.lease import LeaseHeld, LeaseLost, hold_patiently
from pipeline.notify import breakdown, completion, failure, tell
from pipeline.progress import Bars, Lines, watcher_for
from pipeline.reconcile import FailureKind, GiveUp
from pipeline.rewardconfig import RewardModelConfig
from pipeline.runqueue import cancel_all
from pipeline.runs import Run, RunError, create_run
from pipeline.schedulerconfig import LocalConfig, LocalStageConfig, SlurmConfig
from pipeline.submissions import begin_call, read_control, write_control
from pipeline.tasks import PREPARE, Stage, Task
from slurm.local import LocalLimits, LocalScheduler
from slurm.scheduler import Scheduler
from slurm.submission import Refused, requeue


def start(config: Config, watch: bool) -> int:
    """Make a run and carry it out, or submit it. Returns the exit code."""
    scheduler = local_scheduler(config) if isinstance(config.scheduler, LocalConfig) else None
    if scheduler and not watch:
        raise ConfigError("scheduler=local has no queue to submit to; type slurm-ppo run, or scheduler=slurm")
    # Driver jobs import this module too and need not wait for these.
    from pipeline.cluster_checks import check_cluster
    from pipeline.preview import validate_inputs

    for line in validate_inputs(config):
        print(line, file=sys.stderr)
    if scheduler is None:
        check_cluster(config)
    run = create_run(config)
    if scheduler is not None:
        return carry_on(run, scheduler)
    try:
        return follow_run(run) if watch else submit_run(run)
    except Refused:
        if not run.paths.task(PREPARE).record.exists():
            cancel_run(run)  # with other settings it is another run: what is queued belongs to none
        raise


def resume_run(run: Run, watch: bool, back_to: str | None = None) -> int:
    """Continue a run where it stands, or from an earlier point. Returns the exit code."""
    scheduler = local_scheduler(run.config) if isinstance(run.config.scheduler, LocalConfig) else None
    if scheduler is None and back_to is not None:
        cancel_run(run)  # what is queued would compute what is being taken back
    if back_to is not None:
        moved = go_back(run, parse_point(back_to))
        print(f"moved aside: {moved}" if moved else "nothing to move aside", file=sys.stderr)
    if scheduler is not None:
        return carry_on(run, scheduler)
    return follow_run(run) if watch else submit_run(run)


def fork_run(source: str, root: Path, overrides: Sequence[str], config_dir: Path | None) -> str:
    """Make a run that goes on from a policy of another. Returns what to say."""
    from pipeline.cluster_checks import check_cluster
    from pipeline.copies import check_is_vacant
    from pipeline.forking import find_parent, fork, fork_config
    from pipeline.preview import validate_inputs

    check_is_vacant(root)
    parent = find_parent(source)
    config = fork_config(parent, root, overrides, config_dir)
    for line in validate_inputs(config, Path(parent.run.identity.folder)):
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
    if isinstance(run.config.scheduler, LocalConfig):
        raise RunError("the run's tasks are processes of the command that started it: end that with Ctrl-C")
    with hold_patiently(run.paths.locks, LEASE_PATIENCE):
        write_control(run.paths, replace(read_control(run.paths), cancelled=True))
        count = cancel_all(run)
    journal.event(run.paths.events, "cancelled", arrays=count)
    return f"cancelled {count} jobs; nothing that was committed is lost; to continue: {resume_command(run)}"


def carry_on(run: Run, scheduler: Scheduler) -> int:
    """Drive the run on this machine until it ends. Returns the exit code."""
    print(f"run directory: {run.paths.root}", file=sys.stderr, flush=True)
    watcher = watcher_for(sys.stderr, run.plan)
    begun = time.time()
    try:
        outcome, given_up = drive(run, scheduler, watcher)
        tell_how_it_ended(run, outcome, given_up, begun, watcher.note)
    except (LeaseHeld, LeaseLost):
        raise  # another driver goes on
    except Exception as error:  # whatever it is, somebody wants to know that nothing goes on
        tell(run, breakdown(run, error, begun), watcher.note)
        raise
    finally:
        watcher.close()
    return say_how_it_ended(run, outcome, given_up, f"interrupted; to continue: {resume_command(run)}")


def tell_how_it_ended(
    run: Run, outcome: Outcome, given_up: Sequence[GiveUp], begun: float, note: Callable[[str], None]
) -> None:
    """Tell those who are to be told. A run that was interrupted was so by somebody who knows."""
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
    config = run.config.scheduler
    assert isinstance(config, SlurmConfig)
    done = in_call(run, lambda watcher: follow(run, watcher, config.poll_seconds))
    assert done.outcome is not None
    command = shlex.quote(str(run.paths.root))
    left = (
        f"no longer watching; the jobs go on without this command. To stop them: slurm-ppo cancel {command}"
    )
    return say_how_it_ended(run, done.outcome, done.given_up, left)


def advance_once(run: Run) -> int:
    """What a driver job does. Returns the exit code."""
    watcher = Lines(run.plan, sys.stderr)
    done = advance_run(run, watcher)
    if done.outcome is Outcome.FAILED:
        return say_how_it_ended(run, done.outcome, done.given_up, "")
    watcher.note(f"the run is {done.outcome}" if done.outcome else "done; the run goes on")
    if done.outcome is None and not done.is_watched:
        watcher.note("the queue is full, so this job waits in it once more")
        requeue(os.environ["SLURM_JOB_ID"])
    return 0


def in_call(run: Run, act: Callable[["Lines | Bars"], Pass]) -> Pass:
    """Begin a call of a person's, with a new budget of attempts, and show progress during it."""
    with hold_patiently(run.paths.locks, LEASE_PATIENCE):
        begin_call(run.paths)
    print(f"run directory: {run.paths.root}", file=sys.stderr, flush=True)
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
    """What a person will want after submitting."""
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
    """Processes of this machine that run ``python -m stages``'s entry.

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
        pools[Task(0, Stage.SCORE, pool=pool).purpose] = given.pools.get(pool, LocalStageConfig()).slots
    limits = LocalLimits(given.slots, pools, given.time_limit)
    preload = ["stages.preload"]
    if has_models:
        preload += ["stages.preload_models", *model_modules(config)]
    if uses_vllm(config):
        preload.append("stages.preload_vllm")
    return LocalScheduler("stages.runner:main", preload, limits)


def model_modules(config: Config) -> list[str]:
    """The modules that define the run's models, to be imported once instead of in every task."""
    rewards = [c.path for c in config.reward.components.values() if isinstance(c, RewardModelConfig)]
    kinds = set()
    for directory in (config.model.policy, *rewards):
        kind = json.loads((Path(directory) / "config.json").read_text()).get("model_type", "")
        if kind.isidentifier():
            kinds.add(kind)
    return [f"transformers.models.{kind}.modeling_{kind}" for kind in sorted(kinds)]


def summary(run: Run) -> str:
    """How a complete run went: table, curve, where things are."""
    from pipeline.report import write_report
    from pipeline.views import iteration_table, reward_curve

    width = min(shutil.get_terminal_size((80, 24)).columns, 120)
    rows = journal.read(run.paths.metrics)
    report = write_report(run)
    return "\n".join(
        (
            iteration_table(rows, width),
            "",
            reward_curve(rows, width, height=15),
            "",
            f"run directory: {run.paths.root}",
            f"policy:        {run.paths.policies / f'{run.plan.iterations:05d}'}",
            f"report:        {report}",
        )
    )
