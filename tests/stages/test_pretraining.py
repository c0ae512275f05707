"""A critic trained on the rollouts of a run that stands, for the runs after it."""

import json
import shutil
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.run.commits import read_record
from pipeline.run.tasks import Stage, Task
from stages.ppo import pretraining
from stages.ppo.math.shaping import RunningMoments
from tests.support.learning import experience, make_learner
from tests.support.processes import Done, in_process_of_its_own, make_run, stage
from tests.support.scored import commit_scored

RATE = ("--learning-rate", "1e-2", "--epochs", "6")


def pretrain(root: Path, folder: Path, *more: str) -> Done:
    """The command to its end, in a process of its own."""
    log = folder.with_name(f"{folder.name}.log")
    code = in_process_of_its_own(_pretrain, [str(root), str(folder), *more], str(log))
    text = log.read_text()
    log.unlink()
    return Done(code, text)


def _pretrain(arguments: list[str], log: str) -> None:
    with Path(log).open("w") as file, redirect_stdout(file), redirect_stderr(file):
        code = pretraining.main(arguments)
    raise SystemExit(code)


@pytest.fixture(scope="module")
def scored(models, tmp_path_factory):
    """A GRPO run, which has no critic, with rollouts and rewards of two iterations."""
    settings = (
        "algorithm=grpo",
        "rollout.samples_per_prompt=2",
        "data.prompts_per_iteration=4",
        "iterations=2",
    )
    return commit_scored(make_run(models, tmp_path_factory.mktemp("scored") / "run", *settings))


@pytest.fixture(scope="module")
def critic(scored, tmp_path_factory):
    folder = tmp_path_factory.mktemp("critic") / "critic"
    assert (done := pretrain(scored.paths.root, folder, *RATE)).code == 0, done.log
    assert f"give model.critic={folder}" in done.log
    return folder


def test_a_critic_of_a_run_without_one_learns_from_its_rollouts_and_begins_another_run(
    scored, critic, models, tmp_path
):
    said = json.loads((critic / pretraining.SOURCE).read_text())
    assert (said["iterations"], said["epochs"], said["responses"]) == ([1, 2], 6, 16)
    assert len(said["inputs"]) == 2 * 2 * scored.plan.num_shards, "rollout and reward shards"
    assert said["explained_variance"][0] == 0, "a head of zeros foresees nothing"
    assert said["explained_variance"][-1] > 0.2
    foreseen = {}
    for name, more in (("fresh", ()), ("pretrained", (f"model.critic={critic}",))):
        run = commit_scored(make_run(models, tmp_path / name, "algorithm.kl.coef=0", *more))
        assert (done := stage(run, "update", 1)).code == 0, done.log
        metrics = read_record(run.paths, Task(1, Stage.UPDATE)).metrics
        foreseen[name] = metrics["value/explained_variance"]
    assert foreseen["fresh"] == 0
    assert foreseen["pretrained"] > 0.1, "of responses that it was trained on, before the first update"


def test_the_same_rollouts_give_the_same_bytes(scored, critic, tmp_path):
    """So a directory that was lost can be made again, also after a kill."""
    assert pretrain(scored.paths.root, tmp_path / "again", *RATE).code == 0
    one, other = (
        {path.name: path.read_bytes() for path in folder.iterdir()} for folder in (critic, tmp_path / "again")
    )
    assert one == other


def test_returns_are_the_rewards_to_come_as_they_came(models, tmp_path, process_group):
    """By hand: a reward on the last token, discounted by the policy's tokens between."""
    given = experience(holes=True)
    config = make_learner(models, tmp_path / "run", "algorithm.gamma=0.9").config
    returns = pretraining.monte_carlo(config, given, RunningMoments()).returns
    for row in range(len(given)):
        owned = given.mask[row].nonzero().flatten().tolist()
        expected = [float(given.outcome.scores[row]) * 0.9 ** (len(owned) - 1 - i) for i in range(len(owned))]
        np.testing.assert_allclose(returns[row, owned], torch.tensor(expected), atol=1e-6)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("a directory that exists", "exists; give a new directory"),
        ("no rewards", "has no iteration whose rewards are all committed: nothing to learn from"),
        ("a flipped bit", "00001/rollout"),
        ("no run", "is not a run directory"),
    ],
)
def test_what_cannot_be_learned_from_is_named_in_one_line_and_nothing_is_left(scored, tmp_path, damage, said):
    root, folder = tmp_path / "run", tmp_path / "critic"
    if damage != "no run":
        shutil.copytree(scored.paths.root, root, symlinks=True)
    if damage == "a directory that exists":
        folder.mkdir()
    if damage == "no rewards":
        for path in (root / "iterations").glob("*/reward"):
            shutil.rmtree(path)
    if damage == "a flipped bit":
        shard = min((root / "iterations/00001/rollout").glob("*.arrow"))
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    done = pretrain(root, folder)
    assert done.code == 2, done.log
    (line,) = [line for line in done.log.splitlines() if line.startswith("error: ")]
    assert said in line
    assert sorted(path.name for path in tmp_path.iterdir() if path != root) == (
        ["critic"] if folder.exists() else []
    )


@pytest.mark.parametrize("rate", ["fast", "0", "nan", "inf"])
def test_a_learning_rate_that_is_none_is_named(rate, capsys):
    with pytest.raises(SystemExit, match="2"):
        pretraining.main(["run", "critic", "--learning-rate", rate])
    assert f"'{rate}' is not a number above 0" in capsys.readouterr().err
