"""Refilling updates (rollout.oversample): the groups that an update learns from, and those left for others.

Of an iteration's groups, in the order of its prompts, and then of those that wait, the oldest first, an
update takes the first data.prompts_per_iteration that have a spread of rewards. Others that have one are
committed with its policy, and may wait for rollout.carry updates. All of it is a function of committed files.
Dynamic sampling (DAPO, arXiv 2503.14476) samples until a batch is full; here the factor is fixed, so that the
plan of a run depends on no result.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa
import torch
from torch import Tensor

from pipeline.config.schema import Config
from pipeline.run.commits import FileEntry
from pipeline.run.paths import CARRIED_PART
from pipeline.run.plan import policy_maker
from pipeline.run.schemas import (
    CARRIED,
    ROUTED_EXPERTS,
    STEP_REWARDS,
    TEACHER_LOGPROBS,
    TEACHER_TOP_LOGPROBS,
    TEACHER_TOP_TOKENS,
    TEACHER_WEIGHT,
    conform,
)
from pipeline.run.shards import write_shard
from stages import ranks
from stages.context import Context
from stages.files import columns
from stages.files.routes import Routes, routes_column, routes_in
from stages.ppo.batching import Row
from stages.ppo.experience import TOP_COLUMNS, Experience, RewardedRows, by_token, padded, read_experience
from stages.ppo.math.shaping import RunningMoments, ShapingInput
from stages.ppo.state.learned import state_after
from stages.ppo.targets import flat_rows, shape
from stages.ppo.training import say


@dataclass(frozen=True)
class Candidates:
    """Whole groups of responses, of one iteration or several."""

    experience: Experience
    origins: Sequence[int]
    """[N] the iteration whose rollout wrote each response."""

    def select(self, indices: Sequence[int]) -> "Candidates":
        """Return the rows of the given indices, in their order."""
        return Candidates(self.experience.select(indices), [self.origins[i] for i in indices])


@dataclass(frozen=True)
class Intake:
    """What an update begins with."""

    experience: Experience
    """Responses to learn from."""
    scores: Tensor
    """[M] rewards of all of the iteration's own responses that count, also of those that are left out."""
    spare: Candidates | None = None
    """Groups for later updates; None where none may be left."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers of groups, by the names of :mod:`pipeline.metrics.catalogue`."""


@dataclass(frozen=True)
class Pick:
    """Numbers of groups, by what becomes of them."""

    taken: Sequence[int]
    spare: Sequence[int]
    """The oldest first."""
    dropped: Sequence[int]
    """Groups with a spread that no update will learn from."""


def read_intake(context: Context, iteration: int) -> Intake:
    """Return what the update of an iteration learns from: its shards, with rollout.oversample also groups
    that earlier updates left. Raises as :func:`stages.ppo.experience.read_experience`."""
    own, config = read_experience(context, iteration), context.config
    if not config.is_refilled:
        return Intake(own, own.outcome.scores)
    moments = state_after(context, iteration - 1).rewards.including(own.outcome.scores)
    candidates = joined(
        Candidates(own, [iteration] * len(own)), read_spare(context, iteration - 1, own.rewarded)
    )
    return refilled(config, candidates, iteration, moments)


def refilled(config: Config, candidates: Candidates, iteration: int, moments: RunningMoments) -> Intake:
    """Divide an iteration's own groups, followed by those that waited, the oldest first.

    Args:
        moments: moments of all scores of the run up to and with this iteration's own.
    """
    given, wanted, carry = candidates.experience, config.data.prompts_per_iteration, config.rollout.carry
    own_scores = given.outcome.scores[torch.tensor(candidates.origins, dtype=torch.long) == iteration]
    spread = with_spread(given, shape(config, given, moments).shaped)
    of_group = dict(zip(given.groups.tolist(), candidates.origins, strict=True))
    picked = pick({group: of_group[group] for group in spread}, iteration, wanted, carry)
    taken, spare = (candidates.select(rows_of(given, groups)) for groups in (picked.taken, picked.spare))
    own = sum(origin == iteration for origin in of_group.values())
    own_spread = sum(of_group[group] == iteration for group in spread)
    kept = sum(origin == iteration for origin in itertools.chain(taken.origins, spare.origins))
    counts = {
        "refill/taken": len(picked.taken),
        "refill/carried": sum(of_group[group] < iteration for group in picked.taken),
        "refill/flat": own - own_spread,
        "refill/spare": len(picked.spare),
        "refill/dropped": len(picked.dropped),
        "refill/missing": wanted - len(picked.taken),
        "reward/discarded": len(given.rewarded) - kept,
    }
    metrics = {name: float(count) for name, count in counts.items()}
    return Intake(taken.experience, own_scores, spare if carry else None, metrics)


