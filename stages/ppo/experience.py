"""The learner's matrices, made from an iteration's shards. N responses, T tokens of the longest."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from pipeline.run.schemas import (
    ROUTED_EXPERTS,
    STEP_REWARDS,
    TEACHER_LOGPROBS,
    TEACHER_TOP_LOGPROBS,
    TEACHER_TOP_TOKENS,
    TEACHER_WEIGHT,
    FinishReason,
    Validity,
    is_sampled,
    validity_counts,
)
from stages.context import Context, UserError
from stages.files import columns
from stages.files.routes import Routes, routes_in
from stages.ppo.batching import Row
from stages.ppo.math.shaping import ShapingInput
from stages.training import check_has_responses, read_pair_in_batches


@dataclass(frozen=True)
class RewardedRows:
    """All samples of an iteration that have a reward, M of them, whether or not they are learned from: what
    metrics of rewards and lengths are made from."""

    outcome: ShapingInput
    """[M] total reward of each sample, and its length and end."""
    groups: Tensor
    """[M] index of each sample's prompt."""
    responses: pa.Table
    """The rollout table's columns of one number or word a response."""
    rewards: pa.Table
    """The reward table but for its columns of lists."""

    def __len__(self) -> int:
        return len(self.groups)


@dataclass(frozen=True)
class Experience:
    """The responses of one iteration that the update learns from, and their rewards: those whose validity is
    scored."""

    rows: Sequence[Row]
    prompt_ids: Sequence[str]
    samples: Sequence[int]
    """[N] each response's index among the samples of its prompt."""
    shards: Sequence[int]
    """[N] the shard that each response came in."""
    mask: Tensor
    """[N, T] true where the policy wrote the token."""
    rollout_log_probs: Tensor
    """[N, T] the generation engine's."""
    reference_log_probs: Tensor | None
    """[N, T] the frozen reference's; None when KL is off, or before they are computed."""
    teacher_log_probs: Tensor | None
    """[N, T] the teachers', a weighted mean of several; None where the run has none."""
    teacher_weights: Tensor | None
    """[N, 1] sum of the weights of each response's teachers: 0 without any."""
    outcome: ShapingInput
    """[N] total reward of each response, and what else its score is shaped by."""
    greedy: ShapingInput | None
    """[N] the same of the greedy response to each response's prompt; None when there are none."""
    groups: Tensor
    """[N] index of each response's prompt."""
    rewarded: RewardedRows
    """The iteration's samples that have a reward; a selection of rows keeps all of them."""
    teacher_top_tokens: Tensor | None = None
    """[N, T, k] ids that each response's teacher finds most probable (algorithm.distillation.top_k)."""
    teacher_top_log_probs: Tensor | None = None
    """[N, T, k] their log-probabilities."""
    step_rewards: Tensor | None = None
    """[N, T] rewards of steps, at the last token of each; NaN at other tokens. None where no component gives
    any."""
    teaching: Tensor | None = None
    """[N] true for the rows that go through the policy; None for all that have a token of the policy's."""
    shares_prompts: bool = False
    """Whether responses to one prompt go through the models behind one copy of it."""

    @property
    def computed(self) -> Tensor:
        """[N, T] the mask, without rows that do not go through the policy."""
        return self.mask if self.teaching is None else self.mask & self.teaching.unsqueeze(1)

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, indices: Sequence[int]) -> "Experience":
        """Return the rows of the given indices, in their order."""
        chosen = torch.tensor(indices, dtype=torch.long)

        def given(matrix: Tensor | None) -> Tensor | None:
            return None if matrix is None else matrix[chosen]

        return replace(
            self,
            rows=[self.rows[i] for i in indices],
            prompt_ids=[self.prompt_ids[i] for i in indices],
            samples=[self.samples[i] for i in indices],
            shards=[self.shards[i] for i in indices],
            mask=self.mask[chosen],
            rollout_log_probs=self.rollout_log_probs[chosen],
            outcome=self.outcome.select(chosen),
            greedy=None if self.greedy is None else self.greedy.select(chosen),
            groups=torch.unique(self.groups[chosen], return_inverse=True)[1],
            reference_log_probs=given(self.reference_log_probs),
            teacher_log_probs=given(self.teacher_log_probs),
            teacher_weights=given(self.teacher_weights),
            teacher_top_tokens=given(self.teacher_top_tokens),
            teacher_top_log_probs=given(self.teacher_top_log_probs),
            step_rewards=given(self.step_rewards),
            teaching=given(self.teaching),
        )

    def describe(self, indices: Sequence[int], limit: int = 8) -> str:
        """Name the shards, prompts and samples of some rows, in words."""
        by_shard: dict[int, list[str]] = {}
        for i in indices[:limit]:
            by_shard.setdefault(self.shards[i], []).append(f"{self.prompt_ids[i]}/{self.samples[i]}")
        named = "; ".join(f"shard {shard}: {', '.join(names)}" for shard, names in sorted(by_shard.items()))
        more = f" and {len(indices) - limit} more" if len(indices) > limit else ""
        return f"rows (prompt_id/sample) of {named}{more}"


