"""``python -m stages``: exit codes, failure files, and one commit however often a task is tried."""

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.run.commits import read_record
from pipeline.run.directory import Run, load_run
from pipeline.run.environment import PARENT_PIPE, RELEASED
from pipeline.run.paths import RunPaths
from pipeline.run.tasks import Stage, Task
from stages.attempts.execution import commit_state
from stages.context import Context
from stages.models.numerics import set_up_torch
from tests.support import tiny
from tests.support.damage import cut, flip_bit
from tests.support.processes import (
    in_process_of_its_own,
    make_run,
    python_m_stages,
    stage,
    stage_arguments,
    start_stage,
)

ITERATION = [
    ("prepare", 0, 0),
    ("rollout", 1, 0),
    ("rollout", 1, 1),
    ("reward", 1, 0),
    ("reward", 1, 1),
    ("update", 1, 0),
]


def digests(run: Run, *task: object) -> list[tuple[str, int, str]]:
    """Name without attempt, size and hash of what a task committed."""
    name, iteration, shard = task
    record = read_record(run.paths, Task(iteration, Stage(name), shard))
    return sorted((e.path.replace(record.attempt, "*"), e.bytes, e.xxh3_128) for e in record.outputs)


def run_in_one_process(run_dir: str, tasks: list[tuple]) -> None:
    """As a warm worker will: one process, many tasks."""
    from stages.attempts.runner import main

    for name, iteration, shard in tasks:
        assert main(stage_arguments(Path(run_dir), name, iteration, shard)) == 0


@pytest.fixture(scope="module")
def first(models, tmp_path_factory) -> Run:
    """One iteration, each task in a process of its own. Tests must not change it."""
    run = make_run(models, tmp_path_factory.mktemp("first") / "run")
    for task in ITERATION:
        done = stage(run, *task)
        assert done.code == 0, done.log
    return run


@pytest.fixture
def copy(first, tmp_path) -> Run:
    """The same run, to be damaged."""
    shutil.copytree(first.paths.root, tmp_path / "copy")
    return load_run(tmp_path / "copy")


def failed(run: Run, *task: object) -> tuple[int, str, dict]:
    file = run.paths.root / "failure" / "why.json"
    done = stage(run, *task, more=["--failure-file", str(file)])
    return done.code, done.log, json.loads(file.read_text())


def uncommit(run: Run, *task: object) -> None:
    name, iteration, shard = task
    run.paths.task(Task(iteration, Stage(name), shard)).record.unlink()


def test_the_command_commits_and_says_so_and_a_second_time_does_nothing(first, copy, environment):
    """And writes the same bytes as a fork."""
    task = ("rollout", 1, 1)
    uncommit(copy, *task)
    done = python_m_stages(stage_arguments(copy, *task), environment)
    assert done.code == 0, done.log
    assert "iteration 1 rollout shard 1: committed: 4 rows" in done.log
    assert digests(first, *task) == digests(copy, *task)
    record = read_record(copy.paths, Task(1, Stage.ROLLOUT, 1))
    again = stage(copy, *task)
    assert again.code == 0
    assert "iteration 1 rollout shard 1 is committed already; nothing to do" in again.log
    assert read_record(copy.paths, Task(1, Stage.ROLLOUT, 1)) == record


def test_many_tasks_in_one_process_write_the_same_bytes_as_each_in_its_own(models, first, copy, tmp_path):
    """And in another run directory. An engine that is kept must not keep the weights of the policy before."""
    following = [(name, 2, shard) for name, iteration, shard in ITERATION if iteration]
    warm = make_run(models, tmp_path / "warm")
    assert in_process_of_its_own(run_in_one_process, str(warm.paths.root), [*ITERATION, *following]) == 0
    for task in ITERATION:
        assert digests(first, *task) == digests(warm, *task), task
    for task in following:
        assert stage(copy, *task).code == 0
    assert digests(warm, "rollout", 2, 0) == digests(copy, "rollout", 2, 0)
    assert digests(warm, "update", 2, 0) == digests(copy, "update", 2, 0)
    assert digests(warm, "rollout", 2, 0) != digests(warm, "rollout", 1, 0)


def test_of_two_attempts_at_one_task_one_commits_and_both_succeed(copy):
    for task in (("rollout", 1, 0), ("update", 1, 0)):
        expected = digests(copy, *task)
        for old in copy.paths.root.glob(f"iterations/00001/{task[0]}/shard-00000.*"):
            old.unlink()
        logs = [copy.paths.root / f"racer-{i}.log" for i in range(2)]
        racers = [start_stage(stage_arguments(copy, *task), log) for log in logs]
        for racer in racers:
            racer.join(timeout=60)
            assert racer.exitcode == 0
        assert sum(": committed: " in log.read_text() for log in logs) == 1
        assert digests(copy, *task) == expected
    (_,) = copy.paths.root.glob("iterations/00001/rollout/shard-00000.*.arrow")  # the loser's is removed


def test_input_that_is_not_committed_is_named(copy):
    for task in (("rollout", 1, 1), ("reward", 1, 1)):
        uncommit(copy, *task)
    code, log, why = failed(copy, "reward", 1, 1)
    assert code == 4
    assert (why["kind"], why["suspect"]) == ("inputs", "1/rollout/1")
    assert "iteration 1 rollout shard 1 is not committed" in why["message"]
    assert "Traceback" not in log


def flip_a_weight(path: Path) -> None:
    """Of its last numbers: a header that is spoilt is no longer one."""
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


ROLLED_OUT = "iterations/00001/rollout/shard-00001"
SCORED = "iterations/00001/reward/shard-00000.*.arrow"
WEIGHTS = "model.safetensors"