def with_spread(experience: Experience, scores: Tensor) -> list[int]:
    """Return the numbers of the groups of two rows or more from which something is learned, ascending."""
    groups = experience.groups
    has_others = torch.bincount(groups)[groups] > 1
    return torch.unique(groups[~flat_rows(experience, scores) & has_others]).tolist()


def pick(origins: Mapping[int, int], iteration: int, wanted: int, carry: int) -> Pick:
    """Divide groups that have a spread. Pure.

    Args:
        origins: the iteration that each group is of, by its number, in the order in which they are taken.
        wanted: groups that an update takes, and that at most are left.
        carry: updates for which a group may wait.
    """
    numbers = list(origins)
    taken, others = numbers[:wanted], numbers[wanted:]
    young = [group for group in others if origins[group] > iteration - carry]
    young.sort(key=lambda group: (origins[group], group))
    spare = young[max(0, len(young) - wanted) :]  # the newest stay
    return Pick(taken, spare, sorted(set(others).difference(spare)))


def rows_of(experience: Experience, groups: Sequence[int]) -> list[int]:
    """Return the indices of the rows of some groups, group by group."""
    by_group: dict[int, list[int]] = {group: [] for group in groups}
    for row, group in enumerate(experience.groups.tolist()):
        if group in by_group:
            by_group[group].append(row)
    return [row for rows in by_group.values() for row in rows]


def joined(first: Candidates, second: Candidates) -> Candidates:
    """Put both together; groups stay apart, also of the same prompt."""
    one, other = first.experience, second.experience
    number = int(one.groups.max()) + 1 if len(one) else 0
    together = replace(
        one,
        rows=[*one.rows, *other.rows],
        prompt_ids=[*one.prompt_ids, *other.prompt_ids],
        samples=[*one.samples, *other.samples],
        shards=[*one.shards, *other.shards],
        mask=below(one.mask, other.mask),
        rollout_log_probs=below(one.rollout_log_probs, other.rollout_log_probs),
        reference_log_probs=below_if_given(one.reference_log_probs, other.reference_log_probs),
        teacher_log_probs=below_if_given(one.teacher_log_probs, other.teacher_log_probs),
        teacher_weights=below_if_given(one.teacher_weights, other.teacher_weights),
        teacher_top_tokens=below_if_given(one.teacher_top_tokens, other.teacher_top_tokens),
        teacher_top_log_probs=below_if_given(one.teacher_top_log_probs, other.teacher_top_log_probs),
        step_rewards=below_if_given(one.step_rewards, other.step_rewards),
        outcome=one.outcome.followed_by(other.outcome),
        groups=torch.cat([one.groups, other.groups + number]),
    )
    return Candidates(together, [*first.origins, *second.origins])


def below(upper: Tensor, lower: Tensor) -> Tensor:
    """Return the rows of both matrices, [N, T] of the wider one, with zeros after the narrower one's; of
    [N, T, k] both may be wider."""
    widths = torch.tensor([upper.shape, lower.shape]).amax(dim=0).tolist()[1:]
    found = upper.new_zeros(len(upper) + len(lower), *widths)
    for part, rows in ((upper, slice(0, len(upper))), (lower, slice(len(upper), None))):
        found[(rows, *map(slice, part.shape[1:]))] = part
    return found


def below_if_given(upper: Tensor | None, lower: Tensor | None) -> Tensor | None:
    """Return :func:`below` of both; None where the run has no such matrix."""
    return None if upper is None or lower is None else below(upper, lower)


# --- the file --------------------------------------------------------------------------------------------


def save_spare(context: Context, intake: Intake) -> tuple[FileEntry, ...]:
    """Write the groups that are left for later updates under this attempt's own name, durably, on the first
    rank; nothing on others, and where none may be left."""
    if intake.metrics.get("refill/missing"):
        taken, wanted = int(intake.metrics["refill/taken"]), context.config.data.prompts_per_iteration
        say(f"{taken} of {wanted} groups have a spread of rewards: a smaller update (rollout.oversample)")
    if intake.spare is None or not ranks.is_first():
        return ()
    path = context.files.data(context.attempt, CARRIED_PART)
    return (write_shard(context.paths, path, table_of(intake.spare)),)


def read_spare(context: Context, version: int, rewarded: RewardedRows) -> Candidates:
    """Return the groups that were committed with policy ``version`` for later updates; none in the first
    update of a run or fork.

    Raises:
        NotCommitted, CorruptData: naming the update.
    """
    task = policy_maker(version)
    has_some = context.read(task).find_output(CARRIED_PART, "arrow") is not None
    table = context.table(task, CARRIED, CARRIED_PART) if has_some else CARRIED.empty_table()
    return candidates_of(table, rewarded)


