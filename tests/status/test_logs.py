"""The logs of a run, as ``slurm-ppo logs`` shows them."""

import io
import shutil
import threading
import time

import pytest

from pipeline.run.directory import load_run
from pipeline.run.failures import Failure, FailureKind
from pipeline.run.identity import RunError
from pipeline.run.journal import tail
from pipeline.run.lease import hold
from pipeline.run.paths import RunPaths
from pipeline.run.plan import Plan
from pipeline.run.tasks import Stage, Task
from pipeline.status import logs
from pipeline.status.log_files import Log, LogChoice, Reader, find_logs, parse_choice
from pipeline.status.logs import (
    Follower,
    describe_failed,
    describe_failure,
    render_block,
    state_in_words,
    where,
)
from slurm.query import Element
from slurm.states import SlurmState
from tests.support.jobs import element

PLAN = Plan(iterations=2, num_shards=4, evaluate_every=0)


@pytest.fixture
def paths(tmp_path) -> RunPaths:
    """Logs of two iterations, a second attempt, prepare and drivers."""
    for name in (
        "00000-prepare/attempt-1/prompts.log",
        "guard/guard.log",
        "passes/passes.log",
        "00001-rollout/attempt-1/shard-00000.log",
        "00001-driver/attempt-1/driver.log",
        "00002-rollout/attempt-1/shard-00000.log",
        "00002-rollout/attempt-1/shard-00003.log",
        "00002-rollout/attempt-2/shard-00003.log",
        "00002-rollout/attempt-2/shard-00003.failure.json",
    ):
        path = tmp_path / "logs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"of {name}\n")
    return RunPaths(tmp_path)


def names(found: list[Log]) -> list[str]:
    return [log.name for log in found]


def test_logs_have_short_names(paths):
    assert names(find_logs(paths, LogChoice())) == [
        *("guard", "passes", "prepare", "driver@1", "rollout@1 0"),
        *("rollout@2 0", "rollout@2 3", "rollout@2 3 #2"),
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("rollout@1", ["rollout@1 0"]),
        ("rollout", ["rollout@1 0", "rollout@2 0", "rollout@2 3", "rollout@2 3 #2"]),
        ("driver", ["guard", "passes", "driver@1"]),
        ("guard", ["guard"]),
        ("passes", ["passes"]),
        ("prepare", ["prepare"]),
        ("update", []),
    ],
)
def test_a_choice_of_logs(paths, text, found):
    assert names(find_logs(paths, parse_choice(text, PLAN))) == found


def test_what_slurm_printed_of_jobs_is_a_log(paths):
    """Its file is made with the run: while it is empty, it is nothing to show."""
    paths.slurm_log.touch()
    assert names(find_logs(paths, parse_choice("slurm", PLAN))) == []
    paths.slurm_log.write_text("slurmstepd: error: *** JOB 7 ON n1 CANCELLED DUE TO TIME LIMIT ***\n")
    assert names(find_logs(paths, parse_choice("slurm", PLAN))) == ["slurm"]
    assert names(find_logs(paths, LogChoice("driver"))) == ["guard", "passes", "driver@1"]


def test_older_iterations_are_left_out_when_following(paths):
    assert names(find_logs(paths, LogChoice("driver"), since=2)) == ["guard", "passes"]


@pytest.mark.parametrize(
    ("text", "said"),
    [("rolout", "legal: prepare, rollout"), ("rollout@9", "legal: 0 to 2"), ("rollout@", "legal: 0 to 2")],
)
def test_what_is_no_stage_is_refused_with_what_is(text, said):
    with pytest.raises(RunError, match=said):
        parse_choice(text, PLAN)


# --- what failed ---


def failed(task: str, attempt: int, seconds: float, **more: object) -> dict[str, object]:
    return {
        "event": "failed",
        "time": seconds,
        "task": task,
        "attempt": attempt,
        "kind": "error",
        "message": "boom",
    } | more


def test_failed_attempts_come_newest_first_with_the_end_of_their_logs(paths, utc):
    events = [
        failed("2/rollout/3", 1, 0.0, job="36_3", node="gpu07"),
        {"event": "submitted", "time": 1.0},
        failed("1/reward/0", 1, 60.0, kind="lost", message="its node failed (NODE_FAIL)"),
    ]
    assert (
        "\n".join(describe_failed(paths, events, LogChoice(), 20))
        == f"""\
==> 1970-01-01 00:01:00 iteration 1 reward shard 0, attempt 1 (lost): its node failed (NODE_FAIL)
it left no log: {paths.root}/logs/00001-reward/attempt-1/shard-00000.log

==> 1970-01-01 00:00:00 iteration 2 rollout shard 3, attempt 1 (error): boom
job 36_3 on node gpu07
{paths.root}/logs/00002-rollout/attempt-1/shard-00003.log
  | of 00002-rollout/attempt-1/shard-00003.log
"""
    )
    assert list(describe_failed(paths, events, LogChoice("update"), 20)) == ["no failed attempt of update"]
    assert list(describe_failed(paths, [], LogChoice(), 20)) == ["no attempt has failed"]


def test_of_many_failures_some_are_shown(paths):
    events = [failed("2/rollout/3", number, 0.0) for number in range(1, 15)]
    text = list(describe_failed(paths, events, LogChoice(), 0))
    assert sum(line.startswith("==>") for line in text) == 10
    assert text[-1] == f"and 4 earlier; all are in {paths.events}"


def ending(state: SlurmState, exit_code: int = 0, signal: int = 0) -> Element:
    return element(1, state, array_id="34", exit_code=exit_code, signal=signal)


