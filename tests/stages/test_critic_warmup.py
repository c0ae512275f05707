"""A critic that learns alone first: the policy stays as it was, byte for byte, lost states or not."""

import dataclasses
import shutil

import pytest

from pipeline.config.algorithm import Estimator
from pipeline.config.rules import contradictions
from pipeline.run.commits import read_record
from pipeline.run.directory import load_run
from pipeline.run.plan import policy_maker, state_of
from pipeline.run.tasks import Stage, Task
from stages.ppo.metrics import update_metrics
from tests.support.learning import difference, experience, updated, weights
from tests.support.processes import config_of, make_run, stage
from tests.support.scored import commit_scored

WARMUP = ("algorithm.critic_warmup=1", "iterations=3")


def of(name: str, found: dict) -> dict:
    return {key: value for key, value in found.items() if key.startswith(f"{name}.")}


def test_in_a_warmup_the_critic_takes_the_steps_of_an_ordinary_update_and_the_policy_none(make):
    """Within an iteration nothing of the policy's steps reaches the critic, so that both end the same."""
    given = experience(holes=True)
    plain, warming = make("iterations=3"), make(*WARMUP)
    before = weights(warming)
    updated(plain, given)
    done = updated(warming, given)
    after = weights(warming)
    assert difference(of("policy", before), of("policy", after)) == 0
    assert difference(of("critic", weights(plain)), of("critic", after)) == 0
    assert difference(of("critic", before), of("critic", after)) > 1e-5
    assert (warming.policy.steps, warming.critic.steps) == (0, 4)
    assert done.steps.decisions == [{"critic": "taken"}] * 4
    metrics = update_metrics(warming.config, given, done)
    assert metrics["policy/steps"] == 0
    assert metrics["value/grad_norm"] > 0
    assert {"policy/loss", "policy/entropy", "policy/ratio_error_first"}.isdisjoint(metrics)
    assert "mismatch/kl" in metrics


def test_after_a_warmup_the_policy_begins_its_learning_rate(make):
    """With a schedule that ends at 0 its first iteration is the first of two, not the second of three."""
    words = ("update.schedule=linear", "update.warmup_steps=4", "update.epochs=1")
    warming, plain = make(*WARMUP, *words), make("iterations=2", *words)
    given = experience()
    updated(warming, given)
    later = updated(warming, given, iteration=2)
    assert [set(decided) for decided in later.steps.decisions] == [{"policy", "critic"}] * 2
    assert later.steps.rate == updated(plain, given).steps.rate > 0
    assert later.steps.first_ratio_error == 0


def test_the_only_step_of_a_warmup_still_knows_how_engine_and_trainer_differ(make):
    """Where the policy's own step would have given the old log-probabilities, a pass does."""
    words = ("update.epochs=1", "update.minibatches=1", "algorithm.kl.coef=0")
    given = experience(with_kl=False)
    warming, plain = (make(*more, *words) for more in (WARMUP, ("iterations=3",)))
    found, expected = (update_metrics(one.config, given, updated(one, given)) for one in (warming, plain))
    assert found["mismatch/kl"] == expected["mismatch/kl"]
    assert found["value/loss"] == expected["value/loss"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            ("algorithm.estimator=reinforce++", "algorithm.critic_warmup=1"),
            "is for algorithm.estimator=gae only",
        ),
        (("iterations=2", "algorithm.critic_warmup=2"), "leaves none of iterations=2 to train the policy"),
    ],
)
def test_a_warmup_without_a_critic_or_an_end_is_refused(models, tmp_path, words, why):
    config = config_of(models, tmp_path / "run")
    settings = dict(word.split("=") for word in words)
    algorithm = dataclasses.replace(
        config.algorithm,
        critic_warmup=int(settings["algorithm.critic_warmup"]),
        estimator=Estimator(settings.get("algorithm.estimator", config.algorithm.estimator)),
    )
    given = dataclasses.replace(config, algorithm=algorithm, iterations=int(settings.get("iterations", 3)))
    (problem,) = contradictions(given)
    assert problem.key == "algorithm.critic_warmup"
    assert why in str(problem)


def test_policies_of_a_warmup_are_the_same_bytes_and_a_lost_state_is_learned_again_to_the_last_bit(
    models, tmp_path
):
    settings = ("iterations=3", "algorithm.critic_warmup=2", "update.precision=bf16", "update.zero_stage=1")
    steered = ("algorithm.kl.controller=adaptive", "algorithm.kl.target=6")
    run = commit_scored(make_run(models, tmp_path / "run", *settings, *steered))
    for iteration in (1, 2):
        assert (done := stage(run, "update", iteration)).code == 0, done.log
        assert "the critic alone: value loss" in done.log
    first, second = (files_of(run, version) for version in (1, 2))
    assert first == second
    shutil.copytree(run.paths.root, tmp_path / "lost")
    lost = load_run(tmp_path / "lost")
    lost.paths.task(state_of(2)).record.unlink()
    for folder in lost.paths.states.glob("00002*"):
        folder.unlink() if folder.is_symlink() else shutil.rmtree(folder)
    for one in (run, lost):
        assert (done := stage(one, "update", 3)).code == 0, done.log
    assert "the trainer's state of iteration 2 was lost: it is learned again" in done.log
    assert "differ from the committed ones by 0.0e+00" in done.log
    records = [read_record(one.paths, Task(3, Stage.UPDATE)) for one in (run, lost)]
    assert records[0].fingerprint == records[1].fingerprint
    assert files_of(run, 3) != second
    found = [read_record(run.paths, policy_maker(k)).metrics for k in (1, 2, 3)]
    assert [metrics["policy/is_warmup"] for metrics in found] == [1, 1, 0]
    assert len({metrics["objective/kl_coef"] for metrics in found}) == 1, "no KL of a warm-up moves it"


def files_of(run, version: int) -> dict[str, bytes]:
    folder = next(run.paths.policies.glob(f"{version:05d}.*"))
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
