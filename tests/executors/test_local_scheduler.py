"""Jobs on this machine: real processes, bounded in number and time, gone when they should be gone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.executors.processes import Job, JobEnd, LocalExecutor, LocalLimits
from tests.support import ROOT
from tests.support.waiting import eventually

POOLS = {"gpu": 4, "one": 1}


@pytest.fixture
def start(tmp_path):
    """Make executors that are cancelled at the end."""
    made = []

    def make(slots: int = 4, pools: dict[str, int] = POOLS, time_limit: float = 60) -> LocalExecutor:
        made.append(LocalExecutor("tests.support.scheduled:serve", [], LocalLimits(slots, pools, time_limit)))
        return made[-1]

    yield make
    for executor in made:
        executor.cancel()


def job(
    tmp_path: Path, key: str, *arguments: object, pool: str = "gpu", priority: int = 0, ranks: int = 1
) -> Job:
    return Job(key, pool, tuple(map(str, arguments)), tmp_path / "logs" / f"{key}.log", priority, ranks)


def finish(executor: LocalExecutor, seconds: float = 30) -> dict[str, JobEnd]:
    """Wait for all jobs, as the driver does."""
    until, ended = time.monotonic() + seconds, dict(executor.collect_ended())
    while executor._queue or executor._running:
        assert time.monotonic() < until
        executor.wait(1)
        ended |= executor.collect_ended()
    return ended


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pids(file: Path) -> list[int]:
    assert eventually(file.exists)
    return [int(text) for text in file.read_text().split()]


def most_at_once(folder: Path, pattern: str = "*") -> int:
    spans = [tuple(map(float, path.read_text().split())) for path in folder.glob(pattern)]
    return max(sum(a <= start < b for a, b in spans) for start, _ in spans)


def test_how_a_job_ended_is_reported(start, tmp_path):
    executor = start()
    executor.submit(
        [
            job(tmp_path, "good", "exit", 0),
            job(tmp_path, "bad", "exit", 4),
            job(tmp_path, "killed", "signal", 9),
            job(tmp_path, "raised", "raise", "no luck"),
        ]
    )
    codes = {key: status.exit_code for key, status in finish(executor).items()}
    assert codes == {"good": 0, "bad": 4, "killed": -9, "raised": 1}
    assert "RuntimeError: no luck" in (tmp_path / "logs/raised.log").read_text()


def test_the_end_of_a_job_is_told_once(start, tmp_path):
    executor = start()
    executor.submit([job(tmp_path, "a", "sleep", 0.3)])
    assert executor.collect_ended() == {}
    executor.wait(0)
    assert executor.collect_ended() == {}
    assert finish(executor) == {"a": JobEnd(0)}
    assert executor.collect_ended() == {}


def test_slots_and_pools_are_respected_and_used(start, tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    executor = start(slots=3)
    jobs = [job(tmp_path, f"g{i}", "mark", marks, f"g{i}", 0.3) for i in range(6)]
    jobs += [job(tmp_path, f"o{i}", "mark", marks, f"o{i}", 0.3, pool="one") for i in range(3)]
    executor.submit(jobs)
    finish(executor)
    assert len(list(marks.iterdir())) == 9
    assert most_at_once(marks) == 3
    assert most_at_once(marks, "o*") == 1


def test_lower_numbers_start_first_then_the_order_of_submission(start, tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    executor = start(slots=1)
    order = [("late", 3), ("first", 0), ("a", 1), ("b", 1)]
    executor.submit([job(tmp_path, n, "mark", marks, n, 0.01, priority=p) for n, p in order[:1]])
    executor.submit([job(tmp_path, n, "mark", marks, n, 0.01, priority=p) for n, p in order[1:]])
    finish(executor)
    started = sorted(marks.iterdir(), key=lambda path: float(path.read_text().split()[0]))
    assert [path.name for path in started] == ["first", "a", "b", "late"]


def test_the_time_limit_kills_and_says_so(start, tmp_path):
    executor = start(time_limit=3.5)
    executor.submit([job(tmp_path, "slow", "pid", tmp_path / "pids", "deaf"), job(tmp_path, "ok", "exit", 0)])
    ended = finish(executor)
    assert ended["slow"].exit_code == -9
    assert ended["slow"].note == "stopped at the time limit of 3.5 s"
    assert ended["ok"] == JobEnd(0)
    assert eventually(lambda: not any(map(is_alive, pids(tmp_path / "pids"))))


@pytest.mark.parametrize("deaf", ["", "deaf"])
def test_cancel_leaves_no_process(start, tmp_path, monkeypatch, deaf):
    monkeypatch.setattr("pipeline.executors.processes._GRACE_SECONDS", 0.5)
    executor = start(slots=1)
    executor.submit([job(tmp_path, "a", "pid", tmp_path / "pids", deaf), job(tmp_path, "b", "exit", 0)])
    executor.wait(0)
    running = pids(tmp_path / "pids")
    assert all(map(is_alive, running))
    executor.cancel()
    assert eventually(lambda: not any(map(is_alive, running)))
    assert not (tmp_path / "logs/b.log").exists()


def test_a_job_that_ends_takes_its_children_with_it(start, tmp_path):
    """Left-over workers would keep a GPU's memory."""
    executor = start()
    executor.submit([job(tmp_path, "a", "leave", tmp_path / "child")])
    assert finish(executor)["a"].exit_code == 0
    assert eventually(lambda: not any(map(is_alive, pids(tmp_path / "child"))))