@pytest.mark.parametrize(
    ("state", "exit_code", "signal", "said"),
    [
        (SlurmState.FAILED, 1, 0, "FAILED, exit code 1"),
        (SlurmState.FAILED, 137, 0, "FAILED, killed by signal 9 (SIGKILL), often out of memory"),
        (SlurmState.TIMEOUT, 0, 15, "TIMEOUT, stopped at its time limit"),
        (SlurmState.COMPLETED, 0, 0, "COMPLETED"),
        (SlurmState.CANCELLED, 0, 15, "CANCELLED"),
    ],
)
def test_how_slurm_saw_it(state, exit_code, signal, said):
    assert state_in_words(ending(state, exit_code, signal)) == said
    assert where("34_1", "", ending(state, exit_code, signal)) == f"job 34_1 on node gpu07: {said}"


def test_the_failure_block(tmp_path):
    log = tmp_path / "shard.log"
    log.write_text("".join(f"line {i}\n" for i in range(30)))
    task = Task(2, Stage.REWARD, 1)
    failure = Failure(task, 3, FailureKind.ERROR, "ValueError: boom", str(log), "gpu07", "34_1")
    endings = {"34_1": ending(SlurmState.FAILED, 1)}
    shown = "\n".join(f"  | line {i}" for i in range(10, 30))
    assert (
        render_block([failure], endings, 2, "to continue: slurm-ppo resume r")
        == f"""\
failed: iteration 2 reward shard 1, attempt 3 (error): ValueError: boom
  job 34_1 on node gpu07: FAILED, exit code 1
  last lines of {log}:
{shown}
and 2 more tasks
to continue: slurm-ppo resume r"""
    )


def test_a_failure_without_a_log_or_a_job_says_what_is_known(tmp_path):
    task = Task(1, Stage.UPDATE)
    lost = Failure(task, 1, FailureKind.LOST, "its job never arrived", str(tmp_path / "none.log"))
    assert describe_failure(lost, None) == [
        "failed: iteration 1 update, attempt 1 (lost): its job never arrived",
        f"  it left no log: {tmp_path}/none.log",
    ]


def test_the_tail_of_a_long_log_is_whole_lines(tmp_path):
    log = tmp_path / "long.log"
    log.write_text("".join(f"{i:099d}\n" for i in range(5000)))
    assert tail(log, 3) == [f"{i:099d}" for i in (4997, 4998, 4999)]
    assert all(len(line) == 99 for line in tail(log, 10_000))
    assert tail(log, 0) == []


# --- following ---


def test_a_reader_gives_whole_lines_once(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"one\ntw")
    reader = Reader(path, 0)
    assert reader.lines() == ["one"]
    with path.open("ab") as file:
        file.write(b"o\n10 %\r50 %\r100 %\nrest \xff")
    assert reader.lines() == ["two", "100 %"]
    assert reader.lines() == []
    assert reader.remainder() == ["rest \ufffd"]
    path.write_bytes(b"new\n")
    assert reader.lines() == ["new"], "the file was cut"


def test_a_line_without_end_is_not_kept_for_ever(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"x" * (1 << 17))
    assert len(Reader(path, 0).lines()[0]) == 1 << 17


@pytest.fixture
def running(copied_run):
    """A run of which the last update is not committed."""
    (copied_run / "iterations/00002/update/shard-00000.json").unlink()
    (copied_run / "iterations/00002/evaluate/shard-00000.json").unlink()
    return load_run(copied_run)


def test_following_shows_new_lines_of_new_logs_until_nobody_is_at_work(running, monkeypatch):
    monkeypatch.setattr(logs, "_POLL_SECONDS", 0.05)
    out = io.StringIO()
    log = running.paths.task(Task(2, Stage.UPDATE)).log(7)
    with hold(running.paths.locks):
        thread = threading.Thread(target=Follower(running, LogChoice(), out).follow, args=(1,))
        thread.start()
        log.parent.mkdir(parents=True)
        log.write_text("loss 1\nloss")
        time.sleep(0.3)
        with log.open("a") as file:
            file.write(" 2\nunfinished")
        time.sleep(0.3)
    thread.join(timeout=30)
    assert not thread.is_alive()
    lines = out.getvalue().splitlines()
    assert [line for line in lines if "#7" in line] == [
        "update@2 #7 | loss 1",
        "update@2 #7 | loss 2",
        "update@2 #7 | unfinished",
    ]
    assert lines[-1] == "no process is running the run"


def test_following_a_complete_run_ends_at_once(complete_run):
    out = io.StringIO()
    Follower(load_run(complete_run), LogChoice("reward"), out).follow(1)
    assert out.getvalue().splitlines()[-1] == "the run is complete"


def test_logs_of_a_local_run(complete_run, slurm_ppo):
    done = slurm_ppo("logs", complete_run, "rollout@1", "--lines", 1)
    assert done.returncode == 0, done.stderr
    headings = [line for line in done.stdout.splitlines() if line.startswith("==>")]
    folder = f"{complete_run}/logs/00001-rollout/attempt-1"
    assert headings == [f"==> rollout@1 {i}: {folder}/shard-0000{i}.log" for i in range(2)]


def test_the_newest_logs_are_of_what_is_not_done(running, slurm_ppo):
    done = slurm_ppo("logs", running.paths.root)
    assert "==> update@2:" in done.stdout
    assert "rollout" not in done.stdout


def test_logs_of_a_run_that_has_none_yet(complete_run, tmp_path, slurm_ppo):
    for name in ("run.json", "config.yaml"):
        shutil.copy(complete_run / name, tmp_path)
    done = slurm_ppo("logs", tmp_path, "reward@2")
    assert done.returncode == 0
    assert done.stdout == f"no log yet: reward@2 has started nothing ({tmp_path}/logs)\n"
