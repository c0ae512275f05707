"""What each stage of a configuration needs, by the headers of its models."""

from collections.abc import Callable, Iterator
from pathlib import Path

from pipeline.config.algorithm import Estimator, ReferenceStage
from pipeline.config.engine_rules import has_reference_in, scores_with, vllm_in
from pipeline.config.engines import Engine, VllmConfig
from pipeline.config.reward import RewardModelConfig
from pipeline.config.schema import Config
from pipeline.config.update import TrainingEngine
from pipeline.forecast.parts import CONTEXT, MemoryPart, PeakPhase, StageNeed
from pipeline.forecast.serving import cache_per_token, generating, in_vllm, scoring, scoring_tokens
from pipeline.forecast.shapes import ModelShape, read_shape
from pipeline.forecast.training import CUDA, BatchSize, Ranks, host_parts, update_parts, width_of

GpusOf = Callable[[str], int]
"""Return the GPUs that a process of a job kind has; 0 for none."""


def stage_needs(config: Config, gpus_of: GpusOf) -> Iterator[StageNeed]:
    """Yield what a task of each stage needs, where an engine or trainer of slurm-ppo does it.

    Evaluations need what rollout and reward do, one after the other.

    Raises:
        ConfigError: a model's files cannot be read.
    """
    if config.rollout.engine in (*Engine,):
        yield rollout_need(config, gpus_of("rollout"))
    for pool in ("", *config.reward.pools):
        job_kind = f"score-{pool}" if pool else "reward"
        yield from reward_needs(config, pool, job_kind, gpus_of(job_kind))
    if config.update.engine in (*TrainingEngine,):
        yield update_need(config, gpus_of("update"))


def update_need(config: Config, gpus: int) -> StageNeed:
    """Return what each rank of the update needs."""
    policy = read_shape(Path(config.model.policy), lora=config.update.lora)
    critic = reference = None
    if config.algorithm.estimator is Estimator.GAE:
        critic = read_shape(Path(config.model.critic or config.model.policy), gives_number=True)
    if has_reference_in(config, ReferenceStage.UPDATE):
        reference = read_shape(Path(config.model.reference or config.model.policy))
    ranks = Ranks(config.scheduler.num_update_ranks, gpus > 0)
    parts = update_parts(config.update, policy, critic, reference, micro_batch_of(config), ranks)
    host = host_parts(config.update, policy, critic, ranks) if gpus else ()
    return StageNeed("update", parts, host, ranks.number)


def micro_batch_of(config: Config) -> BatchSize:
    """Return the largest micro-batch, where no prompt is longer than what its budget leaves: of rows that are
    nearly all response."""
    longest = longest_response(config) + 1
    tokens = max(config.update.micro_batch_tokens, longest)
    return BatchSize(tokens, tokens, longest)


def longest_response(config: Config) -> int:
    return min(config.rollout.max_new_tokens, config.model.context_length or config.rollout.max_new_tokens)


def rollout_need(config: Config, gpus: int) -> StageNeed:
    """Return what a process that generates needs."""
    rollout, width = config.rollout, width_of(config.rollout_precision)
    shape = read_shape(Path(config.model.policy))
    if rollout.engine == Engine.VLLM:
        longest = rollout.vllm.max_model_len or config.model.context_length or rollout.max_new_tokens
        return _vllm_need("rollout", shape, width, vllm_in(config, "rollout", "rollout"), longest)
    spread = max(1, gpus) if rollout.device_map else 1
    parts = generating(shape, width, rollout.tokens_per_batch, longest_response(config), spread)
    return StageNeed("rollout", (*parts, *_context(gpus)))


def _vllm_need(stage: str, shape: ModelShape, width: int, given: VllmConfig, longest: int) -> StageNeed:
    return StageNeed(
        stage,
        tuple(in_vllm(shape, width, given, longest)),
        share=given.gpu_memory_utilization or 1.0,
        cache=longest * cache_per_token(shape, width, given),
    )


def reward_needs(config: Config, pool: str, job_kind: str, gpus: int) -> Iterator[StageNeed]:
    """Yield what a process that scores needs: all that transformers runs together, vLLM's models in turn."""
    reward, width, together = config.reward, width_of(config.reward_precision), list[MemoryPart]()
    spread = max(1, gpus) if reward.device_map else 1
    for name, component in reward.components_of(pool or None).items():
        if not isinstance(component, RewardModelConfig):
            continue
        engine = scores_with(reward, component)
        shape = read_shape(Path(component.path), gives_number=True)
        if engine == Engine.TRANSFORMERS:
            together += scoring(name, shape, width, reward.tokens_per_batch, spread)
        elif engine == Engine.VLLM:
            longest = reward.vllm.max_model_len or config.model.context_length or 1
            given = vllm_in(config, "reward", job_kind)
            yield _vllm_need(f"{job_kind} {name}", shape, width, given, longest)
    models = {name: teacher.path for name, teacher in reward.teachers_of(pool or None).items()}
    if not pool and has_reference_in(config, ReferenceStage.REWARD):
        models["reference"] = config.model.reference or config.model.policy
    for name, path in models.items():
        shape = read_shape(Path(path))
        together += scoring_tokens(name, shape, width, reward.tokens_per_batch, spread, gpus > 0)
    if together:
        yield StageNeed(job_kind, (*together, *_context(gpus)))


def _context(gpus: int) -> list[MemoryPart]:
    return [MemoryPart(CONTEXT, CUDA, (PeakPhase.SERVING,))] if gpus else []
