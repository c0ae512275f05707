"""The PPO update on tiny models: exact first ratios, no trace of micro-batching, what the stage commits."""

import dataclasses
import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    PretrainedConfig,
)

from pipeline.config.algorithm import GROUP_ESTIMATORS, Estimator, KLConfig, KLController
from pipeline.config.conversion import converted
from pipeline.config.update import Precision
from pipeline.run.commits import read_record
from pipeline.run.tasks import Stage, Task
from stages.context import UserError
from stages.ppo.critics import load_critic
from stages.ppo.math.masked import NoValidTokens
from stages.ppo.math.mismatch import mismatch_metrics
from stages.ppo.math.shaping import RunningMoments
from stages.ppo.metrics import mean_kl, update_metrics
from stages.ppo.minibatches import StepPosition, split_epoch
from stages.ppo.resuming import unlike
from stages.ppo.state.learned import Learned, TrainerState, resumed
from stages.ppo.targets import TargetScores, estimate, token_rewards
from stages.ppo.update import learned
from tests.support import tiny
from tests.support.learning import (
    difference,
    experience,
    make_learner,
    metrics_of,
    updated,
    weights,
    with_scores,
)
from tests.support.processes import make_run, stage
from tests.support.trainers import save_state, state_of


@pytest.mark.parametrize(("budget", "holes"), [(64, True), (100, False), (4096, True)])
def test_the_first_ratio_is_exactly_one_however_rows_are_batched(make, budget, holes):
    metrics = metrics_of(make(f"update.tokens_per_micro_batch={budget}"), experience(holes=holes))
    assert metrics["policy/ratio_error_first"] == 0.0
    assert metrics["policy/ratio"] != 1.0


@pytest.mark.parametrize(
    ("estimator", "with_kl"),
    [*((estimator, True) for estimator in Estimator), (Estimator.GAE, False), (Estimator.GRPO, False)],
)
def test_every_estimator_moves_the_weights_and_reports_finite_numbers(make, estimator, with_kl):
    samples = 1 if estimator is Estimator.GAE else 4
    learner = make(
        f"algorithm.estimator={estimator}",
        f"rollout.samples_per_prompt={samples}",
        "data.prompts_per_iteration=2",
    )
    before = weights(learner)
    given = experience(samples=samples, with_kl=with_kl, holes=True, greedy=estimator is Estimator.REMAX)
    metrics = metrics_of(learner, given)
    assert difference(before, weights(learner)) > 1e-4
    assert {name for name, value in metrics.items() if not math.isfinite(value)} == set()
    assert ("objective/kl" in metrics) is with_kl
    assert ("value/explained_variance" in metrics) is (estimator is Estimator.GAE)


def test_without_kl_there_is_no_kl_to_control(make):
    given = experience(with_kl=False)
    assert mean_kl(given, updated(make(), given).targets) is None


def test_observation_tokens_are_trained_on_by_nobody(make):
    """Log-probabilities of what the environment wrote do not count, not even when they are NaN."""
    given = experience(holes=True)
    learner = make()
    targets = updated(learner, given).targets
    dirty = torch.where(given.mask, given.rollout_log_probs, torch.nan)
    again = make()
    reference = torch.where(given.mask, given.reference_log_probs, torch.nan)
    spoiled = dataclasses.replace(given, rollout_log_probs=dirty, reference_log_probs=reference)
    updated(again, spoiled)
    assert difference(weights(learner), weights(again)) == 0
    assert bool(torch.isfinite(targets.advantages[given.mask]).all())


def test_a_row_of_nothing_but_observations_teaches_nothing(make):
    given = experience()
    mask = given.mask.clone()
    mask[2] = False
    given = dataclasses.replace(given, mask=mask)
    learner, other = make(), make()
    metrics = metrics_of(learner, given)
    assert all(math.isfinite(value) for value in metrics.values())
    scores = given.outcome.scores.clone()
    scores[2] = 100.0
    updated(other, with_scores(given, scores))
    assert difference(weights(learner), weights(other)) == 0