def test_output_is_appended_to_the_log_of_the_job(start, tmp_path):
    log = tmp_path / "logs/a.log"
    log.parent.mkdir()
    log.write_text("before\n")
    executor = start()
    executor.submit([job(tmp_path, "a", "exit", 0)])
    finish(executor)
    assert log.read_text() == "before\nexit 0\n"


def test_a_job_gets_the_environment_of_its_submission_and_no_input(start, tmp_path, monkeypatch):
    executor = start()
    monkeypatch.setenv("SAID_LATER", "hello")
    executor.submit([job(tmp_path, "a", "environment", "SAID_LATER"), job(tmp_path, "b", "stdin")])
    finish(executor)
    assert (tmp_path / "logs/a.log").read_text().splitlines()[1] == "hello"
    assert (tmp_path / "logs/b.log").read_text().splitlines()[1] == "''"


def test_waiting_returns_when_a_job_ends_and_not_before(start, tmp_path):
    executor = start()
    executor.submit([job(tmp_path, "a", "sleep", 0.5)])
    executor.wait(0)
    before = time.monotonic()
    executor.wait(30)
    assert time.monotonic() - before < 20
    assert set(executor.collect_ended()) == {"a"}


def test_a_job_that_ended_just_before_the_driver_waits_is_not_slept_through(start, tmp_path):
    executor = start()
    executor.submit([job(tmp_path, "a", "exit", 0)])
    executor.wait(0)
    assert eventually(lambda: not executor._running["a"].unfinished)
    before = time.monotonic()
    executor.wait(30)
    assert time.monotonic() - before < 20
    assert set(executor.collect_ended()) == {"a"}


