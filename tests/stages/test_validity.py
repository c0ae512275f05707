"""Whether a response counts, and why not: how scores make a reward, and what the update learns from."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeline.config.algorithm import AlgorithmConfig, Estimator, KLConfig
from pipeline.run.commits import publish
from pipeline.run.paths import RunPaths
from pipeline.run.schemas import GREEDY_SAMPLE, REWARD, Validity, validity_counts
from pipeline.run.shards import write_shard
from pipeline.run.tasks import Stage, Task
from stages.context import Context, UserError
from stages.ppo.experience import build_experience, read_experience
from stages.ppo.targets import TargetScores, estimate, shape, token_rewards
from stages.rewards.validity import rewarded, validities, weighted_sum
from tests.support.learning import difference, experience, metrics_of, weights
from tests.support.records import make_record
from tests.support.rollouts import reward_table, rollout_table

SCORE = st.floats(-5, 5, width=32)
WEIGHT = st.floats(-3, 3, width=32)
PARTS = st.lists(st.tuples(st.none() | SCORE, WEIGHT), min_size=1, max_size=5)


# from scores to a reward


@given(st.lists(st.tuples(SCORE, WEIGHT), min_size=1, max_size=5))
def test_without_an_abstention_the_reward_is_the_plain_sum_to_the_bit(parts):
    scores, factors = zip(*parts, strict=True)
    assert weighted_sum(scores, factors) == sum(w * s for s, w in parts)


@given(PARTS)
def test_components_that_abstain_leave_the_row_to_the_others_at_the_scale_of_all(parts):
    scores, factors = zip(*parts, strict=True)
    known = [(score, factor) for score, factor in parts if score is not None]
    counting = sum(abs(factor) for _, factor in known)
    found = weighted_sum(scores, factors)
    if len(known) == len(parts):
        return
    if not counting:
        assert found is None
        return
    scale = sum(map(abs, factors)) / counting
    assert found == pytest.approx(sum(scale * factor * score for score, factor in known), rel=1e-6)
    bound = max(abs(score) for score, _ in known) * sum(map(abs, factors))
    assert abs(found) <= bound * (1 + 1e-6), "no more than if all had a score"


@given(SCORE, st.lists(st.tuples(st.booleans(), st.floats(0.125, 3, width=32)), min_size=1, max_size=5))
def test_where_components_agree_it_does_not_matter_which_of_them_abstain(score, parts):
    factors = [factor for _, factor in parts]
    assume(any(speaks for speaks, _ in parts))
    found = weighted_sum([score if speaks else None for speaks, _ in parts], factors)
    assert found == pytest.approx(score * sum(factors), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("scores", "factors", "reward", "validity"),
    [
        ([1.0, 0.5], [1.0, 2.0], 2.0, Validity.SCORED),
        ([1.0, None], [1.0, 2.0], 3.0, Validity.SCORED),
        ([None, 0.5], [1.0, -2.0], -1.5, Validity.SCORED),
        ([None, None], [1.0, 2.0], None, Validity.ABSTAINED),
        ([None, 0.5], [1.0, 0.0], None, Validity.ABSTAINED),
        ([0.25, None], [1.0, 0.0], 0.25, Validity.SCORED),
    ],
)
def test_a_row_has_a_reward_where_a_component_with_a_weight_has_a_score(scores, factors, reward, validity):
    assert rewarded(scores, factors, [True, True]) == (reward, validity)


@pytest.mark.parametrize("other", [None, 0.5])
def test_what_a_reward_model_cannot_take_has_no_reward_whatever_a_rule_says(other):
    assert rewarded([None, other], [0.0, 1.0], [False, True]) == (None, Validity.UNSCORABLE)


# the column


def test_the_schema_of_reward_shards():
    assert [(field.name, str(field.type), field.nullable) for field in REWARD] == [
        ("prompt_id", "string", False),
        ("sample_index", "int32", False),
        ("reward", "float", True),
        ("reference_logprobs", "list<item: float>", True),
        ("validity", "string", False),
    ]
    assert REWARD.metadata == {b"slurm_ppo_schema": b"reward/2"}
    assert [*Validity] == ["unscorable", "abstained", "no_baseline", "refused", "truncated", "scored"]


ROWS = [
    # prompt, sample, tokens, reason, what the scores say; then without and with mask_truncated
    ("a", 0, 2, "stop", "scored", "scored", "scored"),
    ("a", 1, 2, "length", "scored", "scored", "truncated"),
    ("a", 2, 2, "length", "abstained", "abstained", "abstained"),
    ("a", GREEDY_SAMPLE, 2, "length", "scored", "scored", "scored"),
    ("b", 0, 0, "refused", "scored", "refused", "refused"),
    ("b", 1, 2, "refused", "scored", "scored", "scored"),
    ("b", 2, 0, "refused", "unscorable", "unscorable", "unscorable"),
    ("c", 0, 2, "length", "scored", "no_baseline", "no_baseline"),
    ("c", 1, 2, "stop", "abstained", "abstained", "abstained"),
    ("c", GREEDY_SAMPLE, 2, "stop", "unscorable", "unscorable", "unscorable"),
]


@pytest.mark.parametrize("mask_truncated", [False, True])
def test_each_row_has_one_reason(mask_truncated):
    prompts, samples, lengths, reasons, found, *expected = zip(*ROWS, strict=True)
    rows = rollout_table(
        [[7] * n for n in lengths], prompt_id=prompts, sample_index=samples, finish_reason=reasons
    )
    assert validities(rows, [*map(Validity, found)], mask_truncated) == list(expected[mask_truncated])


# what is learned from

GROUP = st.lists(st.tuples(SCORE, st.sampled_from(Validity)), min_size=1, max_size=4)


def advantage(scores: list[float], index: int, estimator: Estimator, divides: bool) -> float:
    """Of one of a group's scores, by the formula."""
    if len(scores) == 1:
        return 0.0
    if estimator is Estimator.RLOO:
        return scores[index] - sum(s for i, s in enumerate(scores) if i != index) / (len(scores) - 1)
    mean = sum(scores) / len(scores)
    variance = sum((score - mean) ** 2 for score in scores) / (len(scores) - 1)
    return (scores[index] - mean) / ((math.sqrt(variance) + 1e-6) if divides else 1.0)


