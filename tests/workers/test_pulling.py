"""Workers that find their tasks in a run directory: the same bytes, whoever is killed or goes back."""

import json
import os
import signal
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pipeline.config.changeable import Difference
from pipeline.orchestrate.rewind import Point, go_back
from pipeline.run import pass_requests
from pipeline.run.changes import SettingsChange, write_changes
from pipeline.run.commits import read_record
from pipeline.run.control import begin_invocation, read_control, take_over, write_control
from pipeline.run.directory import Run, load_run
from pipeline.run.owner import Owner
from pipeline.run.pass_requests import LastPass, is_requested, read_last, request_pass
from pipeline.run.plan import policy_maker, state_of
from pipeline.run.tasks import PREPARE, Stage, Task
from pipeline.workers.beats import Doing, Reason
from pipeline.workers.claims import claims_of, file_of
from pipeline.workers.outside import CommitHooks
from slurm.sharedfiles import sealed
from tests.support import processes, tiny
from tests.support.passes import take_turn
from tests.support.pulling import beat_of, crew, join, wait_until
from tests.support.waiting import wait_for

SHAPE = ("iterations=3", "rollout.num_shards=4")
ROLLOUTS, REWARDS = ([Task(1, stage, shard) for shard in (0, 1)] for stage in (Stage.ROLLOUT, Stage.REWARD))
UPDATE = policy_maker(1)


@pytest.fixture(scope="module")
def expected(inputs, slurm_ppo, tmp_path_factory) -> Run:
    """The run as the local scheduler does it."""
    root = tmp_path_factory.mktemp("expected") / "run"
    done = slurm_ppo("run", *tiny.overrides(inputs, root, *SHAPE))
    assert done.returncode == 0, done.stderr
    return load_run(root)


@pytest.fixture
def run(inputs, expected, tmp_path) -> Run:
    """One of which only prepare is done."""
    made = processes.make_run(inputs, tmp_path / "run", *SHAPE)
    begin_invocation(made.paths)
    assert processes.stage(made, "prepare").code == 0
    return made


def assert_same_bytes(run: Run, expected: Run) -> None:
    for version in range(1, 4):
        for task in (policy_maker(version), state_of(version)):
            found, told = (read_record(each.paths, task) for each in (run, expected))
            assert found.fingerprint == told.fingerprint, task


def all_of(run: Run, stage: Stage) -> list[Task]:
    return [task for task in run.plan.all_tasks() if task.stage is stage]


def test_two_workers_of_a_stage_share_four_shards_to_the_same_bytes(run, expected):
    with crew(run, *ROLLOUTS, *REWARDS, UPDATE) as workers:
        assert join(*workers) == [0] * 5
    assert_same_bytes(run, expected)
    for number, stage in enumerate((Stage.ROLLOUT, Stage.REWARD, Stage.UPDATE)):
        tasks = all_of(run, stage)
        records = [read_record(run.paths, task) for task in tasks]
        assert {record.pid for record in records} <= {worker.pid for worker in workers[2 * number :][:2]}
        claims = claims_of(run.paths, tasks)
        for record in records:  # each task's output is in the log of its own attempt
            (number_of,) = (c.number for c in claims[record.task] if c.attempt == record.attempt)
            assert f"{record.task}: committed" in run.paths.task(record.task).log(number_of).read_text()
    for worker in workers:
        beat = beat_of(run.paths, worker)
        assert (beat.doing, beat.reason) == (Doing.LEAVING, Reason.DONE)
        lived = beat.startup_seconds + beat.busy_seconds + beat.waiting_seconds
        assert lived == pytest.approx(beat.since - beat.started, abs=0.01)
    # One that claims a task as another commits it finds it done, which is not its work.
    assert sum(beat_of(run.paths, worker).tasks for worker in workers[:2]) == 12


def test_where_each_task_has_a_job_a_worker_leaves_what_else_is_ready(run):
    """It says so before it asks for a pass, which then counts on it no more."""
    with crew(run, ROLLOUTS[1], LINGER="0", START_EARLY="false") as (worker,):
        assert join(worker) == [0]
    beat = beat_of(run.paths, worker)
    assert (beat.doing, beat.reason, beat.tasks) == (Doing.LEAVING, Reason.ONE, 1)
    done = [read_record(run.paths, Task(1, Stage.ROLLOUT, shard)) is not None for shard in range(4)]
    assert done == [False, True, False, False]
    assert (run.paths.root / "committed.txt").read_text() == f"1/rollout/1 {Doing.LEAVING}\n"


