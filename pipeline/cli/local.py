"""Runs on this machine: the process that a person started drives until the end, and holds all tasks."""

import importlib.util
import json
import os
import sys
import time
from pathlib import Path

from pipeline.cli.summary import announce, say_how_it_ended
from pipeline.config.issue import ConfigError
from pipeline.config.reward import RewardModelConfig
from pipeline.config.scheduler import LocalConfig, LocalStageConfig, LocalUpdateConfig
from pipeline.config.schema import Config
from pipeline.executors.local import drive
from pipeline.executors.machine import has_gpus
from pipeline.executors.processes import LocalExecutor, LocalLimits
from pipeline.executors.staying import seconds_of
from pipeline.notify.events import breakdown, tell
from pipeline.orchestrate.driver import tell_of_pass
from pipeline.run.directory import Run, resume_command
from pipeline.run.engine_use import uses_torch, uses_vllm
from pipeline.run.environment import TASK_ENVIRONMENT
from pipeline.run.lease import Lease, LeaseHeld, LeaseLost
from pipeline.run.tasks import Stage, Task
from pipeline.status.progress import watcher_for


def carry_on(run: Run, executor: LocalExecutor, lease: Lease | None = None) -> int:
    """Drive the run on this machine until it ends. Returns the exit code.

    Args:
        lease: held since the run was made; None: it is taken now.
    """
    announce(run)
    watcher = watcher_for(sys.stderr, run.plan)
    begun = time.time()
    try:
        done = drive(run, executor, watcher, lease)
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
    """Make an executor of processes of this machine, which run :func:`stages.worker.serve`.

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
    shares: dict[str, LocalStageConfig | LocalUpdateConfig] = {
        "rollout": given.rollout,
        "reward": given.reward,
        "update": given.update,
        "evaluate": given.evaluate,
        Stage.BENCHMARK: given.benchmark,
    }
    for pool in config.reward.pools:
        shares[Task(0, Stage.SCORE, pool=pool).job_kind] = given.pools.get(pool, LocalStageConfig())
    slots = {"prepare": 1} | {job_kind: share.slots for job_kind, share in shares.items()}
    on_gpus = has_gpus()
    linger = {job_kind: seconds_of(share.linger, on_gpus) for job_kind, share in shares.items()}
    limits = LocalLimits(given.slots, slots, given.time_limit, linger, beside=frozenset({Stage.BENCHMARK}))
    preload = ["stages.preload"]
    if has_models:
        preload += ["stages.preload_models", *model_modules(config)]
    if uses_vllm(config):
        preload.append("stages.preload_vllm")
    return LocalExecutor("stages.worker:serve", preload, limits)


def model_modules(config: Config) -> list[str]:
    """Return the modules that define the run's models, to be imported once instead of in every task."""
    rewards = [c.path for c in config.reward.components.values() if isinstance(c, RewardModelConfig)]
    kinds = set()
    for directory in (config.model.policy, *rewards):
        kind = json.loads((Path(directory) / "config.json").read_text()).get("model_type", "")
        if kind.isidentifier():
            kinds.add(kind)
    return [f"transformers.models.{kind}.modeling_{kind}" for kind in sorted(kinds)]
