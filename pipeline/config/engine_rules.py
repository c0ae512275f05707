"""Contradictions between keys of the engines, each with the way out. Pure: looks at no file."""

from collections.abc import Iterator

from pipeline.config.algorithm import CorrectionLevel, ReferenceStage
from pipeline.config.engines import Engine, VllmConfig
from pipeline.config.issue import ConfigIssue
from pipeline.config.reward import Component, RewardConfig, RewardModelConfig
from pipeline.config.scheduler import ResourcesConfig, SlurmConfig
from pipeline.config.schema import Config


def engine_problems(config: Config) -> Iterator[ConfigIssue]:
    """Yield contradictions among the keys of generation and scoring."""
    yield from _truncation_problems(config)
    rollout, context = config.rollout, config.data.max_prompt_tokens
    if rollout.engine == Engine.VLLM:
        yield from _parallel_problems("rollout", rollout.vllm, config)
        if rollout.device_map is not None:
            why = "vLLM places the model itself; leave it out, and see rollout.vllm.tensor_parallel_size"
            yield ConfigIssue("rollout.device_map", rollout.device_map, why)
        if context and rollout.vllm.max_model_len and rollout.vllm.max_model_len <= context:
            why = f"leaves no room for one new token after data.max_prompt_tokens={context}; give more"
            yield ConfigIssue("rollout.vllm.max_model_len", rollout.vllm.max_model_len, why)
        elif (rollout.vllm.max_model_len or rollout.max_new_tokens + 1) <= rollout.max_new_tokens:
            new = f"rollout.max_new_tokens={rollout.max_new_tokens}"
            why = f"leaves no room for a prompt beside {new}; give more"
            yield ConfigIssue("rollout.vllm.max_model_len", rollout.vllm.max_model_len, why)
    scored = [c for c in config.reward.components.values() if scores_with(config.reward, c) == Engine.VLLM]
    for where in dict.fromkeys(f"pools.{c.pool}" if c.pool else "reward" for c in scored):
        yield from _parallel_problems("reward", config.reward.vllm, config, where)
    yield from _shared_problems(config)


def scores_with(reward: RewardConfig, component: Component) -> str | None:
    """Return the name of the engine that scores a component; None if it is no reward model."""
    return component.engine or reward.engine if isinstance(component, RewardModelConfig) else None


def _truncation_problems(config: Config) -> Iterator[ConfigIssue]:
    """Yield top_p and top_k where training needs log-probabilities that show what these cut off."""
    rollout = config.rollout
    given = [("rollout.top_p", rollout.top_p)] if rollout.top_p < 1 else []
    given += [("rollout.top_k", rollout.top_k)] if rollout.top_k else []
    for key, value in given:
        if config.algorithm.correction.level is not CorrectionLevel.NONE:
            why = (
                "importance weights need the probability with which a token was sampled, and what "
                f"{key.split('.')[1]} cuts off stays in them as an error; turn it off, or set "
                "algorithm.correction.level=none"
            )
            yield ConfigIssue(key, value, why)
        elif rollout.engine == Engine.VLLM and rollout.temperature != 1:
            why = (
                "vLLM gives log-probabilities before the temperature or after the cut, and training needs "
                f"neither; with rollout.temperature={rollout.temperature:g} turn it off, or set "
                "rollout.engine=transformers"
            )
            yield ConfigIssue(key, value, why)


def _parallel_problems(
    stage: str, given: VllmConfig, config: Config, where: str | None = None
) -> Iterator[ConfigIssue]:
    """Yield a model that is split over more or fewer GPUs than its jobs, ``where``, ask Slurm for."""
    where = where or stage
    asked, needed = _gpus(config, where), _num_gpus(given)
    may_have_more = stage == "reward" and config.reward.device_map is not None  # for the reference
    if asked is not None and (asked < needed or (asked > needed and not may_have_more)):
        yield ConfigIssue(
            f"scheduler.{where}.gpus_per_node", asked, f"{_sizes(stage, given)} uses {needed}; give that"
        )


def _shared_problems(config: Config) -> Iterator[ConfigIssue]:
    """Yield jobs with too few GPUs for the models of another stage that they run.

    Evaluations generate and score in one job; prepare scores the reference samples of normalisation.
    """
    sizes = [("rollout", config.rollout.vllm)] if config.rollout.engine == Engine.VLLM else []
    scored = [c for c in config.reward.components.values() if scores_with(config.reward, c) == Engine.VLLM]
    sizes += [("reward", config.reward.vllm)] if scored else []
    for stage, given in sizes if config.evaluate.every else ():
        yield from _fewer_problems("evaluate", stage, given, config)
    norms = [c.normalization for c in scored if isinstance(c, RewardModelConfig) and c.normalization]
    if any(norm.reference_samples for norm in norms):
        yield from _fewer_problems("prepare", "reward", config.reward.vllm, config)


def _fewer_problems(where: str, stage: str, given: VllmConfig, config: Config) -> Iterator[ConfigIssue]:
    asked, needed = _gpus(config, where), _num_gpus(given)
    if asked is not None and asked < needed:
        why = f"it runs models as {stage} does, and {_sizes(stage, given)} uses {needed}; give at least that"
        yield ConfigIssue(f"scheduler.{where}.gpus_per_node", asked, why)


def _num_gpus(given: VllmConfig) -> int:
    return given.tensor_parallel_size * given.pipeline_parallel_size


def _sizes(stage: str, given: VllmConfig) -> str:
    return (
        f"{stage}.vllm.tensor_parallel_size={given.tensor_parallel_size} times pipeline_parallel_size="
        f"{given.pipeline_parallel_size}"
    )


def _gpus(config: Config, where: str) -> int | None:
    """Return the GPUs of one task; None where Slurm is asked for no number: a whole node may have some."""
    resources = _resources(config, where)
    asked = resources and resources.gpus_per_node
    return int(asked.rsplit(":", 1)[-1]) if asked else None


def _resources(config: Config, where: str) -> ResourcesConfig | None:
    """Return the resources of a stage's or pool's Slurm jobs; None elsewhere, and where a pool has none."""
    if not isinstance(config.scheduler, SlurmConfig):
        return None
    if where.startswith("pools."):
        return config.scheduler.pools.get(where.removeprefix("pools."))
    found: ResourcesConfig = getattr(config.scheduler, where)
    return found


def is_normalised_by_samples(component: Component) -> bool:
    """Whether prepare scores reference samples with a component."""
    norm = component.normalization if isinstance(component, RewardModelConfig) else None
    return bool(norm and norm.reference_samples)


def has_reference_in(config: Config, stage: ReferenceStage) -> bool:
    """Whether a stage computes the reference's log-probabilities."""
    kl = config.algorithm.kl
    return kl.coef > 0 and kl.reference_in is stage
