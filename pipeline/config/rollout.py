"""The configuration of the rollout: how responses are generated."""

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from pipeline.config.engines import AUTO, GeneratorName, VllmConfig
from pipeline.config.types import (
    DeviceMap,
    NonNegativeInt,
    OpenFraction,
    PositiveFloat,
    PositiveInt,
    SchedulerName,
)
from pipeline.config.update import Precision

ENVIRONMENT_SCHEDULER = "environment"
"""Scheduler that asks the environments that made the prompts."""


@dataclass(frozen=True, kw_only=True)
class MultiTurnConfig:
    """Conversations of several turns: after each of the policy's, the user's Python says what comes next."""

    scheduler: SchedulerName
    """``module:function``, called as step(conversation) after each turn of the policy; it returns messages to
    continue with, or None to stop. See docs/howto/multi_turn.md. environment: what the environment says that
    made the prompt (data.environment)."""
    max_turns: PositiveInt = 8
    """Limit on the policy's turns in one conversation."""
    max_turn_tokens: PositiveInt | None = None
    """Limit on the tokens of one turn. Default: what is left of rollout.max_new_tokens, which counts all
    turns and what came between them."""
    step_seconds: PositiveFloat = 60.0
    """Limit on the seconds of one call of the scheduler; a longer one is an error that names the prompt."""
    workers: PositiveInt = 8
    """Calls of the scheduler that may run at once, each in a thread of its own."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Sampling of responses."""

    engine: GeneratorName = AUTO
    """Generation engine: transformers, vllm, or ``module:function`` of your own (see stages/engines). auto:
    vllm where it is installed, the stage has GPUs, and nothing in the settings keeps it from that model;
    else transformers."""
    num_shards: PositiveInt = 2
    """Array elements per iteration, of the rollout stage and of the reward stage."""
    staleness: Annotated[int, Field(ge=0, le=2, strict=True)] = 0
    """Updates by which the policy that responses are of is older than the newest one: with 1 or 2 the next
    iteration is rolled out while an update computes. Needs algorithm.correction.level=token or geometric,
    or algorithm.old_log_probs=rollout. See docs/howto/algorithm.md."""
    oversample: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    """Prompts that an iteration rolls out, as a multiple of data.prompts_per_iteration, rounded up. The
    update learns from the first ones whose samples differ in reward (dynamic sampling, arXiv 2503.14476, by a
    fixed factor). Above 1 needs algorithm.shaping.filter_groups."""
    carry: Annotated[int, Field(ge=0, le=2, strict=True)] = 1
    """Updates for which the samples of a prompt that oversample left spare may wait, to fill one that has too
    few; 0: none wait. Needs what staleness needs, as their policy is older."""
    samples_per_prompt: PositiveInt = 1
    """Responses per prompt (n); more than one for the group estimators."""
    max_new_tokens: PositiveInt = 128
    """Longest response in tokens; cut shorter where the context ends."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; log-probabilities are those of the tempered distribution."""
    top_p: OpenFraction = 1.0
    """Nucleus sampling; 1 is off. Log-probabilities stay those of the untruncated distribution."""
    top_k: NonNegativeInt = 0
    """Sample among the k likeliest tokens; 0 is off."""
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    """Token ids that end a response, besides the end tokens of the model, its tokenizer and its chat
    template. One that was added to the tokenizer is no part of the response's text."""
    tokens_per_batch: PositiveInt = 16384
    """Token budget (prompt plus max_new_tokens, padding included) of one generation batch; a longer sequence
    is a batch of its own."""
    precision: Precision | None = Precision.AUTO
    """Number format of the generating model. auto, null: update.precision, but bf16 (fp16 on GPUs without it)
    where that is fp32 and vLLM generates, whose fast attention has no fp32. auto: also fp32 without GPUs,
    where update.precision=auto is bf16."""
    merge_adapters: bool = False
    """With update.lora, give the engine a merged model, made in the node's temporary folder (TMPDIR), also if
    it could put the adapter on its base by itself."""
    device_map: DeviceMap | None = None
    """transformers' device_map for models too large for one GPU ("auto"). Default: one device."""
    num_threads: PositiveInt = 1
    """CPU threads of a task; part of the result, because float sums depend on it."""
    vllm: VllmConfig = field(default_factory=VllmConfig)
    """Settings of engine=vllm."""
    multi_turn: MultiTurnConfig | None = None
    """Conversations of several turns, with tools or an environment. Default: one turn."""
