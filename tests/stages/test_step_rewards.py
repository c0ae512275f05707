"""Rewards of steps: from what a rule returns for turns or parts of a response to the advantages of tokens."""

import dataclasses
import math

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoTokenizer

from pipeline.config.algorithm import Estimator
from pipeline.config.reward import RuleConfig, StepUnit
from pipeline.config.rules import contradictions
from pipeline.run.schemas import STEP_REWARDS
from pipeline.run.tasks import PREPARE
from stages.context import Context, UserError
from stages.ppo.experience import build_experience
from stages.ppo.math.advantages import (
    from_steps,
    grpo,
    normalized_steps,
    reward_steps,
    rloo,
    without_own,
)
from stages.ppo.refill import with_spread
from stages.ppo.targets import TargetScores, estimate, flat_rows, last_tokens, step_ends, token_rewards
from stages.rewards.components import component_scores
from stages.rewards.steps import SteppedScore, scores_in, step_columns, step_rewards
from stages.tasks.reward import reward_table
from stages.tasks.score import score_table
from tests.support.learning import experience
from tests.support.ppo_batches import batches, for_any
from tests.support.processes import config_of, make_run
from tests.support.rollouts import rollout_table
from tests.support.scoring import responses

NAN = math.nan
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]], dtype=torch.bool)
STEPS = torch.tensor([[NAN, 1.0, NAN, NAN, 0.0], [NAN, NAN, 0.5, 1.0, NAN]], dtype=torch.float64)
"""Two responses to one prompt, of 5 and 4 tokens: steps of 1 and 0, and of 0.5 and 1."""
GROUPS = torch.tensor([0, 0])


def cut():
    ends = ~STEPS.isnan()
    return reward_steps(torch.where(ends, STEPS, 0.0), ends, MASK)


def close(found, expected) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=found.dtype), rtol=0, atol=1e-6)


def test_grpo_normalises_over_the_groups_steps_and_sums_those_to_come():
    """By hand: mean 0.625, deviation 0.478714 of (1, 0, 0.5, 1), plus 1e-6."""
    steps = cut()
    close(steps.rewards, [1.0, 0.0, 0.5, 1.0])
    found = from_steps(steps, normalized_steps(steps, GROUPS, normalize_std=True), MASK)
    late, early = -1.3055797, -0.5222319
    close(found[0], [early, early, late, late, late])
    close(found[1], [0.5222319] * 3 + [0.7833478, 0.0])
    plain = from_steps(steps, normalized_steps(steps, GROUPS, normalize_std=False), MASK)
    close(plain, [[-0.25, -0.25, -0.625, -0.625, -0.625], [0.25, 0.25, 0.25, 0.375, 0.0]])


def test_rloo_compares_a_step_with_those_of_the_other_responses():
    """By hand: the means of the others are 0.75 and 0.5."""
    steps = cut()
    found = from_steps(steps, without_own(steps, GROUPS), MASK)
    close(found, [[-0.5, -0.5, -0.75, -0.75, -0.75], [0.5, 0.5, 0.5, 0.5, 0.0]])


def test_rewards_between_steps_belong_to_the_step_that_follows_and_after_the_last_to_the_last():
    """As a KL penalty at every token does."""
    ends = ~STEPS.isnan()
    ends[0, 4] = False
    rewards = torch.where(ends, STEPS, 0.0) - torch.where(MASK, 0.1, 0.0)
    steps = reward_steps(rewards, ends, MASK)
    close(steps.rewards, [1.0 - 0.5, 0.5 - 0.3, 1.0 - 0.1])


def test_rows_without_a_token_have_no_step_and_change_nothing():
    mask = torch.cat([torch.zeros(3, 5, dtype=torch.bool), MASK])
    rewards = torch.cat([torch.ones(3, 5, dtype=torch.float64), STEPS.nan_to_num()])
    steps = reward_steps(rewards, mask & (torch.cat([torch.ones(3, 5), STEPS]) == 1.0), mask)
    close(steps.rewards, [1.0, 1.5])
    close(normalized_steps(steps, torch.tensor([0, 1, 2, 3, 3]), normalize_std=False), [-0.25, 0.25])