def test_an_iteration_of_nothing_but_observations_is_a_clear_error(make):
    given = experience()
    nothing = dataclasses.replace(given, mask=torch.zeros_like(given.mask))
    with pytest.raises(NoValidTokens, match="none of the 8 responses has a token that the policy wrote"):
        updated(make(), nothing)


def test_rows_that_the_policy_wrote_nothing_in_are_in_no_mini_batch(make):
    given = experience()
    learner = make("algorithm.whiten_advantages=false")
    rows = split_epoch(learner.config, given, 1, 0)[0].rows
    mask = given.mask.clone()
    mask[list(rows)] = False
    given = dataclasses.replace(given, mask=mask)
    dealt = [list(batch.rows) for batch in split_epoch(learner.config, given, 1, 0)]
    assert sorted(i for batch in dealt for i in batch) == sorted(set(range(8)) - set(rows))
    assert [len(batch) for batch in dealt] == [2, 2]
    assert all(math.isfinite(value) for value in metrics_of(learner, given).values())


@pytest.mark.parametrize(
    ("estimator", "packed"), [*((estimator, True) for estimator in Estimator), (Estimator.GAE, False)]
)
def test_a_prompt_that_the_engine_refused_goes_through_no_model_and_is_counted(make, estimator, packed):
    """Its tokens may be none that the models have; every sample of it is refused."""
    greedy = estimator is Estimator.REMAX
    samples = 2 if greedy or estimator in GROUP_ESTIMATORS else 1
    learner = make(
        f"algorithm.estimator={estimator}",
        f"rollout.samples_per_prompt={1 if greedy else samples}",
        "data.prompts_per_iteration=4",
        f"update.remove_padding={packed}",
    )
    given = experience(rows=8, samples=samples, greedy=greedy, refused=range(2 * samples, 3 * samples))
    before = weights(learner)
    metrics = metrics_of(learner, given)
    assert difference(before, weights(learner)) > 1e-4
    assert {name for name, value in metrics.items() if not math.isfinite(value)} == set()
    count = 1 if greedy else samples
    refused = count / len(given.rewarded)
    assert len(given.rewarded) - len(given) == metrics["reward/discarded"] == count
    assert metrics["finish_reason/refused"] == refused
    assert metrics["response_length/min"] == 0


def test_the_reward_lies_on_the_last_token_of_the_policy(make):
    given = experience(holes=True, with_kl=False)
    mask = given.mask.clone()
    mask[0, -4:] = False
    mask[1] = False
    given = dataclasses.replace(given, mask=mask)
    rewards = token_rewards(
        make().config, given, given.outcome.scores, torch.zeros_like(given.rollout_log_probs), 0.0
    )
    for row in range(len(given)):
        columns = rewards[row].nonzero().flatten().tolist()
        owned = mask[row].nonzero().flatten().tolist()
        assert columns == owned[-1:]
        assert rewards[row].sum() == (given.outcome.scores[row] if owned else 0)


def test_kl_is_taken_off_the_reward_at_every_token(make):
    given = experience()
    old = given.reference_log_probs + 0.1 * given.mask
    with_kl = token_rewards(make().config, given, given.outcome.scores, old, 2.0)
    without = token_rewards(make().config, given, given.outcome.scores, old, 0.0)
    torch.testing.assert_close((without - with_kl)[given.mask], torch.full((int(given.mask.sum()),), 0.2))
    assert bool((with_kl[~given.mask] == 0).all())


def test_the_critic_may_have_a_lambda_of_its_own(make):
    """With 1 it learns the whole reward to come, while advantages stay those of lam."""
    given = experience()
    values, rewards = torch.rand_like(given.rollout_log_probs), given.mask.float()
    scores = TargetScores(given.outcome.scores, None)
    plain, own, whole = (
        estimate(make(*words).config, given, rewards, scores, values)
        for words in ((), ("algorithm.critic_lam=1",), ("algorithm.lam=1",))
    )
    torch.testing.assert_close(own[0], plain[0])
    torch.testing.assert_close(own[1][given.mask], whole[1][given.mask])
    assert not torch.allclose(own[1][given.mask], plain[1][given.mask])


