"""The whole configuration as frozen dataclasses: every key, its meaning, unit and default.

Hydra composes, :mod:`pipeline.compose` converts once into :class:`Config`, :mod:`pipeline.checks` refuses
contradictions; everything inward takes these dataclasses and nothing else. Defaults live here and nowhere
else: the YAML groups under ``configs/`` only say what differs.
"""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from pipeline.algorithmconfig import AlgorithmConfig
from pipeline.configtypes import (
    STRICT,
    FiniteFloat,
    Name,
    NonNegativeInt,
    OpenFraction,
    PluginName,
    PositiveFloat,
    PositiveInt,
    Text,
)
from pipeline.schedulerconfig import LocalConfig, SchedulerConfig
from pipeline.updateconfig import Precision, UpdateConfig


class BadRows(StrEnum):
    """What to do with prompt rows that cannot be used."""

    DROP = "drop"
    """Leave them out, count them, and list them in a file of the run."""
    FATAL = "fatal"
    """List them in the same file and stop before the first rollout."""


class WandbMode(StrEnum):
    """Where W&B rows go."""

    AUTO = "auto"
    """Online when an API key is present, offline otherwise; WANDB_MODE decides when set."""
    ONLINE = "online"
    OFFLINE = "offline"
    DISABLED = "disabled"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelConfig:
    """The models a run starts from: Hugging Face directories with safetensors weights."""

    policy: Text
    """Directory of the causal language model to train, with its tokenizer. Policy version 0."""
    reference: Text | None = None
    """Directory of the frozen reference model for KL. Default: the policy's own directory."""
    critic: Text | None = None
    """Directory the critic starts from (a backbone; its head may be missing). Default: the policy's
    backbone with a value head of zeros."""
    context_length: PositiveInt | None = None
    """Most tokens of prompt and response together. Default: the policy's max_position_embeddings."""
    trust_remote_code: bool = False
    """Run Python code that lies in a model directory. Leave off unless you wrote that code."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataConfig:
    """Where prompts come from and how they are dealt to iterations."""

    prompts: Text
    """JSONL, Parquet or Arrow file, or a Hugging Face dataset directory written by save_to_disk."""
    heldout: Text | None = None
    """Prompts for the evaluate stage, same formats. Default: none, and nothing is evaluated."""
    prompt_column: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages {role, content}."""
    id_column: Text | None = None
    """Column with a unique id per row. Default: a hash of the prompt's content."""
    split: str = "train"
    """Split to read when the directory holds a dataset with several."""
    prompts_per_iteration: PositiveInt = 256
    """Prompts that one iteration rolls out; a multiple of rollout.num_shards."""
    max_prompt_tokens: PositiveInt | None = None
    """Longest usable prompt in tokens. Default: context_length minus rollout.max_new_tokens."""
    bad_rows: BadRows = BadRows.DROP
    """Rows that are empty, not text, too long or have a duplicate id: drop (counted and listed) or fatal."""
    shuffle: bool = True
    """Deal prompts in a new order each epoch, derived from the run's seed. Off: the file's order."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RolloutConfig:
    """How responses are sampled."""

    engine: Literal["transformers"] = "transformers"
    """Generation engine."""
    num_shards: PositiveInt = 2
    """Array elements per iteration, of the rollout stage and of the reward stage."""
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
    """Token ids that end a response, besides the model's own end-of-sequence ids."""
    tokens_per_batch: PositiveInt = 16384
    """Token budget (prompt plus max_new_tokens, padding included) of one generation batch; a longer sequence
    is a batch of its own."""
    precision: Precision = Precision.FP32
    """Number format of the generating model."""
    device_map: str | None = None
    """transformers' device_map for models too large for one GPU ("auto"). Default: one device."""
    num_threads: PositiveInt = 1
    """CPU threads of a task; part of the result, because float sums depend on it."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class NormalizationConfig:
    """Linear map of raw scores to mean 0 and standard deviation 1 (arXiv 1909.08593, section 2.1)."""

    mean: FiniteFloat | None = None
    """Mean of raw scores to subtract. Given together with std, or measured from reference_samples."""
    std: PositiveFloat | None = None
    """Standard deviation of raw scores to divide by."""
    reference_samples: Text | None = None
    """File (formats of data.prompts) with reference responses to measure mean and std on, once per run."""
    response_column: str = "response"
    """Column of reference_samples with the response; data.prompt_column holds its prompt."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardModelConfig:
    """A sequence-classification model with one output, its own tokenizer and chat template."""

    kind: Literal["model"] = "model"
    """Marks this component as a reward model."""
    path: Text
    """Model directory (safetensors, tokenizer, config)."""
    weight: FiniteFloat = 1.0
    """Factor of this component in the total reward."""
    normalization: NormalizationConfig | None = None
    """How raw scores are normalised. Default: not at all."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RuleConfig:
    """A Python function that scores responses, named ``module:function``."""

    kind: Literal["rule"] = "rule"
    """Marks this component as a rule."""
    function: PluginName
    """``module:function``; called once per shard as f(prompts=[...], responses=[...], **columns)."""
    weight: FiniteFloat = 1.0
    """Factor of this component in the total reward."""


Component = Annotated[RewardModelConfig | RuleConfig, Field(discriminator="kind")]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardConfig:
    """What scores responses."""

    components: Annotated[dict[Name, Component], Field(min_length=1)]
    """Named components; the reward is their weighted sum, and each is kept as a column."""
    engine: Literal["transformers"] = "transformers"
    """Scoring engine of the reward models."""
    tokens_per_batch: PositiveInt = 2048
    """Token budget (padding included) of one scoring batch; a longer sequence is a batch of its own."""
    precision: Precision = Precision.FP32
    """Number format of reward and reference models."""
    device_map: str | None = None
    """transformers' device_map for models too large for one GPU ("auto"). Default: one device."""
    num_threads: PositiveInt = 1
    """CPU threads of a task; part of the result, because float sums depend on it."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvaluateConfig:
    """Greedy generation on held-out prompts, scored like a rollout; the best policy is kept track of."""

    every: NonNegativeInt = 0
    """Evaluate policy 0, every this many iterations, and the last one. 0: never."""
    num_prompts: PositiveInt | None = None
    """Use the first this many held-out prompts. Default: all."""
    num_threads: PositiveInt = 1
    """CPU threads of the task."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class WandbConfig:
    """The mirror of metrics.jsonl on Weights & Biases."""

    mode: WandbMode = WandbMode.AUTO
    """auto, online, offline or disabled."""
    project: Name = "slurm-ppo"
    """W&B project."""
    entity: str | None = None
    """W&B user or team. Default: the key's own."""
    tags: tuple[str, ...] = ()
    """W&B tags."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrackingConfig:
    """Where metrics go besides the run directory."""

    wandb: WandbConfig = WandbConfig()
    """Weights & Biases."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config:
    """One run."""

    name: Name = "run"
    """Name of the run; also its name on W&B."""
    run_dir: Text = "runs/${name}"
    """Directory that holds everything the run has; it must not exist yet."""
    seed: NonNegativeInt = 0
    """Every random choice derives from this number and from what is being done."""
    iterations: PositiveInt = 100
    """PPO iterations: rollout, reward, update."""
    model: ModelConfig
    """Models to start from."""
    data: DataConfig
    """Prompts."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling."""
    reward: RewardConfig
    """Scoring."""
    update: UpdateConfig = UpdateConfig()
    """Training."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """PPO."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """Evaluation on held-out prompts."""
    scheduler: SchedulerConfig = LocalConfig()
    """Where tasks run."""
    tracking: TrackingConfig = TrackingConfig()
    """Metrics' mirrors."""

    @property
    def responses_per_iteration(self) -> int:
        """Rows of one iteration over all shards."""
        return self.data.prompts_per_iteration * self.rollout.samples_per_prompt
