"""Distillation on the policy's own responses: teachers' log-probabilities, and what is learned from them."""

import dataclasses
import math

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from pipeline.config.algorithm import DistillationConfig, KLEstimator
from pipeline.config.model_files import read_tensors
from pipeline.config.reward import TeacherConfig
from pipeline.run.schemas import TEACHER_LOGPROBS, TEACHER_WEIGHT
from stages.context import UserError
from stages.ppo.averaging import write_average
from stages.ppo.batching import micro_batches
from stages.ppo.targets import Targets, teacher_advantages
from stages.ppo.training import teacher_loss
from stages.rewards.teachers import combined, taught
from tests.support import tiny
from tests.support.learning import experience, metrics_of, updated
from tests.support.rollouts import rollout_table

TAUGHT = ("reward=teacher", "algorithm=reinforce_plus_plus", "algorithm.kl.coef=0")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return tiny.make_policy(tmp_path_factory.mktemp("teacher") / "model", seed=5)


def with_teacher(log_probs, weights):
    """Eight responses that have these log-probabilities of a teacher, and weights of theirs."""
    given = experience(with_kl=False)
    return dataclasses.replace(given, teacher_log_probs=log_probs, teacher_weights=weights)


def test_a_token_s_advantage_is_its_log_ratio_of_teacher_to_old_policy_times_the_weight():
    """log 0.5 - log 0.2 is 0.916291; log 0.1 - log 0.4 is -1.386294."""
    given = experience(rows=2, with_kl=False)
    theirs, mine = torch.zeros_like(given.rollout_log_probs), torch.zeros_like(given.rollout_log_probs)
    theirs[:, 0], mine[:, 0] = math.log(0.5), math.log(0.2)
    theirs[:, 1], mine[:, 1] = math.log(0.1), math.log(0.4)
    given = dataclasses.replace(given, teacher_log_probs=theirs, teacher_weights=torch.tensor([[1.0], [0.5]]))
    found = teacher_advantages(given, mine)
    assert found[0, :3].tolist() == pytest.approx([0.916291, -1.386294, 0], abs=1e-6)
    assert found[1, :3].tolist() == pytest.approx([0.458145, -0.693147, 0], abs=1e-6)
    no_teacher = dataclasses.replace(given, teacher_weights=torch.zeros(2, 1))
    assert not teacher_advantages(no_teacher, mine).any()


@pytest.mark.parametrize(
    ("estimator", "straight_through", "value", "gradient"),
    [
        (KLEstimator.K3, False, 0.5 / 0.2 - math.log(0.5 / 0.2) - 1, 1 - 0.5 / 0.2),
        (KLEstimator.K2, False, math.log(0.5 / 0.2) ** 2 / 2, -math.log(0.5 / 0.2)),
        (KLEstimator.K1, True, -math.log(0.5 / 0.2), -math.log(0.5 / 0.2)),
    ],
)
def test_in_the_loss_it_is_the_estimator_times_the_weight(estimator, straight_through, value, gradient):
    given = experience(rows=2, with_kl=False)
    (batch,) = micro_batches(given.rows, [0, 1], 512)
    nothing = torch.zeros_like(given.rollout_log_probs)
    targets = Targets(
        mask=given.mask,
        old_log_probs=None,
        old_values=None,
        advantages=nothing,
        returns=None,
        weights=None,
        reference_log_probs=None,
        kl_coef=0.0,
        teacher_log_probs=nothing + math.log(0.5),
        teacher_weights=torch.tensor([[2.0], [0.0]]),
    )
    settings = DistillationConfig(estimator=estimator, straight_through=straight_through)
    log_probs = torch.full((2, batch.num_response_columns), math.log(0.2), requires_grad=True)
    of_row = batch.rows.tolist().index
    found = teacher_loss(settings, targets, batch, log_probs)
    assert float(found[of_row(0), 0].detach()) == pytest.approx(2 * value, abs=1e-6)
    assert not found[of_row(1)].any()
    found.sum().backward()
    assert float(log_probs.grad[of_row(0), 0]) == pytest.approx(2 * gradient, abs=1e-6)
    assert not log_probs.grad[of_row(1)].any()