def read_experience(context: Context, iteration: int) -> Experience:
    """Make matrices of all shards of an iteration, read and verified one after the other.

    What the learner needs of a shard is copied batch by batch, each of which is let go of before the next: in
    memory are what the matrices are made from, once, and what is left of one shard.

    Raises:
        NotCommitted, CorruptData, StaleData: naming the shard.
        UserError: there is no response to learn from, nor one that algorithm.mask_truncated left out.
    """
    num_shards = context.config.rollout.num_shards
    parts: list[_Part] = []
    shards: list[int] = []
    for shard in range(num_shards):
        of_shard = list(itertools.starmap(_part_of, read_pair_in_batches(context, iteration, shard)))
        shards += [shard for part in of_shard for _ in part.prompt_ids]
        parts += of_shard
    pa.default_memory_pool().release_unused()  # the files' memory, which Arrow would keep for later ones
    check_has_responses(iteration, sum(part.num_rows for part in parts))
    counts: Counter[Validity] = Counter()
    for part in parts:
        counts.update(part.counts)
    if not counts[Validity.SCORED] + counts[Validity.TRUNCATED]:
        found = ", ".join(f"{number} {one}" for one, number in counts.items())
        raise UserError(
            f"iteration {iteration} has no response that counts ({found}): {_WHY_NONE}; "
            "the log of its reward tasks says more"
        )
    return _joined(parts, shards)


def build_experience(responses: pa.Table, rewards: pa.Table, shards: Sequence[int]) -> Experience:
    """Make matrices of a rollout table and its reward table; ``shards`` [rows] is each row's shard."""
    kept = [shard for shard, counts in zip(shards, _counting(rewards).to_pylist(), strict=True) if counts]
    return _joined([_part_of(responses, rewards)], kept)


@dataclass(frozen=True)
class _Part:
    """What the learner needs of some rows. Nothing in it holds on to the tables that it was made from."""

    num_rows: int
    """All rows, also greedy ones and those that do not count."""
    counts: Counter[Validity]
    """Number of samples by validity."""
    prompt_ids: list[str]
    samples: list[int]
    rows: list[Row]
    matrices: dict[str, Tensor]
    """[rows, longest] of each per-token column, by name. Taken out when all parts' are put together, so that
    no number is in memory twice."""
    outcome: ShapingInput
    greedy_ids: list[str]
    greedy: ShapingInput
    """Outcome of greedy responses, to the prompts of ``greedy_ids``."""
    rewarded_ids: list[str]
    """Prompts of all samples that have a reward."""
    rewarded: ShapingInput
    responses: pa.Table
    rewards: pa.Table


_WHY_NONE = "rules abstained from all of them, models could take none, or prompts were refused"
_MASK, _ROLLOUT, _REFERENCE = "response_mask", "rollout_logprobs", "reference_logprobs"
TOP_COLUMNS = (TEACHER_TOP_TOKENS, TEACHER_TOP_LOGPROBS)
_FOR_METRICS = ("finish_reason", "num_turns")
_WITH_REWARD = pa.array([one for one in Validity if one.has_reward], pa.string())


def _counting(rewards: pa.Table) -> pa.ChunkedArray:
    """Return booleans [rows]: true for samples to learn from, and to compare others with."""
    return pc.and_(is_sampled(rewards), pc.equal(rewards["validity"], Validity.SCORED))


