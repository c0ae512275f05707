"""The whole configuration as frozen dataclasses: every key, its meaning, unit and default.

Hydra composes, :mod:`pipeline.config.compose` checks types and ranges and converts once into
:class:`Config`, :mod:`pipeline.config.resolve` refuses contradictions; everything inward takes these
dataclasses and nothing else. Defaults live here and nowhere else: the YAML groups under ``configs/`` only say
what differs.
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum

from pydantic import ConfigDict, with_config

from pipeline.config.algorithm import AlgorithmConfig
from pipeline.config.engines import Engine
from pipeline.config.environment import EnvironmentConfig
from pipeline.config.evaluate import EvaluateConfig
from pipeline.config.job_kinds import BENCHMARK
from pipeline.config.notify import NotifyConfig
from pipeline.config.reward import RewardConfig
from pipeline.config.rollout import RolloutConfig
from pipeline.config.scheduler import LocalConfig, SchedulerConfig, SlurmConfig
from pipeline.config.shares import divided
from pipeline.config.types import (
    ChatArguments,
    Days,
    FiniteFloat,
    Fraction,
    Name,
    NonNegativeInt,
    Paths,
    PluginName,
    PositiveInt,
    Seed,
    Text,
    WandbLine,
    WandbTag,
    Weight,
)
from pipeline.config.update import HALF, Precision, UpdateConfig

NO_NAME = "run"
"""Name of a run that is given none."""
PROMPTS_KEY = "data.prompts"
"""Key of the files of prompts to train on, which messages call them by."""
TOOLS_COLUMN = "tools"
"""Name of the column with the tools of a chat, if no other is given."""


class LongPrompts(StrEnum):
    """Treatment of prompts of more than data.max_prompt_tokens tokens."""

    DROP = "drop"
    """Leave them out, count them, and list them."""
    TRUNCATE = "truncate"
    """Keep their last data.max_prompt_tokens tokens, and count them."""


class WandbMode(StrEnum):
    """Ways to mirror rows on W&B."""

    AUTO = "auto"
    """Online when an API key is present, offline otherwise; WANDB_MODE decides when set."""
    ONLINE = "online"
    OFFLINE = "offline"
    DISABLED = "disabled"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The models a run starts from: Hugging Face directories with safetensors weights."""

    policy: Text
    """Directory of the causal language model to train, with its tokenizer. Policy version 0."""
    reference: Text | None = None
    """Directory of the frozen reference model for KL. Default: the policy's own directory."""
    critic: Text | None = None
    """Directory the critic starts from, of the policy's vocabulary: a critic, a reward model, whose head it
    takes, or a language model, which gets a value head of zeros. Default: the policy's."""
    context_length: PositiveInt | None = None
    """Limit on the tokens of prompt and response together. Default: the policy's max_position_embeddings."""
    tokenizer: PluginName | None = None
    """``module:function`` that makes a model directory's tokenizer. Default: transformers' AutoTokenizer."""
    chat_template_arguments: ChatArguments = field(default_factory=dict)
    """Values by name that the policy's chat template is given for each prompt, such as
    ``{enable_thinking: false}``."""
    trust_remote_code: bool = False
    """Run the Python code in a model directory. Leave off unless you trust that code."""


