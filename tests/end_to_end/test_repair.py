"""Runs that something went wrong with, and that come to their end all the same."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from pipeline.run.paths import RunPaths
from pipeline.run.records import Records
from pipeline.run.tasks import Stage, Task, parse_task
from tests.cluster.scenario import read_lines, read_record
from tests.support import light, light_training, tiny
from tests.support.damage import flip_bit
from tests.support.killing import assert_same_end, events
from tests.support.tables import LONG
from tests.support.waiting import wait_for


def drop_commit(run_dir: Path, task: str) -> None:
    """As if the task had never been done."""
    shutil.rmtree(run_dir / "iterations" / task)


def test_a_lagging_evaluation_that_finds_its_policy_damaged_has_it_trained_again(
    copied_run, complete_run, slurm_ppo
):
    """The later policy is committed already: the run goes back for the damaged one and ends the same."""
    drop_commit(copied_run, "00001/evaluate")
    drop_commit(copied_run, "00002/evaluate")
    (copied_run / "metrics.jsonl").write_text("")
    shutil.rmtree(copied_run / "rows")  # rows come after all that is in them
    flip_bit(copied_run / "policy" / "00001" / "model.safetensors")
    done = slurm_ppo("resume", copied_run, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "iteration 1 update is corrupt" in done.stderr
    assert_same_end(copied_run, complete_run)


def test_an_evaluation_of_a_policy_that_was_made_again_meanwhile_is_made_again_too(
    copied_run, slurm_ppo, environment, tmp_path
):
    """It was at work when its policy was taken back, and committed when the next driver came."""
    evaluated = copied_run / "iterations/00001/evaluate"
    late = shutil.copytree(evaluated, tmp_path / "late")
    other = environment | {light.DICE: "1"}
    assert slurm_ppo("resume", copied_run, "--from", "update@1", env=other).returncode == 0
    shutil.rmtree(evaluated)
    shutil.copytree(late, evaluated)
    done = slurm_ppo("resume", copied_run, env=other)
    assert done.returncode == 0, done.stderr
    records = Records(RunPaths(copied_run))
    for task in (Task(1, Stage.EVALUATE), Task(2, Stage.EVALUATE)):
        read = records.get(task).inputs
        there = {source: records.get(parse_task(source)).fingerprint for source in read}
        assert there == dict(read), "of this policy, and after this evaluation"


@LONG
def test_with_one_slot_evaluation_does_not_wait_for_the_end(inputs, slurm_ppo, environment, tmp_path):
    run_dir = tmp_path / "run"
    words = tiny.overrides(
        inputs,
        run_dir,
        f"data.heldout={inputs / 'heldout.jsonl'}",
        "evaluate.every=1",
        "iterations=4",
        "scheduler.slots=1",
    )
    done = slurm_ppo("run", *words, env=environment | {"LIGHT_SECONDS": "0.2"})
    assert done.returncode == 0, done.stderr
    launched = {event["task"]: event["time"] for event in events(run_dir, "launched")}
    record = json.loads((run_dir / "iterations/00001/evaluate/shard-00000.json").read_text())
    assert record["ended"] < launched["4/rollout/0"]


def test_best_is_right_after_a_kill_between_the_row_and_it(copied_run, slurm_ppo):
    expected = (copied_run / "best.json").read_text()
    (copied_run / "best.json").unlink()
    assert slurm_ppo("resume", copied_run).returncode == 0
    assert (copied_run / "best.json").read_text() == expected


@pytest.mark.parametrize("damage", [Path.unlink, flip_bit])
def test_a_best_policy_that_is_being_made_again_stops_nothing(copied_run, slurm_ppo, damage):
    """Its record is gone or broken when the driver starts; at the end best.json names its new folder."""
    drop_commit(copied_run, "00002/evaluate")
    damage(copied_run / "iterations/00002/update/shard-00000.json")
    done = slurm_ppo("resume", copied_run)
    assert done.returncode == 0, done.stderr
    best = json.loads((copied_run / "best.json").read_text())
    assert (copied_run / best["policy"] / "model.safetensors").is_file()


def change_weights(directory: Path) -> None:
    path = directory / "model.safetensors"
    weights = load_file(path)
    save_file({name: weight * 2 for name, weight in weights.items()}, path, metadata={"format": "pt"})


@pytest.fixture
def own_inputs(inputs, tmp_path) -> Path:
    """Inputs that a test may change."""
    return shutil.copytree(inputs, tmp_path / "own")


def test_a_model_that_changed_under_the_run_is_refused_and_one_that_was_touched_is_not(
    own_inputs, slurm_ppo, tmp_path
):
    run_dir = tmp_path / "run"
    assert slurm_ppo("run", *tiny.overrides(own_inputs, run_dir)).returncode == 0
    for path in (own_inputs / "reward_model").iterdir():
        path.touch()
    assert slurm_ppo("resume", run_dir, "--from", "reward@2").returncode == 0
    change_weights(own_inputs / "reward_model")
    done = slurm_ppo("resume", run_dir, "--from", "reward@2")
    assert done.returncode == 2
    assert "reward_model/model.safetensors has changed since the run began" in done.stderr


def test_the_same_words_start_over_when_nothing_was_committed(own_inputs, slurm_ppo, tmp_path):
    tiny.write_jsonl(own_inputs / "prompts.jsonl", [{"id": f"p{i}", "prompt": "x" * 70} for i in range(24)])
    words = tiny.overrides(own_inputs, tmp_path / "run")
    failed = slurm_ppo("run", *words)
    assert failed.returncode == 2
    assert "nothing was committed: fix the settings and run the same command again" in failed.stderr
    tiny.write_jsonl(own_inputs / "prompts.jsonl", [{"id": f"p{i}", "prompt": "x"} for i in range(24)])
    assert slurm_ppo("run", *words).returncode == 0


@LONG
@pytest.mark.parametrize("every", [0, 1])
def test_numbers_are_those_of_a_policy_that_was_made_again_as_another_one(
    inputs, slurm_ppo, environment, tmp_path, every
):
    """As on GPUs, no two attempts give the same bytes; a record is spoilt after its row was written."""
    root, gate = tmp_path / "run", tmp_path / "gate"
    given = environment | {light.DICE: "1", light_training.GATE: f"2:{gate}"}
    more = ("iterations=3", f"evaluate.every={every}", f"data.heldout={inputs / 'heldout.jsonl'}")
    words = [sys.executable, "-m", "pipeline", "run", *tiny.overrides(inputs, root, *more)]
    with subprocess.Popen(words, env=given, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as begun:
        wait_for(lambda: len(read_lines(root / "metrics.jsonl")) == 1, "the first row")
        begun.send_signal(signal.SIGINT)
    before = read_lines(root / "metrics.jsonl")
    gate.touch()
    flip_bit(root / "iterations/00001/update/shard-00000.json")
    done = slurm_ppo("resume", root, env=given)
    assert done.returncode == 0, done.stderr
    rows = read_lines(root / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == [1, 2, 3]
    update = read_record(root, 1, "update")["metrics"]
    assert rows[0]["policy/loss"] == update["policy/loss"] != before[0]["policy/loss"]
    if every:
        assert rows[0]["evaluate/reward"] == read_record(root, 1, "evaluate")["metrics"]["evaluate/reward"]
        assert rows[0]["evaluate/reward"] != before[0]["evaluate/reward"]
