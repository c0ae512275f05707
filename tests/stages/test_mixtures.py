"""Mixtures of experts: whatever the class, the loss of routers is transformers' own, over the tokens that a
batch has, and everything else of an update is as it is for other models."""

import math
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from stages.context import UserError
from stages.ppo.batching import Row, collate, collate_shared
from stages.ppo.forward import response_log_probs
from stages.ppo.minibatches import split_epoch
from stages.ppo.routers import Routers, routers_of
from stages.ppo.training import Learner
from tests.support.families import family, make_mixture
from tests.support.learning import (
    difference,
    experience,
    make_learner,
    metrics_of,
    process_group,
    updated,
    weights,
)
from tests.support.tables import sample

WITH_LOSS = (
    *("ernie4_5_moe", "flex_olmo", "gpt_oss", "granitemoe", "granitemoehybrid", "granitemoeshared", "jamba"),
    *("minimax", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe"),
    "qwen3_next",
)
"""Families that transformers has such a loss for."""
GRPO = ("algorithm=grpo", "rollout.samples_per_prompt=4", "data.prompts_per_iteration=2")
ROWS = [Row([5, 6, 7], [8, 9, 10, 11]), Row([5, 6, 7], [12]), Row([4] * 9, [8, 9])]


@pytest.fixture(scope="module", autouse=True)
def group():
    with process_group():
        yield


@pytest.fixture
def inputs(models, tmp_path):
    """Make the inputs of a run whose policy is a mixture of the byte tokenizer's vocabulary."""

    def made(name: str, **settings: object) -> Path:
        folder = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}"
        return make_mixture(models, folder, name, **settings)

    return made


def learner_of(folder: Path, *more: str) -> Learner:
    return make_learner(folder, folder / "run", *GRPO, "model.context_length=64", *more)


def loss_of(model: PreTrainedModel, *batches) -> list[torch.Tensor]:
    routers = routers_of(model, 1.0)
    assert isinstance(routers, Routers)
    found = []
    for batch in batches:
        with routers.recorded() as logits:
            response_log_probs(model, batch, temperature=1.0)
        found.append(routers.loss(logits, batch))
    return found


@pytest.mark.parametrize("name", sample(WITH_LOSS, 1 / 4))
def test_the_loss_of_routers_is_that_of_transformers_without_padding(name):
    model, batch = family(name), collate(ROWS, [0, 1, 2])
    given = {"input_ids": batch.input_ids, "attention_mask": batch.is_real.long()}
    wanted = model(**given, output_router_logits=True).aux_loss
    (found,) = loss_of(model, batch)
    torch.testing.assert_close(found, wanted)
    found.backward()
    router, _ = routers_of(model, 1.0).modules[0]
    assert all(bool(one.grad.any()) for one in router.parameters() if one.requires_grad)


def test_the_loss_is_over_the_tokens_that_a_micro_batch_has_in_any_layout():
    model = family("qwen3_moe")
    apart, packed, shared = collate(ROWS, [0, 1, 2]), collate(ROWS, [0, 1, 2], True), [[0, 1], [2]]
    of_padded, of_packed = loss_of(model, apart, packed)
    torch.testing.assert_close(of_packed, of_padded)
    lines = collate_shared(ROWS, shared)
    assert [int(batch.is_real.sum()) for batch in (apart, packed, lines)] == [22, 22, 20]
    assert [batch.num_tokens for batch in (apart, packed, lines)] == [22, 22, 20]
    model.config.output_router_logits = True  # the model's own loss takes no mask of shared lines
    (of_shared,) = loss_of(model, lines)
    assert 1.5 < float(of_shared) < 3