def test_after_a_policy_a_pass_is_asked_for_before_the_state_behind_it_is_written(run, expected):
    with crew(run, *ROLLOUTS, *REWARDS, UPDATE, LIGHT_STATE_SECONDS="0.2") as workers:
        assert join(*workers) == [0] * 5
    lines = (run.paths.root / "committed.txt").read_text().splitlines()
    assert [line for line in lines if line.startswith("1/update")] == [
        f"1/update/0 {Doing.BUSY}",
        f"1/update/0 {Doing.BUSY}",
    ]
    assert_same_bytes(run, expected)


def test_whoever_is_killed_at_work_or_while_waiting_others_go_on(run, expected):
    with crew(run, ROLLOUTS[0], LIGHT_SECONDS="100") as (computing,), crew(run, REWARDS[0]) as (waiting,):
        wait_until(run, computing, Doing.BUSY, ROLLOUTS[0])
        wait_for(lambda: ROLLOUTS[0] in claims_of(run.paths, ROLLOUTS), "the claim, which follows that word")
        wait_until(run, waiting, Doing.WAITING, REWARDS[0])
        for worker in (computing, waiting):
            os.kill(worker.pid, signal.SIGKILL)
            worker.join()
        with crew(run, ROLLOUTS[1], REWARDS[1], UPDATE) as others:
            assert join(*others) == [0] * 3
    assert_same_bytes(run, expected)
    assert [claim.number for claim in claims_of(run.paths, ROLLOUTS)[ROLLOUTS[0]]] == [1, 2]


def test_a_go_back_while_workers_wait_has_them_do_it_again(run, expected):
    with crew(run, ROLLOUTS[0], REWARDS[0]) as workers:
        wait_until(run, workers[0], Doing.WAITING, ROLLOUTS[0]._replace(iteration=2))
        wait_until(run, workers[1], Doing.WAITING, REWARDS[0]._replace(iteration=2))
        before = read_record(run.paths, ROLLOUTS[0])
        aside = go_back(run, Point(Stage.ROLLOUT, 1))
        with crew(run, UPDATE) as (update,):
            assert join(*workers, update) == [0] * 3
    assert_same_bytes(run, expected)
    assert read_record(run.paths, ROLLOUTS[0]).started > before.started
    moved = {path.name for path in (aside / "iterations/00001/rollout").iterdir()}
    assert {f"shard-{shard:05d}.claim-1.json" for shard in range(4)} <= moved


def test_who_computes_while_the_run_goes_back_does_it_again_for_the_run_as_it_is_then(
    run, expected, tmp_path
):
    assert processes.stage(run, "rollout", 1, ROLLOUTS[1].shard).code == 0
    held = tmp_path / "held"
    held.touch()
    with crew(run, ROLLOUTS[0], LIGHT_HOLD=str(held)) as (worker,):
        wait_for((tmp_path / f"held.{worker.pid}").exists, "the task's first response")
        assert beat_of(run.paths, worker).doing is Doing.BUSY
        aside = go_back(run, Point(Stage.ROLLOUT, 1))
        held.unlink()
        with crew(run, *REWARDS, UPDATE) as others:
            assert join(worker, *others) == [0] * 4
    assert_same_bytes(run, expected)
    late = json.loads((aside / "iterations/00001/rollout/shard-00000.json").read_text())
    record = read_record(run.paths, ROLLOUTS[0])
    assert late["pid"] == record.pid == worker.pid
    assert late["attempt"] != record.attempt
    assert record.fingerprint == read_record(expected.paths, ROLLOUTS[0]).fingerprint
    assert beat_of(run.paths, worker).tasks == 12, "what went with the history that is gone is no task done"


def test_a_claim_that_is_spoilt_is_nobodys(run):
    path = file_of(run.paths, ROLLOUTS[0], 1)
    path.parent.mkdir(parents=True)
    path.write_text('{"task": "1/rol')
    with crew(run, ROLLOUTS[0]) as (worker,):
        wait_until(run, worker, Doing.WAITING, ROLLOUTS[0]._replace(iteration=2))
    record = read_record(run.paths, ROLLOUTS[0])
    assert record.attempt.startswith("2-")
    assert claims_of(run.paths, ROLLOUTS)[ROLLOUTS[0]][0].worker == ""


def test_signals_a_hint_wakes_and_a_warning_ends_who_waits(run):
    with crew(run, UPDATE) as (worker,):
        wait_until(run, worker, Doing.WAITING, UPDATE)
        os.kill(worker.pid, signal.SIGUSR1)
        os.kill(worker.pid, signal.SIGTERM)
        assert join(worker) == [0]
        beat = beat_of(run.paths, worker)
        assert (beat.doing, beat.reason, beat.tasks) == (Doing.LEAVING, Reason.WARNED, 0)