def test_mini_batches_are_a_fresh_permutation_each_epoch_and_the_same_each_time(make):
    config, given = make().config, experience()
    epochs = [[list(b.rows) for b in split_epoch(config, given, 1, epoch)] for epoch in (0, 1, 0)]
    assert epochs[0] == epochs[2] != epochs[1]
    assert [sorted(i for rows in epoch for i in rows) for epoch in epochs] == [list(range(8))] * 3
    assert [list(b.rows) for b in split_epoch(config, given, 2, 0)] != epochs[0]
    for batch in split_epoch(config, given, 1, 0):
        assert sorted(i for m in batch.micro_batches for i in m.rows.tolist()) == sorted(batch.rows)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_routers_that_jitter_in_training_do_not_where_probabilities_are_compared(
    models, tmp_path, make, checkpointing
):
    """Mixtral's multiply what they see by random numbers; the first ratio was off by a hundredth."""
    folder = tmp_path / "inputs"
    shutil.copytree(models, folder)
    llama = AutoConfig.from_pretrained(folder / "policy")
    shape = {name: getattr(llama, name) for name in ("vocab_size", "hidden_size", "num_attention_heads")}
    shape |= {"head_dim": 32, "num_key_value_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
    config = MixtralConfig(**shape, num_local_experts=2, router_jitter_noise=0.1, attention_dropout=0.1)
    MixtralForCausalLM(config).save_pretrained(folder / "policy")
    settings = (*GRPO, f"update.activation_checkpointing={checkpointing}".lower(), "model.context_length=64")
    learner = make_learner(folder, tmp_path / "run", *settings)
    metrics = metrics_of(learner, experience(samples=4))
    assert metrics["policy/ratio_error_first"] == 0
    assert metrics["policy/steps"] == 4


SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
WITH_DROPOUT = {
    "OPT": OPTConfig(**SMALL, ffn_dim=32, word_embed_proj_dim=32, dropout=0.4, attention_dropout=0.3),
    "GPT-2": GPT2Config(n_embd=32, n_layer=1, n_head=2, resid_pdrop=0.4, embd_pdrop=0.3, attn_pdrop=0.2),
    "GPT-NeoX": GPTNeoXConfig(**SMALL, intermediate_size=32, hidden_dropout=0.4, attention_dropout=0.3),
}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", list(WITH_DROPOUT))
def test_dropout_draws_nothing_while_training_and_stays_in_the_policy_that_is_made(
    models, tmp_path, make, family, checkpointing
):
    """A layer of OPT drops by a rate of its own, and layers that compute twice stay in training mode."""
    folder = tmp_path / "inputs"
    shutil.copytree(models, folder)
    config: PretrainedConfig = WITH_DROPOUT[family]
    config.vocab_size = AutoConfig.from_pretrained(folder / "policy").vocab_size
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "policy")
    given = json.loads((folder / "policy" / "config.json").read_text())
    settings = (*GRPO, f"update.activation_checkpointing={checkpointing}".lower(), "model.context_length=64")
    learner = make_learner(folder, tmp_path / "run", *settings)
    assert metrics_of(learner, experience(samples=4))["policy/ratio_error_first"] == 0
    learner.policy.save_model(tmp_path / "made")
    assert json.loads((tmp_path / "made" / "config.json").read_text()) == given


ONE_STEP = ("update.epochs=1", "update.minibatches=1")
GRPO = ("algorithm=grpo", "rollout.samples_per_prompt=4", "data.prompts_per_iteration=2")


def test_responses_that_end_with_the_last_token_that_fits_are_not_cut(make):
    """Row 17 of these has max_new_tokens=12 tokens, and its last one is an end."""
    given = experience(rows=20)
    reasons = given.rewarded.responses["finish_reason"].to_pylist()
    assert (float(given.outcome.lengths[17]), reasons[17]) == (12, "stop")
    metrics = metrics_of(make("data.prompts_per_iteration=20"), given)
    assert metrics["response_length/clip_ratio"] == reasons.count("length") / 20 == 0.25


