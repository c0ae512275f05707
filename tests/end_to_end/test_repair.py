"""Runs that something went wrong with, and that come to their end all the same."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from tests.support import tiny
from tests.support.damage import flip_bit
from tests.support.killing import assert_same_end, events


def drop_commit(run_dir: Path, task: str) -> None:
    """As if the task had never been done."""
    shutil.rmtree(run_dir / "iterations" / task)


def test_a_lagging_evaluation_that_finds_its_policy_damaged_has_it_trained_again(
    complete_run, slurm_ppo, tmp_path
):
    """The later policy is committed already: the run goes back for the damaged one and ends the same."""
    run_dir = tmp_path / "run"
    shutil.copytree(complete_run, run_dir, symlinks=True)
    drop_commit(run_dir, "00001/evaluate")
    drop_commit(run_dir, "00002/evaluate")
    (run_dir / "metrics.jsonl").write_text("")
    shutil.rmtree(run_dir / "rows")  # rows come after all that is in them
    flip_bit(run_dir / "policy" / "00001" / "model.safetensors")
    done = slurm_ppo("resume", run_dir, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "iteration 1 update is corrupt" in done.stderr
    assert_same_end(run_dir, complete_run)


def test_with_one_slot_evaluation_does_not_wait_for_the_end(inputs, slurm_ppo, tmp_path):
    run_dir = tmp_path / "run"
    words = tiny.overrides(
        inputs,
        run_dir,
        f"data.heldout={inputs / 'heldout.jsonl'}",
        "evaluate.every=1",
        "iterations=4",
        "scheduler.slots=1",
    )
    done = slurm_ppo("run", *words)
    assert done.returncode == 0, done.stderr
    launched = {event["task"]: event["time"] for event in events(run_dir, "launched")}
    record = json.loads((run_dir / "iterations/00001/evaluate/shard-00000.json").read_text())
    assert record["ended"] < launched["4/rollout/0"]


def test_best_is_right_after_a_kill_between_the_row_and_it(complete_run, slurm_ppo, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(complete_run, run_dir, symlinks=True)
    expected = (run_dir / "best.json").read_text()
    (run_dir / "best.json").unlink()
    assert slurm_ppo("resume", run_dir).returncode == 0
    assert (run_dir / "best.json").read_text() == expected


@pytest.mark.parametrize("damage", [Path.unlink, flip_bit])
def test_a_best_policy_that_is_being_made_again_stops_nothing(complete_run, slurm_ppo, tmp_path, damage):
    """Its record is gone or broken when the driver starts; at the end best.json names its new folder."""
    run_dir = tmp_path / "run"
    shutil.copytree(complete_run, run_dir, symlinks=True)
    drop_commit(run_dir, "00002/evaluate")
    damage(run_dir / "iterations/00002/update/shard-00000.json")
    done = slurm_ppo("resume", run_dir)
    assert done.returncode == 0, done.stderr
    best = json.loads((run_dir / "best.json").read_text())
    assert (run_dir / best["policy"] / "model.safetensors").is_file()


def change_weights(directory: Path) -> None:
    path = directory / "model.safetensors"
    weights = load_file(path)
    save_file({name: weight * 2 for name, weight in weights.items()}, path, metadata={"format": "pt"})


@pytest.fixture
def own_inputs(inputs, tmp_path) -> Path:
    """Inputs that a test may change."""
    return shutil.copytree(inputs, tmp_path / "own")


def test_a_model_that_changed_under_the_run_is_refused(own_inputs, slurm_ppo, tmp_path):
    run_dir = tmp_path / "run"
    assert slurm_ppo("run", *tiny.overrides(own_inputs, run_dir)).returncode == 0
    change_weights(own_inputs / "reward_model")
    done = slurm_ppo("resume", run_dir, "--from", "reward@2")
    assert done.returncode == 2
    assert "reward_model/model.safetensors has changed since the run began" in done.stderr


def test_a_model_that_was_only_touched_is_not(own_inputs, slurm_ppo, tmp_path):
    run_dir = tmp_path / "run"
    assert slurm_ppo("run", *tiny.overrides(own_inputs, run_dir)).returncode == 0
    for path in (own_inputs / "reward_model").iterdir():
        path.touch()
    assert slurm_ppo("resume", run_dir, "--from", "reward@2").returncode == 0


def test_a_reward_model_without_its_head_is_refused(models, slurm_ppo, tmp_path):
    own = shutil.copytree(models, tmp_path / "own")
    path = own / "reward_model" / "model.safetensors"
    weights = load_file(path)
    weights["v_head.weight"] = weights.pop("score.weight")
    save_file(weights, path, metadata={"format": "pt"})
    done = slurm_ppo("run", *tiny.overrides(own, tmp_path / "run"))
    assert done.returncode == 2
    assert "lacks weights of LlamaForSequenceClassification: score.weight" in done.stderr


def test_the_same_words_start_over_when_nothing_was_committed(own_inputs, slurm_ppo, tmp_path):
    tiny.write_jsonl(own_inputs / "prompts.jsonl", [{"id": f"p{i}", "prompt": "x" * 70} for i in range(24)])
    words = tiny.overrides(own_inputs, tmp_path / "run")
    failed = slurm_ppo("run", *words)
    assert failed.returncode == 2
    assert "nothing was committed: mend the settings and type the same command again" in failed.stderr
    tiny.write_jsonl(own_inputs / "prompts.jsonl", [{"id": f"p{i}", "prompt": "x"} for i in range(24)])
    assert slurm_ppo("run", *words).returncode == 0