@for_any(batch=batches(min_tokens=2))
def test_with_one_step_a_response_group_estimators_are_what_they_are_without(batch):
    batch = batch.rows(batch.mask.any(dim=1))
    batch = dataclasses.replace(batch, groups=torch.unique(batch.groups, return_inverse=True)[1])
    ends, totals = last_tokens(batch.mask), torch.where(batch.mask, batch.rewards, 0.0).sum(dim=1)
    steps = reward_steps(batch.rewards, ends, batch.mask)
    by_group = {
        "grpo": (grpo(totals, batch.groups, batch.mask, True), normalized_steps(steps, batch.groups, True)),
        "rloo": (rloo(totals, batch.groups, batch.mask), without_own(steps, batch.groups)),
    }
    for expected, values in by_group.values():
        torch.testing.assert_close(from_steps(steps, values, batch.mask), expected, rtol=1e-6, atol=1e-6)


def given_steps():
    """Four responses to two prompts: the first two with steps, for the others the rule gave empty lists."""
    given = experience(rows=4, samples=2, with_kl=False)
    steps = torch.full_like(given.rollout_log_probs, math.nan)
    steps[0, 0], steps[0, 2], steps[1, 1] = 0.5, 1.0, -1.0
    scores = torch.tensor([1.5, -1.0, 0.0, 0.0])
    outcome = dataclasses.replace(given.outcome, scores=scores)
    return dataclasses.replace(given, outcome=outcome, step_rewards=steps)


def test_steps_lie_at_their_tokens_and_what_shaping_changes_at_the_last(make):
    given = given_steps()
    config = make("algorithm=ppo").config
    plain = token_rewards(config, given, given.outcome.scores, None, 0.0)
    assert plain[0].nonzero().flatten().tolist() == [0, 2]
    assert (float(plain[0, 0]), float(plain[0, 2]), float(plain[1, 1])) == (0.5, 1.0, -1.0)
    assert plain[2:].abs().sum() == 0
    penalised = given.outcome.scores - 0.25
    shaped = token_rewards(config, given, penalised, None, 0.0)
    at_last = last_tokens(given.mask)
    torch.testing.assert_close((shaped - plain)[at_last], torch.full((4,), -0.25))
    assert bool((step_ends(given, penalised) & at_last).any(dim=1).all())
    assert step_ends(dataclasses.replace(given, step_rewards=None), penalised) is None


def test_gae_finds_the_steps_to_come_at_each_token(make):
    """By hand, with values of 0, gamma 0.5 and lambda 1: tokens halve what is to come."""
    given = given_steps()
    config = make("algorithm.gamma=0.5", "algorithm.lam=1", "algorithm.whiten_advantages=false").config
    scores = TargetScores(given.outcome.scores, None)
    rewards = token_rewards(config, given, scores.shaped, None, 0.0)
    advantages, returns = estimate(config, given, rewards, scores, torch.zeros_like(rewards))
    close(advantages[0, :3], [0.5 + 0.25, 0.5, 1.0])
    assert torch.equal(advantages[given.mask], returns[given.mask])


@pytest.mark.parametrize(
    "estimator", [Estimator.GRPO, Estimator.RLOO, Estimator.REINFORCE_PLUS_PLUS_BASELINE]
)
def test_group_estimators_of_a_run_take_the_steps(make, estimator):
    given = given_steps()
    words = (
        f"algorithm.estimator={estimator}",
        "rollout.samples_per_prompt=2",
        "data.prompts_per_iteration=4",
    )
    config = make(*words).config
    scores = TargetScores(given.outcome.scores, None)
    rewards = token_rewards(config, given, scores.shaped, None, 0.0)
    found, none = estimate(config, given, rewards, scores, None)
    assert none is None
    first = found[0][given.mask[0]]
    assert first[0] != first[-1], "a token before a step has more to come than one after it"
    plain = dataclasses.replace(given, step_rewards=None)
    rewards = token_rewards(config, plain, scores.shaped, None, 0.0)
    assert len(set(estimate(config, plain, rewards, scores, None)[0][0][given.mask[0]].tolist())) == 1


