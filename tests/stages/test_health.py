"""An update that meets numbers that are not finite, moves too far, or has too little memory."""

from pathlib import Path

import pytest
import torch

from pipeline.config.resolve import resolve
from pipeline.forecast.shapes import ModelShape
from pipeline.run.failures import FailureKind
from pipeline.run.plan import policy_maker
from stages.attempts.failures import classify, explain
from stages.context import NumericalError, OutOfMemory
from stages.ppo.experience import Experience
from stages.ppo.memory import needs_of, out_of_memory_explained, suggestions
from tests.support.composed import composed_of
from tests.support.learning import difference, experience, metrics_of, updated, weights, with_scores

GIB = 2**30


def spoiled(value: float, row: int = 5) -> Experience:
    """One response whose score is not a number."""
    given = experience()
    scores = given.outcome.scores.clone()
    scores[row] = value
    return with_scores(given, scores)


NOT_WHITENED = ("algorithm.whiten_advantages=false", "update.epochs=1")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_step_from_a_bad_score_is_skipped_and_the_others_are_taken(make, caplog, value):
    learner = make(*NOT_WHITENED)
    before = weights(learner)
    metrics = metrics_of(learner, spoiled(value))
    said = caplog.text
    assert "step skipped: the policy loss is" in said
    assert "in iteration 1, epoch 1, mini-batch 1; rows (prompt_id/sample) of shard 1: p5/0" in said
    assert metrics["policy/skipped_steps"] == 1
    assert metrics["policy/steps"] == 1
    assert difference(before, weights(learner)) > 1e-4
    assert all(bool(torch.isfinite(weight).all()) for weight in weights(learner).values())


def test_one_skipped_step_too_many_fails_the_update(make):
    learner = make(*NOT_WHITENED, "update.max_skipped_steps=0")
    before = weights(learner)
    with pytest.raises(NumericalError, match=r"p5/0 \(1 steps skipped; max_skipped_steps is 0\)"):
        updated(learner, spoiled(torch.nan))
    assert difference(before, weights(learner)) == 0


def test_an_update_without_any_step_fails_however_many_may_be_skipped(make):
    learner = make(*NOT_WHITENED, "update.minibatches=1", "update.max_skipped_steps=99")
    with pytest.raises(NumericalError, match=r"no step could be taken: .* iteration 1, .*shard 1: p5/0$"):
        updated(learner, spoiled(torch.nan))


def test_a_gradient_that_is_not_finite_skips_the_step_of_that_model_alone(make, caplog):
    learner = make("update.epochs=1")
    parameter = next(p for name, p in learner.critic.model.named_parameters() if name.endswith("norm.weight"))
    seen = []
    parameter.register_hook(
        lambda gradient: gradient * (torch.nan if not seen.append(1) and len(seen) == 1 else 1)
    )
    before = weights(learner)
    metrics = metrics_of(learner, experience())
    assert "step skipped: the gradient norm of the critic is nan in iteration 1" in caplog.text
    assert metrics["policy/skipped_steps"] == 1
    assert metrics["policy/steps"] == 2
    assert difference(before, weights(learner)) > 1e-4


def test_a_policy_that_moves_too_far_ends_the_iteration_early(make):
    far = ("update.learning_rate=1e-2", "update.epochs=4")
    free, held = make(*far), make(*far, "algorithm.target_kl=0.001")
    metrics = [metrics_of(learner, experience()) for learner in (free, held)]
    assert [m["policy/stopped_early"] for m in metrics] == [0, 1]
    assert metrics[0]["policy/steps"] == 8
    assert 1 <= metrics[1]["policy/steps"] < 8
    assert metrics[1]["policy/approx_kl"] < metrics[0]["policy/approx_kl"]


def test_what_target_kl_ends_is_as_if_it_had_never_begun(make):
    """The steps before are the only ones, and a next iteration goes on from them."""
    far = ("update.learning_rate=1e-2", "update.epochs=1")
    held, one_step = make(*far, "algorithm.target_kl=1e-9"), make(*far)
    done = updated(held, experience())
    assert len(done.steps.sums) == 1
    other = updated(one_step, experience())
    assert done.steps.sums[0] == other.steps.sums[0]
    assert held.policy.steps == 1
    updated(held, experience(), iteration=2)
    assert all(bool(torch.isfinite(weight).all()) for weight in weights(held).values())


# memory


