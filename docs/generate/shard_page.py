"""docs/reference/shards.md: the columns of every Arrow file."""

from enum import StrEnum

import pyarrow as pa

from docs.generate.docstrings import attribute_docs, member_docs
from docs.generate.markdown import code, page, prose, table
from pipeline.run import schemas

COLUMNS = {
    "prompt_id": "the row's own id, or a hash of the prompt",
    "prompt_text": "the prompt as the policy reads it, chat template included",
    "prompt_messages": "the chat messages as JSON; null for plain text",
    "prompt_tokens": "its token ids",
    "sample_index": "0 to n - 1 among the samples of a prompt; -1 for a greedy response",
    "response_tokens": "token ids after the prompt; in conversations also what was said to the policy",
    "response_mask": "true where the policy wrote the token, false where a tool or an environment did",
    "rollout_logprobs": "the engine's log-probability of each token; 0 where the mask is false",
    "finish_reason": "why the response ended: see below",
    "num_turns": "turns of the policy",
    "response_text": "all of the response as text",
    "response_messages": "with `rollout.multi_turn` what followed the prompt, as JSON; else null",
    "reward": "the weighted sum of the components; null where a reward model could not take the response, or "
    "all rules abstain",
    "reference_logprobs": "the reference's log-probability of each response token; null for greedy "
    "responses, when KL is off and when the update computes them",
    "iteration": "the iteration whose rollout wrote the response",
    "shard": "its shard there",
    "has_ended": "true for finish_reason `stop`",
    "teacher_logprobs": "as in reward shards; null without teachers",
    "teacher_weight": "as in reward shards; null without teachers",
    "step_rewards": "as in reward shards; null where no component has `steps`",
    "prompt_index": "the prompt's place among all usable ones, from 0",
    "epoch": "0-based epoch of the prompt's file in which it was last scored",
    "mean_reward": "mean reward of its samples then",
    "is_out": "whether the epoch of the first iteration that is rolled out with this policy leaves it out",
    "validity": "whether the update learns from the response, and why not: see below",
}
"""Meaning of each column, the same in every schema."""

ABOUT = """\
Shards are Arrow IPC files. Each carries its schema's name and version under the key `slurm_ppo_schema` of the
metadata, and readers refuse versions that they do not know. `pipeline.run.shards.read_shard` verifies a shard
before it reads it.

The user's own columns follow those below. In a rollout they are dictionary-encoded, so that what responses
to one prompt share is stored once; `to_pylist` gives the values. A prompt's tools, where there are some, are
in the column `prompt_tools`, as JSON. With `algorithm.router_replay` rollouts have a column
`routed_experts`: a list of layers x top_k numbers (uint8, or uint16 for more than 256 experts) per token of
prompt and response but the last. Where a component has `steps`, reward shards have a column
`step_rewards`: a list with a float32 per response token, of a step that ends there the reward, else null."""


def shard_page() -> str:
    found = {name: value for name, value in vars(schemas).items() if isinstance(value, pa.Schema)}
    docs = attribute_docs(schemas)
    return page(
        "Shards",
        ABOUT,
        *(_schema(schema, docs[name]) for name, schema in found.items()),
        f"## finish_reason\n\n{_values(schemas.FinishReason)}",
        f"## validity\n\n{prose(schemas.Validity.__doc__ or '')}\n\n{_values(schemas.Validity)}",
    )


def _values(kind: type[StrEnum]) -> str:
    return table(("value", "means"), ((code(v), d) for v, d in member_docs(kind).items()))


def _schema(schema: pa.Schema, doc: str) -> str:
    rows = [
        (code(field.name), str(field.type), "yes" if field.nullable else "no", COLUMNS[field.name])
        for field in schema
    ]
    heading = f"## {schemas.version_of(schema)}\n\n{prose(doc)}"
    return f"{heading}\n\n{table(('column', 'type', 'may be null', 'meaning'), rows)}"