@pytest.mark.parametrize("name", sample(("qwen3_moe", "gpt_oss", "deepseek_v3"), 1 / 3))
@pytest.mark.parametrize("budget", [64, 4096])
def test_old_and_new_policy_agree_on_a_mixture_to_the_last_bit(name, budget, inputs):
    """As of any other model; deepseek_v3 balances its experts by a bias, and has no such loss."""
    learner = learner_of(inputs(name, output_router_logits=True), f"update.tokens_per_micro_batch={budget}")
    metrics = metrics_of(learner, experience(samples=4))
    assert metrics["policy/ratio_error_first"] == 0.0
    assert ("policy/router_loss" in metrics) == (name != "deepseek_v3")
    assert all(math.isfinite(value) for value in metrics.values())


def test_the_weight_is_that_of_config_json_where_its_output_router_logits_is_true(inputs):
    given, own = experience(samples=4), {"router_aux_loss_coef": 0.5}
    asked, silent = inputs("qwen3_moe", **own, output_router_logits=True), inputs("qwen3_moe", **own)
    key = "algorithm.router_aux_loss_coef"
    learned = {}
    for case, learner in {
        "config": learner_of(asked),
        "key": learner_of(silent, f"{key}=0.5"),
        "zero": learner_of(asked, f"{key}=0"),
        "none": learner_of(silent),
    }.items():
        updated(learner, given)
        learned[case] = weights(learner)
    assert difference(learned["config"], learned["key"]) == 0
    assert difference(learned["zero"], learned["none"]) == 0
    assert difference(learned["config"], learned["none"]) > 1e-4


def test_micro_batches_weigh_in_the_loss_by_their_tokens(inputs):
    """Each has a loss of its own: what is equally busy over all of them is not over each."""
    folder = inputs("qwen3_moe")
    learner = learner_of(folder, "algorithm.router_aux_loss_coef=1", "update.tokens_per_micro_batch=24")
    given = experience(samples=4)
    batch = split_epoch(learner.config, given, 1, 0)[0]
    assert len(batch.micro_batches) > 1
    losses = loss_of(learner.policy.model, *batch.micro_batches)
    tokens = [micro.num_tokens for micro in batch.micro_batches]
    wanted = sum(float(loss) * n for loss, n in zip(losses, tokens, strict=True)) / sum(tokens)
    done = updated(learner, given)
    assert done.steps.sums[0]["router_loss"] == pytest.approx(wanted, rel=1e-5)


def test_responses_without_an_advantage_are_routed_too(inputs):
    """They have no gradient of the policy's loss, and are left out of updates of other models."""
    rewards = [1.0] * 4 + [0.0, 1.0, 0.0, 1.0]
    settings = ("algorithm.kl.coef=0", "update.epochs=1", "update.minibatches=1")
    given, computed = experience(samples=4, with_kl=False, rewards=rewards), {}
    for coef in (0, 1):
        learner = learner_of(inputs("qwen3_moe"), *settings, f"algorithm.router_aux_loss_coef={coef}")
        computed[coef] = metrics_of(learner, given)["policy/computed_responses"]
    assert computed == {0: 4.0, 1: 8.0}


def test_rewards_that_are_all_equal_leave_the_loss_of_routers_to_learn(inputs):
    folder, settings = (
        inputs("qwen3_moe", initializer_range=0.3),
        ("algorithm.kl.coef=0", "update.epochs=9", "update.minibatches=1"),
    )
    learner = learner_of(folder, *settings, "algorithm.router_aux_loss_coef=1", "update.learning_rate=0.02")
    given = experience(samples=4, with_kl=False, rewards=[1.0] * 8)
    first, *_, last = (sums["router_loss"] for sums in updated(learner, given).steps.sums)
    assert first > 2.04
    assert last < 2.02


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama", "LlamaForCausalLM has no experts; leave it out, or give 0"),
        ("deepseek_v3", "DeepseekV3ForCausalLM has no loss of its routers (router_aux_loss_coef) in "),
    ],
)
def test_a_weight_for_a_model_without_such_a_loss_is_refused(name, said):
    with pytest.raises(UserError) as refused:
        routers_of(family(name), 0.1)
    assert str(refused.value).startswith(f"algorithm.router_aux_loss_coef=0.1: {said}")
    assert routers_of(family(name), None) is None
