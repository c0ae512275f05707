"""Resources that a task holds where no accounting says: on this machine, and in an allocation. Pure."""

from pipeline.config.allocation import AllocationConfig, StepConfig
from pipeline.config.job_kinds import parts_of
from pipeline.config.scheduler import LocalConfig
from pipeline.config.schema import Config
from pipeline.run.tasks import Stage


def num_threads(config: Config, stage: Stage) -> int:
    """Return the number of a task's CPU threads, on which its result depends."""
    generating = {Stage.ROLLOUT: config.rollout.num_threads, Stage.EVALUATE: config.evaluate.num_threads}
    return {Stage.UPDATE: config.update.num_threads, **generating}.get(stage, config.reward.num_threads)


def held_by(config: Config, job_kind: str) -> tuple[int, int]:
    """Return the CPUs and GPUs that a task holds; 0 for what only a scheduler or a driver knows.

    On this machine the CPUs are the threads of its ranks, and the GPUs those that the configuration counts.
    """
    stage, pool = parts_of(job_kind)
    given = config.scheduler
    if isinstance(given, LocalConfig):
        share = given.pools.get(pool) if pool else getattr(given, stage, None)
        ranks = given.num_update_ranks if stage == Stage.UPDATE else 1
        gpus = share.gpus if share is not None and isinstance(share.gpus, int) else 0
        return num_threads(config, Stage(stage)) * ranks, gpus
    if isinstance(given, AllocationConfig):
        step = given.resources.get(f"pools.{pool}" if pool else stage, StepConfig())
        return step.num_ranks * step.cpus_per_task, step.nodes * (step.num_gpus or 0)
    return 0, 0
