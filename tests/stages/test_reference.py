"""The reference's log-probabilities come from the reward stage, or from the update, and are the same."""

import pytest

from pipeline.run.commits import read_record
from pipeline.run.directory import Run
from pipeline.run.schemas import ROLLOUT
from pipeline.run.shards import read_shard
from pipeline.run.tasks import Stage, Task
from tests.support.processes import make_run, stage


def two_iterations(models, folder, *more: str) -> Run:
    run = make_run(models, folder, "update.epsilon=1e-3", "rollout.num_shards=1", *more)
    for task in [("prepare",), *((name, i) for i in (1, 2) for name in ("rollout", "reward", "update"))]:
        done = stage(run, *task)
        assert done.code == 0, done.log
    return run


def metrics_of(run: Run, iteration: int) -> dict[str, float]:
    record = read_record(run.paths, Task(iteration, Stage.UPDATE))
    assert record is not None
    return dict(record.metrics)


@pytest.fixture(scope="module")
def in_reward(models, tmp_path_factory) -> Run:
    return two_iterations(models, tmp_path_factory.mktemp("reward") / "run")


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_a_reference_in_the_update_penalises_as_one_in_the_reward_stage(
    models, tmp_path, in_reward, zero_stage
):
    settings = ("algorithm.kl.reference_in=update", f"update.zero_stage={zero_stage}")
    run = two_iterations(models, tmp_path / "run", *settings)
    assert metrics_of(run, 1)["objective/kl"] == 0, "the same weights over the same micro-batches"
    ours, theirs = metrics_of(run, 2), metrics_of(in_reward, 2)
    assert theirs["objective/kl"] != 0
    for name in ("objective/kl", "objective/kl_per_token", "policy/loss", "value/returns_mean"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
    assert ours["seconds/update/reference"] > 0


@pytest.mark.trial(1 / 2)
def test_a_reference_that_follows_each_policy_is_the_policy_itself(models, tmp_path):
    """Over the same micro-batches: without algorithm.kl.sync_every the second iteration's KL is not 0."""
    settings = ("algorithm.kl.reference_in=update", "algorithm.kl.sync_every=1")
    run = two_iterations(models, tmp_path / "run", *settings)
    assert metrics_of(run, 2)["objective/kl"] == 0


def test_the_update_reports_where_its_time_went(in_reward):
    metrics = metrics_of(in_reward, 2)
    parts = {name for name in metrics if name.startswith("seconds/update/")}
    assert parts == {
        f"seconds/update/{part}" for part in ("read", "reference", "load", "old_log_probs", "steps", "save")
    }
    assert 0.5 < metrics["policy/padding_efficiency"] <= 1


def test_a_record_counts_every_pass_of_every_token(in_reward):
    """Old log-probabilities, old values, and a step of policy and critic in each epoch: of all rows, as all
    have an advantage with a critic. Generating and the reference have each token once."""
    paths, config = in_reward.paths, in_reward.config
    table = read_shard(paths, read_record(paths, Task(2, Stage.ROLLOUT)), ROLLOUT)
    columns = (table[name].to_pylist() for name in ("prompt_tokens", "response_tokens"))
    size = sum(len(tokens) for column in columns for tokens in column)
    passes = 2 + 2 * config.update.epochs
    found = {stage: read_record(paths, Task(2, stage)).metrics for stage in (Stage.ROLLOUT, Stage.UPDATE)}
    assert found[Stage.ROLLOUT]["model_tokens"] == size
    assert found[Stage.UPDATE]["model_tokens"] == passes * size
    for metrics in found.values():
        assert metrics["model_tokens"] <= metrics["model_positions"] < 2 * metrics["model_tokens"]
