"""The configuration of the reward: the components that score responses."""

import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, JsonValue, ValidationInfo
from pydantic_core import PydanticCustomError

from pipeline.config.engines import EngineName, VllmConfig
from pipeline.config.types import (
    ArgumentName,
    DeviceMap,
    EnvironmentName,
    FiniteFloat,
    Fraction,
    HttpUrl,
    Name,
    NonNegativeInt,
    PoolName,
    PositiveFloat,
    PositiveInt,
    RuleName,
    Text,
)
from pipeline.config.update import Precision


@dataclass(frozen=True, kw_only=True)
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


class ModelSteps(StrEnum):
    """Ends of the steps of a response that a reward model scores."""

    TURNS = "turns"
    """The end of each turn of the policy."""
    SEPARATOR = "separator"
    """The end of each separator that follows a step; text behind the last is a step too."""


class StepScore(StrEnum):
    """Scores of a step by the outputs of a reward model at its last token."""

    LOGIT = "logit"
    """The output itself, of a model with one."""
    PROBABILITY = "probability"
    """The sigmoid of one output; of two the second's share of their softmax."""


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """A classification model of sequences, with steps also of tokens, with its own tokenizer and template."""

    kind: Literal["model"] = "model"
    """Marks this component as a reward model."""
    path: Text
    """Model directory (safetensors, tokenizer, config)."""
    weight: FiniteFloat = 1.0
    """Factor of this component in the total reward."""
    normalization: NormalizationConfig | None = None
    """Normalisation of raw scores. Default: none."""
    engine: EngineName | None = None
    """Scoring engine of this model. Default: reward.engine."""
    steps: ModelSteps | None = None
    """Rewards of steps: transformers reads the model's score at the token that ends each step. Their sum is
    the response's score. Default: one score for a response."""
    separator: Text | None = None
    """With steps=separator: text that ends a step. Default: an empty line."""
    step_token: Text | None = None
    """With steps=separator: token that the model reads in place of each separator and behind the last step,
    and at which it scores, such as <extra_0>. Default: it reads the separators."""
    step_score: StepScore = StepScore.LOGIT
    """With steps: the score of a step by the model's outputs."""
    pool: PoolName | None = None
    """Score in array jobs of its own, with the resources of scheduler.pools.<pool>; components may share one.
    Default: in the reward stage's jobs."""


EMPTY_LINE = "\n\n"
"""Separator of steps if none is given."""


class RowsPerCall(StrEnum):
    """Responses that one call of a rule gets."""

    RESPONSE = "response"
    """One response: each has a time limit of its own, and an error names it."""
    PROMPT = "prompt"
    """All responses of a prompt, for rules that compare them."""
    SHARD = "shard"
    """All responses of a shard."""


class OnError(StrEnum):
    """What becomes of a response to which a rule gives no score of its own."""

    STOP = "stop"
    """The task fails, and names it."""
    SCORE = "score"
    """It gets error_score, and is counted."""


class StepUnit(StrEnum):
    """Ways in which a rule says where the steps of a response end."""

    TURNS = "turns"
    """A list of numbers, one for each turn of the policy."""
    CHARACTERS = "characters"
    """A list of pairs in order: characters of the response up to the step's end, number."""


@dataclass(frozen=True, kw_only=True)
class RuleConfig:
    """A Python function that scores responses, in processes of its own. See docs/howto/rewards.md."""

    kind: Literal["rule"] = "rule"
    """Marks this component as a rule."""
    function: RuleName
    """``module:function``, or the name of a ready rule such as exact_match; called as
    f(prompts=[...], responses=[...], **columns, **arguments). It returns a number for each response, or
    None, with which it abstains."""
    arguments: dict[ArgumentName, JsonValue] = field(default_factory=dict)
    """Further keyword arguments of each call."""
    rows_per_call: RowsPerCall = RowsPerCall.RESPONSE
    """Responses that one call gets: response (one), prompt (all of a prompt) or shard (all of a shard)."""
    time_limit: PositiveFloat = 30.0
    """Seconds that a call may take for each of its responses."""
    timeout_score: FiniteFloat | None = None
    """Score of a response that takes longer. Default: an error that names it."""
    on_error: OnError = OnError.STOP
    """What becomes of a response at which the function raises, ends its process or returns no finite number:
    stop (the task fails and names it) or score (it gets error_score and is counted)."""
    error_score: FiniteFloat = 0.0
    """With on_error=score: the score of such a response."""
    max_failed: Fraction = 0.1
    """With on_error=score: largest share of such responses in an iteration, over all its shards; in an
    evaluation, of its own. More are an error."""
    steps: StepUnit | None = None
    """Rewards of steps: the function returns a list for each response. Its sum is the response's score, and
    each number is the reward of the token at which its step ends. Default: one number for a response."""
    special_tokens: bool = False
    """Leave special tokens, such as a tokenizer's own <think>, in ``responses``; the text without them is
    passed as ``plain_responses``. The token that ends a response is in neither."""
    prefill: Text | None = None
    """End of the prompt's text that belongs to the response, such as <think>: where a prompt ends with it, it
    is put before the response that the function gets."""
    import_limit: PositiveFloat = 60.0
    """Seconds that importing the function may take."""
    workers: PositiveInt = 1
    """Processes that call the function side by side."""
    trial: bool = True
    """Call it once on an empty response in validate and prepare. Turn off what needs a GPU, a service or a
    package that only its own jobs have."""
    weight: FiniteFloat = 1.0
    """Factor of this component in the total reward."""
    pool: PoolName | None = None
    """Pool whose jobs score it, as of a reward model. Default: in the reward stage's jobs."""


