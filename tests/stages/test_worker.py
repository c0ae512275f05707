"""One process does task after task: the same bytes as processes of their own, and no more memory."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.run.commits import read_record
from pipeline.run.directory import load_run
from pipeline.run.failures import FailureKind
from pipeline.run.plan import state_of
from pipeline.run.tasks import PREPARE
from stages.attempts.runner import AttemptEnd
from stages.process.imported import imported_files, is_changed
from stages.workers.loop import is_spoilt
from tests.support import ROOT, processes


def done_by_one_worker(run_dir: Path, too_early: int = 0) -> list[dict]:
    """What it says of each attempt."""
    command = [sys.executable, "-m", "tests.support.light_worker", str(run_dir), str(too_early)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_one_worker_that_has_failed_before_ends_in_the_bytes_of_fresh_processes(
    inputs, complete_run, tmp_path
):
    heldout = (f"data.heldout={inputs / 'heldout.jsonl'}", "evaluate.every=1")
    run = processes.make_run(inputs, tmp_path / "run", *heldout)
    attempts = done_by_one_worker(run.paths.root, too_early=2)
    assert [one["code"] for one in attempts] == [4, 4] + [0] * (len(attempts) - 2)
    assert len({one["pid"] for one in attempts}) == 1
    complete = load_run(complete_run)
    tasks = [PREPARE, *(task for iteration in (1, 2) for task in run.plan.tasks(iteration))]
    for task in (*tasks, state_of(1), state_of(2)):
        mine, other = (read_record(one.paths, task) for one in (run, complete))
        assert mine.fingerprint == other.fingerprint, task


def test_two_hundred_iterations_in_one_worker_take_no_more_memory(inputs, tmp_path):
    few = (
        "iterations=200",
        "rollout.num_shards=1",
        "data.prompts_per_iteration=2",
        "rollout.max_new_tokens=2",
    )
    run = processes.make_run(inputs, tmp_path / "run", *few)
    attempts = done_by_one_worker(run.paths.root)
    sizes = [one["bytes"] for one in attempts if "/update/" in one["task"]]
    assert len(sizes) == 200
    assert max(sizes) <= 1.05 * sizes[4]


@pytest.mark.parametrize(
    ("failure", "ranks", "spoilt"),
    [
        (None, 1, False),
        (None, 4, False),
        (FailureKind.INPUTS, 1, False),
        (FailureKind.MEMORY, 1, True),
        (FailureKind.DISK, 1, True),
        (FailureKind.INPUTS, 2, True),
    ],
)
def test_after_which_failures_a_process_is_not_used_again(failure, ranks, spoilt):
    assert is_spoilt(AttemptEnd(int(failure is not None), failure), ranks) is spoilt


def test_code_of_the_user_that_has_changed_is_seen(tmp_path, monkeypatch):
    own = tmp_path / "own_rule_of_test_worker.py"
    own.write_text("def score(): return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = frozenset(sys.modules)
    importlib.import_module("own_rule_of_test_worker")
    files = imported_files(but=before)
    assert list(files) == [str(own)]
    assert not is_changed(files)
    own.write_text("def score(): return 10\n")
    assert is_changed(files)
    own.unlink()
    assert is_changed(files)
