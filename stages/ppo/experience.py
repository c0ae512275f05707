"""The learner's matrices, made from an iteration's shards. N responses, T tokens of the longest."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from pipeline.run.schemas import FinishReason, is_sampled
from stages.ppo.batching import Row
from stages.ppo.math.shaping import Outcome


@dataclass(frozen=True)
class Experience:
    """The policy's responses of one iteration, and their rewards."""

    rows: Sequence[Row]
    prompt_ids: Sequence[str]
    shards: Sequence[int]
    """[N] the shard that each response came in."""
    mask: Tensor
    """[N, T] true where the policy wrote the token."""
    rollout_log_probs: Tensor
    """[N, T] the generation engine's."""
    reference_log_probs: Tensor | None
    """[N, T] the frozen reference's; None when KL is off, or while nobody has computed them."""
    outcome: Outcome
    """[N] total reward of each response, and what else its score is shaped by."""
    greedy: Outcome | None
    """[N] the same of the greedy response to each response's prompt; None when there are none."""
    groups: Tensor
    """[N] index of each response's prompt."""
    responses: pa.Table
    """The rollout table, for metrics."""
    rewards: pa.Table
    """The reward table, for metrics."""

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, indices: Sequence[int]) -> "Experience":
        """Return the rows of the given indices, in their order."""
        chosen, reference = torch.tensor(indices, dtype=torch.long), self.reference_log_probs
        return replace(
            self,
            rows=[self.rows[i] for i in indices],
            prompt_ids=[self.prompt_ids[i] for i in indices],
            shards=[self.shards[i] for i in indices],
            mask=self.mask[chosen],
            rollout_log_probs=self.rollout_log_probs[chosen],
            reference_log_probs=None if reference is None else reference[chosen],
            outcome=self.outcome.select(chosen),
            greedy=None if self.greedy is None else self.greedy.select(chosen),
            groups=torch.unique(self.groups[chosen], return_inverse=True)[1],
            responses=self.responses.take(pa.array(indices, pa.int64())),
            rewards=self.rewards.take(pa.array(indices, pa.int64())),
        )

    def describe(self, indices: Sequence[int], limit: int = 8) -> str:
        """Name the shards, prompts and samples of some rows, in words."""
        samples = self.responses["sample_index"]
        by_shard: dict[int, list[str]] = {}
        for i in indices[:limit]:
            by_shard.setdefault(self.shards[i], []).append(f"{self.prompt_ids[i]}/{samples[i]}")
        named = "; ".join(f"shard {shard}: {', '.join(names)}" for shard, names in sorted(by_shard.items()))
        more = f" and {len(indices) - limit} more" if len(indices) > limit else ""
        return f"rows (prompt_id/sample) of {named}{more}"


def build_experience(responses: pa.Table, rewards: pa.Table, shards: Sequence[int]) -> Experience:
    """Make matrices of a rollout table and its reward table; ``shards`` [rows] is each row's shard."""
    sampled = is_sampled(responses)
    greedy, scored = responses.filter(pc.invert(sampled)), rewards.filter(pc.invert(sampled))
    row_of = {prompt_id: row for row, prompt_id in enumerate(greedy["prompt_id"].to_pylist())}
    responses, rewards = responses.filter(sampled), rewards.filter(sampled)
    ids = responses["prompt_id"].to_pylist()
    greedy_rows = [row_of[prompt_id] for prompt_id in ids] if row_of else []
    index = {prompt_id: i for i, prompt_id in enumerate(dict.fromkeys(ids))}
    reference = rewards["reference_logprobs"]
    pairs = zip(pieces(responses["prompt_tokens"]), pieces(responses["response_tokens"]), strict=True)
    return Experience(
        rows=[Row(prompt, response) for prompt, response in pairs],
        prompt_ids=ids,
        shards=[shard for shard, kept in zip(shards, sampled.to_pylist(), strict=True) if kept],
        mask=padded(responses["response_mask"]).bool(),
        rollout_log_probs=padded(responses["rollout_logprobs"]),
        reference_log_probs=None if reference.null_count else padded(reference),
        outcome=outcome_of(responses, rewards),
        greedy=outcome_of(greedy, scored).select(torch.tensor(greedy_rows)) if greedy_rows else None,
        groups=torch.tensor([index[prompt_id] for prompt_id in ids]),
        responses=responses,
        rewards=rewards,
    )


def outcome_of(responses: pa.Table, rewards: pa.Table) -> Outcome:
    lengths = pc.list_value_length(responses["response_tokens"])
    return Outcome(
        scores=torch.tensor(rewards["reward"].to_numpy(), dtype=torch.float32),
        lengths=torch.tensor(lengths.to_numpy(), dtype=torch.float32),
        has_ended=torch.tensor(pc.equal(responses["finish_reason"], FinishReason.STOP).to_numpy()),
    )


def pieces(column: pa.ChunkedArray) -> list[np.ndarray]:
    """Return the lists of a column as views of one array."""
    array = column.combine_chunks()
    offsets = array.offsets.to_numpy()
    values = np.array(array.values)  # a copy, because torch warns of arrays that cannot be written to
    return [values[start:stop] for start, stop in itertools.pairwise(offsets)]


def padded(column: pa.ChunkedArray) -> Tensor:
    """Make [N, T] in fp32 from a column of lists, with zeros after each row's end."""
    array = column.combine_chunks()
    lengths = np.diff(array.offsets.to_numpy())
    matrix = np.zeros((len(lengths), lengths.max(initial=0)), dtype=np.float32)
    matrix[np.arange(matrix.shape[1]) < lengths[:, None]] = array.flatten().to_numpy(zero_copy_only=False)
    return torch.from_numpy(matrix)