@dataclass(frozen=True, kw_only=True)
class BandConfig:
    """Prompts that epochs leave out, by the mean reward of their responses when they were last rolled out:
    what is too hard or too easy teaches little. An epoch has as many iterations as without, and those that
    are in it come up again; where they are too few for an iteration, the nearest to the band join them."""

    lowest: FiniteFloat | None = None
    """Mean reward below which a prompt is left out. Default: none is."""
    highest: FiniteFloat | None = None
    """Mean reward above which a prompt is left out. Default: none is."""
    rest: PositiveInt = 1
    """Epochs for which a prompt is left out, before it is rolled out again."""

    @property
    def is_given(self) -> bool:
        """Whether any prompt may be left out."""
        return self.lowest is not None or self.highest is not None


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Source of the prompts, and their order."""

    prompts: Paths | None = None
    """JSONL, CSV, Parquet or Arrow file, or a Hugging Face dataset directory: of save_to_disk, or laid out as
    on the hub; or a name and such a path for each of several (data.prompts.NAME=FILE). It or
    environment must be given."""
    weights: dict[Name, Weight] = field(default_factory=dict)
    """Weights of several files by name: each has that share of every iteration's prompts. Default: an epoch
    has each row of all files once."""
    environment: EnvironmentConfig | None = None
    """Environments that make the prompts, in place of a file, and score responses to them. Default: none."""
    heldout: Paths | None = None
    """Prompts for the evaluate stage, same formats: one path, or a name and a path for each of several sets
    (data.heldout.NAME=FILE). Default: none, and nothing is evaluated."""
    prompt_column: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages {role, content, ...}, which may be JSON
    text."""
    id_column: Text | None = None
    """Column with a unique id per row. Default: a hash of the prompt's content."""
    tools_column: Text | None = TOOLS_COLUMN
    """Column with the tools that a chat template is given, a list of objects, also as JSON text; null for a
    row without, and for no such column. One of another name than the default must be in every file."""
    columns: tuple[Text, ...] | None = None
    """Other columns to keep, for rules, templates and services. Default: all."""
    split: str = "train"
    """Split to read when the directory holds a dataset with several."""
    limit: PositiveInt | None = None
    """Rows to read of each file of data.prompts, the first ones. Default: all."""
    prompts_per_iteration: PositiveInt = 256
    """Prompts that one iteration rolls out (times rollout.oversample), and that its update learns from; a
    multiple of rollout.num_shards."""
    max_prompt_tokens: PositiveInt | None = None
    """Longest usable prompt in tokens. Default: context_length minus rollout.max_new_tokens."""
    max_dropped: Fraction = 0.5
    """Largest share of a file's rows that may be dropped, and are counted and listed: empty, not text, too
    long or of a duplicate id. With more, the run is refused before its first rollout. 0: none; 1: any."""
    long_prompts: LongPrompts = LongPrompts.DROP
    """Prompts that are too long: drop, or truncate (on the left)."""
    shuffle: bool = True
    """Shuffle the prompts in each epoch, by the run's seed. Off: the file's order."""
    sort_by: Text | None = None
    """Column with numbers, such as a level: each epoch goes from the least to the greatest, with -COLUMN from
    the greatest to the least, and shuffle is for rows of one number. The rest at an epoch's end that fills no
    iteration is never dealt. Default: no such order."""
    band: BandConfig = field(default_factory=BandConfig)
    """Prompts that epochs leave out."""

    @property
    def shuffles_epochs(self) -> bool:
        """Whether each epoch has an order of its own."""
        return self.shuffle and self.sort_by is None

    @property
    def sort_column(self) -> str | None:
        """Name of the column that gives the order of the prompts."""
        return None if self.sort_by is None else self.sort_by.removeprefix("-")

    @property
    def has_heldout(self) -> bool:
        """Whether there are held-out prompts: of a file, or made by environments."""
        return bool(self.heldout or self.environment)

    @property
    def prompt_keys(self) -> dict[str, str]:
        """Paths of the files of prompts by their keys, e.g. ``data.prompts.NAME``."""
        return _by_key(PROMPTS_KEY, self.prompts)

    @property
    def heldout_sets(self) -> dict[str, str]:
        """Paths of the held-out prompts by the set's name; the name of one path is empty."""
        return _by_name(self.heldout)

    @property
    def heldout_keys(self) -> dict[str, str]:
        """Paths of the held-out prompts by their keys, e.g. ``data.heldout.NAME``."""
        return _by_key("data.heldout", self.heldout)


def _by_name(given: str | dict[str, str] | None) -> dict[str, str]:
    """Return paths by name; the name of one path is empty."""
    if isinstance(given, dict):
        return given
    return {"": given} if given else {}


def _by_key(key: str, given: str | dict[str, str] | None) -> dict[str, str]:
    return {f"{key}.{name}" if name else key: path for name, path in _by_name(given).items()}


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    """The mirror of metrics.jsonl on Weights & Biases."""

    mode: WandbMode = WandbMode.AUTO
    """auto, online, offline or disabled."""
    project: Name | None = None
    """W&B project. Default: WANDB_PROJECT, else W&B's own settings, else slurm-ppo."""
    entity: str | None = None
    """W&B user or team. Default: WANDB_ENTITY, else W&B's own settings, else the key's own."""
    tags: tuple[WandbTag, ...] = ()
    """W&B tags. Default: WANDB_TAGS. Runs of a sweep also have one for each setting that it varies, such as
    ``seed=0``."""
    name: WandbLine | None = None
    """Display name. Default: WANDB_NAME, else the run's name; of a sweep's run with its settings."""
    group: WandbLine | None = None
    """Group of runs. Default: WANDB_RUN_GROUP, else none; of a sweep's run the sweep's name."""
    job_type: WandbLine | None = None
    """Job type, a second level of grouping. Default: WANDB_JOB_TYPE, else none; of a sweep's run its settings
    without the seed."""
    notes: str | None = None
    """Notes about the run, shown beside it; may hold Markdown. Default: WANDB_NOTES."""
    samples_every: NonNegativeInt = 10
    """Show responses of the first iteration, every this many, and the last one as a table. 0: never."""