@pytest.mark.parametrize("settings", [GRPO, ("algorithm.kl.coef=0",)])
def test_the_only_step_of_an_iteration_gives_the_old_log_probabilities_itself(
    make, monkeypatch, caplog, settings
):
    """Bit for bit what a pass for them before the step gives, and as many metrics, without that pass."""
    given = experience(samples=4, holes=True, with_kl=settings == GRPO)
    seen = []
    for is_skipped in (True, False):
        caplog.clear()
        if not is_skipped:
            monkeypatch.setattr("stages.ppo.learner.step_gives_old_log_probs", lambda config: False)
        learner, passes = make(*ONE_STEP, *settings), []
        learner.policy.model.register_forward_hook(lambda *_, passes=passes: passes.append(1))
        metrics = metrics_of(learner, given)
        seen.append((weights(learner), metrics, len(passes), "the step gives them" in caplog.text))
    (one, measured, fewer, is_told), (other, expected, more, is_told_again) = seen
    assert difference(one, other) == 0
    assert expected.pop("policy/ratio_error_first") == 0
    assert measured == expected
    assert measured["mismatch/k3"] > 0
    # passes that show whether logits may be made a part at a time, and whether prompts may be shared
    trial = 4 if settings == GRPO else 2
    assert (2 * (fewer - trial), is_told, is_told_again) == (more - trial, True, False)


@pytest.mark.parametrize(
    "needed", [(), (*GRPO, "update.minibatches=2"), (*GRPO, "algorithm.correction.level=token")]
)
def test_old_log_probabilities_are_computed_first_where_anything_needs_them(make, needed):
    """A KL in the reward, a second step, importance weights."""
    metrics = metrics_of(make(*ONE_STEP, *needed), experience(samples=4))
    assert metrics["policy/ratio_error_first"] == 0


ROLLOUTS = (*GRPO, "algorithm.old_log_probs=rollout")


@pytest.mark.parametrize("steps", [ONE_STEP, ("update.epochs=2", "update.minibatches=2")])
def test_with_the_rollouts_log_probabilities_the_trainer_makes_no_pass_for_them(make, caplog, steps):
    """Where the engine gave the trainer's numbers the same is learned, bit for bit, in fewer passes."""
    given = experience(samples=4, holes=True)
    old = updated(make(*GRPO, *steps), given).before
    given = dataclasses.replace(given, rollout_log_probs=old)
    seen = []
    for settings in (GRPO, ROLLOUTS):
        caplog.clear()
        learner, passes = make(*settings, *steps), []
        learner.policy.model.register_forward_hook(lambda *_, passes=passes: passes.append(1))
        metrics = metrics_of(learner, given)
        seen.append((weights(learner), metrics, len(passes), "none are computed" in caplog.text))
    (one, expected, more, _), (other, metrics, fewer, is_told) = seen
    assert is_told
    assert difference(one, other) == 0
    expected.pop("policy/ratio_error_first", None)
    assert metrics == expected
    assert metrics["mismatch/max"] == 0
    of_epoch = len(split_epoch(learner.config, given, 1, 0)) if steps != ONE_STEP else 0
    assert more - fewer == of_epoch, "a micro-batch for each mini-batch"


