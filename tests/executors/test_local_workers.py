"""Processes of this machine that stay for the next job: whose they are, what they keep, when they leave."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.executors import processes
from pipeline.executors.processes import Job, JobEnd, LocalExecutor, LocalLimits
from pipeline.executors.staying import LEAST_FREE, Idle, seconds_of, who_leaves
from tests.support import ROOT, tiny
from tests.support.killing import assert_same_end, events, wait_for
from tests.support.waiting import eventually

ALWAYS = math.inf


class Executor(LocalExecutor):
    """Remembers how all its jobs ended."""

    def __init__(self, *given) -> None:
        super().__init__(*given)
        self.ends: dict[str, JobEnd] = {}

    def collect_ended(self):
        found = super().collect_ended()
        self.ends |= found
        return found

    def until_end(self, key: str) -> JobEnd:
        until = time.monotonic() + 30
        while key not in self.ends:
            assert time.monotonic() < until, f"{key} does not end"
            self.wait(1)
            self.collect_ended()
        return self.ends[key]


@pytest.fixture
def start():
    """Make executors whose processes stay, and end them."""
    made = []

    def make(linger: float = ALWAYS, slots: int = 2) -> Executor:
        limits = LocalLimits(slots, {"a": 2, "b": 2}, 60, {"a": linger, "b": linger})
        made.append(Executor("tests.support.scheduled:serve", [], limits))
        return made[-1]

    yield make
    for executor in made:
        executor.cancel()
        assert not executor._idle
        assert not executor._leaving


@pytest.fixture
def do(tmp_path):
    """Run jobs to their end, one after the other; return their ends."""
    names = iter(range(100))

    def one(executor: Executor, *arguments: object, pool: str = "a", ranks: int = 1) -> JobEnd:
        key = f"job-{next(names)}"
        executor.submit([Job(key, pool, tuple(map(str, arguments)), tmp_path / f"{key}.log", ranks=ranks)])
        return executor.until_end(key)

    return one


def pids_in(file: Path) -> list[int]:
    return [int(line) for line in file.read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def idle_pids(executor: Executor) -> list[int]:
    return [process.pid for team, _ in executor._idle for process in team.processes]


def test_a_process_does_the_jobs_of_its_pool_each_with_its_own_log_and_environment(
    start, do, tmp_path, monkeypatch
):
    executor, file = start(), tmp_path / "pids"
    assert do(executor, "self", file) == JobEnd(0)
    monkeypatch.setenv("SAID_LATER", "hello")
    assert do(executor, "environment", "SAID_LATER", "LEFT_BY_A_JOB") == JobEnd(0)
    monkeypatch.delenv("SAID_LATER")
    assert do(executor, "environment", "SAID_LATER") == JobEnd(0)
    assert do(executor, "self", file, pool="b") == JobEnd(0)
    assert do(executor, "self", file) == JobEnd(0)
    first, other, last = pids_in(file)
    assert first == last != other
    logs = [(tmp_path / f"job-{n}.log").read_text().splitlines()[1:] for n in range(5)]
    assert logs == [[], ["hello", "still here"], ["None"], [], []]


def test_after_a_failure_a_process_ends_and_the_next_job_gets_another(start, do, tmp_path):
    executor, file = start(), tmp_path / "pids"
    do(executor, "self", file)
    assert do(executor, "exit", 4) == JobEnd(4)
    assert do(executor, "raise", "no luck") == JobEnd(1)
    assert do(executor, "signal", 9) == JobEnd(-9)
    do(executor, "self", file)
    first, second = pids_in(file)
    assert first != second
    assert eventually(lambda: not is_alive(first))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_process_that_dies_while_it_is_idle_costs_nothing(start, do, ranks):
    executor = start()
    what = ("ranks", *["exit 0"] * ranks) if ranks > 1 else ("exit", 0)
    do(executor, *what, ranks=ranks)
    first = idle_pids(executor)
    os.kill(first[-1], signal.SIGKILL)
    assert do(executor, *what, ranks=ranks) == JobEnd(0)
    assert not {*first} & {*idle_pids(executor)}
    assert eventually(lambda: not any(map(is_alive, first)))


def test_a_job_that_a_dying_process_never_began_goes_to_another(start, do, tmp_path):
    executor = start()
    do(executor, "exit", 0)
    (pid,) = idle_pids(executor)
    os.kill(pid, signal.SIGSTOP)  # it takes no order, but is not dead yet
    executor.submit([Job("late", "a", ("exit", "0"), tmp_path / "late.log")])
    executor.wait(0)
    os.kill(pid, signal.SIGKILL)
    assert executor.until_end("late") == JobEnd(0)
    assert (tmp_path / "late.log").read_text() == "exit 0\n"


def test_each_job_of_a_process_has_a_time_limit_and_a_bell_of_its_own(start, do, tmp_path):
    executor, file = start(slots=1), tmp_path / "file"
    file.touch()
    do(executor, "release", file)
    (pid,) = idle_pids(executor)
    file.unlink()
    executor.submit([Job("writes", "a", ("release", str(file)), tmp_path / "writes.log")])
    executor.wait(30)
    running = executor._running["writes"]
    assert running.is_released
    assert running.deadline > time.monotonic() + 50
    do(executor, "touch", file, pool="b")
    assert executor.until_end("writes") == JobEnd(0)
    assert pid in idle_pids(executor)
    executor.submit([Job("computes", "a", ("after", str(tmp_path / "go"), "exit", "0"), tmp_path / "c.log")])
    executor.wait(0.1)
    assert not executor._running["computes"].is_released, "it has said nothing itself"
    (tmp_path / "go").touch()
    assert executor.until_end("computes") == JobEnd(0)


def test_ranks_stay_together_and_a_failure_of_one_ends_all(start, do, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_GRACE_SECONDS", 0.5)
    executor = start()
    do(executor, "ranks", "exit 0", "exit 0", ranks=2)
    both = idle_pids(executor)
    do(executor, "ranks", "exit 0", "exit 0", ranks=2)
    assert idle_pids(executor) == both
    assert do(executor, "ranks", "exit 0", "exit 3", ranks=2).exit_code == 3
    assert idle_pids(executor) == []
    assert eventually(lambda: not any(map(is_alive, both)))


def test_an_idle_process_leaves_when_its_time_is_over(start, do):
    executor = start(linger=0.2)
    do(executor, "exit", 0)
    (pid,) = idle_pids(executor)
    executor.wait(30)
    assert eventually(lambda: not is_alive(pid))


def test_the_longest_idle_one_makes_room_for_another_stage_where_memory_is_short(
    start, do, monkeypatch, tmp_path
):
    executor, file = start(slots=3), tmp_path / "pids"
    jobs = [Job(name, "a", ("self", str(file)), tmp_path / f"{name}.log") for name in ("one", "two")]
    executor.submit(jobs)
    assert [executor.until_end(one.key) for one in jobs] == [JobEnd(0)] * 2
    longest, other = idle_pids(executor)
    monkeypatch.setattr(processes, "free_share", lambda: 0.01 if is_alive(longest) else 0.5)
    assert do(executor, "exit", 0, pool="b") == JobEnd(0)
    assert not is_alive(longest)
    assert is_alive(other)


SCHEDULE = """
import math, sys, time
from pathlib import Path
from pipeline.executors.processes import Job, LocalExecutor, LocalLimits
if __name__ == "__main__":
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    limits = LocalLimits(1, {"a": 1}, 60, {"a": math.inf})
    executor = LocalExecutor("tests.support.scheduled:serve", [], limits)
    words = ("ranks", *[f"self {folder / 'pids'}"] * ranks)
    executor.submit([Job("a", "a", words, folder / "log", ranks=ranks)])
    while not executor._idle:
        executor.wait(1)
        executor.collect_ended()
    (folder / "idle").touch()
    time.sleep(60)
