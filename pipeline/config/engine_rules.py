"""Contradictions between keys of the engines, each with the way out. Pure: looks at no file."""

from collections.abc import Iterator
from dataclasses import replace

from pipeline.config.algorithm import CorrectionLevel, OldLogProbs, ReferenceStage
from pipeline.config.engines import Engine, VllmConfig
from pipeline.config.issue import ConfigIssue
from pipeline.config.job_kinds import parts_of
from pipeline.config.reward import Component, RewardConfig, RewardModelConfig
from pipeline.config.schema import Config

ALONE, BESIDE_REFERENCE = 0.9, 0.6
"""Shares of a GPU's memory that vLLM takes if none is given."""


def engine_problems(config: Config) -> Iterator[ConfigIssue]:
    """Yield contradictions among the keys of generation and scoring."""
    yield from _truncation_problems(config)
    scored = [c for c in config.reward.components.values() if scores_with(config.reward, c) == Engine.VLLM]
    generates = config.rollout.engine == Engine.VLLM
    if generates:
        yield from _gpu_problems(config, "rollout", "rollout")
        yield from _rollout_problems(config)
    for where in dict.fromkeys(f"pools.{c.pool}" if c.pool else "reward" for c in scored):
        yield from _gpu_problems(config, where, "reward")
    # Evaluations generate and score in one job; prepare scores the reference samples of normalisation.
    if generates and config.evaluate.every:
        yield from _gpu_problems(config, "evaluate", "rollout", is_own=False)
    if scored and config.evaluate.every:
        yield from _gpu_problems(config, "evaluate", "reward", is_own=False)
    if any(map(is_normalised_by_samples, scored)):
        yield from _gpu_problems(config, "prepare", "reward", is_own=False)


def scores_with(reward: RewardConfig, component: Component) -> str | None:
    """Return the name of the engine that scores a component; None if it is no reward model."""
    return component.engine or reward.engine if isinstance(component, RewardModelConfig) else None


def _truncation_problems(config: Config) -> Iterator[ConfigIssue]:
    """Yield top_p and top_k where training needs log-probabilities that show what these cut off."""
    rollout, algorithm = config.rollout, config.algorithm
    needing = None
    if algorithm.correction.level is not CorrectionLevel.NONE:
        needing = "importance weights need", "set algorithm.correction.level=none"
    elif algorithm.old_log_probs is OldLogProbs.ROLLOUT:
        needing = "algorithm.old_log_probs=rollout needs", "set that to trainer"
    for name, is_on in (("top_p", rollout.top_p < 1), ("top_k", rollout.top_k > 0)):
        if is_on and needing:
            why = (
                f"{needing[0]} the probability with which a token was sampled, and what {name} "
                f"cuts off stays in the ratio as an error; turn it off, or {needing[1]}"
            )
            yield ConfigIssue.at(rollout, name, why, "rollout.")
        elif is_on and rollout.engine == Engine.VLLM and rollout.temperature != 1:
            why = (
                "vLLM gives log-probabilities before the temperature or after the cut, and training needs "
                f"neither; with rollout.temperature={rollout.temperature:g} turn it off, or set "
                "rollout.engine=transformers"
            )
            yield ConfigIssue.at(rollout, name, why, "rollout.")


def _rollout_problems(config: Config) -> Iterator[ConfigIssue]:
    """Yield what vLLM cannot generate with."""
    rollout, prompt, longest = (
        config.rollout,
        config.data.max_prompt_tokens,
        config.rollout.vllm.max_model_len,
    )
    if rollout.device_map is not None:
        why = "vLLM places the model itself; leave it out, and see rollout.vllm.tensor_parallel_size"
        yield ConfigIssue.at(config, "rollout.device_map", why)
    if longest and prompt and longest <= prompt:
        why = f"leaves no room for one new token after data.max_prompt_tokens={prompt}; give more"
        yield ConfigIssue.at(config, "rollout.vllm.max_model_len", why)
    elif longest and longest <= rollout.max_new_tokens:
        why = f"leaves no room for a prompt beside rollout.max_new_tokens={rollout.max_new_tokens}; give more"
        yield ConfigIssue.at(config, "rollout.vllm.max_model_len", why)


def _gpu_problems(config: Config, where: str, stage: str, is_own: bool = True) -> Iterator[ConfigIssue]:
    """Yield jobs, ``where``, that ask for other GPUs than a model of ``stage`` is split over.

    Jobs that are not the stage's own may ask for more; so may those that hold a reference beside it.
    """
    given: VllmConfig = getattr(config, stage).vllm
    resources = config.slurm.resources.get(where) if config.slurm else None
    asked = resources.num_gpus if resources else None
    if asked is None:
        return
    needed = given.tensor_parallel_size * given.pipeline_parallel_size
    may_have_more = not is_own or (stage == "reward" and config.reward.device_map is not None)
    if asked < needed or (asked > needed and not may_have_more):
        why = (
            f"{stage}.vllm.tensor_parallel_size={given.tensor_parallel_size} times pipeline_parallel_size="
            f"{given.pipeline_parallel_size} uses {needed}; give "
        )
        why = f"{why}that" if is_own else f"it runs models as {stage} does, and {why}at least that"
        yield ConfigIssue(f"scheduler.{where}.gpus_per_node", asked, why)


def is_normalised_by_samples(component: Component) -> bool:
    """Whether prepare scores reference samples with a component."""
    norm = component.normalization if isinstance(component, RewardModelConfig) else None
    return bool(norm and norm.reference_samples)


def has_reference_in(config: Config, stage: ReferenceStage) -> bool:
    """Whether a stage computes the reference's log-probabilities."""
    kl = config.algorithm.kl
    return kl.coef > 0 and kl.reference_in is stage


def vllm_in(config: Config, section: str, job_kind: str) -> VllmConfig:
    """Return vLLM's settings of ``rollout`` or ``reward`` in tasks of a job kind, with the share of a GPU's
    memory that it takes there: the one that is given, else less where a reference or teacher is to stay
    beside it."""
    given: VllmConfig = getattr(config, section).vllm
    if given.gpu_memory_utilization is not None:
        return given
    stays = given.own_process is not False  # in the task's own process nothing stays beside it on a GPU
    is_shared = stays and _has_model_beside(config, job_kind)
    return replace(given, gpu_memory_utilization=BESIDE_REFERENCE if is_shared else ALONE)


def _has_model_beside(config: Config, job_kind: str) -> bool:
    """Whether tasks of a job kind compute log-probabilities of the reference or a teacher."""
    stage, pool = parts_of(job_kind)
    if stage == "reward":
        return has_reference_in(config, ReferenceStage.REWARD) or bool(config.reward.teachers_of(None))
    return stage == "score" and bool(config.reward.teachers_of(pool))
