"""An iteration's shards as the learner's matrices. N responses, T tokens of the longest."""

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import torch
from torch import Tensor

from pipeline.commits import StaleData
from pipeline.schemas import REWARD, ROLLOUT
from pipeline.tasks import Stage, Task
from stages.context import Context
from stages.ppo.batching import Row


@dataclass(frozen=True)
class Experience:
    """What the policy did in one iteration and what it got for it."""

    rows: Sequence[Row]
    prompt_ids: Sequence[str]
    mask: Tensor
    """[N, T] true where the policy wrote the token."""
    rollout_log_probs: Tensor
    """[N, T] the generation engine's."""
    reference_log_probs: Tensor | None
    """[N, T] the frozen reference's; None when KL is off."""
    scores: Tensor
    """[N] total reward of each response."""
    groups: Tensor
    """[N] index of each response's prompt."""
    responses: pa.Table
    """The rollout table, for metrics."""
    rewards: pa.Table
    """The reward table, for metrics."""

    def __len__(self) -> int:
        return len(self.rows)


def read_experience(context: Context, iteration: int, num_shards: int) -> Experience:
    """All shards of an iteration, verified and joined row by row.

    Raises:
        NotCommitted, CorruptData, StaleData: naming the shard.
    """
    rollouts, rewards = [], []
    for shard in range(num_shards):
        rollout, reward = (Task(iteration, stage, shard) for stage in (Stage.ROLLOUT, Stage.REWARD))
        rollouts.append(context.table(rollout, ROLLOUT))
        rewards.append(context.table(reward, REWARD))
        check_same_rows(reward, rollouts[-1], rewards[-1])
    return build_experience(pa.concat_tables(rollouts), pa.concat_tables(rewards))


def check_same_rows(task: Task, rollout: pa.Table, reward: pa.Table) -> None:
    """The reward shard must have the rollout shard's rows in the same order. Raises StaleData."""
    key = ["prompt_id", "sample_index"]
    if not rollout.select(key).equals(reward.select(key)):
        raise StaleData(task, "its rows are not those of the rollout shard")


def build_experience(responses: pa.Table, rewards: pa.Table) -> Experience:
    """Matrices of a rollout table and its reward table."""
    tokens = responses["response_tokens"].to_pylist()
    prompts = responses["prompt_tokens"].to_pylist()
    width = max(map(len, tokens))
    ids = responses["prompt_id"].to_pylist()
    index = {prompt_id: i for i, prompt_id in enumerate(dict.fromkeys(ids))}
    reference = rewards["reference_logprobs"]
    return Experience(
        rows=[Row(p, r) for p, r in zip(prompts, tokens, strict=True)],
        prompt_ids=ids,
        mask=padded(responses["response_mask"].to_pylist(), width).bool(),
        rollout_log_probs=padded(responses["rollout_logprobs"].to_pylist(), width),
        reference_log_probs=None if reference.null_count else padded(reference.to_pylist(), width),
        scores=torch.tensor(rewards["reward"].to_pylist(), dtype=torch.float32),
        groups=torch.tensor([index[prompt_id] for prompt_id in ids]),
        responses=responses,
        rewards=rewards,
    )


def padded(values: Sequence[Sequence[float]], width: int) -> Tensor:
    """[N, width] fp32, zeros after each row's end."""
    matrix = torch.zeros(len(values), width)
    for i, row in enumerate(values):
        matrix[i, : len(row)] = torch.tensor(row, dtype=torch.float32)
    return matrix
