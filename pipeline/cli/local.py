"""Runs on this machine: the process that a person started drives until the end, and holds all tasks."""

import importlib.util
import json
import os
import sys
import time
from pathlib import Path

from pipeline.cli.summary import announce, say_how_it_ended
from pipeline.config.allocation import AllocationConfig
from pipeline.config.issue import ConfigError
from pipeline.config.reward import RewardModelConfig
from pipeline.config.schema import Config
from pipeline.executors.allocation import allocation_executor
from pipeline.executors.local import drive
from pipeline.executors.local_limits import local_limits
from pipeline.executors.processes import LocalExecutor
from pipeline.notify.events import breakdown, tell
from pipeline.orchestrate.driver import tell_of_pass
from pipeline.run.directory import Run, resume_command
from pipeline.run.engine_use import uses_torch, uses_vllm
from pipeline.run.environment import TASK_ENVIRONMENT
from pipeline.run.lease import Lease, LeaseHeld, LeaseLost
from pipeline.status.progress import watcher_for


def carry_on(run: Run, executor: LocalExecutor, lease: Lease | None = None, patience: float = 0.0) -> int:
    """Drive the run on this machine until it ends. Returns the exit code.

    Args:
        lease: held since the run was made; None: it is taken now.
        patience: seconds to wait for another driver that may be about to end.
    """
    announce(run)
    watcher = watcher_for(sys.stderr, run.plan)
    begun = time.time()
    try:
        done = drive(run, executor, watcher, lease, patience)
        tell_of_pass(run, done, begun, watcher.note)
    except (LeaseHeld, LeaseLost):
        raise  # another driver goes on
    except Exception as error:  # whatever it is, somebody wants to know that nothing goes on
        tell(run, breakdown(run, error, begun), watcher.note)
        raise
    finally:
        watcher.close()
    return say_how_it_ended(run, done, f"interrupted; to continue: {resume_command(run)}")


def local_executor(config: Config) -> LocalExecutor:
    """Make an executor of processes of this machine, which run
    :func:`stages.workers.loop.serve`, or of job steps.

    Raises:
        ConfigError: the training libraries are not installed, a task needs more GPUs than there are, or more
            than the allocation has.
    """
    if isinstance(config.scheduler, AllocationConfig):
        return allocation_executor(config)
    has_models = uses_torch(config)
    needed = [*["torch", "transformers", "deepspeed"] * has_models, *["vllm"] * uses_vllm(config)]
    missing = [name for name in needed if not importlib.util.find_spec(name)]
    if missing:
        raise ConfigError(
            f"scheduler.kind=local runs tasks on this machine, which lacks {', '.join(missing)}; "
            "install them with: pip install 'slurm-ppo[train]'"
        )
    limits = local_limits(config)
    os.environ.update(TASK_ENVIRONMENT)
    preload = ["stages.preload"]
    if has_models:
        preload += ["stages.preload.models", *model_modules(config)]
    if uses_vllm(config):
        preload.append("stages.preload.vllm")
    return LocalExecutor("stages.workers.loop:serve", preload, limits)


def model_modules(config: Config) -> list[str]:
    """Return the modules that define the run's models, to be imported once instead of in every task."""
    rewards = [c.path for c in config.reward.components.values() if isinstance(c, RewardModelConfig)]
    kinds = set()
    for directory in (config.model.policy, *rewards):
        kind = json.loads((Path(directory) / "config.json").read_text()).get("model_type", "")
        if kind.isidentifier():
            kinds.add(kind)
    return [f"transformers.models.{kind}.modeling_{kind}" for kind in sorted(kinds)]