ENVIRONMENT_RULE = "environment"
"""Name of the ready rule that scores as the environment does that made the prompt."""
PLAIN_RESPONSES = "plain_responses"
"""Name under which a rule with special_tokens gets the text without them."""
RULE_ARGUMENTS = frozenset({"prompts", "responses"})
"""Names that the user's columns may not have beside a rule, to which columns are passed by name."""


def passed_names(rule: RuleConfig) -> frozenset[str]:
    """Return the names of what slurm-ppo itself passes to a rule: no column or argument may have one."""
    return RULE_ARGUMENTS | ({PLAIN_RESPONSES} if rule.special_tokens else frozenset())


def prefill_of(prompt: str, rule: RuleConfig) -> str:
    """Return the end of a prompt's text that belongs to the response for a rule, blanks after it included;
    empty where the prompt ends otherwise."""
    text, wanted = prompt.rstrip(), (rule.prefill or "").rstrip()
    return prompt[len(text) - len(wanted) :] if wanted and text.endswith(wanted) else ""


class RemoteApi(StrEnum):
    """Protocols of reward services: the form of requests and answers."""

    CLASSIFY = "classify"
    """vLLM's /classify of a sequence-classification model: the last logit."""
    CHAT = "chat"
    """An OpenAI-compatible /v1/chat/completions: a judge, whose reply holds the score."""
    PLAIN = "plain"
    """Prompts, responses and columns as JSON; a list of scores comes back."""


@dataclass(frozen=True, kw_only=True)
class RemoteConfig:
    """A service that scores responses over HTTP. See docs/howto/rewards.md."""

    kind: Literal["remote"] = "remote"
    """Marks this component as a remote service."""
    url: HttpUrl
    """Whole address that is posted to, such as http://gpu07:8000/classify."""
    api: RemoteApi = RemoteApi.CLASSIFY
    """Protocol of the service: classify, chat or plain."""
    model: Text | None = None
    """Name of the model in each request. Default: the one that the service has; chat needs a name."""
    tokenizer: Text | None = None
    """Directory of the served model's tokenizer (for classify): the token ids that it gives, with its chat
    template, are sent. Default: the text as the policy saw and wrote it is sent."""
    max_model_len: PositiveInt | None = None
    """With tokenizer: most tokens of one sequence; what is longer is cut on the left, and counted."""
    template: Text | None = None
    """Message to the judge (for chat), with {prompt}, {response} and {COLUMN} for columns of the prompt file;
    braces of its own are doubled."""
    score_pattern: Text | None = None
    """Regular expression whose group is the score (for chat); its last match in the reply counts. Default:
    the reply is the number and nothing else."""
    unreadable_score: FiniteFloat | None = None
    """Score where the reply holds none (for chat). Default: an error that names the response."""
    parameters: dict[ArgumentName, JsonValue] = field(default_factory=dict)
    """Further fields of each request, such as {max_tokens: 256}."""
    batch_size: PositiveInt | None = None
    """Responses per request. Default: 32; chat has 1."""
    max_concurrency: PositiveInt = 8
    """Requests of one task that are under way at once."""
    timeout: PositiveFloat = 60.0
    """Seconds until the whole answer to a request must be there."""
    max_retries: NonNegativeInt = 5
    """Times that a request is sent again after a failed connection or a status of 500 and above."""
    backoff: PositiveFloat = 0.5
    """Seconds before the first retry; each next wait is twice as long."""
    max_backoff: PositiveFloat = 30.0
    """Longest wait, also where the service asks for a longer one (Retry-After)."""
    api_key_env: EnvironmentName | None = None
    """Environment variable that holds the key, sent as a bearer token. Default: no key is sent."""
    trial: bool = True
    """Look before the run whether the service answers. Turn off for one that is started later."""
    weight: FiniteFloat = 1.0
    """Factor of this component in the total reward."""
    pool: PoolName | None = None
    """Pool whose jobs score it, as of a reward model. Default: in the reward stage's jobs."""


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """A language model that the policy is drawn to on its own responses (algorithm.distillation)."""

    path: Text
    """Directory of the model, of the policy's vocabulary. transformers computes it, as the reference."""
    weight: PositiveFloat = 1.0
    """Factor of its KL. Several teachers of one response count as one: the weighted mean of their
    log-probabilities, with the sum of their weights."""
    only: dict[Text, JsonValue] = field(default_factory=dict)
    """Values of the prompts' columns, such as ``{subject: maths}``, for responses to which alone it is a
    teacher. Default: all."""
    pool: PoolName | None = None
    """Pool whose jobs compute it, as of a component. Default: in the reward stage's jobs."""


