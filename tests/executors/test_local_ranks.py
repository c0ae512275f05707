"""Several ranks of an update on this machine: if one is killed, all start again and end in the same bytes."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config.issue import ConfigError
from pipeline.decide.judging import judge_process
from pipeline.executors.limits import WorkerEnd
from pipeline.run.commits import read_record
from pipeline.run.directory import load_run
from pipeline.run.endings import Evidence, read_endings
from pipeline.run.failures import DISK_EXIT, FailureKind, Said
from pipeline.run.plan import policy_maker
from pipeline.run.tasks import Stage, Task
from pipeline.status.log_files import LogChoice, find_logs, parse_choice
from pipeline.status.logs import describe_failed
from tests.support import ROOT
from tests.support.composed import composed_of
from tests.support.damage import flip_bit
from tests.support.killing import HOOKS, data_file
from tests.support.processes import make_run, stage
from tests.support.ranks import respond_and_score, updated
from tests.support.tables import LONG
from tests.support.waiting import wait_for

SETTINGS = ("iterations=1", "update.zero_stage=2", "scheduler.update.ranks=2")


@pytest.fixture(scope="module")
def undisturbed(models, tmp_path_factory) -> Path:
    """A run whose update was done by two ranks, without a driver. Tests must not change it."""
    run = make_run(models, tmp_path_factory.mktemp("ranks") / "run", *SETTINGS)
    assert stage(run, "prepare").code == 0
    updated(respond_and_score(run, 1), 2)
    return run.paths.root


@pytest.fixture
def scored(undisturbed, tmp_path) -> Path:
    """The same before its update."""
    run_dir = Path(shutil.copytree(undisturbed, tmp_path / "run", symlinks=True))
    made = [run_dir / "iterations/00001" / name for name in ("update", "state")]
    for folder in (*made, *run_dir.glob("*/00001.*")):
        shutil.rmtree(folder)
    return run_dir


def fingerprint(run_dir: Path) -> str:
    """Of the policy, and of the sums over critic and trainer state."""
    return read_record(load_run(run_dir).paths, Task(1, Stage.UPDATE)).fingerprint


def failures(run_dir: Path) -> list[tuple[str, str, str]]:
    """Task, kind and message of each failed attempt, of which events and the store say the same."""
    events = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    told = [(e["task"], e["kind"], e["message"]) for e in events if e["event"] == "failed"]
    kept = read_endings(load_run(run_dir).paths, range(10)).values()
    failed = [ending for ending in kept if ending.evidence is not Evidence.RETRACTION]
    assert [(e.task, e.kind, e.message) for e in failed] == told
    return told


SAID = Said(FailureKind.ERROR, "a bug", "1/reward/0")


@pytest.mark.parametrize(
    ("said", "end", "ranks", "judged"),
    [
        (
            None,
            WorkerEnd(1),
            1,
            (FailureKind.KILLED, "ended with exit code 1 and said nothing", Evidence.EXIT_CODE),
        ),
        (None, WorkerEnd(-9), 1, (FailureKind.KILLED, "killed by signal 9", Evidence.EXIT_CODE)),
        (None, WorkerEnd(1, "a time limit"), 1, (FailureKind.KILLED, "a time limit", Evidence.EXIT_CODE)),
        (None, WorkerEnd(DISK_EXIT, "full"), 1, (FailureKind.DISK, "full", Evidence.EXIT_CODE)),
        (SAID, WorkerEnd(1), 1, (FailureKind.ERROR, "a bug", Evidence.FAILURE_FILE)),
        (SAID, WorkerEnd(-9), 1, (FailureKind.ERROR, "a bug", Evidence.FAILURE_FILE)),
        (SAID, WorkerEnd(1, "rank 1"), 2, (FailureKind.ERROR, "a bug (rank 1)", Evidence.FAILURE_FILE)),
        (SAID, WorkerEnd(-9, "rank 0"), 2, (FailureKind.KILLED, "rank 0", Evidence.EXIT_CODE)),
    ],
)
def test_how_a_process_ended_is_judged_by_its_own_word_or_else_by_its_exit_code(said, end, ranks, judged):
    """Of several ranks a file is that of one that found its peer gone, where another was killed."""
    assert judge_process(policy_maker(1), said, end.exit_code, end.note, ranks) == judged


def writers(log: Path) -> list[int]:
    """The processes whose output goes to a log."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(
            FileNotFoundError, ProcessLookupError, PermissionError
        ):  # ended, or not ours
            if (folder / "fd" / "1").readlink() == log:
                found.append(int(folder.name))
    return found