def test_with_the_rollouts_log_probabilities_numbers_say_what_they_are_of(make):
    """The mismatch of the rows that were computed before any step, the ratio to what the engine gave; no
    first ratio, which need not be 1."""
    given = experience(samples=4, holes=True)
    learner = make(*ROLLOUTS, "update.minibatches=2", "update.epochs=1")
    done = updated(learner, given)
    metrics = update_metrics(learner.config, given, done)
    first, _ = split_epoch(learner.config, given, 1, 0)
    assert done.compared.any(dim=1).nonzero().flatten().tolist() == sorted(first.rows)
    before = updated(make(*GRPO, "update.minibatches=2", "update.epochs=1"), given).before
    assert torch.equal(done.before[done.compared], before[done.compared])
    expected = mismatch_metrics(given.rollout_log_probs, before, done.compared)
    assert {name: metrics[name] for name in expected} == expected
    assert "policy/ratio_error_first" not in metrics
    gap = (before - given.rollout_log_probs).exp()[done.compared].mean()
    ratio = done.steps.sums[0]["ratio"] / int(done.compared.sum())
    assert ratio == pytest.approx(float(gap), rel=1e-5)
    assert abs(ratio - 1) > 0.01
    assert metrics["objective/kl"] == 0, "of the policy that wrote the responses, here the reference"


def test_an_engine_that_gave_no_log_probabilities_is_named(make):
    given = experience(samples=4)
    unknown = given.rollout_log_probs.clone()
    unknown[3, 0] = math.nan
    given = dataclasses.replace(given, rollout_log_probs=unknown)
    with pytest.raises(UserError, match="gave no log-probability for 1 tokens, and algorithm"):
        updated(make(*ROLLOUTS), given)


def test_m2po_reports_the_second_moment_before_and_after(make):
    given = experience(holes=True)
    settings = "algorithm.correction={level: token, mode: m2po, second_moment: 0.02}"
    metrics = metrics_of(make(settings), given)
    assert metrics["correction/second_moment"] > 0.02 >= metrics["correction/second_moment_kept"] > 0
    assert 0 < metrics["correction/masked_share"] < 0.5
    assert metrics["policy/ratio_error_first"] == 0
    assert "correction/second_moment" not in metrics_of(make("algorithm.correction.level=token"), given)


def test_a_fresh_critic_knows_nothing_and_learns(make):
    learner = make("update.critic_learning_rate=1e-2", "update.epochs=4")
    given = experience()
    first = updated(learner, given, 0.0).targets
    assert float(first.old_values.abs().max()) == 0.0
    losses = []
    for iteration in range(2, 6):
        losses.append(updated(learner, given, 0.0, iteration).steps.sums[-1]["value_loss"])
    assert losses[-1] < losses[0]


def test_equal_rewards_are_reported_and_change_nothing_but_by_kl(make):
    learner = make("algorithm=grpo", "rollout.samples_per_prompt=4", "data.prompts_per_iteration=2")
    before = weights(learner)
    metrics = metrics_of(learner, experience(samples=4, with_kl=False, rewards=[0.7] * 8))
    assert metrics["reward/frac_zero_std"] == 1
    assert all(math.isfinite(value) for value in metrics.values())
    assert difference(before, weights(learner)) < 1e-6
    metrics = metrics_of(make(), experience(rewards=[0.7] * 8))
    assert metrics["reward/frac_zero_std"] == 1


def test_a_trainer_state_too_large_for_one_file_is_read_as_one(make, tmp_path, monkeypatch):
    learner = make()
    updated(learner, experience())
    save_state(learner.policy, tmp_path / "whole")
    monkeypatch.setattr("stages.ppo.state.saved_state.LARGEST_FILE", 5_000)  # less than some tensors
    save_state(learner.policy, tmp_path / "parts")
    assert len(list((tmp_path / "parts").iterdir())) > 10
    states = []
    for folder in ("whole", "parts"):
        other = make().policy
        other.load_state(tmp_path / folder)
        states.append(state_of(other))
        assert other.steps == 4
    assert difference(*states) == 0
    assert difference(states[0], state_of(learner.policy)) == 0


def test_a_state_that_is_not_what_was_learned_is_found_out(make):
    learner, given = make(), experience()
    steps = updated(learner, given).steps
    numbers = learned(learner, TrainerState(1, 0.05, 8, RunningMoments(), 0), steps)
    assert [decision["critic"] for decision in numbers.decisions] == ["taken"] * 4
    assert converted(Learned, json.loads(numbers.to_json())) == numbers
    assert unlike(learner, numbers) is None
    updated(learner, given, iteration=2)
    assert "policy: its exp_avg/" in unlike(learner, numbers)