def _part_of(responses: pa.Table, rewards: pa.Table) -> _Part:
    counting, sampled = _counting(rewards), is_sampled(rewards)
    has_reward = pc.and_(sampled, pc.is_in(rewards["validity"], value_set=_WITH_REWARD))
    is_all = pc.all(counting).as_py()

    def kept(table: pa.Table, name: str) -> pa.ChunkedArray:
        return table[name] if is_all else table[name].filter(counting)

    prompts, tokens = (columns.lists(kept(responses, name)) for name in ("prompt_tokens", "response_tokens"))
    routes: list[Routes | None] = [None] * len(tokens)
    if ROUTED_EXPERTS in responses.column_names:
        routes = [routed.copy() for routed in routes_in(kept(responses, ROUTED_EXPERTS))]
    matrices = {name: padded(kept(responses, name)) for name in (_MASK, _ROLLOUT)}
    width = matrices[_MASK].shape[1]  # the longest response may have no teacher
    if not (reference := kept(rewards, _REFERENCE)).null_count:
        matrices[_REFERENCE] = padded(reference)
    if TEACHER_LOGPROBS in rewards.column_names:
        matrices[TEACHER_LOGPROBS] = padded(kept(rewards, TEACHER_LOGPROBS), width)
        matrices[TEACHER_WEIGHT] = torch.tensor(kept(rewards, TEACHER_WEIGHT).to_numpy()[:, None]).float()
    for name in TOP_COLUMNS if TEACHER_TOP_TOKENS in rewards.column_names else ():
        matrices[name] = padded_top(kept(rewards, name), kept(rewards, TEACHER_LOGPROBS), width)
    if STEP_REWARDS in rewards.column_names:
        matrices[STEP_REWARDS] = padded(kept(rewards, STEP_REWARDS), width)
    others = pc.invert(sampled)
    return _Part(
        num_rows=responses.num_rows,
        counts=validity_counts(rewards),
        prompt_ids=kept(responses, "prompt_id").to_pylist(),
        samples=kept(responses, "sample_index").to_pylist(),
        rows=list(map(Row, prompts, tokens, routes)),
        matrices=matrices,
        outcome=_outcome_of(responses, rewards, counting),
        greedy_ids=responses["prompt_id"].filter(others).to_pylist(),
        greedy=_outcome_of(responses, rewards, others),
        rewarded_ids=responses["prompt_id"].filter(has_reward).to_pylist(),
        rewarded=_outcome_of(responses, rewards, has_reward),
        responses=responses.select(_FOR_METRICS).filter(has_reward),
        rewards=rewards.select(_without_lists(rewards)).filter(has_reward),
    )


def _without_lists(table: pa.Table) -> list[str]:
    return [field.name for field in table.schema if not pa.types.is_list(field.type)]


def _joined(parts: Sequence[_Part], shards: Sequence[int]) -> Experience:
    """Put parts together; ``shards`` [N] is each response's shard."""
    ids = [prompt_id for part in parts for prompt_id in part.prompt_ids]

    def given(name: str) -> Tensor | None:
        return _stacked(parts, name) if all(name in part.matrices for part in parts) else None

    top_tokens, top_log_probs = (_top_of(parts, name) for name in TOP_COLUMNS)
    return Experience(
        rows=[row for part in parts for row in part.rows],
        prompt_ids=ids,
        samples=[sample for part in parts for sample in part.samples],
        shards=shards,
        mask=_stacked(parts, _MASK),
        rollout_log_probs=_stacked(parts, _ROLLOUT),
        reference_log_probs=given(_REFERENCE),
        teacher_log_probs=given(TEACHER_LOGPROBS),
        teacher_weights=given(TEACHER_WEIGHT),
        outcome=_together([part.outcome for part in parts]),
        greedy=_greedy_of(parts, ids),
        groups=_groups_of(ids),
        teacher_top_tokens=top_tokens,
        teacher_top_log_probs=top_log_probs,
        step_rewards=given(STEP_REWARDS),
        rewarded=RewardedRows(
            outcome=_together([part.rewarded for part in parts]),
            groups=_groups_of([prompt_id for part in parts for prompt_id in part.rewarded_ids]),
            responses=pa.concat_tables([part.responses for part in parts]),
            rewards=pa.concat_tables([part.rewards for part in parts]),
        ),
    )


def _groups_of(prompt_ids: Sequence[str]) -> Tensor:
    """Return the index of each row's prompt, in the order in which prompts first occur."""
    index = {prompt_id: i for i, prompt_id in enumerate(dict.fromkeys(prompt_ids))}
    return torch.tensor([index[prompt_id] for prompt_id in prompt_ids], dtype=torch.long)


