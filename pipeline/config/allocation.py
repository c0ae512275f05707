"""The configuration of a run inside one allocation of Slurm, whose tasks are job steps."""

from dataclasses import dataclass, field
from typing import Literal

from pipeline.config.types import EnvironmentName, Gpus, Line, Memory, OptionName, PoolName, PositiveInt, Text


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """What a task of one stage gets of the allocation. As many run at once as fit."""

    nodes: PositiveInt = 1
    """Nodes of one task; more than one only for the update."""
    ntasks_per_node: PositiveInt = 1
    """Ranks on each node; more than one only for the update."""
    gpus_per_node: Gpus | None = None
    """GPUs on each node, a count or TYPE:COUNT, which no other task sees. Default: none."""
    cpus_per_task: PositiveInt = 1
    """CPU cores of each rank."""
    mem: Memory | None = None
    """Memory on each node, e.g. 64G. Default: tasks share that of the allocation."""
    container: Text | None = None
    """Words put before the task's command, e.g. "apptainer exec --nv /images/ppo.sif". Default:
    scheduler.container."""
    python: Text | None = None
    """Python interpreter of the task. Default: scheduler.python."""
    environment: dict[EnvironmentName, Line] = field(default_factory=dict)
    """Environment variables, over those of scheduler.environment."""
    options: dict[OptionName, Line | int | bool] = field(default_factory=dict)
    """Any other srun option, without its dashes: {cpu-bind: cores}."""

    @property
    def num_ranks(self) -> int:
        """Processes of one task."""
        return self.nodes * self.ntasks_per_node

    @property
    def num_gpus(self) -> int | None:
        """GPUs on each node; None where that is not said: a whole node may have some."""
        return None if self.gpus_per_node is None else int(str(self.gpus_per_node).rpartition(":")[2])


STEP_STAGES = ("prepare", "rollout", "reward", "update", "evaluate", "benchmark")
"""Stages whose tasks have resources of their own."""


@dataclass(frozen=True, kw_only=True)
class DrivenConfig:
    """Settings of runs whose tasks are started by the process that drives the run."""

    max_attempts: PositiveInt = 3
    """Tries per task and per call of run or resume, before the run stops as failed."""
    time_limit: PositiveInt = 14400
    """Seconds a task may run before it is stopped and counted as failed."""

    @property
    def update_seconds(self) -> float:
        """Seconds that an update may take."""
        return float(self.time_limit)


@dataclass(frozen=True, kw_only=True)
class AllocationConfig(DrivenConfig):
    """Tasks as job steps (srun) of the allocation that slurm-ppo run is started in."""

    kind: Literal["allocation"] = "allocation"
    """Job steps of one allocation."""
    prepare: StepConfig = StepConfig()
    """The task that checks and tokenises the prompts, once per run."""
    rollout: StepConfig = StepConfig()
    """Rollout tasks."""
    reward: StepConfig = StepConfig()
    """Reward tasks."""
    update: StepConfig = StepConfig()
    """Update tasks."""
    evaluate: StepConfig = StepConfig()
    """Evaluate tasks."""
    benchmark: StepConfig = StepConfig()
    """Tasks of evaluate.command."""
    pools: dict[PoolName, StepConfig] = field(default_factory=dict)
    """Tasks of the reward components that name a pool, by that name."""
    container: Text | None = None
    """Container command of every stage that names none of its own."""
    python: Text | None = None
    """Python interpreter of every task. Default: the one that slurm-ppo runs in."""
    environment: dict[EnvironmentName, Line] = field(default_factory=dict)
    """Environment variables of every task."""
    grace: PositiveInt = 60
    """Seconds that running tasks get when slurm-ppo is warned or interrupted, to commit or to save what they
    have. Less than the seconds of sbatch --signal=B:USR2@SECONDS."""

    @property
    def resources(self) -> dict[str, StepConfig]:
        """What tasks of each stage and pool get, by their keys below ``scheduler``."""
        stages = {stage: getattr(self, stage) for stage in STEP_STAGES}
        return stages | {f"pools.{name}": given for name, given in self.pools.items()}

    @property
    def num_update_ranks(self) -> int:
        """Processes that make one update together."""
        return self.update.num_ranks
