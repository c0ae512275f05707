"""Every Arrow schema that crosses the filesystem, with its version. Readers refuse what they do not know."""

from collections import Counter
from enum import StrEnum
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config.reward import RuleConfig, passed_names
from pipeline.config.schema import Config
from pipeline.run.wide import combined

VERSION_KEY = b"slurm_ppo_schema"

GREEDY_SAMPLE = -1
"""``sample_index`` of a greedy response. With algorithm.estimator=remax a rollout shard has one per prompt,
right after the prompt's samples: a baseline, scored like them, never trained on. An evaluation has no others
unless evaluate.samples_per_prompt is given.
"""


class FinishReason(StrEnum):
    """Reason why a response ended."""

    STOP = "stop"
    """The model wrote a stop token, in the last turn."""
    LENGTH = "length"
    """max_new_tokens or the context was reached, or would have been by what was said to the last turn."""
    REFUSED = "refused"
    """The model cannot take the prompt, and the response is empty; or it cannot take what was said to one of
    its turns, and the response ends with that turn."""


class Validity(StrEnum):
    """Whether a response counts in the update, and why not: of several reasons the first of these."""

    UNSCORABLE = "unscorable"
    """A reward model cannot take the response, which has no reward."""
    ABSTAINED = "abstained"
    """Every component whose weight is not 0 abstained: a rule returned None. The response has no reward."""
    NO_BASELINE = "no_baseline"
    """With algorithm.estimator=remax: the greedy response to the same prompt has no reward."""
    REFUSED = "refused"
    """The model cannot take the prompt, and the response is empty."""
    TRUNCATED = "truncated"
    """The response was cut at a limit of tokens, and algorithm.mask_truncated leaves such ones out."""
    SCORED = "scored"
    """The response counts. So do greedy responses that have a reward: as baselines."""

    @property
    def has_reward(self) -> bool:
        """Whether metrics of rewards and lengths count the response, whether or not it is learned from."""
        return self in (Validity.REFUSED, Validity.TRUNCATED, Validity.SCORED)


class SchemaError(ValueError):
    """A file's schema is not the one that this version reads."""


def _versioned(name: str, fields: list[pa.Field]) -> pa.Schema:
    return pa.schema(fields, metadata={VERSION_KEY: name.encode()})


_RESPONSE = [
    pa.field("prompt_id", pa.string(), nullable=False),
    # 0 to n - 1 among the samples of a prompt, or GREEDY_SAMPLE.
    pa.field("sample_index", pa.int32(), nullable=False),
]
"""Columns that name a response."""

PROMPTS = _versioned(
    "prompts/1",
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("prompt_text", pa.string(), nullable=False),
        # The chat messages as JSON, so that a reward model can apply its own template; null for plain text.
        pa.field("prompt_messages", pa.string()),
        pa.field("prompt_tokens", pa.list_(pa.int32()), nullable=False),
    ],
)
"""One row per usable prompt; the user's other columns follow."""