def _greedy_of(parts: Sequence[_Part], ids: Sequence[str]) -> ShapingInput | None:
    """Return the outcome of the greedy response to each of the prompts ``ids``; None when there are none."""
    greedy_ids = [prompt_id for part in parts for prompt_id in part.greedy_ids]
    if not ids or not greedy_ids:
        return None
    row_of = {prompt_id: row for row, prompt_id in enumerate(greedy_ids)}
    found = _together([part.greedy for part in parts])
    return found.select(torch.tensor([row_of[prompt_id] for prompt_id in ids]))


def _outcome_of(responses: pa.Table, rewards: pa.Table, chosen: pa.ChunkedArray) -> ShapingInput:
    """Return the outcome of the rows for which ``chosen`` is true."""
    lengths = pc.list_value_length(responses["response_tokens"])
    has_ended = pc.equal(responses["finish_reason"], FinishReason.STOP)
    scores, lengths, ended = (
        column.filter(chosen).combine_chunks().to_numpy(zero_copy_only=False)
        for column in (rewards["reward"], lengths, has_ended)
    )
    return ShapingInput(
        scores=torch.tensor(scores, dtype=torch.float32),
        lengths=torch.tensor(lengths, dtype=torch.float32),
        has_ended=torch.tensor(ended, dtype=torch.bool),
    )


def _together(outcomes: Sequence[ShapingInput]) -> ShapingInput:
    scores, lengths, ended = zip(*((one.scores, one.lengths, one.has_ended) for one in outcomes), strict=True)
    return ShapingInput(torch.cat(scores), torch.cat(lengths), torch.cat(ended))


_DTYPES: dict[pa.DataType, Any] = {pa.bool_(): np.bool_, pa.int32(): np.int32}
"""NumPy types of columns; those of others are float32."""


def padded_top(column: pa.ChunkedArray, of_tokens: pa.ChunkedArray, width: int) -> Tensor:
    """Return [rows, width * k] of a column with k values where ``of_tokens`` has one; k is 0 without any."""
    k = int(columns.lengths(column).sum()) // max(1, int(columns.lengths(of_tokens).sum()))
    return padded(column, width * k)


def by_token(matrix: Tensor, longest: int, k: int) -> Tensor:
    """Return [N, T, k] of a matrix [N, t * k] of at most T tokens, with zeros after a row's end."""
    whole = torch.nn.functional.pad(matrix, (0, longest * k - matrix.shape[1]))
    return whole.view(len(matrix), longest, k)


def _top_of(parts: Sequence[_Part], name: str) -> Tensor | None:
    """Put one column of the likeliest tokens together; k is 0 in parts that no teacher is for."""
    if not all(name in part.matrices for part in parts):
        return None
    widths = [part.matrices[_MASK].shape[1] for part in parts]
    sizes = (part.matrices[name].shape[1] for part in parts)
    k = max(size // max(1, width) for size, width in zip(sizes, widths, strict=True))
    return by_token(_stacked(parts, name), max(widths), k)


def padded(column: pa.ChunkedArray, width: int = 0) -> Tensor:
    """Return [rows, longest] of a column of lists, at least ``width`` wide, with zeros after a row's end."""
    lengths, row = columns.lengths(column), 0
    dtype = _DTYPES.get(column.type.value_type, np.float32)
    matrix = np.zeros((len(lengths), lengths.max(initial=width)), dtype)
    for chunk, values in zip(column.chunks, columns.values(column), strict=True):
        rows = slice(row, row + len(chunk))
        matrix[rows][np.arange(matrix.shape[1]) < lengths[rows, None]] = values
        row += len(chunk)
    return torch.from_numpy(matrix)


def _stacked(parts: Sequence[_Part], name: str) -> Tensor:
    """Put the parts' matrices of one column below each other, [N, T], and let go of them."""
    if len(parts) == 1:
        return parts[0].matrices.pop(name)
    shapes = [part.matrices[name].shape for part in parts]
    height, width = sum(rows for rows, _ in shapes), max(longest for _, longest in shapes)
    dtype = parts[0].matrices[name].numpy().dtype
    whole, row = np.zeros((height, width), dtype), 0  # numpy's, whose memory is not touched before its turn
    for part in parts:
        block = part.matrices.pop(name).numpy()
        whole[row : row + len(block), : block.shape[1]] = block
        row += len(block)
    return torch.from_numpy(whole)