def grouped_steps():
    """Six responses to three prompts: equal sums of unlike steps, unlike sums of equal steps, and equal ones;
    and which groups are flat."""
    given = experience(rows=6, samples=2, with_kl=False)
    steps = torch.full_like(given.rollout_log_probs, math.nan)
    steps[0, 1], steps[1, 0], steps[1, 2] = 1.0, 0.5, 0.5
    steps[2, 1], steps[3, 0], steps[3, 2] = 0.5, 0.5, 0.5
    steps[4, 0], steps[5, 2] = 0.25, 0.25
    outcome = dataclasses.replace(given.outcome, scores=steps.nan_to_num().sum(dim=1))
    return dataclasses.replace(given, outcome=outcome, step_rewards=steps), [False, True, True]


@pytest.mark.parametrize("estimator", [Estimator.GRPO, Estimator.RLOO])
def test_a_group_is_flat_where_its_estimator_finds_nothing_to_learn(make, estimator):
    """Also for rollout.oversample, which takes the groups that are not."""
    given, flat = grouped_steps()
    words = ("rollout.samples_per_prompt=2", "data.prompts_per_iteration=4")
    config = make(f"algorithm.estimator={estimator}", *words).config
    scores = TargetScores(given.outcome.scores, None)
    rewards = token_rewards(config, given, scores.shaped, None, 0.0)
    found = estimate(config, given, rewards, scores, None)[0]
    learns = [bool(found[2 * group : 2 * group + 2].any()) for group in range(3)]
    assert learns == [not one for one in flat]
    assert flat_rows(given, scores.shaped)[::2].tolist() == flat
    assert with_spread(given, scores.shaped) == [0]
    sums = dataclasses.replace(given, step_rewards=None)
    assert flat_rows(sums, scores.shaped)[::2].tolist() == [True, False, True]


def test_reinforce_baseline_is_whitened_over_tokens(make):
    given = given_steps()
    config = make(
        "algorithm.estimator=reinforce++-baseline",
        "rollout.samples_per_prompt=2",
        "data.prompts_per_iteration=4",
    ).config
    scores = TargetScores(given.outcome.scores, None)
    rewards = token_rewards(config, given, scores.shaped, None, 0.0)
    found = estimate(config, given, rewards, scores, None)[0][given.mask]
    close(found.mean(), 0.0)
    assert float(found.std()) == pytest.approx(1.0, abs=1e-4)


# from a rule to a shard

RULES = """
def turns(*, responses, response_messages, **columns):
    return [[float(len(m["content"])) for m in ms if m["role"] == "assistant"] for ms in response_messages]

def sentences(*, responses, **columns):
    return [[(i + 1, 1.0) for i, c in enumerate(text) if c == "."] or None for text in responses]

def wrong(*, responses, **columns):
    return [[(5, 1.0), (3, 1.0)] for _ in responses]

def beyond(*, responses, **columns):
    return [[(1000, 1.0)] for _ in responses]

def one(*, responses, **columns):
    return [0.5 for _ in responses]
"""


@pytest.fixture
def scored(models, tmp_path, monkeypatch):
    """Scores by a function of the user's module, as the reward stage makes a table of them."""
    module = tmp_path.name
    (tmp_path / f"{module}.py").write_text(RULES)
    monkeypatch.syspath_prepend(str(tmp_path))

    def score(name: str, rows: pa.Table, steps: str = "characters"):
        rule = f"{{kind: rule, function: '{module}:{name}', steps: {steps}, weight: 2}}"
        words = ("reward.components={}", f"reward.components.rule={rule}", "algorithm.kl.coef=0")
        run = make_run(models, tmp_path / "run", *words)
        scores, metrics = component_scores(Context(run.paths, run.config, PREPARE, "test"), rows)
        return reward_table(run.config, rows, scores, None), scores, metrics

    return score


