"""What goes wrong in a worker and around it: nothing is waited for in vain, and whoever must know is told."""

import errno
import json
import os
import shutil
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.scheduler import ResourcesConfig
from pipeline.run import pass_requests
from pipeline.run.commits import read_record
from pipeline.run.control import begin_invocation, take_over
from pipeline.run.directory import Run, load_run
from pipeline.run.failures import DISK_EXIT, FailureKind
from pipeline.run.owner import Owner
from pipeline.run.pass_requests import is_requested, request_pass
from pipeline.run.plan import policy_maker
from pipeline.run.tasks import Stage, Task, task_key
from pipeline.workers.beats import Beat, Doing, Reason, read_beats, write_beat
from pipeline.workers.claims import Claim, claims_of
from pipeline.workers.outside import CommitHooks
from stages.attempts.arguments import Arguments
from stages.attempts.failures import report
from stages.attempts.runner import AttemptEnd
from stages.context import OtherRankFailed
from stages.workers import loop, pulling, start
from tests.support import processes
from tests.support.passes import take_turn
from tests.support.processes import fork_server, in_process_of_its_own, stage_arguments
from tests.support.pulling import beat_of, join, source_of, start_worker, wait_until
from tests.support.waiting import wait_for

SHAPE = ("iterations=2", "rollout.num_shards=2")
ROLLOUT, REWARD, UPDATE = Task(1, Stage.ROLLOUT), Task(1, Stage.REWARD), policy_maker(1)
SETTINGS = ResourcesConfig(linger=60)


@pytest.fixture(scope="module")
def prepared(inputs, tmp_path_factory) -> Path:
    run = processes.make_run(inputs, tmp_path_factory.mktemp("prepared") / "run", *SHAPE)
    begin_invocation(run.paths)
    assert processes.stage(run, "prepare").code == 0
    return run.paths.root


@pytest.fixture(scope="module")
def responded(prepared, tmp_path_factory) -> Path:
    """The same with responses to score."""
    root = shutil.copytree(prepared, tmp_path_factory.mktemp("responded") / "run", symlinks=True)
    for shard in (0, 1):
        assert processes.stage(load_run(root), "rollout", 1, shard).code == 0
    return root


@pytest.fixture(scope="module")
def scored(responded, tmp_path_factory) -> Path:
    """The same with scores to learn from."""
    root = shutil.copytree(responded, tmp_path_factory.mktemp("scored") / "run", symlinks=True)
    for shard in (0, 1):
        assert processes.stage(load_run(root), "reward", 1, shard).code == 0
    return root


@pytest.fixture
def run(prepared, tmp_path) -> Run:
    return load_run(shutil.copytree(prepared, tmp_path / "run", symlinks=True))


def raises(number: int) -> Callable[..., Any]:
    def fails(*given: object, **named: object) -> None:
        raise OSError(number, os.strerror(number))

    return fails


def main(run: Run, first: Task) -> None:
    """The worker's command, in this process."""
    words = stage_arguments(run, first.stage, first.iteration, first.shard)
    start.end_process(start.main(words))


def the_beat(run: Run) -> Beat:
    (beat,) = read_beats(run.paths).values()
    return beat


# --- a disk that takes nothing ---


def with_a_broken_disk(root: Path, what: str, number: int) -> None:
    run = load_run(root)
    setattr(start if what == "load_run" else pulling, what, raises(number))
    main(run, ROLLOUT)


@pytest.mark.parametrize(
    ("what", "number"), [("load_run", errno.EIO), ("recorded", errno.ENOTCONN), ("take", errno.ENOSPC)]
)
def test_a_worker_that_cannot_start_look_or_claim_for_its_disk_says_so_by_its_exit_code(run, what, number):
    assert in_process_of_its_own(with_a_broken_disk, run.paths.root, what, number) == DISK_EXIT
    assert not claims_of(run.paths, [ROLLOUT])


def test_an_error_that_is_no_disks_is_raised(run):
    assert in_process_of_its_own(with_a_broken_disk, run.paths.root, "take", errno.EACCES) == 1