def test_who_was_overtaken_has_not_done_the_task(run):
    with crew(run, ROLLOUTS[0], LIGHT_SECONDS="5 0 100") as (worker,):
        wait_until(run, worker, Doing.BUSY, ROLLOUTS[0])
        os.kill(worker.pid, signal.SIGSTOP)
        assert processes.stage(run, "rollout", 1, 0).code == 0
        os.kill(worker.pid, signal.SIGCONT)
        wait_until(run, worker, Doing.BUSY, ROLLOUTS[1])
        assert beat_of(run.paths, worker).tasks == 0


def test_who_leaves_for_its_memory_or_a_warning_says_so(run):
    with crew(run, ROLLOUTS[0], GROWING="1") as (worker,):
        assert join(worker) == [0]
        beat = beat_of(run.paths, worker)
        assert (beat.doing, beat.reason, beat.tasks) == (Doing.LEAVING, Reason.GREW, 4)
    next_one = ROLLOUTS[0]._replace(iteration=2)
    with crew(run, UPDATE) as (update,), crew(run, *REWARDS) as _:
        wait_until(run, update, Doing.WAITING, UPDATE._replace(iteration=2))
        with crew(run, next_one, LIGHT_SECONDS="100") as (worker,):
            wait_until(run, worker, Doing.BUSY, next_one)
            log = run.paths.task(next_one).log(1)
            wait_for(log.exists, "the task's beginning")
            os.kill(worker.pid, signal.SIGUSR2)
            assert join(worker) == [5]
            beat = beat_of(run.paths, worker)
            assert (beat.doing, beat.reason, beat.tasks) == (Doing.LEAVING, Reason.WARNED, 0)


def test_who_waits_leaves_when_the_run_s_settings_were_changed_under_it(run):
    with crew(run, UPDATE, WATCHFUL="1") as (worker,):
        wait_until(run, worker, Doing.WAITING, UPDATE)
        run.paths.config_yaml.touch()
        assert join(worker) == [0]
        beat = beat_of(run.paths, worker)
        assert (beat.doing, beat.reason, beat.tasks) == (Doing.LEAVING, Reason.CHANGED, 0)


def test_a_worker_goes_on_with_its_settings_to_the_end_of_its_task_and_leaves_once_they_are_others(run):
    with crew(run, ROLLOUTS[0], LIGHT_SECONDS="3") as (worker,):
        wait_until(run, worker, Doing.BUSY, ROLLOUTS[0])
        memory = Difference("rollout.vllm.kv_cache_gib", None, 2.0)
        write_changes(run.paths, [SettingsChange(time.time(), "ada", 1, (memory,))])
        begin_invocation(run.paths)
        assert join(worker) == [0]
    beat = beat_of(run.paths, worker)
    assert (beat.reason, beat.tasks) == (Reason.CHANGED, 1)
    assert read_record(run.paths, ROLLOUTS[0])
    assert run.with_newest_settings().config.rollout.vllm.kv_cache_gib == 2.0


def test_who_waits_notices_a_change_also_where_the_command_was_killed_right_after_it(run):
    with crew(run, UPDATE, WATCHFUL="1") as (worker,):
        wait_until(run, worker, Doing.WAITING, UPDATE)
        memory = Difference("rollout.vllm.kv_cache_gib", None, 2.0)
        write_changes(run.paths, [SettingsChange(time.time(), "ada", 1, (memory,))])
        assert join(worker) == [0]
    assert beat_of(run.paths, worker).reason == Reason.CHANGED


def test_a_task_that_takes_too_long_ends_with_its_worker_and_one_that_can_save_is_warned_before(
    run, expected
):
    ready, scoring = ROLLOUTS[0]._replace(shard=2), REWARDS[0]._replace(shard=2)
    assert processes.stage(run, "rollout", 1, ready.shard).code == 0
    limit = {"TASK_TIME": "0:00:04", "LIGHT_SECONDS": "100"}
    slow = {
        ROLLOUTS[0]: limit | {"LIGHT_SECONDS": "0 100"},
        ROLLOUTS[1]: limit | {"LIGHT_DEAF": "1"},
        scoring: limit,
    }
    with ExitStack() as stack:
        workers = [stack.enter_context(crew(run, task, **given))[0] for task, given in slow.items()]
        assert join(*workers) == [5] * 3
    said = [json.loads(run.paths.task(task).failure(1).read_text()) for task in slow]
    assert [failure["kind"] for failure in said] == ["paused", "timeout", "timeout"]
    assert [failure["message"] for failure in said[1:]] == ["it took more than 4 s"] * 2
    beats = [beat_of(run.paths, worker) for worker in workers]
    assert {beat.doing for beat in beats} == {Doing.LEAVING}
    assert [beat.reason for beat in beats] == [Reason.WARNED, Reason.FAILED, Reason.FAILED]
    begin_invocation(run.paths)  # whoever owns the run resumes it
    with crew(run, *ROLLOUTS, *REWARDS, UPDATE) as others:
        assert join(*others) == [0] * 5
    assert_same_bytes(run, expected)
    assert "continues from 1 of 2 responses" in run.paths.task(ROLLOUTS[0]).log(2).read_text()


