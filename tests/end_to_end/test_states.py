"""The trainer's state is committed behind its policy: rollouts do not wait, and a lost one ends nothing.

What was learnt since an earlier state is learnt again, from committed shards, to the same bytes.
"""

import json
from pathlib import Path

import pytest

from pipeline.run.directory import load_run
from pipeline.run.plan import state_of
from tests.support import light_training, tiny
from tests.support.damage import edit, flip_bit
from tests.support.killing import assert_same_end, events, hooked, policy_bytes, state_bytes

TRIAL = pytest.mark.trial(1 / 2)


def arguments(inputs: Path, run_dir: Path, *more: str) -> list[str]:
    """Exactly the words of the ``complete_run`` fixture, but for the directory."""
    heldout = (f"data.heldout={inputs / 'heldout.jsonl'}", "evaluate.every=1")
    return tiny.overrides(inputs, run_dir, *heldout, *more)


def lost(run_dir: Path) -> list[int]:
    """Iterations whose state the journal calls lost."""
    return [event["iteration"] for event in events(run_dir, "state_lost")]


def test_rollouts_start_while_the_state_is_written_and_the_next_update_when_it_is(
    inputs, complete_run, slurm_ppo, environment, tmp_path
):
    """With these variables there is no room for a copy, and a state is written only once the next iteration's
    rollouts have begun to commit."""
    run_dir = tmp_path / "run"
    waiting = environment | {light_training.STATE_WAITS: "1", light_training.ROOM: "1"}
    done = slurm_ppo("run", *arguments(inputs, run_dir, "scheduler.slots=1"), env=waiting)
    assert done.returncode == 0, done.stderr
    assert_same_end(run_dir, complete_run)
    assert lost(run_dir) == []
    state = json.loads(load_run(run_dir).paths.task(state_of(1)).record.read_text())
    launches = {event["task"]: event["time"] for event in events(run_dir, "launched")}
    assert launches["2/rollout/0"] < state["ended"] < launches["2/update/0"]
    assert (run_dir / "state" / "00002" / "critic" / "model.safetensors").exists()


@TRIAL
@pytest.mark.parametrize(
    ("point", "is_lost"),
    [
        ("after-link:iterations/00001/update/shard-00000.json", True),
        ("before-fsync:state/00001.", True),
        ("before-link:iterations/00001/state/shard-00000.json", True),
        ("after-link:iterations/00001/state/shard-00000.json", False),
    ],
)
def test_killed_between_policy_and_state_an_update_is_not_repeated_and_the_run_ends_the_same(
    point, is_lost, inputs, complete_run, slurm_ppo, environment, tmp_path
):
    run_dir = tmp_path / "run"
    done = slurm_ppo("run", *arguments(inputs, run_dir), env=hooked(environment, tmp_path, point))
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("killed-*")), "the hook never fired"
    assert_same_end(run_dir, complete_run)
    assert events(run_dir, "failed") == []
    assert sum(event["task"] == "1/update/0" for event in events(run_dir, "launched")) == 1
    assert lost(run_dir) == [1] * is_lost, "said once"
    assert ("ended before the trainer's state was saved; the next update has it in" in done.stderr) is is_lost
    left = [path.name for path in (run_dir / "state").iterdir() if path.name.startswith("00001")]
    assert len(left) == (0 if is_lost else 2), "what was written in vain is removed"


@TRIAL
def test_what_the_last_update_wrote_of_a_state_in_vain_is_removed(
    inputs, complete_run, slurm_ppo, environment, tmp_path
):
    run_dir = tmp_path / "run"
    point = "before-link:iterations/00002/state/shard-00000.json"
    done = slurm_ppo("run", *arguments(inputs, run_dir), env=hooked(environment, tmp_path, point))
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("killed-*")), "the hook never fired"
    assert policy_bytes(run_dir) == policy_bytes(complete_run)
    assert lost(run_dir) == [2]
    assert not [path.name for path in (run_dir / "state").iterdir() if path.name.startswith("00002")]