SEVEN_BILLION = ModelShape(
    parameters=7_000_000_000,
    layers=32,
    hidden=4096,
    inner=11008,
    heads=32,
    key_heads=32,
    head_size=128,
    vocabulary=32000,
)


def config_of(inputs: Path, tmp_path: Path, *more: str):
    return resolve(composed_of(inputs, tmp_path / "run", *more))


def advised(config, micro_batch: int, num_ranks: int) -> list[str]:
    needs = needs_of(config.update, SEVEN_BILLION, micro_batch, num_ranks)
    return suggestions(config.update, needs, 1000, num_ranks)


def test_seven_billion_weights_need_16_bytes_each_in_fp32_and_18_in_bf16(inputs, tmp_path):
    fp32, bf16, sharded = (
        needs_of(config_of(inputs, tmp_path, *given).update, SEVEN_BILLION, 1, ranks).states
        for given, ranks in (
            ((), 1),
            (("update.precision=bf16", "update.zero_stage=1"), 1),
            (("update.precision=bf16", "update.zero_stage=3"), 8),
        )
    )
    assert fp32 == 16 * 7e9
    assert bf16 == 18 * 7e9
    assert sharded == 18 * 7e9 / 8


def test_advice_begins_with_what_takes_most(inputs, tmp_path):
    large_batch = config_of(
        inputs,
        tmp_path,
        "update.zero_stage=3",
        "update.precision=bf16",
        "update.tokens_per_micro_batch=65536",
    )
    assert advised(large_batch, 65536, 8)[0] == (
        "update.tokens_per_micro_batch=32768 (now 65536; longest row 1000)"
    )
    large_states = config_of(inputs, tmp_path, "update.zero_stage=1", "update.precision=bf16")
    assert advised(large_states, 2048, 8)[0] == "update.zero_stage=2 (now 1)"


def test_a_setting_that_is_used_up_is_not_advised(inputs, tmp_path):
    config = config_of(
        inputs,
        tmp_path,
        "update.zero_stage=3",
        "update.activation_checkpointing=true",
        "update.offload_optimizer=true",
        "update.tokens_per_micro_batch=800",
    )
    assert advised(config, 1000, 8) == ["more ranks (now 8) with zero_stage=3", "update.lora={}"]


@pytest.mark.parametrize(
    ("error", "others", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), 1, FailureKind.CONFIG),
        (RuntimeError("CUDA error: out of memory"), 1, FailureKind.CONFIG),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), 30, FailureKind.ERROR),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"), 0, FailureKind.MEMORY),
    ],
)
def test_out_of_memory_says_what_to_change_and_is_tried_again_where_more_may_be_free(
    inputs, tmp_path, monkeypatch, error, others, kind
):
    """Of a GPU only if others have a part of it: neither is that free, nor has torch reserved it."""
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (5 * GIB, 80 * GIB))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda: (75 - others) * GIB)
    monkeypatch.setattr("os.sysconf", lambda name: 80 * GIB if "PAGES" in name else 1)
    with (
        pytest.raises(
            OutOfMemory, match=r"a rank has 80.0 GiB; .* Change, in this order: update\."
        ) as caught,
        out_of_memory_explained(config_of(inputs, tmp_path), experience()),
    ):
        raise error
    assert classify(caught.value) == (kind, None)
    assert ("others use 30.0 of the GPU's 80.0 GiB" in str(caught.value)) is (others == 30)
    assert explain(caught.value, policy_maker(1)).is_of_device is (kind is not FailureKind.MEMORY)


def test_the_host_really_runs_out(inputs, tmp_path):
    with (
        pytest.raises(OutOfMemory, match="out of memory: a rank has"),
        out_of_memory_explained(config_of(inputs, tmp_path), experience()),
    ):
        torch.empty(1 << 60, dtype=torch.uint8)


def test_any_other_error_stays_what_it_is(inputs, tmp_path):
    with (
        pytest.raises(RuntimeError, match="size mismatch"),
        out_of_memory_explained(config_of(inputs, tmp_path), experience()),
    ):
        raise RuntimeError("size mismatch")


def test_memory_that_was_not_enough_beside_a_kept_learner_is_tried_again_without_it(inputs, tmp_path):
    with (
        pytest.raises(OutOfMemory, match="in a process that had kept a learner") as caught,
        out_of_memory_explained(config_of(inputs, tmp_path), experience(), is_used=True),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert classify(caught.value) == (FailureKind.ERROR, None)