@LONG
def test_any_rank_that_is_killed_costs_an_attempt_and_changes_nothing(
    undisturbed, scored, environment, tmp_path
):
    run_dir, marker = scored, tmp_path / "killed"
    # of the first attempt rank 1 as soon as it is there, of the second rank 0 while it saves
    hooked = environment | {
        "PYTHONPATH": str(HOOKS),
        "KILL_AT": "before-fsync:policy/00001.",
        "KILL_MARKER": str(marker),
    }
    command = [sys.executable, "-m", "pipeline", "resume", run_dir]
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(command, env=hooked, cwd=ROOT, stdout=said, stderr=said)
    try:
        kill_writer(run_dir / "logs/00001-update/attempt-1/shard-00000.rank-1.log")
        code = process.wait(timeout=120)
    finally:
        process.kill()
    assert code == 0, (tmp_path / "said").read_text()
    assert marker.exists()
    assert failures(run_dir) == [
        ("1/update/0", "killed", "rank 1 of 2 killed by signal 9"),
        ("1/update/0", "killed", "rank 0 of 2 killed by signal 9"),
    ]
    assert fingerprint(run_dir) == fingerprint(undisturbed)
    names = ["update@1", "update@1 rank 1", "update@1 #2", "update@1 rank 1 #2"]
    run = load_run(run_dir)
    logs = find_logs(run.paths, parse_choice("update", run.plan))
    assert [log.name for log in logs] == [*names, "update@1 #3", "update@1 rank 1 #3"]
    assert ["update: committed" in log.path.read_text() for log in logs] == [False] * 4 + [True, False]
    events = [json.loads(line) for line in run.paths.events.read_text().splitlines()]
    shown = "\n".join(describe_failed(run.paths, events, LogChoice("update"), 5))
    assert "00001-update/attempt-1/shard-00000.rank-1.log" in shown
    assert not any(writers(log.path) for log in find_logs(run.paths, LogChoice()))
    assert list(run_dir.rglob("*.rendezvous")) == []


def kill_writer(log: Path) -> None:
    """The process that writes a log, as soon as there is one."""
    (pid,) = wait_for(lambda: writers(log), f"a process that writes {log}", 200)
    os.kill(pid, signal.SIGKILL)


def test_ranks_that_find_an_input_spoilt_say_so_and_it_is_made_again(undisturbed, scored, slurm_ppo):
    flip_bit(data_file(scored, "00001/reward/shard-00001"))
    done = slurm_ppo("resume", scored)
    assert done.returncode == 0, done.stderr
    ((task, kind, message),) = failures(scored)
    assert (task, kind) == ("1/update/0", "inputs")
    assert "iteration 1 reward shard 1 is corrupt" in message
    assert "of 2 ended with exit code 4)" in message
    assert fingerprint(scored) == fingerprint(undisturbed)


def test_only_the_update_has_ranks(models, tmp_path):
    for name in ("rollout", "reward", "evaluate"):
        with pytest.raises(
            ConfigError, match=rf"scheduler.{name}.ranks: unknown key.*scheduler.update.ranks"
        ):
            composed_of(models, tmp_path / "run", f"scheduler.{name}.ranks=2")
    with pytest.raises(ConfigError, match=r"scheduler.update.ranks"):
        composed_of(models, tmp_path / "run", "scheduler.update.ranks=0")