def table_of(candidates: Candidates) -> pa.Table:
    """Return the table of candidates, by the schema CARRIED."""
    given, outcome = candidates.experience, candidates.experience.outcome
    lengths = [len(row.response) for row in given.rows]

    def cut(matrix: Tensor | None) -> list[object]:
        if matrix is None:
            return [None] * len(given)
        return [row[:length].flatten().numpy() for row, length in zip(matrix, lengths, strict=True)]

    weights = given.teacher_weights
    rows = {
        "iteration": candidates.origins,
        "shard": given.shards,
        "prompt_id": given.prompt_ids,
        "sample_index": given.samples,
        "prompt_tokens": [row.prompt for row in given.rows],
        "response_tokens": [row.response for row in given.rows],
        "response_mask": cut(given.mask),
        "rollout_logprobs": cut(given.rollout_log_probs),
        "has_ended": outcome.has_ended.tolist(),
        "reward": outcome.scores.tolist(),
        "reference_logprobs": cut(given.reference_log_probs),
        TEACHER_LOGPROBS: cut(given.teacher_log_probs),
        TEACHER_WEIGHT: [None] * len(given) if weights is None else weights.squeeze(1).tolist(),
        STEP_REWARDS: cut(given.step_rewards),
    }
    tops = {
        TEACHER_TOP_TOKENS: (given.teacher_top_tokens, pa.int32()),
        TEACHER_TOP_LOGPROBS: (given.teacher_top_log_probs, pa.float32()),
    }
    further = {
        name: pa.array(cut(top), pa.list_(kind)) for name, (top, kind) in tops.items() if top is not None
    }
    routes = [row.routes for row in given.rows]
    if any(one is not None for one in routes):
        further[ROUTED_EXPERTS] = routes_column(routes)
    return conform(rows, CARRIED, extra=pa.table(further))


def candidates_of(table: pa.Table, rewarded: RewardedRows) -> Candidates:
    """Return the candidates of a table of :func:`table_of`.

    Args:
        rewarded: samples of the iteration that learns from them, which these are none of.
    """
    origins = table["iteration"].to_pylist()
    prompts, responses = (columns.lists(table[name]) for name in ("prompt_tokens", "response_tokens"))
    prompt_ids, weights = table["prompt_id"].to_pylist(), table[TEACHER_WEIGHT]
    keys = list(zip(origins, prompt_ids, strict=True))
    routes: list[Routes | None] = [None] * len(origins)
    if ROUTED_EXPERTS in table.column_names:
        routes = [*routes_in(table[ROUTED_EXPERTS])]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    mask, (top_tokens, top_log_probs) = padded(table["response_mask"]), _tops_of(table)
    experience = Experience(
        rows=list(map(Row, prompts, responses, routes)),
        prompt_ids=prompt_ids,
        samples=table["sample_index"].to_pylist(),
        shards=table["shard"].to_pylist(),
        mask=mask,
        rollout_log_probs=padded(table["rollout_logprobs"]),
        reference_log_probs=_padded_if_given(table["reference_logprobs"]),
        teacher_log_probs=_padded_if_given(table[TEACHER_LOGPROBS]),
        teacher_weights=None if weights.null_count else torch.tensor(weights.to_numpy()[:, None]).float(),
        teacher_top_tokens=top_tokens,
        teacher_top_log_probs=top_log_probs,
        step_rewards=_padded_if_given(table[STEP_REWARDS]),
        outcome=ShapingInput(
            scores=torch.tensor(table["reward"].to_pylist(), dtype=torch.float32),
            lengths=torch.tensor([len(response) for response in responses], dtype=torch.float32),
            has_ended=torch.tensor(table["has_ended"].to_pylist(), dtype=torch.bool),
        ),
        greedy=None,
        groups=torch.tensor([numbers[key] for key in keys], dtype=torch.long),
        rewarded=rewarded,
    )
    return Candidates(experience, origins)


def _tops_of(table: pa.Table) -> tuple[Tensor | None, Tensor | None]:
    """Return [N, T, k] of the columns of the likeliest tokens; None where a table has rows, and not these
    columns."""
    if not table.num_rows:
        return torch.zeros(0, 0, 0, dtype=torch.int32), torch.zeros(0, 0, 0)
    if TEACHER_TOP_TOKENS not in table.column_names:
        return None, None
    lengths = columns.lengths(table["response_tokens"])
    k = int(columns.lengths(table[TEACHER_TOP_TOKENS]).sum()) // int(lengths.sum())
    tokens, log_probs = (by_token(padded(table[name]), int(lengths.max()), k) for name in TOP_COLUMNS)
    return tokens, log_probs


def _padded_if_given(column: pa.ChunkedArray) -> Tensor | None:
    return None if column.null_count else padded(column)