ROLLOUT = _versioned(
    "rollout/2",
    [
        *_RESPONSE,
        pa.field("prompt_tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("response_tokens", pa.list_(pa.int32()), nullable=False),
        # True where the policy wrote the token, false where a tool or an environment did.
        pa.field("response_mask", pa.list_(pa.bool_()), nullable=False),
        pa.field("rollout_logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("num_turns", pa.int32(), nullable=False),
        pa.field("prompt_text", pa.string(), nullable=False),
        pa.field("prompt_messages", pa.string()),
        pa.field("response_text", pa.string(), nullable=False),
        # With rollout.multi_turn: what followed the prompt, as JSON like prompt_messages; else null.
        pa.field("response_messages", pa.string()),
    ],
)
"""One row per response, those of a prompt side by side; the user's other columns follow."""

REWARD = _versioned(
    "reward/2",
    [
        *_RESPONSE,
        # Null for a response that a reward model cannot take, or of which all rules abstain.
        pa.field("reward", pa.float32()),
        # One per response token; null for greedy responses, when KL is off and when the update computes them.
        pa.field("reference_logprobs", pa.list_(pa.float32())),
        # One of Validity: the update learns from the samples that are scored, and leaves the others out.
        pa.field("validity", pa.string(), nullable=False),
    ],
)
"""The same rows in the same order as the rollout shard; one float32 column per component follows. Where
there are teachers, ``teacher_logprobs`` (float32 per response token, the weighted mean over the response's
teachers, null without any) and ``teacher_weight`` (float64, the sum of their weights). With
algorithm.distillation.top_k = k also ``teacher_top_tokens`` (int32) and ``teacher_top_logprobs`` (float32):
of each response token k values, end to end: the ids that its teacher finds most probable there, the
likeliest first, and their log-probabilities.
"""


SCORE = _versioned("score/1", _RESPONSE)
"""The same rows in the same order as the rollout shard; one float64 column per component of a pool follows:
in double precision, so that the reward's sum is the same wherever a component was scored. Then
``teacher/NAME`` per teacher of the pool: a float32 per response token, null for responses that it is not for;
with algorithm.distillation.top_k also ``teacher_top_tokens/NAME`` and ``teacher_top_logprobs/NAME``, as in
reward shards.
"""


PROMPT_TOOLS = "prompt_tools"
"""Column of prompts and responses with the tools that chat templates are given, as JSON; null for a prompt
without. Only where a prompt has some."""
STEP_REWARDS = "step_rewards"
"""Column of reward shards with a list of float32, one per response token: the reward of the step that ends
there, null at other tokens; the list is null for a response without a reward. Only where a component has
``steps``."""
HELDOUT_SET = "heldout_set"
"""Column of held-out prompts with the name of their set, where the run has several."""
PROMPT_SOURCE = "prompt_source"
"""Column of prompts and responses with the name of the file of the prompt, where the run has several."""
PROMPT_INDEX = "prompt_index"
"""Column of rollout shards with the prompt's place among all usable ones, from 0. Only with data.band."""
ROUTED_EXPERTS = "routed_experts"
"""Column of rollout shards with the experts that the policy's routers chose for each token of prompt and
response but the last: a list of layers x top_k numbers, uint8 or uint16, a token. Only with
algorithm.router_replay."""
ENVIRONMENT_TASK = "environment_task"
"""Column with the name of the task of an environment, such as ``sums/17``."""
ENVIRONMENT_ENTRY = "environment_entry"
"""Column with what scoring a response to it takes, as JSON: ``source``, ``arguments`` and ``metadata``,
and ``python``, if the environment has an interpreter of its own."""
RESERVED_COLUMNS = frozenset(
    {PROMPT_TOOLS, ROUTED_EXPERTS, *(field.name for schema in (PROMPTS, ROLLOUT, REWARD) for field in schema)}
)
"""Names that the user's own columns may not have."""


def environment_of(task: str) -> str:
    """Return the environment of a task by the task's name."""
    return task.partition("/")[0]


def reserved_columns(config: Config) -> frozenset[str]:
    """Return the names that the user's columns may not have in this run."""
    rules = [one for one in config.reward.components.values() if isinstance(one, RuleConfig)]
    given = {HELDOUT_SET: config.data.heldout, PROMPT_SOURCE: config.data.prompts}
    of_sets = frozenset(column for column, paths in given.items() if isinstance(paths, dict))
    of_sets |= {PROMPT_INDEX} if config.data.band.is_given else set()
    return RESERVED_COLUMNS | of_sets | frozenset().union(*map(passed_names, rules))


def extra_columns(table: pa.Table) -> pa.Table:
    """Return the user's own columns of a prompt or rollout table."""
    return table.select([name for name in table.column_names if name not in RESERVED_COLUMNS])


def columns_besides(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the columns of a table that are not of ``schema``: the user's own, and prompt_tools."""
    return table.select([name for name in table.column_names if name not in schema.names])


def is_sampled(rows: pa.Table) -> pa.ChunkedArray:
    """Return booleans [rows]: true for what the policy sampled, false for greedy responses."""
    return pc.not_equal(rows["sample_index"], GREEDY_SAMPLE)


def validity_counts(rewards: pa.Table) -> Counter[Validity]:
    """Count the samples of a reward table by validity, without greedy responses."""
    return Counter(map(Validity, rewards["validity"].filter(is_sampled(rewards)).to_pylist()))


def steps_column(name: str) -> str:
    """Return the name of the column with the steps that a component of a pool gives."""
    return f"steps/{name}"


def component_column(name: str) -> str:
    """Return the name of a reward component's column."""
    return f"reward/{name}"


def teacher_column(name: str) -> str:
    """Return the name of a teacher's column in a pool's scores: a log-probability per response token; null
    for responses that it does not teach."""
    return f"teacher/{name}"


TEACHER_LOGPROBS, TEACHER_WEIGHT = "teacher_logprobs", "teacher_weight"
"""Columns of a reward shard where there are teachers."""
TEACHER_TOP_TOKENS, TEACHER_TOP_LOGPROBS = "teacher_top_tokens", "teacher_top_logprobs"
"""Columns of a reward shard with algorithm.distillation.top_k."""


def teacher_columns(name: str, top_k: int | None) -> tuple[str, ...]:
    """Return the names of all columns of a teacher in a pool's scores."""
    further = (f"{column}/{name}" for column in (TEACHER_TOP_TOKENS, TEACHER_TOP_LOGPROBS) if top_k)
    return teacher_column(name), *further


CARRIED = _versioned(
    "carried/1",
    [
        # The iteration and shard whose rollout wrote the response.
        pa.field("iteration", pa.int32(), nullable=False),
        pa.field("shard", pa.int32(), nullable=False),
        *_RESPONSE,
        pa.field("prompt_tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("response_tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("response_mask", pa.list_(pa.bool_()), nullable=False),
        pa.field("rollout_logprobs", pa.list_(pa.float32()), nullable=False),
        # True for finish_reason stop.
        pa.field("has_ended", pa.bool_(), nullable=False),
        pa.field("reward", pa.float32(), nullable=False),
        pa.field("reference_logprobs", pa.list_(pa.float32())),
        pa.field(TEACHER_LOGPROBS, pa.list_(pa.float32())),
        pa.field(TEACHER_WEIGHT, pa.float64()),
        pa.field(STEP_REWARDS, pa.list_(pa.float32())),
    ],
)
"""With rollout.oversample: responses that an update has left for later ones, in whole groups, oldest first.
Columns mean what they mean in rollout and reward shards, whose ``routed_experts``, ``teacher_top_tokens`` and
``teacher_top_logprobs`` follow where those have them."""


BAND = _versioned(
    "band/1",
    [
        # The prompt's place among all usable ones, from 0.
        pa.field(PROMPT_INDEX, pa.int64(), nullable=False),
        # 0-based epoch of its file in which it was last scored, and the mean reward of its samples then.
        pa.field("epoch", pa.int64(), nullable=False),
        pa.field("mean_reward", pa.float64(), nullable=False),
        # Whether the epoch of the first iteration that is rolled out with this policy leaves it out.
        pa.field("is_out", pa.bool_(), nullable=False),
    ],
)
"""With data.band: the prompts that were scored so far, committed by each update."""


def version_of(schema: pa.Schema) -> str:
    """Return name and version of one of these schemas, e.g. ``rollout/2``."""
    version: str = schema.metadata[VERSION_KEY].decode()
    return version


def check_schema(found: pa.Schema, expected: pa.Schema, where: str) -> None:
    """Refuse a table that is not of this version or lacks a column.

    Raises:
        SchemaError: naming the file, what it is and what was expected.
    """
    version = (found.metadata or {}).get(VERSION_KEY, b"no version").decode()
    wanted = version_of(expected)
    if version != wanted:
        raise SchemaError(f"{where} holds {version}, but this version of slurm-ppo reads {wanted}")
    for field in expected:
        index = found.get_field_index(field.name)
        if index < 0 or found.field(index).type != field.type:
            has = "is absent" if index < 0 else f"has type {found.field(index).type}"
            raise SchemaError(f"{where}: column {field.name!r} {has}; {wanted} wants {field.type}")


def conform(columns: dict[str, Any], schema: pa.Schema, extra: pa.Table | None = None) -> pa.Table:
    """Make a table of exactly ``schema``'s columns plus those of ``extra``, with the schema's version."""
    arrays = [_column(columns[field.name], field.type) for field in schema]
    fields = list(schema)
    if extra is not None:
        fields += [extra.schema.field(i).remove_metadata() for i in range(extra.num_columns)]
        arrays += [combined(column) for column in extra.columns]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields, metadata=schema.metadata))


def _column(values: Any, kind: pa.DataType) -> pa.Array | pa.ChunkedArray:
    return combined(values) if isinstance(values, pa.ChunkedArray) else pa.array(values, type=kind)
