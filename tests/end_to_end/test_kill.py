"""Killed anywhere and resumed, a run ends in the same policy, byte for byte, as an undisturbed one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.run.commits import require_record
from pipeline.run.directory import load_run
from pipeline.run.tasks import task_key
from tests.support import ROOT, tiny
from tests.support.damage import cut, flip_bit
from tests.support.every_state import stopped_copy
from tests.support.killing import assert_same_end, data_file, events, hooked
from tests.support.mirrored import family, kill_all
from tests.support.tables import LONG, sample
from tests.support.waiting import wait_for


def arguments(inputs: Path, run_dir: Path) -> list[str]:
    """Exactly the words of the ``complete_run`` fixture, but for the directory."""
    return tiny.overrides(inputs, run_dir, f"data.heldout={inputs / 'heldout.jsonl'}", "evaluate.every=1")


def leftovers(run_dir: Path) -> int:
    """Files and folders of iterations and policies: as many as an undisturbed run has."""
    places = [
        *(run_dir / "iterations").rglob("*"),
        *(run_dir / "policy").iterdir(),
        *(run_dir / "state").iterdir(),
    ]
    return len(places)


def attempts_of(run_dir: Path) -> dict[str, str]:
    """Attempts whose results count, by the keys of their tasks."""
    run = load_run(run_dir)
    records = (require_record(run.paths, task) for task in run.plan.all_tasks())
    return {task_key(record.task): record.attempt for record in records}


POINTS = [
    "before-fsync:iterations/00001/rollout/shard-00001",
    "before-link:iterations/00001/rollout/shard-00000.json",
    "after-link:iterations/00001/rollout/shard-00000.json",
    "before-link:iterations/00002/reward/shard-00001.json",
    "before-fsync:policy/00001.",
    "before-link:iterations/00001/update/shard-00000.json",
    "after-link:iterations/00002/reward/shard-00000.json",
    "before-link:data/prompts.json",
]


@pytest.mark.parametrize("point", sample(POINTS, 1 / 4))
def test_a_task_killed_in_the_commit_protocol_is_repeated(
    point, inputs, complete_run, slurm_ppo, environment, tmp_path
):
    run_dir = tmp_path / "run"
    done = slurm_ppo("run", *arguments(inputs, run_dir), env=hooked(environment, tmp_path, point))
    assert list(tmp_path.glob("killed-*")), "the hook never fired"
    assert done.returncode == 0, done.stderr
    assert_same_end(run_dir, complete_run)
    assert leftovers(run_dir) == leftovers(complete_run), "a losing attempt's files are removed"
    if not point.startswith("after-link"):
        assert "killed by signal 9" in done.stderr
        assert [e["kind"] for e in events(run_dir, "failed")] == ["killed"]


@LONG
def test_real_models_killed_in_an_update_and_with_their_driver_end_in_the_same_weights(
    models, complete_real_run, slurm_ppo, environment, tmp_path
):
    """What an optimizer, a loss scale or a generator kept in memory would be lost here."""
    run_dir = tmp_path / "run"
    killed = slurm_ppo("run", *arguments(models, run_dir), env=hooked(environment, tmp_path, "driver:14"))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = slurm_ppo("resume", run_dir, env=hooked(environment, tmp_path, "before-fsync:policy/00002."))
    assert resumed.returncode == 0, resumed.stderr
    assert "killed by signal 9" in resumed.stderr
    assert_same_end(run_dir, complete_real_run)


@pytest.mark.parametrize("fsync", sample([1, 6, 12, 18], 1 / 4))
def test_a_driver_killed_at_any_write_can_be_resumed(
    fsync, inputs, complete_run, slurm_ppo, environment, tmp_path
):
    run_dir = tmp_path / "run"
    killed = slurm_ppo(
        "run", *arguments(inputs, run_dir), env=hooked(environment, tmp_path, f"driver:{fsync}")
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    word = ["resume", run_dir] if (run_dir / "run.json").exists() else ["run", *arguments(inputs, run_dir)]
    resumed = slurm_ppo(*word)
    assert resumed.returncode == 0, resumed.stderr
    assert_same_end(run_dir, complete_run, may_lose_state=True)


@LONG
def test_everything_killed_again_and_again_at_any_time(
    inputs, complete_run, slurm_ppo, environment, tmp_path
):
    """As when a node goes down."""
    run_dir = tmp_path / "run"
    word = ["run", *arguments(inputs, run_dir)]
    journal = run_dir / "events.jsonl"
    for _ in range(3):
        before = lines_of(journal)
        command = [sys.executable, "-m", "pipeline", *word]
        process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        wait_for(lambda: lines_of(journal) >= before + 4, "tasks of this call")  # noqa: B023
        kill_all(family(process.pid), signal.SIGKILL)
        process.wait()
        word = ["resume", str(run_dir)]
    done = slurm_ppo(*word)
    assert done.returncode == 0, done.stderr
    assert_same_end(run_dir, complete_run, may_lose_state=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_stops_cleanly_and_says_how_to_continue(
    number, inputs, complete_run, slurm_ppo, environment, tmp_path
):
    run_dir = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline", "run", *arguments(inputs, run_dir)],
        env=environment,
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    record = run_dir / "iterations" / "00001" / "rollout" / "shard-00000.json"
    wait_for(record.exists, "a commit")
    process.send_signal(number)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 3
    assert f"slurm-ppo resume {run_dir}" in error
    assert slurm_ppo("status", run_dir).returncode == 3
    assert slurm_ppo("resume", run_dir).returncode == 0
    assert_same_end(run_dir, complete_run)


def test_a_second_driver_is_refused_with_host_process_and_age(inputs, slurm_ppo, environment, tmp_path):
    run_dir = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline", "run", *arguments(inputs, run_dir)],
        env=environment,
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )
    wait_for((run_dir / "config.yaml").exists, "a run, whose driver holds the lease")
    refused = slurm_ppo("resume", run_dir)
    process.send_signal(signal.SIGINT)
    process.wait(timeout=30)
    assert refused.returncode == 2
    assert f"host {os.uname().nodename}, process {process.pid}, since " in refused.stderr


@pytest.mark.parametrize(
    ("damage", "said"), [(flip_bit, "xxh3_128"), (cut, "bytes instead of"), (Path.unlink, "is gone")]
)
def test_a_damaged_shard_is_named_and_just_that_task_is_repeated(
    damage, said, complete_run, slurm_ppo, tmp_path
):
    run_dir = stopped_copy(complete_run, tmp_path / "run")
    damage(data_file(run_dir, "00002/rollout/shard-00001"))
    done = slurm_ppo("resume", run_dir)
    assert done.returncode == 0, done.stderr
    assert "iteration 2 rollout shard 1 is corrupt" in done.stderr
    assert said in done.stderr
    assert_same_end(run_dir, complete_run)
    assert attempts_of(run_dir).keys() == attempts_of(complete_run).keys()
    repeated = dict(attempts_of(run_dir).items() - attempts_of(complete_run).items())
    assert sorted(repeated) == ["2/evaluate/0", "2/rollout/1", "2/update/0"]


@pytest.mark.parametrize(
    "point", sample(["rollout@2", "reward@2", "update@1", "evaluate@1", "update"], 2 / 5)
)
def test_going_back_moves_aside_and_ends_the_same(point, copied_run, complete_run, slurm_ppo):
    done = slurm_ppo("resume", copied_run, "--from", point)
    assert done.returncode == 0, done.stderr
    (aside,) = (copied_run / "superseded").iterdir()
    assert str(aside) in done.stderr
    assert any(aside.rglob("*.json"))
    assert_same_end(copied_run, complete_run)


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0