Component = Annotated[RewardModelConfig | RuleConfig | RemoteConfig, Field(discriminator="kind")]


def _some_or_teachers(components: dict[str, Any], given: ValidationInfo) -> dict[str, Any]:
    """Return the components, of which there may be none beside teachers, also where these are wrong."""
    if not components and not given.data.get("teachers", True):
        raise PydanticCustomError("too_short", "must be given")
    return components


KINDS = ("model", "rule", "remote")
"""Kinds of components."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Components that score responses, and how reward models are run."""

    teachers: dict[Name, TeacherConfig] = field(default_factory=dict)
    """Named models that give each token of a response a log-probability. With one, components may be {}: the
    reward is then 0, and the policy learns from teachers alone."""
    components: Annotated[dict[Name, Component], AfterValidator(_some_or_teachers)]
    """Named components; the reward is their weighted sum, and each is kept as a column. Where a rule abstains
    (returns None), the sum of the others is multiplied by the magnitudes of all weights over those of theirs;
    where all do, the update leaves the response out."""
    engine: EngineName = "transformers"
    """Scoring engine of the reward models: transformers, vllm, or ``module:function`` of your own."""
    vllm: VllmConfig = field(default_factory=VllmConfig)
    """Settings of engine=vllm."""
    fall_back: bool = False
    """Score with transformers a reward model that vLLM does not support."""
    tokens_per_batch: PositiveInt = 2048
    """Token budget (padding included) of one scoring batch; a longer sequence is a batch of its own."""
    precision: Precision | None = Precision.AUTO
    """Number format of reward and reference models. auto, null: update.precision. auto: also fp32 without
    GPUs that compute in it, where update.precision=auto is bf16."""
    device_map: DeviceMap | None = None
    """transformers' device_map for models too large for one GPU ("auto"). Default: one device."""
    num_threads: PositiveInt = 1
    """CPU threads of a task; part of the result, because float sums depend on it."""

    @property
    def pools(self) -> tuple[str, ...]:
        """Pools that components and teachers name, each once, in their order."""
        both = (*self.components.values(), *self.teachers.values())
        return tuple(dict.fromkeys(one.pool for one in both if one.pool))

    def components_of(self, pool: str | None) -> dict[str, Component]:
        """Return the components of one pool; for None, those that the reward task scores itself."""
        return {name: c for name, c in self.components.items() if c.pool == pool}

    def teachers_of(self, pool: str | None) -> dict[str, TeacherConfig]:
        """Return the teachers of one pool; for None, those that the reward task computes itself."""
        return {name: one for name, one in self.teachers.items() if one.pool == pool}


def strange_column(teacher: TeacherConfig, columns: Sequence[str]) -> str | None:
    """Return which column of a teacher's ``only`` the prompts do not have, as a problem, if any."""
    unknown = [column for column in teacher.only if column not in columns]
    known = ", ".join(columns) or "none"
    return f"{unknown[0]} is not a column of the prompts; known: {known}" if unknown else None


def template_problem(template: str) -> str | None:
    """Return what is wrong with a judge's message, if anything is."""
    try:
        fields = template_fields(template)
    except ValueError as error:
        return f"{error}; braces that stand for nothing are doubled: {{{{ }}}}"
    if wrong := [field for field in fields if not field.isidentifier()]:
        legal = "{prompt}, {response} or {COLUMN}"
        return f"{{{wrong[0]}}} is not a name; write {legal}, and {{{{ }}}} for braces of its own"
    return None if "response" in fields else "has no {response}, so every response would be judged alike"


def template_fields(template: str) -> list[str]:
    """Return the fields between braces, with conversion and format. Raises ValueError for unpaired braces."""
    return [
        name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
        for _, name, form, conversion in string.Formatter().parse(template)
        if name is not None
    ]


def unknown_field(remote: RemoteConfig, columns: Sequence[str]) -> str | None:
    """Return which field of a judge's message is no column of the prompts, as a problem, if any."""
    known = ["prompt", "response", "response_messages", *columns]
    unknown = [field for field in template_fields(remote.template or "") if field not in known]
    return f"{{{unknown[0]}}} is not a column of the prompts; known: {', '.join(known)}" if unknown else None