def table_of(groups: list[list[tuple[float, Validity]]]) -> tuple[pa.Table, pa.Table]:
    """A rollout and its rewards, whose rows have any validity."""
    rows = [(f"p{g}", i, *row) for g, group in enumerate(groups) for i, row in enumerate(group)]
    prompts, samples, scores, reasons = zip(*rows, strict=True)
    rollout = rollout_table([[7, 8]] * len(rows), prompt_id=prompts, sample_index=samples)
    given = [score if one.has_reward else None for score, one in zip(scores, reasons, strict=True)]
    rewards = reward_table(rollout, given, rm=given)
    column = rewards.schema.get_field_index("validity")
    return rollout, rewards.set_column(column, REWARD.field("validity"), pa.array(reasons, pa.string()))


@settings(max_examples=60)
@given(
    groups=st.lists(GROUP, min_size=1, max_size=4),
    estimator=st.sampled_from([Estimator.GRPO, Estimator.RLOO]),
    divides=st.booleans(),
)
def test_group_statistics_are_those_of_the_rows_that_count_and_one_alone_has_advantage_0(
    groups, estimator, divides
):
    rollout, rewards = table_of(groups)
    found = build_experience(rollout, rewards, [0] * rollout.num_rows)
    counting = [[score for score, one in group if one is Validity.SCORED] for group in groups]
    assert found.outcome.scores.tolist() == [score for group in counting for score in group]
    assert len(found.rewarded) == sum(one.has_reward for group in groups for _, one in group)
    assume(len(found))
    algorithm = AlgorithmConfig(estimator=estimator, normalize_group_std=divides, kl=KLConfig(coef=0.0))
    config = SimpleNamespace(
        algorithm=algorithm, rollout=SimpleNamespace(samples_per_prompt=4, max_new_tokens=9)
    )
    scores = shape(config, found, None)
    rewarding = token_rewards(config, found, scores.shaped, None, 0.0)
    advantages, _ = estimate(config, found, rewarding, TargetScores(scores.shaped, None), None)
    expected = [advantage(group, i, estimator, divides) for group in counting for i in range(len(group))]
    want = torch.tensor(expected).unsqueeze(1).expand(-1, 2)
    torch.testing.assert_close(advantages, want, rtol=1e-3, atol=1e-3 if divides else 1e-4)