def test_several_teachers_of_a_response_are_one_with_their_weighted_mean():
    teachers = {"a": TeacherConfig(path="/a", weight=3.0), "b": TeacherConfig(path="/b")}
    found = combined(
        teachers,
        {
            "a": pa.array([[-1.0, -2.0], None, [-4.0]], pa.list_(pa.float32())),
            "b": pa.array([[-3.0, -6.0], None, None], pa.list_(pa.float32())),
        },
    )
    assert found[TEACHER_LOGPROBS].to_pylist() == [[-1.5, -3.0], None, [-4.0]]
    assert found[TEACHER_WEIGHT].to_pylist() == [4.0, 0.0, 3.0]
    assert combined({}, {}).num_columns == 0


def test_a_teacher_is_for_the_prompts_that_have_its_values():
    rows = rollout_table([[4], [5], [6]], subject=["maths", "law", "maths"], level=[1, 1, 2])
    assert taught("t", TeacherConfig(path="/t"), rows).tolist() == [True, True, True]
    assert taught("t", TeacherConfig(path="/t", only={"subject": "maths"}), rows).tolist() == [
        True,
        False,
        True,
    ]
    both = TeacherConfig(path="/t", only={"subject": "maths", "level": 2})
    assert np.flatnonzero(taught("t", both, rows)).tolist() == [2]
    with pytest.raises(UserError, match=r"reward.teachers.t.only: topic is not a column .*: subject, level"):
        taught("t", TeacherConfig(path="/t", only={"topic": 1}), rows)


def test_an_update_brings_the_policy_nearer_to_its_teacher_and_starts_from_a_ratio_of_1(make, teacher):
    """The responses were sampled by neither, so that only their own tokens say how near it is."""
    learner = make(*TAUGHT, f"reward.teachers.teacher.path={teacher}", "update.epochs=4")
    given = experience(with_kl=False)
    wanted = torch.where(given.mask, -2.0, 0.0)  # more than the 1 in 260 that the policy gives each token
    given = dataclasses.replace(given, teacher_log_probs=wanted, teacher_weights=torch.ones(len(given), 1))
    before = metrics_of(learner, given)
    after = metrics_of(learner, given)
    assert before["policy/ratio_error_first"] == 0
    assert before["policy/advantage_mean"] == pytest.approx(-before["teacher/kl_per_token"], rel=1e-5)
    assert before["teacher/kl_per_token"] < after["teacher/kl_per_token"] < 0
    assert before["teacher/responses"] == len(given)


def test_without_a_teacher_for_any_response_there_is_nothing_to_measure_or_learn(make, teacher):
    learner = make(*TAUGHT, f"reward.teachers.teacher.path={teacher}")
    given = with_teacher(torch.zeros_like(experience().rollout_log_probs), torch.zeros(8, 1))
    given = dataclasses.replace(
        given, outcome=dataclasses.replace(given.outcome, scores=torch.zeros_like(given.outcome.scores))
    )
    start = [one.detach().clone() for one in learner.policy.model.parameters()]
    done = updated(learner, given)
    assert not done.targets.advantages.any()
    for one, was in zip(learner.policy.model.parameters(), start, strict=True):
        assert torch.equal(one, was)


def test_the_average_is_the_share_of_the_policy_and_the_rest_of_the_reference(models, teacher, tmp_path):
    write_average(models / "policy", read_tensors(teacher), 0.25, tmp_path / "average")
    policy, theirs, found = (
        load_file(folder / "model.safetensors")
        for folder in (models / "policy", teacher, tmp_path / "average")
    )
    assert found.keys() == policy.keys()
    for name, weight in found.items():
        assert weight.dtype is torch.float32
        assert torch.allclose(weight, 0.25 * policy[name] + 0.75 * theirs[name], rtol=0, atol=1e-7)
    lacking = {name: header for name, header in read_tensors(teacher).items() if "embed" not in name}
    with pytest.raises(UserError, match=r"no weight model.embed_tokens.weight .* or set it to 1"):
        write_average(models / "policy", lacking, 0.25, tmp_path / "none")