@pytest.mark.parametrize("limit", [{"TASK_TIME": "0:01:00"}, {}], ids=["task_time", "as its own"])
def test_no_second_task_is_begun_that_may_not_end_before_the_worker_itself_does(run, limit):
    ends = str(time.time() + 90)  # with a warning 120 s before
    with crew(run, ROLLOUTS[0], ENDS=ends, LIGHT_SECONDS="0.1", **limit) as (worker,):
        assert join(worker) == [0]
        beat = beat_of(run.paths, worker)
        assert (beat.doing, beat.reason, beat.tasks) == (Doing.LEAVING, Reason.TIME, 1)
    assert claims_of(run.paths, ROLLOUTS).keys() == {ROLLOUTS[0]}


def test_of_many_who_wait_one_makes_the_pass_that_nobody_has_asked_for(run):
    request_pass(run.paths)
    take_turn(run.paths, lambda: None)
    hour_old = _last_pass_of_an_hour_ago(run)
    made = run.paths.root / "passes.txt"
    with crew(run, UPDATE, *REWARDS, TENDS="1") as workers:
        wait_for(made.exists, "a pass")
        for worker, task in zip(workers, (UPDATE, *REWARDS), strict=True):
            wait_until(run, worker, Doing.WAITING, task)
        os.kill(workers[0].pid, signal.SIGTERM)
        assert join(workers[0]) == [0]
    # a second one where two looked before either asked, and the first's pass was over before the second asked
    assert len(made.read_text().splitlines()) < len(workers)
    assert read_last(run.paths).number > hour_old.number
    assert not is_requested(run.paths)


def test_who_waits_asks_for_no_pass_while_one_is_at_work(run, monkeypatch):
    monkeypatch.setattr(pass_requests, "start_pass", lambda paths: None)
    for began, is_asked in ((time.time(), False), (time.time() - 1800, True)):  # the second was killed
        _last_pass_of_an_hour_ago(run, began)
        CommitHooks(run, "4711_0r0", began=0.0).waits()
        assert is_requested(run.paths) is is_asked


def _last_pass_of_an_hour_ago(run: Run, began: float | None = None) -> LastPass:
    """Have the newest pass end an hour ago, or another have begun since, which has not ended."""
    ended = time.time() - 3600
    last = LastPass(began=ended - 1 if began is None else began, ended=ended, number=1)
    passes = run.paths.slurm / "passes"
    passes.mkdir(parents=True, exist_ok=True)
    (passes / "last").write_text(sealed(asdict(last)))
    return last


def test_a_run_that_is_cancelled_ends_who_waits(run):
    with crew(run, UPDATE) as (worker,):
        wait_until(run, worker, Doing.WAITING, UPDATE)
        write_control(run.paths, replace(read_control(run.paths), cancelled=True))
        assert join(worker) == [0]
        assert beat_of(run.paths, worker).reason is Reason.TURNED


def test_a_run_that_is_taken_over_ends_those_who_wait_of_its_former_owner_alone(run):
    former, owner = Owner("ada", 61001, "gold"), Owner("ben", 61002, "gold")
    jobs = [{"SLURM_JOB_UID": str(one.uid), "SLURM_CLUSTER_NAME": "gold"} for one in (former, owner)]
    with crew(run, UPDATE, **jobs[0]) as (hers,), crew(run, UPDATE, **jobs[1]) as (his,):
        for worker in (hers, his):
            wait_until(run, worker, Doing.WAITING, UPDATE)
        take_over(run.paths, owner, former)
        assert join(hers) == [0]
        assert beat_of(run.paths, hers).reason is Reason.TURNED
        assert his.exitcode is None


def test_a_task_that_fails_is_tried_as_often_as_it_may_and_then_left(run):
    """A disk on which its log cannot even be made would do; here the engine's own inputs are gone."""
    update = read_record(run.paths, PREPARE)
    assert update is not None
    (run.paths.root / update.outputs[0].path).write_bytes(b"")
    with crew(run, ROLLOUTS[0]) as (worker,):
        assert join(worker) != [None]
    (claim,) = claims_of(run.paths, ROLLOUTS)[ROLLOUTS[0]]
    assert "corrupt" in run.paths.task(ROLLOUTS[0]).failure(claim.number).read_text()
    assert Path(run.paths.task(ROLLOUTS[0]).log(1)).exists()