def on_a_full_disk(root: Path, takes_reports: bool) -> None:
    """One that takes no commit, and reports of failures or none."""
    run = load_run(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stages.attempts.execution.publish", raises(errno.ENOSPC))
        if not takes_reports:
            patch.setattr("stages.attempts.failures.link_once", raises(errno.ENOSPC))
        main(run, ROLLOUT)


@pytest.mark.parametrize("takes_reports", [True, False])
def test_a_task_that_a_disk_did_not_take_is_its_workers_last_so_that_the_exit_code_is_its(run, takes_reports):
    """Where there is no other word the worker's last one is that it is at the task: it is judged when the job
    has ended, which has the exit code."""
    assert in_process_of_its_own(on_a_full_disk, run.paths.root, takes_reports) == DISK_EXIT
    ((claim,),) = claims_of(run.paths, run.plan.tasks(1)).values()
    beat = the_beat(run)
    said = (beat.doing, beat.reason, beat.attempt)
    assert said == (
        (Doing.LEAVING, Reason.FAILED, "") if takes_reports else (Doing.BUSY, None, claim.attempt)
    )
    assert run.paths.task(claim.task).failure(claim.number).exists() is takes_reports


# --- what is kept ---


def with_a_trainer_kept(root: Path, loses_disk: bool) -> None:
    """An update's worker that keeps its trainer. What it says of itself while it saves that is left in a
    file. It loses its disk once the update is committed, or goes on until it is warned."""
    run = load_run(root)

    def save() -> None:
        (root / "saved.json").write_text(json.dumps(asdict(the_beat(run))))

    kept = types.ModuleType("stages.ppo.kept")
    vars(kept).update(is_there=lambda: True, save=save, release=lambda: None, seconds_to_save=lambda: 0.0)
    sys.modules[kept.__name__] = kept
    recorded = pulling.recorded

    def lost(*given: Any) -> Any:
        if loses_disk and read_record(run.paths, UPDATE):
            raises(errno.EIO)()
        return recorded(*given)

    pulling.recorded = lost
    main(run, UPDATE)


@pytest.mark.parametrize("loses_disk", [False, True])
def test_a_worker_that_leaves_is_at_its_update_while_it_saves_what_it_kept(scored, tmp_path, loses_disk):
    """Whoever is to do the next update waits until that is over."""
    run = load_run(shutil.copytree(scored, tmp_path / "run", symlinks=True))
    process = fork_server().Process(target=with_a_trainer_kept, args=(run.paths.root, loses_disk))
    process.start()
    if not loses_disk:
        wait_until(run, process, Doing.WAITING, policy_maker(2))
        os.kill(process.pid, signal.SIGTERM)
    assert join(process) == [DISK_EXIT if loses_disk else 0]
    said = json.loads((run.paths.root / "saved.json").read_text())
    attempt = read_record(run.paths, UPDATE).attempt
    assert (said["doing"], said["task"], said["attempt"]) == (Doing.BUSY, task_key(UPDATE), attempt)
    assert the_beat(run).doing is Doing.LEAVING
    assert "committed" in run.paths.task(UPDATE).log(1).read_text()


def fails_and_leaves(root: Path) -> None:
    """The worker fails once; what it says meanwhile, and whether it saved anything, is left in files."""
    run = load_run(root)

    def asked(stays: bool) -> None:
        (root / "asked.txt").write_text(f"{stays} {the_beat(run).doing}")
        source.leave(Reason.TURNED)

    source = source_of(run, ROLLOUT, SETTINGS, failed=asked)
    loop.run_attempt = lambda given: AttemptEnd(0) if given.loads else AttemptEnd(4, FailureKind.INPUTS)
    loop.save_kept_trainer = (root / "saved.txt").touch
    sys.exit(loop.work(source))


def test_a_failure_asks_for_a_pass_and_nothing_is_saved_together_with_ranks_that_may_be_elsewhere(run):
    assert in_process_of_its_own(fails_and_leaves, run.paths.root) == 4
    assert (run.paths.root / "asked.txt").read_text() == f"True {Doing.WAITING}"
    assert not (run.paths.root / "saved.txt").exists()


def commits(root: Path, is_taken_over: bool) -> None:
    """The worker commits once, in a run that may be on another cluster by then; that others are told of it
    leaves a file."""
    run, former = load_run(root), Owner("ada", 61001, "gold")
    os.environ |= {"SLURM_JOB_UID": str(former.uid), "SLURM_CLUSTER_NAME": former.cluster}

    def attempt(given: Arguments) -> AttemptEnd:
        if is_taken_over and not given.loads:
            take_over(run.paths, replace(former, cluster="silver"), former)
        return AttemptEnd(0)

    def told(task: Task) -> None:
        (root / "told.txt").touch()
        source.leave(Reason.DONE)

    source = source_of(run, ROLLOUT, SETTINGS, committed=told)
    loop.run_attempt = attempt
    sys.exit(loop.work(source))


@pytest.mark.parametrize("is_taken_over", [False, True])
def test_a_commit_in_a_run_that_was_taken_over_rings_nobody(run, is_taken_over):
    """By the number of a worker that waits on another cluster some other job may run on this one."""
    assert in_process_of_its_own(commits, run.paths.root, is_taken_over) == 0
    assert (run.paths.root / "told.txt").exists() is not is_taken_over


# --- passes ---


def takes_too_long(root: Path) -> None:
    run = load_run(root)
    source = source_of(run, ROLLOUT, SETTINGS, failed=CommitHooks(run, "4711_0r0").failed)
    source.limit.end_process(60.0, Claim(ROLLOUT, 1, "1-4711_0r0", "4711_0r0", 0.0))


def test_a_task_that_took_too_long_asks_for_a_pass_that_others_make(run):
    assert in_process_of_its_own(takes_too_long, run.paths.root) == 5
    assert is_requested(run.paths)
    assert not (run.paths.root / "slurm/passes/started").exists()


def test_a_disk_that_takes_no_request_ends_no_worker_and_is_reported_once(run, monkeypatch, capsys):
    afterwards = CommitHooks(run, "4711_0r0")
    for name in ("request", "poll", "leave"):
        monkeypatch.setattr(afterwards.keeper, name, raises(errno.ENOSPC))
    for _ in range(3):
        afterwards.waits()
    assert capsys.readouterr().out.count("no pass was started: ") == 1
    afterwards.committed(ROLLOUT)
    afterwards.failed(True)
    assert capsys.readouterr().out.count("no pass was requested: ") == 1
    afterwards.leaves(True)


OTHERS = {
    "waits": (Beat("1_0r0", "reward", "another", 7, 0.0, Doing.WAITING, beat=1), True, True),
    "computes": (Beat("1_0r0", "reward", "another", 7, 0.0, Doing.BUSY, beat=1), False, False),
    "leaves": (Beat("1_0r0", "reward", "another", 7, 0.0, Doing.LEAVING, beat=1), False, False),
    "waited long ago": (Beat("1_0r0", "reward", "another", 7, 0.0, Doing.WAITING, beat=0), False, False),
    "itself": (Beat("4711_0r0", "reward", "another", 7, 0.0, Doing.WAITING, beat=1), False, False),
    "at the last update": (
        Beat("1_0r0", "update", "another", 7, 0.0, Doing.BUSY, task=task_key(policy_maker(2)), beat=1),
        *(False, True),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_who_leaves_waits_for_a_pass_unless_another_one_sees_to_it(run, monkeypatch, name):
    """In the last update of a run many leave, and what each would start computes beside it."""
    started = []
    monkeypatch.setattr(
        pass_requests, "start_pass", lambda paths: started.append(take_turn(paths, lambda: None))
    )
    monkeypatch.setattr(pass_requests.PassRunner, "_is_served", lambda keeper: True)
    other, *is_seen_to = OTHERS[name]
    other = replace(other, beat=time.time() if other.beat else 0.0)
    write_beat(run.paths, other)
    for is_to_be_seen, is_left_to_it in zip((True, False), is_seen_to, strict=True):
        started.clear()
        take_turn(run.paths, lambda: None)
        request_pass(run.paths)
        CommitHooks(run, "4711_0r0").leaves(is_to_be_seen)
        assert is_requested(run.paths) == (not started) == is_left_to_it, is_to_be_seen


# --- warnings ---


def test_a_worker_that_is_warned_in_a_task_that_cannot_save_ends_that_and_leaves(responded, tmp_path):
    run = load_run(shutil.copytree(responded, tmp_path / "run", symlinks=True))
    process = start_worker(run, REWARD, LIGHT_SECONDS="1 0")
    wait_until(run, process, Doing.BUSY, REWARD)
    wait_for(run.paths.task(REWARD).log(1).exists, "the task's beginning")
    os.kill(process.pid, signal.SIGUSR2)
    assert join(process) == [0]
    beat = beat_of(run.paths, process)
    assert (beat.doing, beat.reason) == (Doing.LEAVING, Reason.WARNED)
    assert read_record(run.paths, REWARD)


# --- several ranks ---


def say(file: Path, error: Exception, after: float) -> None:
    time.sleep(after)
    report(error, Arguments(UPDATE, file.parent, "1-7_0r0", file, 0.0), 1.0)


@pytest.mark.parametrize("is_said", [True, False])
def test_of_several_ranks_the_one_that_failed_says_why_and_where(tmp_path, monkeypatch, is_said):
    """The other is as quick, and sees no more than its words. It speaks where the first cannot."""
    monkeypatch.setattr("stages.attempts.failures._GIVE_WAY_SECONDS", 20.0 if is_said else 0.1)
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    file, why = tmp_path / "failure.json", "CUDA error: uncorrectable ECC error encountered"
    other = threading.Thread(target=say, args=(file, OtherRankFailed(f"another rank failed, {why}"), 0.0))
    other.start()
    if is_said:
        say(file, RuntimeError(why), 0.3)
    other.join(timeout=30)
    told = json.loads(file.read_text())
    assert (told["kind"], told["node"]) == ("device", "n2")
    assert ("another rank" in told["message"]) is not is_said