@pytest.mark.parametrize(
    ("pattern", "damage", "task", "suspect", "said"),
    [
        (f"{ROLLED_OUT}.*.arrow", flip_bit, ("update", 1, 0), "1/rollout/1", "xxh3_128"),
        (f"{ROLLED_OUT}.json", cut, ("reward", 1, 1), "1/rollout/1", "is corrupt"),
        (SCORED, cut, ("update", 1, 0), "1/reward/0", "bytes instead of"),
        (SCORED, Path.unlink, ("update", 1, 0), "1/reward/0", "is gone"),
        (f"policy/00001.*/{WEIGHTS}", flip_a_weight, ("rollout", 2, 0), "1/update/0", WEIGHTS),
    ],
)
def test_input_that_is_corrupt_is_named_and_nothing_is_committed(copy, pattern, damage, task, suspect, said):
    (path,) = copy.paths.root.glob(pattern)
    damage(path)
    record = copy.paths.task(Task(task[1], Stage(task[0]), task[2])).record
    record.unlink(missing_ok=True)
    code, log, why = failed(copy, *task)
    assert (code, why["kind"], why["suspect"]) == (4, "inputs", suspect)
    assert said in why["message"]
    assert "Traceback" not in log
    assert not record.exists()


def test_scores_of_responses_that_were_since_computed_anew_are_stale(models, copy, tmp_path):
    """A rollout shard with another result than the reward shard was computed from."""
    other = make_run(models, tmp_path / "other", "seed=7")
    for task in (("prepare", 0, 0), ("rollout", 1, 0)):
        assert stage(other, *task).code == 0
    source, target = (run.paths.task(Task(1, Stage.ROLLOUT, 0)) for run in (other, copy))
    uncommit(copy, "rollout", 1, 0)
    for path in source.folder.glob("shard-00000.*"):
        shutil.copy(path, target.folder)
    record = json.loads(target.record.read_text())
    record["inputs"] = read_record(copy.paths, Task(1, Stage.ROLLOUT, 1)).inputs
    target.record.write_text(json.dumps(dict(record)))
    uncommit(copy, "update", 1, 0)
    code, _, why = failed(copy, "update", 1)
    assert (code, why["kind"]) == (4, "inputs")
    assert why["suspect"] == "1/reward/0"
    assert "is stale" in why["message"]


def test_a_folder_that_is_no_run_is_the_users_mistake(tmp_path):
    process = start_stage(stage_arguments(tmp_path, "rollout", 1), tmp_path / "log")
    process.join(timeout=60)
    said = (tmp_path / "log").read_text()
    assert process.exitcode == 2
    assert "is not a run directory" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "task", [("rollout", 1, 2), ("rollout", 3, 0), ("update", 1, 1), ("rollout", 0, 0), ("evaluate", 1, 0)]
)
def test_a_task_that_the_run_does_not_have_is_refused(copy, task):
    code, log, why = failed(copy, *task)
    assert (code, why["kind"]) == (2, "config")
    assert "iterations 1 to 2 of shards 0 to 1" in why["message"]
    assert "Traceback" not in log


def test_an_error_of_the_program_leaves_its_traceback_and_exit_code_1(copy):
    shutil.rmtree(copy.paths.root / "iterations/00001/update")
    (copy.paths.root / "iterations/00001/update").write_text("a file where a folder must be")
    code, log, why = failed(copy, "update", 1)
    assert (code, why["kind"], why["suspect"]) == (1, "error", None)
    assert "Traceback (most recent call last)" in log
    assert "iteration 1 update failed" in log


def test_a_policy_that_writes_nan_is_never_committed_as_a_rollout(models, tmp_path):
    policy = tiny.make_policy(tmp_path / "policy")
    weights = load_file(policy / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][:] = 3e38  # numbers, whose products are none
    save_file(weights, policy / "model.safetensors", metadata={"format": "pt"})
    run = make_run(models, tmp_path / "run", f"model.policy={policy}")
    assert stage(run, "prepare").code == 0
    code, log, why = failed(run, "rollout", 1, 0)
    assert (code, why["kind"]) == (1, "numerics")
    assert "policy 0 gives log-probabilities that are not finite for prompt_id p" in why["message"]
    assert "Traceback" in log
    assert read_record(run.paths, Task(1, Stage.ROLLOUT, 0)) is None


def make_tensors_like_a_task() -> None:
    set_up_torch(num_threads=2, seed=0)
    assert torch.get_num_threads() == 2
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    before = torch.zeros(1 << 10)
    del before  # its memory is what comes next
    assert not any(bool(torch.empty(1 << 10).isnan().all()) for _ in range(3))


def test_tasks_do_not_spend_their_time_on_filling_new_memory():
    """Which torch's deterministic mode does, in one thread: the second one gained 1.5 times at most."""
    assert in_process_of_its_own(make_tensors_like_a_task) == 0


@pytest.mark.parametrize("frees", [True, False])
def test_others_are_called_to_the_devices_only_once_they_are_free(tmp_path, monkeypatch, frees):
    """Where the host has no room for a copy, the devices are used until the process ends."""
    reader, ringer = os.pipe()
    os.set_blocking(reader, False)
    monkeypatch.setenv(PARENT_PIPE, str(ringer))
    task = Task(1, Stage.UPDATE)
    heard = []

    class Writer:
        def detach(self) -> bool:
            return frees

        def write(self, is_wanted: bool) -> tuple:
            with contextlib.suppress(BlockingIOError):
                heard.append(os.read(reader, 9))
            return ()

    commit_state(Context(RunPaths(tmp_path), None, task, "1-aa"), Writer(), None, history=-1)
    os.close(ringer)
    heard.append(os.read(reader, 9))
    os.close(reader)
    assert b"".join(heard) == (RELEASED if frees else b"")