def committed(folder, rollout: pa.Table, rewards: pa.Table) -> Context:
    """An update that has this shard to learn from."""
    paths = RunPaths(folder)
    for stage, table in ((Stage.ROLLOUT, rollout), (Stage.REWARD, rewards)):
        task = Task(1, stage)
        entry = write_shard(paths, paths.task(task).data("1-aa"), table)
        assert publish(paths, make_record(task, outputs=(entry,)))
    config = SimpleNamespace(rollout=SimpleNamespace(num_shards=1, staleness=0))
    return Context(paths, config, Task(1, Stage.UPDATE), "1-aa")


def test_an_iteration_of_which_no_response_counts_ends_in_an_error_that_says_why(tmp_path):
    groups = [[(1.0, Validity.ABSTAINED), (1.0, Validity.ABSTAINED)], [(0.0, Validity.REFUSED)]]
    with pytest.raises(UserError, match=r"no response that counts \(2 abstained, 1 refused\): rules abstain"):
        read_experience(committed(tmp_path, *table_of(groups)), 1)


def test_an_iteration_of_which_all_are_cut_teaches_nothing_and_goes_on(tmp_path, make):
    given = read_experience(committed(tmp_path, *table_of([[(1.0, Validity.TRUNCATED)] * 4])), 1)
    assert (len(given), len(given.rewarded)) == (0, 4)
    learner = make()
    before = weights(learner)
    metrics = metrics_of(learner, given)
    assert metrics["reward/mean"] == 1.0
    assert metrics["reward/discarded"] == 4
    assert metrics["policy/steps"] == 0
    assert difference(before, weights(learner)) == 0


def test_a_component_that_abstains_from_all_has_no_mean(make):
    given = experience()
    names = given.rewarded.rewards.column_names
    column = pa.nulls(len(given), pa.float32())
    rewards = given.rewarded.rewards.set_column(names.index("reward/rm"), "reward/rm", column)
    silent = replace(given, rewarded=replace(given.rewarded, rewards=rewards))
    assert "reward/rm/mean" in metrics_of(make(), given)
    assert "reward/rm/mean" not in metrics_of(make(), silent)


def test_samples_are_counted_by_validity_without_greedy_ones():
    prompts, samples, lengths, reasons, found, *_ = zip(*ROWS, strict=True)
    rows = rollout_table(
        [[7] * n for n in lengths], prompt_id=prompts, sample_index=samples, finish_reason=reasons
    )
    column = validities(rows, [*map(Validity, found)], mask_truncated=True)
    rewards = reward_table(rows, [0.0] * len(ROWS))
    index = rewards.schema.get_field_index("validity")
    rewards = rewards.set_column(index, REWARD.field("validity"), pa.array(column, pa.string()))
    assert validity_counts(rewards) == {
        Validity.SCORED: 2,
        Validity.TRUNCATED: 1,
        Validity.ABSTAINED: 2,
        Validity.REFUSED: 1,
        Validity.UNSCORABLE: 1,
        Validity.NO_BASELINE: 1,
    }
