"""Rows whose advantage is 0 leave forward and backward, and nothing but the work is less."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from pipeline.config.algorithm import GROUP_ESTIMATORS, Estimator, LossAggregation, PolicyLossName
from stages import ranks
from stages.ppo import learner as learning
from stages.ppo.math.shaping import RunningMoments
from stages.ppo.minibatches import all_minibatches, begin_epochs, split_epoch
from stages.ppo.targets import shape, teaching_rows
from tests.support.learning import difference, experience, make_learner, metrics_of, updated, weights
from tests.support.ranks import ended, start_ranks
from tests.support.tables import LONG

COMMON = ("rollout.samples_per_prompt=4", "algorithm.kl.coef=0", "rollout.num_shards=1")
GROUPS = ("data.prompts_per_iteration=3", *COMMON)
ONE_STEP = ("update.epochs=1", "update.minibatches=1")
FORWARD = (
    "policy/entropy",
    "policy/ratio",
    "policy/approx_kl",
    "policy/clip_",
    "policy/dual_clip_",
    "mismatch/",
)
FORWARD += ("correction/",)
"""What begins the names of metrics of the rows computed."""
OTHERS = ("policy/computed_responses", "policy/padding_efficiency")
flags = st.lists(st.sampled_from([0.0, 1.0]), min_size=12, max_size=12)
choices = {
    "rewards": st.one_of(flags, st.just([1.0] * 4 + [0.0, 1.0] * 2 + [0.0] * 4), st.just([1.0] * 12)),
    "estimator": st.sampled_from([*GROUP_ESTIMATORS, Estimator.REMAX]),
    "loss": st.sampled_from(list(PolicyLossName)),
    "aggregation": st.sampled_from(list(LossAggregation)),
    "budget": st.sampled_from([1, 64, 4096]),
    "packed": st.booleans(),
    "minibatches": st.integers(1, 4),
    "more": st.sampled_from(
        [
            (),
            ("algorithm.correction.level=token",),
            ("algorithm.correction={level: token, mode: m2po}",),
            ("algorithm.old_log_probs=rollout",),
            ("update.epochs=1", "update.minibatches=1"),
        ]
    ),
}


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(**choices)
def test_the_same_is_learned_as_from_all_rows(
    models, tmp_path, process_group, rewards, estimator, loss, aggregation, budget, packed, minibatches, more
):
    if estimator is Estimator.REMAX and "rollout" in str(more):
        more = ()  # which is refused
    if loss is PolicyLossName.GMPO and "token" in str(more):
        more = ("algorithm.correction.level=geometric",)
    words = (
        *GROUPS,
        f"algorithm.estimator={estimator}",
        f"algorithm.policy_loss={loss}",
        f"algorithm.loss_aggregation={aggregation}",
        f"update.tokens_per_micro_batch={budget}",
        f"update.remove_padding={packed}",
        f"update.minibatches={minibatches}",
        *more,
    )
    greedy = estimator is Estimator.REMAX
    rows = experience(rows=12, samples=4, holes=True, with_kl=False, rewards=rewards, greedy=greedy)
    found = []
    for is_all in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if is_all:
                patch.setattr(learning, "teaching_rows", lambda *_: None)
            learner = make_learner(models, tmp_path / "run", *words)
            found.append((metrics_of(learner, rows), weights(learner)))
    (ours, learned), (theirs, expected) = found
    assert difference(learned, expected) < 1e-6
    assert ours.keys() == theirs.keys()
    assert ours["policy/computed_responses"] <= theirs["policy/computed_responses"] == len(rows)
    for name, value in theirs.items():
        if not name.startswith((*FORWARD, *OTHERS)):
            assert ours[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_metrics_of_the_forward_pass_are_of_the_rows_computed(make):
    rewards = [1.0] * 4 + [0.0, 1.0] * 2 + [0.0] * 4
    grpo = ("algorithm.estimator=grpo", *ONE_STEP)
    learner = make(*GROUPS, *grpo)
    rows = experience(rows=12, samples=4, with_kl=False, rewards=rewards)
    metrics = metrics_of(learner, rows)
    alone = metrics_of(make("data.prompts_per_iteration=1", *COMMON, *grpo), rows.select(range(4, 8)))
    assert metrics["policy/computed_responses"] == 4
    assert metrics["response_tokens"] == float(rows.outcome.lengths.sum())
    for name in ("policy/entropy", "policy/approx_kl", "mismatch/kl", "mismatch/max"):
        assert metrics[name] == pytest.approx(alone[name], rel=1e-4), name
    assert alone["policy/grad_norm"] == pytest.approx(
        metrics["policy/grad_norm"] * int(rows.mask.sum()) / int(rows.mask[4:8].sum()), rel=1e-4
    )


@pytest.mark.parametrize(
    "word",
    [
        "algorithm.kl.coef=0.1",
        "algorithm.entropy_coef=0.01",
        "algorithm.target_kl=9",
        "algorithm.policy_loss=mine:plain",
        "algorithm.correction.level=token algorithm.correction.normalize=true",
    ],
)
def test_where_another_number_needs_them_all_rows_are_computed(make, word):
    rows = experience(rows=12, samples=4, with_kl=False, rewards=[1.0] * 12)
    assert teaching(make(*GROUPS, "algorithm.estimator=grpo"), rows).sum() == 0
    assert teaching(make(*GROUPS, "algorithm.estimator=grpo", *word.split()), rows) is None


def teaching(learner, rows):
    moments = RunningMoments().including(rows.outcome.scores)
    return teaching_rows(learner.config, rows, shape(learner.config, rows, moments))


def test_a_row_that_a_later_epoch_computes_alone_has_an_old_log_probability(make):
    words = (
        "algorithm.estimator=grpo",
        "update.minibatches=4",
        "update.epochs=5",
        "update.learning_rate=1e-9",
    )
    learner = make(*GROUPS, *words)
    rows = experience(rows=12, samples=4, with_kl=False, rewards=[1.0] * 8 + [0.0, 1.0, 0.0, 0.0])
    given = dataclasses.replace(rows, teaching=teaching(learner, rows))
    taken, first = begin_epochs(learner.config, given, 1, None)
    every = {row for _, batch in all_minibatches(learner.config, taken, first, 1) for row in batch.computed}
    of_first = {row for batch in split_epoch(learner.config, given, 1, 0) for row in batch.computed}
    assert every > of_first, "later epochs compute others too"
    assert taken.teaching.nonzero().flatten().tolist() == sorted(every)
    assert metrics_of(learner, rows)["policy/approx_kl"] == pytest.approx(0.0, abs=1e-5)


def test_with_a_critic_all_rows_are_computed(make):
    assert teaching(make("algorithm.kl.coef=0"), experience(with_kl=False, rewards=[1.0] * 8)) is None


def test_an_advantage_that_is_not_a_number_is_computed_and_refused(make):
    rows = experience(rows=12, samples=4, with_kl=False, rewards=[1.0] * 12)
    scores = rows.outcome.scores.clone()
    scores[5] = math.nan
    rows = dataclasses.replace(rows, outcome=dataclasses.replace(rows.outcome, scores=scores))
    found = teaching(make(*GROUPS, "algorithm.estimator=rloo"), rows)
    assert found.tolist() == [False] * 4 + [True] * 4 + [False] * 4


def learn(models: Path, folder: Path, rank: int) -> None:
    """One group of three teaches, so that of two ranks and four mini-batches many have nothing."""
    ranks.start_distributed()
    rows = experience(rows=12, samples=4, with_kl=False, rewards=[1.0] * 8 + [0.0, 1.0, 0.0, 0.0])
    for zero_stage in (0,) if ranks.size() == 1 else (2, 3):
        words = (
            *GROUPS,
            "algorithm.estimator=grpo",
            "update.minibatches=4",
            f"update.zero_stage={zero_stage}",
        )
        learner = make_learner(models, folder / f"run-{rank}", *words)
        steps = updated(learner, rows).steps
        assert len(steps.sums) == 8
        learned = {name: learner.policy._master(p).clone() for name, p in learner.policy.trained()}
        if rank == 0:
            save_file(learned, folder / f"{ranks.size()}-{zero_stage}.safetensors")


@LONG
def test_a_rank_without_rows_takes_part(models, tmp_path):
    for size in (1, 2):
        assert ended(start_ranks(size, tmp_path / f"meeting-{size}", learn, models, tmp_path)) == [0] * size
    expected = load_file(tmp_path / "1-0.safetensors")
    for path in tmp_path.glob("*.safetensors"):
        assert difference(load_file(path), expected) < 1e-6, path
    assert not torch.equal(expected["lm_head.weight"], torch.zeros_like(expected["lm_head.weight"]))
