"""The configuration of training: steps, precision, memory, and what is kept of it."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from pipeline.config.types import (
    DecayRate,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Text,
    TokenBudget,
    ZeroStage,
)


class TrainingEngine(StrEnum):
    """Trainers that come with slurm-ppo."""

    DEEPSPEED = "deepspeed"
    """AdamW with ZeRO, on one rank or many."""


TrainerName = Annotated[str, Field(pattern=r"^(deepspeed|[A-Za-z_][\w.]*:[A-Za-z_][\w.]*)$")]
"""One of :class:`TrainingEngine`, or ``module:function`` of a trainer of the user's."""


class Schedule(StrEnum):
    """Learning-rate schedule over all optimizer steps of the run, after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class Precision(StrEnum):
    """Number format of model weights and activations."""

    AUTO = "auto"
    """Decided when the run begins, which then has one of the others."""
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    """In training with a dynamic loss scale."""


HALF = frozenset({Precision.BF16, Precision.FP16})
"""Formats of 16 bits."""
MICRO_BATCH = {"cpu": 384, "gpu": 2048}
"""Tokens of a micro-batch by kind of device, where nothing else is said. On CPUs more gains no time, as their
caches hold no more, and takes memory."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters instead of the policy's own weights (arXiv 2106.09685), through peft."""

    rank: PositiveInt = 16
    """Rank of each adapter."""
    alpha: PositiveFloat = 32.0
    """The adapter's output is scaled by alpha / rank."""
    target_modules: Literal["all-linear"] | tuple[Text, ...] = "all-linear"
    """Names of the linear layers that get one, or all of them but the output layer."""
    target_parameters: tuple[Text, ...] = ()
    """Names of weights of experts that get one for each expert, such as gate_up_proj and down_proj, where one
    tensor holds those of all experts. Engines get merged models, but for transformers."""


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """Training of the policy and the critic."""

    engine: TrainerName = TrainingEngine.DEEPSPEED
    """Trainer: deepspeed, or ``module:function`` of your own; see docs/howto/own_engine.md."""
    epochs: PositiveInt = 1
    """Passes over an iteration's responses."""
    minibatches: PositiveInt = 4
    """Optimizer steps per pass; divides the number of responses of an iteration."""
    tokens_per_micro_batch: TokenBudget = "auto"
    """Token budget (padding included) of one forward and backward pass of a rank; a longer sequence has a
    pass of its own. auto: 2048 on GPUs, 384 on CPUs."""
    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate of the policy."""
    critic_learning_rate: PositiveFloat = 1e-5
    """Peak learning rate of the critic."""
    schedule: Schedule = Schedule.CONSTANT
    """Learning-rate schedule after the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    """AdamW's decay rates."""
    epsilon: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """Global norm that larger gradients are scaled down to."""
    max_skipped_steps: NonNegativeInt = 2
    """Steps of an iteration that may be skipped because a loss or gradient is not finite; with one more, or
    without any step taken, the update fails. Steps at which fp16 lowers its loss scale do not count."""
    zero_stage: ZeroStage = "auto"
    """DeepSpeed ZeRO stage. auto: 1 in half precision, which needs it, or with offload_optimizer; else 0."""
    precision: Precision = Precision.AUTO
    """Number format of weights in forward and backward; optimizer state is fp32. auto: bf16 where the stage
    has GPUs that compute in it; else fp32."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, more time."""
    offload_optimizer: bool = False
    """Keep optimizer state and fp32 weights in the host's memory and step there; needs zero_stage 1 or more
    and a C++ compiler at first use."""
    attention: Text | None = None
    """transformers' attn_implementation (eager, sdpa, flash_attention_2, ...). Default: the model's own."""
    remove_padding: bool | None = None
    """Lay the sequences of a micro-batch end to end instead of padding them. Default: with flash attention;
    other attention then also computes, and masks, what one sequence would see of another."""
    lora: LoraConfig | None = None
    """Train, and commit, low-rank adapters of the policy only. Default: all weights."""
    save_every: PositiveInt = 1
    """Updates from one saved trainer's state to the next. A trainer that stays in its process has the others
    in memory; any other learns them again. Those of keep_every and of the last iteration are always saved,
    and one is due as soon as the updates since the last took a quarter of their time limit. A fork of
    another iteration begins by learning its state again."""
    keep_last: PositiveInt | None = 3
    """Keep policy, critic and trainer state of the newest this many iterations, at least 2, and prune
    older ones as keep_every says. The best policy is always kept. null: keep all."""
    keep_every: PositiveInt | None = None
    """Interval of older iterations to keep: those that it divides. Needs keep_last. Default: none."""
    keep_shards_last: PositiveInt | None = 20
    """Keep shards, records and logs of the newest this many iterations, at least 2, as files, and pack those
    of each older one into an archive, which everything still reads. null: keep all as files."""
    num_threads: PositiveInt = 1
    """CPU threads of the task; part of the result, because float sums depend on it."""

    @property
    def zero(self) -> int:
        """The ZeRO stage as a number, of auto too."""
        if self.zero_stage != "auto":
            return self.zero_stage
        return int(self.offload_optimizer or self.precision in HALF)

    @property
    def micro_batch_tokens(self) -> int:
        """The token budget of a micro-batch as a number; of auto, before it is decided, that of GPUs."""
        given = self.tokens_per_micro_batch
        return MICRO_BATCH["gpu"] if given == "auto" else given