"""


def test_idle_processes_die_with_a_killed_executor(tmp_path):
    script = tmp_path / "schedule.py"
    script.write_text(SCHEDULE)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, script, tmp_path, "2"], env=environment)
    assert eventually((tmp_path / "idle").exists, seconds=60)
    pids = pids_in(tmp_path / "pids")
    assert len(pids) == 2
    assert all(map(is_alive, pids))
    process.kill()
    process.wait()
    assert eventually(lambda: not any(map(is_alive, pids)))


# --- the rule ---

POOLS = st.sampled_from(["rollout", "reward", "update"])
IDLE = st.lists(st.builds(Idle, POOLS, st.floats(0, 1000)), max_size=6)
LINGER = st.dictionaries(POOLS, st.sampled_from([0.0, 5.0, 200.0, ALWAYS]))


@given(idle=IDLE, linger=LINGER, now=st.floats(1000, 2000), starting=POOLS, free=st.floats(0, 1))
def test_who_leaves(idle, linger, now, starting, free):
    leaving = who_leaves(idle, linger, now, starting, free)
    assert sorted({*leaving}) == sorted(leaving)
    over = [n for n, one in enumerate(idle) if now - one.since > linger.get(one.pool, 0.0) + 1e-6]
    assert {*over} <= {*leaving}, "nobody outstays"
    for place in leaving:
        if now < idle[place].since + linger.get(idle[place].pool, 0.0):
            assert free < LEAST_FREE, "nobody leaves early where memory is free"
            assert idle[place].pool != starting, "it would have done the job itself"
            assert len(leaving) == 1, "one at a time: the next may fit then"
    others = [one for one in idle if one.pool != starting]
    if free < LEAST_FREE and others:
        assert leaving, "no job waits for ever beside idle processes"
    assert who_leaves(idle, linger, now, "", free) == who_leaves(idle, linger, now), "without need none"


def test_linger_in_seconds():
    assert [seconds_of(given, False) for given in ("auto", 0, 30)] == [ALWAYS, 0, 30]
    assert [seconds_of(given, True) for given in ("auto", 0, 30)] == [0, 0, 30]


# --- whole runs ---


def records(run_dir: Path, stage: str) -> list[dict]:
    paths = run_dir.glob(f"iterations/*/{stage}/shard-?????.json")
    return [json.loads(path.read_text()) for path in sorted(paths)]


def words(inputs: Path, run_dir: Path, *more: str) -> list[str]:
    return tiny.overrides(
        inputs, run_dir, f"data.heldout={inputs / 'heldout.jsonl'}", "evaluate.every=1", *more
    )


def test_a_run_is_done_by_few_processes_and_ends_as_with_one_for_each_task(
    inputs, complete_run, slurm_ppo, tmp_path
):
    for stage, most in (("rollout", 2), ("reward", 2), ("update", 1), ("evaluate", 1)):
        by_process = Counter(record["pid"] for record in records(complete_run, stage))
        assert len(by_process) <= most < sum(by_process.values())
    cold = [f"scheduler.{stage}.linger=0" for stage in ("rollout", "reward", "update", "evaluate")]
    done = slurm_ppo("run", *words(inputs, tmp_path / "cold", *cold))
    assert done.returncode == 0, done.stderr
    for stage in ("rollout", "reward", "update"):
        pids = [record["pid"] for record in records(tmp_path / "cold", stage)]
        assert len({*pids}) == len(pids)
    assert_same_end(tmp_path / "cold", complete_run)


def test_a_process_killed_while_the_run_goes_on_without_it_is_replaced(
    inputs, complete_run, environment, tmp_path
):
    """It has rolled out, and waits for the update, which takes its time."""
    run_dir = tmp_path / "run"
    slow = environment | {"LIGHT_STATE_SECONDS": "0", "LIGHT_SECONDS": "0.1"}
    command = [sys.executable, "-m", "pipeline", "run", *words(inputs, run_dir)]
    driver = subprocess.Popen(command, env=slow, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: len(records(run_dir, "rollout")) == 2, "two shards")
        killed = {record["pid"] for record in records(run_dir, "rollout")}
        wait_for(lambda: records(run_dir, "reward"), "a score")
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        _, said = driver.communicate(timeout=120)
    finally:
        driver.kill()
    assert driver.returncode == 0, said
    assert events(run_dir, "failed") == []
    assert not killed & {record["pid"] for record in records(run_dir, "rollout")[2:]}
    assert_same_end(run_dir, complete_run)
