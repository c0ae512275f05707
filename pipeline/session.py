"""One call of ``run`` or ``resume``: drive the run on this machine, show progress, say how it ended."""

import importlib.util
import json
import os
import shlex
import shutil
import sys
from collections import deque
from pathlib import Path

from pipeline import journal
from pipeline.compose import ConfigError
from pipeline.config import Config, RewardModelConfig
from pipeline.driver import Outcome, drive
from pipeline.environment import TASK_ENVIRONMENT
from pipeline.progress import watcher_for
from pipeline.reconcile import FailureKind, GiveUp
from pipeline.runs import Run
from pipeline.tasks import PREPARE
from slurm.local import LocalLimits, LocalScheduler
from slurm.scheduler import Scheduler

_LOG_LINES = 20


def carry_on(run: Run, scheduler: Scheduler) -> int:
    """Drive the run until it ends. Returns the exit code."""
    print(f"run directory: {run.paths.root}", file=sys.stderr, flush=True)
    watcher = watcher_for(sys.stderr, run.plan)
    try:
        outcome, given_up = drive(run, scheduler, watcher)
    finally:
        watcher.close()
    if outcome is Outcome.COMPLETE:
        print(summary(run))
        return 0
    if outcome is Outcome.FAILED:
        print(failure_block(run, given_up), file=sys.stderr)
        return 2 if any(item.failure.kind is FailureKind.CONFIG for item in given_up) else 1
    print(f"interrupted; to continue: {resume_command(run)}", file=sys.stderr)
    return 3


def local_scheduler(config: Config) -> LocalScheduler:
    """Processes of this machine that run ``python -m stages``'s entry.

    Raises:
        ConfigError: the training libraries are not installed.
    """
    missing = [name for name in ("torch", "transformers", "deepspeed") if not importlib.util.find_spec(name)]
    if missing:
        raise ConfigError(
            f"scheduler.kind=local runs tasks on this machine, which lacks {', '.join(missing)}; "
            "install them with: pip install 'slurm-ppo[train]'"
        )
    os.environ.update(TASK_ENVIRONMENT)
    given = config.scheduler
    pools = {
        "prepare": 1,
        "rollout": given.rollout.slots,
        "reward": given.reward.slots,
        "update": given.update.slots,
        "evaluate": given.evaluate.slots,
    }
    limits = LocalLimits(given.slots, pools, given.time_limit)
    return LocalScheduler("stages.runner:main", ["stages.preload", *model_modules(config)], limits)


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


def resume_command(run: Run) -> str:
    return f"slurm-ppo resume {shlex.quote(str(run.paths.root))}"


def way_out(run: Run, given_up: tuple[GiveUp, ...]) -> str:
    """The command to continue with, or what to mend first."""
    if not any(item.failure.kind is FailureKind.CONFIG for item in given_up):
        return f"nothing that was committed is lost; to continue: {resume_command(run)}"
    if not run.paths.task(PREPARE).record.exists():
        return "nothing was committed: mend the settings and type the same command again"
    return (
        f"mend what the message names, then: {resume_command(run)} (settings are frozen; "
        "to change one, start a new run with another run_dir=...)"
    )


def failure_block(run: Run, given_up: tuple[GiveUp, ...]) -> str:
    """What failed, where, the end of its log, and the command to continue."""
    lines = []
    for item in given_up[:3]:
        failure = item.failure
        lines.append(f"failed: {item.task}, attempt {failure.attempt} ({failure.kind}): {failure.message}")
        log = Path(failure.log)
        if log.is_file():
            with log.open(errors="replace") as file:
                tail = deque(file, maxlen=_LOG_LINES)
            lines += [f"last lines of {log}:", *(f"  | {line.rstrip()}" for line in tail)]
    if len(given_up) > 3:
        lines.append(f"and {len(given_up) - 3} more tasks")
    lines.append(way_out(run, given_up))
    return "\n".join(lines)
