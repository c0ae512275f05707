"""Jobs on this machine: real processes, bounded in number and time, gone when they should be gone."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm.local import LocalLimits, LocalScheduler
from slurm.scheduler import Job, JobState, JobStatus

ROOT = Path(__file__).parent.parent
POOLS = {"gpu": 4, "one": 1}


@pytest.fixture
def start(tmp_path):
    """Make schedulers that are cancelled at the end."""
    made = []

    def make(slots: int = 4, pools: dict[str, int] = POOLS, time_limit: float = 60) -> LocalScheduler:
        made.append(LocalScheduler("scheduled:main", [], LocalLimits(slots, pools, time_limit)))
        return made[-1]

    yield make
    for scheduler in made:
        scheduler.cancel()


def job(tmp_path: Path, key: str, *arguments: object, pool: str = "gpu", priority: int = 0) -> Job:
    return Job(key, pool, tuple(map(str, arguments)), tmp_path / "logs" / f"{key}.log", priority)


def finish(scheduler: LocalScheduler, seconds: float = 30) -> dict[str, JobStatus]:
    """Wait for all jobs, as the driver does."""
    until = time.monotonic() + seconds
    while any(s.state is not JobState.ENDED for s in scheduler.query().values()):
        assert time.monotonic() < until
        scheduler.wait(1)
    return dict(scheduler.query())


def eventually(holds: Callable[[], object], seconds: float = 10) -> bool:
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


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
    scheduler = start()
    scheduler.submit(
        [
            job(tmp_path, "good", "exit", 0),
            job(tmp_path, "bad", "exit", 4),
            job(tmp_path, "killed", "signal", 9),
            job(tmp_path, "raised", "raise", "no luck"),
        ]
    )
    codes = {key: status.exit_code for key, status in finish(scheduler).items()}
    assert codes == {"good": 0, "bad": 4, "killed": -9, "raised": 1}
    assert "RuntimeError: no luck" in (tmp_path / "logs/raised.log").read_text()


def test_a_job_is_pending_then_running_then_ended_then_forgotten(start, tmp_path):
    scheduler = start()
    scheduler.submit([job(tmp_path, "a", "sleep", 0.3)])
    assert scheduler.query()["a"].state is JobState.PENDING
    scheduler.wait(0)
    assert scheduler.query()["a"].state is JobState.RUNNING
    assert finish(scheduler)["a"] == JobStatus(JobState.ENDED, 0)
    scheduler.forget("a")
    assert scheduler.query() == {}


def test_slots_and_pools_are_respected_and_used(start, tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    scheduler = start(slots=3)
    jobs = [job(tmp_path, f"g{i}", "mark", marks, f"g{i}", 0.3) for i in range(6)]
    jobs += [job(tmp_path, f"o{i}", "mark", marks, f"o{i}", 0.3, pool="one") for i in range(3)]
    scheduler.submit(jobs)
    finish(scheduler)
    assert len(list(marks.iterdir())) == 9
    assert most_at_once(marks) == 3
    assert most_at_once(marks, "o*") == 1


def test_lower_numbers_start_first_then_the_order_of_submission(start, tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    scheduler = start(slots=1)
    order = [("late", 3), ("first", 0), ("a", 1), ("b", 1)]
    scheduler.submit([job(tmp_path, n, "mark", marks, n, 0.01, priority=p) for n, p in order[:1]])
    scheduler.submit([job(tmp_path, n, "mark", marks, n, 0.01, priority=p) for n, p in order[1:]])
    finish(scheduler)
    started = sorted(marks.iterdir(), key=lambda path: float(path.read_text().split()[0]))
    assert [path.name for path in started] == ["first", "a", "b", "late"]


def test_the_time_limit_kills_and_says_so(start, tmp_path):
    scheduler = start(time_limit=0.7)
    scheduler.submit(
        [job(tmp_path, "slow", "pid", tmp_path / "pids", "deaf"), job(tmp_path, "ok", "exit", 0)]
    )
    ended = finish(scheduler)
    assert ended["slow"].exit_code == -9
    assert ended["slow"].note == "stopped at the time limit of 0.7 s"
    assert ended["ok"] == JobStatus(JobState.ENDED, 0)
    assert eventually(lambda: not any(map(is_alive, pids(tmp_path / "pids"))))


@pytest.mark.parametrize("deaf", ["", "deaf"])
def test_cancel_leaves_no_process(start, tmp_path, monkeypatch, deaf):
    monkeypatch.setattr("slurm.local._GRACE_SECONDS", 0.5)
    scheduler = start(slots=1)
    scheduler.submit([job(tmp_path, "a", "pid", tmp_path / "pids", deaf), job(tmp_path, "b", "exit", 0)])
    scheduler.wait(0)
    running = pids(tmp_path / "pids")
    assert all(map(is_alive, running))
    scheduler.cancel()
    assert eventually(lambda: not any(map(is_alive, running)))
    assert not (tmp_path / "logs/b.log").exists()
    assert set(scheduler.query()) == {"a"}


def test_a_job_that_ends_takes_its_children_with_it(start, tmp_path):
    """Left-over workers would keep a GPU's memory."""
    scheduler = start()
    scheduler.submit([job(tmp_path, "a", "leave", tmp_path / "child")])
    assert finish(scheduler)["a"].exit_code == 0
    assert eventually(lambda: not any(map(is_alive, pids(tmp_path / "child"))))


def test_output_is_appended_to_the_log_of_the_job(start, tmp_path):
    log = tmp_path / "logs/a.log"
    log.parent.mkdir()
    log.write_text("before\n")
    scheduler = start()
    scheduler.submit([job(tmp_path, "a", "exit", 0)])
    finish(scheduler)
    assert log.read_text() == "before\nexit 0\n"


def test_a_job_gets_the_environment_of_its_submission_and_no_input(start, tmp_path, monkeypatch):
    scheduler = start()
    monkeypatch.setenv("SAID_LATER", "hello")
    scheduler.submit([job(tmp_path, "a", "environment", "SAID_LATER"), job(tmp_path, "b", "stdin")])
    finish(scheduler)
    assert (tmp_path / "logs/a.log").read_text().splitlines()[1] == "hello"
    assert (tmp_path / "logs/b.log").read_text().splitlines()[1] == "''"


def test_waiting_returns_when_a_job_ends_and_not_before(start, tmp_path):
    scheduler = start()
    scheduler.submit([job(tmp_path, "a", "sleep", 0.5)])
    scheduler.wait(0)
    before = time.monotonic()
    scheduler.wait(30)
    assert time.monotonic() - before < 20
    assert scheduler.query()["a"].state is JobState.ENDED


SCHEDULE = """
import sys, time
from pathlib import Path
from slurm.local import LocalLimits, LocalScheduler
from slurm.scheduler import Job
if __name__ == "__main__":
    file = Path(sys.argv[1])
    scheduler = LocalScheduler("scheduled:main", [], LocalLimits(1, {"gpu": 1}, 60))
    scheduler.submit([Job("a", "gpu", ("pid", str(file)), file.with_suffix(".log"))])
    scheduler.wait(0)
    time.sleep(60)
"""


def test_jobs_die_with_a_killed_scheduler(tmp_path):
    script = tmp_path / "schedule.py"
    script.write_text(SCHEDULE)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    process = subprocess.Popen([sys.executable, script, tmp_path / "pids"], env=environment)
    running = pids(tmp_path / "pids")
    assert all(map(is_alive, running))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert eventually(lambda: not any(map(is_alive, running)))