@dataclass(frozen=True, kw_only=True)
class TensorboardConfig:
    """The mirror of metrics.jsonl as event files of TensorBoard."""

    enabled: bool = False
    """Write ``tensorboard/`` in the run directory. Needs the extra ``tensorboard``."""


@dataclass(frozen=True, kw_only=True)
class MlflowConfig:
    """The mirror of metrics.jsonl on MLflow."""

    enabled: bool = False
    """Log to MLflow. Needs the extra ``mlflow``."""
    uri: Text | None = None
    """Tracking URI: a server's address, or a folder for MLflow's file store. Default: ``mlflow/`` in the run
    directory."""
    experiment: Name = "slurm-ppo"
    """Experiment of MLflow; made where there is none."""


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Mirrors of the metrics besides the run directory."""

    wandb: WandbConfig = WandbConfig()
    """Weights & Biases."""
    tensorboard: TensorboardConfig = TensorboardConfig()
    """TensorBoard."""
    mlflow: MlflowConfig = MlflowConfig()
    """MLflow."""


@dataclass(frozen=True, kw_only=True)
class StorageConfig:
    """The filesystem that the run directory is on."""

    purge_days: Days | None = None
    """Days without use after which the site removes files there. ``status`` and ``doctor`` then report files
    of the run that are about to be removed. Default: nothing is removed."""


# Unknown keys are errors, in the dataclasses within it too.
@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, kw_only=True)
class Config:
    """One run."""

    name: Name = NO_NAME
    """Name of the run; also its name on W&B."""
    run_dir: Text = "runs/${name}"
    """Directory for all files of the run; it must not exist yet."""
    seed: Seed = 0
    """Seed that every random choice derives from, together with the name of what is drawn."""
    iterations: PositiveInt = 100
    """PPO iterations: rollout, reward, update."""
    model: ModelConfig
    """Models to start from."""
    data: DataConfig
    """Prompts."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Sampling."""
    reward: RewardConfig
    """Scoring."""
    update: UpdateConfig = field(default_factory=UpdateConfig)
    """Training."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """PPO."""
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    """Evaluation on held-out prompts, and by a program."""
    scheduler: SchedulerConfig = field(default_factory=LocalConfig)
    """Scheduler of the tasks: this machine, a Slurm cluster, or one allocation of it."""
    tracking: TrackingConfig = TrackingConfig()
    """Mirrors of the metrics."""
    notify: NotifyConfig = field(default_factory=NotifyConfig)
    """Notifications when the run fails, completes or stalls."""
    storage: StorageConfig = StorageConfig()
    """Where the run directory lies."""

    @property
    def slurm(self) -> SlurmConfig | None:
        """Settings of the cluster; None for a run that one process drives: on this machine, or in an
        allocation."""
        return self.scheduler if isinstance(self.scheduler, SlurmConfig) else None

    def attempts_of(self, job_kind: str) -> int:
        """Return how often a task of a job kind is tried, in one call of submit, run or resume."""
        is_command = job_kind == BENCHMARK
        return self.evaluate.command_attempts if is_command else self.scheduler.max_attempts

    @property
    def is_refilled(self) -> bool:
        """Whether iterations roll out more prompts than their updates learn from (rollout.oversample)."""
        return self.rollout.oversample > 1

    @property
    def prompts_per_rollout(self) -> int:
        """Prompts that one iteration rolls out, over all shards."""
        exact = self.data.prompts_per_iteration * self.rollout.oversample
        return math.ceil(round(exact, 6))  # 10 x 1.1 is a little more than 11 in floating point

    @property
    def next_rolled_out(self) -> int:
        """Iterations after a policy's own until the first whose responses may be of it."""
        return 1 + self.rollout.staleness

    @property
    def prompt_shares(self) -> dict[str, int]:
        """Prompts of every iteration by the name of their file; empty without weights."""
        return divided(self.prompts_per_rollout, self.data.weights) if self.data.weights else {}

    @property
    def responses_per_iteration(self) -> int:
        """Rows of one iteration over all shards."""
        return self.prompts_per_rollout * self.rollout.samples_per_prompt

    @property
    def responses_per_update(self) -> int:
        """Rows that an update learns from, where none is left out."""
        return self.data.prompts_per_iteration * self.rollout.samples_per_prompt

    @property
    def rollout_precision(self) -> Precision:
        """Number format of generating responses. Default: that of training, with bf16 for fp32 under vLLM."""
        if self.rollout.precision not in (None, Precision.AUTO):
            return self.rollout.precision
        is_slow = self.rollout.engine == Engine.VLLM and self.update.precision not in HALF
        return Precision.BF16 if is_slow else self.update.precision

    @property
    def reward_precision(self) -> Precision:
        """Number format of reward and reference models."""
        given = self.reward.precision
        return self.update.precision if given in (None, Precision.AUTO) else given