def test_sentences_of_a_response_have_their_rewards_where_they_end(models, scored):
    rows = responses(models, [("p", "One. Two."), ("p", "no end"), ("q", "ü. x")])
    table, _, metrics = scored("sentences", rows)
    assert metrics["abstained/rule"] == 1
    assert table["reward"].to_pylist() == [4.0, None, 2.0]
    steps = table[STEP_REWARDS].to_pylist()
    assert steps[1] is None
    tokens, tokenizer = rows["response_tokens"].to_pylist(), AutoTokenizer.from_pretrained(models / "policy")
    for row, text, ends in ((0, "One. Two.", [4, 9]), (2, "ü. x", [2])):
        at = [i for i, value in enumerate(steps[row]) if value is not None]
        assert len(steps[row]) == len(tokens[row])
        assert [steps[row][i] for i in at] == [2.0] * len(ends), "times the weight"
        assert [tokenizer.decode(tokens[row][: i + 1]) for i in at] == [text[:end] for end in ends]
    given = build_experience(rows, table, [0] * 3)
    assert len(given) == 2
    assert given.step_rewards.nan_to_num().sum(dim=1).tolist() == [4.0, 2.0]
    assert STEP_REWARDS not in given.rewarded.rewards.column_names


def test_turns_of_a_conversation_have_theirs_at_their_last_tokens(scored):
    said = '[{"role": "assistant", "content": "abc"}, {"role": "user", "content": "and?"}, '
    said += '{"role": "assistant", "content": "d"}]'
    mask = [True, True, True, False, False, True, True]
    rows = rollout_table(
        [[5] * 7], response_mask=[mask], num_turns=[2], response_messages=[said], response_text=["abc d"]
    )
    table, scores, _ = scored("turns", rows, steps="turns")
    assert table[STEP_REWARDS].to_pylist() == [[None, None, 6.0, None, None, None, 2.0]]
    assert scores["rule"] == [4.0]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "wrong",
            r"returned \[\(5, 1.0\), \(3, 1.0\)\] instead of a list of pairs \(characters, number\) in order",
        ),
        ("beyond", "a step up to character 1000, and its text has 6; give at most that"),
        ("one", "returned 0.5 instead of a list of pairs"),
    ],
)
def test_what_is_no_list_of_steps_is_named_with_its_row(models, scored, name, said):
    with pytest.raises(UserError, match=said) as found:
        scored(name, responses(models, [("p", "a text")]))
    assert "prompt_id p0, sample 0" in str(found.value)


def test_another_number_of_steps_than_turns_is_named(scored):
    said = '[{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]'
    rows = rollout_table([[5, 6]], response_messages=[said], response_text=["a"])
    with pytest.raises(UserError, match=r"2 steps, and it has 1 turns; give one number for each turn"):
        scored("turns", rows, steps="turns")


def test_a_pool_hands_on_the_steps_of_its_components(models, scored):
    rows = responses(models, [("p", "One. Two."), ("p", "no end")])
    _, scores, _ = scored("sentences", rows)
    found = scores_in(score_table(rows, scores, teachers={}, with_steps=["rule"]), "rule")
    assert found == scores["rule"]
    assert found[0].steps == list(scores["rule"][0].steps)
    assert step_columns({}) == {}


def test_other_components_give_their_score_at_the_last_token_and_abstentions_scale_the_rest():
    steps = SteppedScore.of([None, 1.0, None, 0.5])
    mask = [True, True, False, True]
    assert steps == 1.5
    assert step_rewards([steps, 3.0], [1.0, 0.5], mask) == [None, 1.0, None, 2.0]
    assert step_rewards([steps, None], [1.0, 0.5], mask) == [None, 1.5, None, 0.75]
    assert step_rewards([None, 3.0], [1.0, 0.0], mask) is None
    assert step_rewards([2.0], [1.0], []) == []


def test_characters_of_conversations_are_refused(models, tmp_path):
    config = config_of(models, tmp_path / "run", "rollout.multi_turn={scheduler: 'a:b'}")
    rule = RuleConfig(function="a:b", steps=StepUnit.CHARACTERS)
    reward = dataclasses.replace(config.reward, components={"rule": rule})
    problems = [str(one) for one in contradictions(dataclasses.replace(config, reward=reward))]
    assert any(
        "steps" in one and "a conversation is no single text; set it to turns" in one for one in problems
    )


def test_without_steps_shards_and_numbers_are_as_they_were(models, scored):
    rows = responses(models, [("p", "One. Two.")])
    table, _, _ = scored("one", rows, steps="null")
    assert table.column_names[-1] == "reward/rule"
    assert build_experience(rows, table, [0]).step_rewards is None
    np.testing.assert_equal(table["reward"].to_pylist(), [1.0])