@TRIAL
def test_states_that_cannot_be_written_end_nothing_not_even_the_last(
    inputs, slurm_ppo, environment, tmp_path
):
    """Everything is learnt again each time, to what a trainer gets that commits policy and state at once."""
    failing = environment | {light_training.STATE_FAILS: "1 2 3"}
    three = ("iterations=3", "evaluate.every=0", "data.heldout=null")
    done = slurm_ppo("run", *arguments(inputs, tmp_path / "run", *three), env=failing)
    assert done.returncode == 0, done.stderr
    assert lost(tmp_path / "run") == [1, 2, 3]
    assert (
        "No space left on device"
        in (tmp_path / "run/logs/00002-update/attempt-1/shard-00000.log").read_text()
    )
    engine = "update.engine=tests.support.light:make_trainer_at_once"
    at_once = slurm_ppo("run", *arguments(inputs, tmp_path / "at_once", *three, engine))
    assert at_once.returncode == 0, at_once.stderr
    assert lost(tmp_path / "at_once") == []
    last = "policy/00003/model.safetensors"
    assert (tmp_path / "run" / last).read_bytes() == (tmp_path / "at_once" / last).read_bytes()
    status = slurm_ppo("status", tmp_path / "run")
    assert status.returncode == 0, "the run is complete"
    assert "the trainer's state of iteration 3 was lost" in " ".join(status.stdout.split())


@TRIAL
def test_a_run_that_fails_meanwhile_lets_the_state_be_written(inputs, slurm_ppo, environment, tmp_path):
    run_dir = tmp_path / "run"
    point = "before-link:iterations/00002/rollout/shard-00000.json"
    slow = hooked(environment | {light_training.STATE_SECONDS: "3"}, tmp_path, point)
    done = slurm_ppo("run", *arguments(inputs, run_dir, "scheduler.max_attempts=1"), env=slow)
    assert done.returncode == 1, done.stderr
    assert (run_dir / "iterations/00001/state/shard-00000.json").exists()
    assert slurm_ppo("resume", run_dir).returncode == 0
    assert lost(run_dir) == []


@TRIAL
def test_a_state_that_has_rotted_is_moved_aside_and_learnt_again(copied_run, complete_run, slurm_ppo):
    state = copied_run / "state" / "00001"
    flip_bit(state.resolve() / "moments" / "policy.safetensors")
    done = slurm_ppo("resume", copied_run, "--from", "update@2")
    assert done.returncode == 0, done.stderr
    assert "iteration 1 state is moved aside, and the next update learns it again" in done.stderr
    assert [event["task"] for event in events(copied_run, "retracted")] == ["1/state/0"]
    assert lost(copied_run) == [], "it was said already"
    assert policy_bytes(copied_run) == policy_bytes(complete_run)
    assert state_bytes(copied_run) == state_bytes(complete_run)
    assert list(copied_run.glob("superseded/*/state/00001.*/moments/policy.safetensors"))


def test_a_fork_needs_a_state_and_is_told_which_iterations_have_one(copied_run, tmp_path, slurm_ppo):
    load_run(copied_run).paths.task(state_of(1)).record.unlink()
    refused = slurm_ppo("fork", f"{copied_run}@1", tmp_path / "fork")
    assert refused.returncode == 2
    assert "trainer's state 1 of" in refused.stderr
    assert "was lost, or is still being saved (its policy is there); choose 2" in refused.stderr
    exported = slurm_ppo("export", f"{copied_run}@1", tmp_path / "model")
    assert exported.returncode == 0, "an export needs none"


@TRIAL
def test_going_back_behind_a_lost_state_learns_it_again(copied_run, complete_run, slurm_ppo):
    load_run(copied_run).paths.task(state_of(1)).record.unlink()
    done = slurm_ppo("resume", copied_run, "--from", "update@2")
    assert done.returncode == 0, done.stderr
    assert policy_bytes(copied_run) == policy_bytes(complete_run)
    assert state_bytes(copied_run) == state_bytes(complete_run)


@pytest.mark.parametrize(
    "more",
    [
        {"format": 2, "version": "9.9", "news": 1},
        {"format": 2, "version": {"slurm-ppo": "0.1.0"}},
        {"version": "0.1.0", "root": None},
        {"format": None},
    ],
    ids=["later", "before 0.1.0", "long before", "of none"],
)
def test_a_run_of_another_format_is_refused_in_a_line_with_the_way_out(copied_run, more, tmp_path, slurm_ppo):
    edit(copied_run / "run.json", more)
    new = tmp_path / "new"
    for command, *more in (["status"], ["resume"], ["fork", new, "iterations=3"], ["export", new]):
        done = slurm_ppo(command, copied_run, *more)
        assert done.returncode == 2, done.stderr
        (line,) = done.stderr.splitlines()
        assert ", and this version of slurm-ppo" in line
        assert "that made it, or start a run from its newest policy (model.policy=...)" in line