def test_a_critic_may_lack_its_head_but_no_weight_of_its_backbone(tmp_path):
    critic = tiny.make_policy(tmp_path / "critic")
    loaded = load_file(critic / "model.safetensors")
    del loaded["model.layers.1.mlp.up_proj.weight"]
    save_file(loaded, critic / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks weights .*: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_critic(critic, Precision.FP32, trust_remote_code=False)


def test_a_learning_rate_never_leaves_its_schedule_whatever_a_fork_changes(make):
    """A fork of iteration 8 of 10 with other epochs and mini-batches is where its parent would have been."""
    for epochs, minibatches in ((4, 2), (1, 8)):
        config = make("iterations=10", f"update.epochs={epochs}", f"update.minibatches={minibatches}").config
        position, total = StepPosition(9, 0, 0).position(config)
        assert position / total == 0.8
        last, total = StepPosition(10, epochs - 1, minibatches - 1).position(config)
        assert last == total - 1


# the stage


def scored_run(models, folder, *more):
    """A run up to its first update."""
    run = make_run(models, folder, "rollout.num_shards=1", *more)
    for task in (("prepare",), ("rollout", 1), ("reward", 1)):
        done = stage(run, *task)
        assert done.code == 0, done.log
    return run


@pytest.mark.parametrize(("controller", "coef"), [(KLController.FIXED, 0.5), (KLController.ADAPTIVE, 0.05)])
def test_a_fixed_kl_coefficient_is_a_forks_own_and_an_adapted_one_goes_on(controller, coef):
    state = TrainerState(3, 0.05, 24, RunningMoments(), 0)
    assert resumed(state, KLConfig(coef=0.5, controller=controller)) == dataclasses.replace(
        state, kl_coef=coef
    )


def test_a_critic_that_computes_nan_commits_nothing(models, tmp_path):
    """Its weights are numbers, so that prepare has nothing to say."""
    critic = tiny.make_policy(tmp_path / "critic")
    loaded = load_file(critic / "model.safetensors")
    loaded["model.layers.1.mlp.up_proj.weight"][:] = 3e38
    save_file(loaded, critic / "model.safetensors", metadata={"format": "pt"})
    run = scored_run(models, tmp_path / "run", f"model.critic={critic}")
    done = stage(run, "update", 1)
    assert done.code == 1
    assert "step skipped: the policy loss is nan in iteration 1, epoch 1, mini-batch 1; rows" in done.log
    assert "(3 steps skipped; max_skipped_steps is 2)" in done.log
    assert read_record(run.paths, Task(1, Stage.UPDATE)) is None
    assert not run.paths.policies.exists()


def test_generation_settings_that_transformers_would_not_save_do_not_lose_an_update(models, tmp_path):
    """Models in the wild have a temperature without do_sample; saving must not fail after the training."""
    policy = tiny.make_policy(tmp_path / "policy")
    settings = '{"do_sample": false, "temperature": 0.9, "top_p": 0.6, "eos_token_id": 1}'
    (policy / "generation_config.json").write_text(settings)
    run = scored_run(models, tmp_path / "run", f"model.policy={policy}")
    done = stage(run, "update", 1)
    assert done.code == 0, done.log
    (saved,) = run.paths.policies.glob("00001.*/generation_config.json")
    assert saved.read_text() == settings


def test_updates_with_zero_in_half_precision_go_on_over_iterations(models, tmp_path):
    """In full precision, and with other numbers of ranks: tests/stages/test_ranks.py."""
    run = scored_run(models, tmp_path / "run", "update.precision=bf16", "update.zero_stage=3")
    for task in (("update", 1), ("rollout", 2), ("reward", 2), ("update", 2)):
        done = stage(run, *task)
        assert done.code == 0, done.log
    metrics = read_record(run.paths, Task(2, Stage.UPDATE)).metrics
    assert metrics["policy/ratio_error_first"] == 0
    assert metrics["policy/grad_norm"] > 0
