"""Engines that a stage's tasks compute with, by the configuration."""

from collections.abc import Collection, Iterator, Mapping

from pipeline.config.algorithm import ReferenceStage
from pipeline.config.engine_rules import has_reference_in, is_normalised_by_samples, scores_with
from pipeline.config.engines import Engine
from pipeline.config.reward import Component, RewardModelConfig
from pipeline.config.schema import Config
from pipeline.config.update import TrainingEngine
from pipeline.run.tasks import WORK_STAGES, Stage, task_of


def engines_of(config: Config, stage: Stage, pool: str = "") -> Iterator[tuple[str, str]]:
    """Yield (configuration key, engine) for all that a stage's tasks compute with; ``pool`` is for score."""
    if stage.generates:
        yield "rollout.engine", config.rollout.engine
    for name, component in _scored_by(config, stage, pool).items():
        if engine := scores_with(config.reward, component):
            own = isinstance(component, RewardModelConfig) and component.engine
            yield f"reward.components.{name}.engine" if own else "reward.engine", engine
    for name in config.reward.teachers_of(pool or None) if stage.scores else ():
        yield f"reward.teachers.{name}.path", Engine.TRANSFORMERS
    if stage is Stage.REWARD and has_reference_in(config, ReferenceStage.REWARD):
        yield "algorithm.kl.reference_in", Engine.TRANSFORMERS
    if stage is Stage.UPDATE or (stage is Stage.PREPARE and config.update.lora):
        yield "update.engine", config.update.engine


def _scored_by(config: Config, stage: Stage, pool: str) -> Mapping[str, Component]:
    """Return the components that a stage's tasks score with; prepare measures how some are normalised."""
    reward = config.reward
    if stage.scores:
        return reward.components_of(pool or None)
    if stage is Stage.EVALUATE:
        return reward.components
    is_measured = stage is Stage.PREPARE
    return {n: c for n, c in reward.components.items() if is_measured and is_normalised_by_samples(c)}


def all_engines(config: Config) -> set[str]:
    """Return every engine and trainer that any task computes with."""
    pools = ("", *config.reward.pools)
    return {name for stage in WORK_STAGES for pool in pools for _, name in engines_of(config, stage, pool)}


def uses_torch(config: Config) -> bool:
    """Whether any task computes with a built-in engine. User-supplied ones import what they need."""
    return not all_engines(config).isdisjoint({*Engine, *TrainingEngine})


def uses_vllm(config: Config, job_kinds: Collection[str] | None = None) -> bool:
    """Whether any task computes with vLLM; of some job kinds alone, where they are given."""
    if job_kinds is None:
        return Engine.VLLM in all_engines(config)
    tasks = [task_of(1, kind) for kind in job_kinds]
    used = {name for task in tasks for _, name in engines_of(config, task.stage, task.pool)}
    return Engine.VLLM in used