SCHEDULE = """
import sys, time
from pathlib import Path
from pipeline.executors.processes import Job, LocalExecutor, LocalLimits
if __name__ == "__main__":
    log, ranks, *words = sys.argv[1:]
    executor = LocalExecutor("tests.support.scheduled:serve", [], LocalLimits(1, {"gpu": 1}, 60))
    executor.submit([Job("a", "gpu", tuple(words), Path(log), ranks=int(ranks))])
    executor.wait(0)
    time.sleep(60)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_jobs_die_with_a_killed_executor(tmp_path, ranks):
    script = tmp_path / "schedule.py"
    script.write_text(SCHEDULE)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    words = ["pid", tmp_path / "pids"]
    if ranks == 2:
        words = ["ranks", f"pid {tmp_path / 'first'}", f"pid {tmp_path / 'pids'}"]
    command = [sys.executable, script, tmp_path / "log", str(ranks), *words]
    process = subprocess.Popen(command, env=environment)
    running = pids(tmp_path / "pids") + (pids(tmp_path / "first") if ranks == 2 else [])
    assert len(running) == 2 * ranks
    assert all(map(is_alive, running))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert eventually(lambda: not any(map(is_alive, running)))


# several ranks


PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "RENDEZVOUS_FILE", "MASTER_ADDR", "MASTER_PORT")


def test_ranks_are_told_their_places_and_where_to_meet(start, tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "of somebody else")
    executor, said = start(), set()
    for key in ("a", "a", "b"):  # twice to the same log
        executor.submit([job(tmp_path, key, "environment", *PLACE, ranks=2)])
        assert finish(executor)[key] == JobEnd(0)
        logs = [tmp_path / f"logs/{key}.log", tmp_path / f"logs/{key}.rank-1.log"]
        first, second = (log.read_text().splitlines()[-6:] for log in logs)
        assert (first[:3], second[:3]) == (["0", "0", "2"], ["1", "1", "2"])
        assert first[3:] == second[3:]
        assert first[4:] == ["", ""]
        assert not Path(first[3]).exists()
        assert Path(first[3]).parent.is_dir()
        said.add(first[3])
    assert len(said) == 3, "no two starts meet at the same place"


def test_one_process_is_told_no_place(start, tmp_path, monkeypatch):
    for name in PLACE:
        monkeypatch.delenv(name, raising=False)
    executor = start()
    executor.submit([job(tmp_path, "a", "environment", *PLACE)])
    finish(executor)
    assert (tmp_path / "logs/a.log").read_text().splitlines()[1:] == ["None"] * 6


def test_a_job_ends_when_its_last_rank_does_and_takes_one_slot(start, tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    executor = start(slots=1)
    whats = [f"mark {marks} r{rank} {seconds}" for rank, seconds in enumerate((0.01, 0.6, 0.2))]
    executor.submit([job(tmp_path, "a", "ranks", *whats, ranks=3), job(tmp_path, "b", "mark", marks, "b", 0)])
    assert finish(executor) == {key: JobEnd(0) for key in "ab"}
    last = max(float((marks / f"r{rank}").read_text().split()[1]) for rank in range(3))
    assert float((marks / "b").read_text().split()[0]) >= last


def test_a_rank_that_has_ended_does_not_keep_the_driver_awake_and_leaves_nothing(start, tmp_path):
    executor = start()
    whats = [f"leave {tmp_path / 'child'}", f"pid {tmp_path / 'pids'}"]
    executor.submit([job(tmp_path, "a", "ranks", *whats, ranks=2)])
    executor.wait(0)
    pids(tmp_path / "pids")
    (running,) = executor._running.values()
    assert eventually(lambda: len(running.unfinished) == 1)
    assert executor.collect_ended() == {}
    assert eventually(lambda: not any(map(is_alive, pids(tmp_path / "child"))))
    before = time.monotonic()
    executor.wait(0.5)
    assert time.monotonic() - before >= 0.5


@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [("signal 9", -9, "killed by signal 9"), ("exit 4", 4, "ended with exit code 4")],
)
def test_when_one_rank_fails_the_others_are_stopped_and_it_is_named(
    start, tmp_path, monkeypatch, ending, code, words
):
    monkeypatch.setattr("pipeline.executors.processes._GRACE_SECONDS", 0.5)
    executor = start()
    first, third = tmp_path / "first", tmp_path / "third"
    whats = [f"pid {first} deaf", f"after {first} after {third} {ending}", f"pid {third}"]
    executor.submit([job(tmp_path, "a", "ranks", *whats, ranks=3)])
    ended = finish(executor)["a"]
    assert ended == JobEnd(code, f"rank 1 of 3 {words}", rank=1)
    left = pids(first) + pids(third)
    assert eventually(lambda: not any(map(is_alive, left)))


@pytest.mark.parametrize(
    ("endings", "rank", "code"),
    [
        (("exit 1", "signal 9"), 1, -9),  # the error was that the peer had gone
        (("exit 3", "signal 6"), 0, 3),  # a library gave up where the peer had gone
        (("exit 0", "exit 5"), 1, 5),
        (("exit 7", "exit 5"), 0, 7),
    ],
)
def test_of_several_that_failed_at_once_the_likely_cause_is_named(start, tmp_path, endings, rank, code):
    executor = start()
    executor.submit([job(tmp_path, "a", "ranks", *endings, ranks=2)])
    executor.wait(0)
    (running,) = executor._running.values()
    assert eventually(lambda: not running.unfinished)
    ended = finish(executor)["a"]
    assert (ended.rank, ended.exit_code) == (rank, code)


def test_the_time_limit_ends_all_ranks(start, tmp_path):
    executor = start(time_limit=2)
    whats = [f"pid {tmp_path / 'first'}", "exit 0", f"pid {tmp_path / 'third'} deaf"]
    executor.submit([job(tmp_path, "a", "ranks", *whats, ranks=3)])
    ended = finish(executor)["a"]
    assert ended == JobEnd(-9, "stopped at the time limit of 2 s")
    left = pids(tmp_path / "first") + pids(tmp_path / "third")
    assert eventually(lambda: not any(map(is_alive, left)))


def test_cancel_leaves_no_process_of_any_rank(start, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.executors.processes._GRACE_SECONDS", 0.5)
    executor = start()
    whats = [f"pid {tmp_path / 'first'}", f"pid {tmp_path / 'second'} deaf"]
    executor.submit([job(tmp_path, "a", "ranks", *whats, ranks=2)])
    executor.wait(0)
    running = pids(tmp_path / "first") + pids(tmp_path / "second")
    assert all(map(is_alive, running))
    executor.cancel()
    assert eventually(lambda: not any(map(is_alive, running)))


# --- a job that goes on when its result is committed ---


def test_a_job_that_only_writes_files_leaves_its_slot_to_other_stages(start, tmp_path):
    """The update ends once a rollout has run; with one slot that could never be."""
    executor, file = start(slots=1), tmp_path / "file"
    update, another = (job(tmp_path, key, "release", file, pool="one") for key in ("update", "another"))
    executor.submit([update])
    executor.wait(30)
    assert executor.collect_ended() == {}, "it is waited for until it has released its slot"
    executor.submit([another, job(tmp_path, "rollout", "touch", file)])
    executor.wait(30)
    assert [queued.key for queued in executor._queue] == ["another"], "a stage's own jobs wait for its end"
    assert {end.exit_code for end in finish(executor).values()} == {0}


def test_of_several_ranks_all_have_to_release_their_devices(start, tmp_path):
    executor, file = start(slots=1), tmp_path / "file"
    both = job(
        tmp_path, "both", "ranks", f"release {file}", f"after {tmp_path / 'go'} release {file}", ranks=2
    )
    executor.submit([both])
    executor.wait(0.5)
    assert not executor._running["both"].is_released
    (tmp_path / "go").touch()
    executor.wait(30)
    assert executor._running["both"].is_released
    file.touch()
    assert finish(executor)["both"].exit_code == 0


def test_what_is_cancelled_may_spare_jobs_that_only_save_what_a_commit_left(start, tmp_path):
    """Also one that copies it from its devices still, and whose bell nobody has heard yet."""
    executor, file, rung = start(slots=3), tmp_path / "file", tmp_path / "file.rung"
    executor.submit([job(tmp_path, "writes", "release", file)])
    executor.wait(30)
    executor.submit([job(tmp_path, "copies", "commit", file), job(tmp_path, "computes", "sleep", 60)])
    executor.wait(0.01)
    assert eventually(rung.exists)
    executor.cancel(spares_committed=True)
    assert sorted(executor._running) == ["copies", "writes"]
    assert not executor._running["copies"].is_released
    file.touch()
    assert {end.exit_code for end in finish(executor).values()} == {0}


def test_a_job_that_has_committed_and_uses_its_devices_keeps_its_slot(start, tmp_path):
    executor, file, rung = start(slots=1), tmp_path / "file", tmp_path / "file.rung"
    executor.submit([job(tmp_path, "update", "commit", file), job(tmp_path, "rollout", "exit", 0)])
    executor.wait(0.01)
    assert eventually(rung.exists)
    executor.wait(0.01)
    assert list(executor._running) == ["update"]
    file.touch()
    assert {end.exit_code for end in finish(executor).values()} == {0}
