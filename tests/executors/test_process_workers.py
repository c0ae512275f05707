"""Passes over workers of this machine whose processes are scripted: who is judged, killed, started, rung."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.config.scheduler import LocalConfig
from pipeline.decide.reconcile import Actions, Launch, Observation
from pipeline.executors import local, process_workers
from pipeline.executors.limits import Limits, Started, WorkerEnd
from pipeline.executors.process_workers import ProcessWorkers
from pipeline.orchestrate import jobs
from pipeline.orchestrate.driver import Outcome, Pass
from pipeline.orchestrate.jobs import Ended, Jobs
from pipeline.run import journal
from pipeline.run.endings import read_endings
from pipeline.run.failures import FailureKind
from pipeline.run.tasks import PREPARE, Stage, Task, task_key
from pipeline.workers.beats import BeatReader, Doing, Reason, read_living
from pipeline.workers.claims import Claim, take
from pipeline.workers.handover import Handover, read_instructions
from tests.support.beats import beat, write_beats
from tests.support.scripted import imagined_run

ROLLOUT, REWARD = Task(1, Stage.ROLLOUT, 0), Task(1, Stage.REWARD, 0)
LATE = 60.0
"""Seconds that a worker has to end by itself what takes too long."""


class ScriptedProcesses:
    """Processes that do nothing; a test says when they end."""

    def __init__(self, **limits: object) -> None:
        self.limits = Limits(**{"workers": {}, "time_limit": 100.0, **limits})
        self.living: dict[str, Started] = {}
        self.ends: dict[str, WorkerEnd] = {}
        self.rung: list[str] = []
        self.starting_seconds = 0.0

    def wait(self, seconds: float) -> None: ...

    def start(self, worker: Started, words: Sequence[str], variables: Mapping[str, str]) -> bool:
        self.living[worker.name] = worker
        return True

    def collect_ended(self) -> Mapping[str, WorkerEnd]:
        ended, self.ends = self.ends, {}
        return ended

    def nodes_of(self, worker: str) -> tuple[str, ...]:
        return ()

    def ring(self, workers: Collection[str]) -> None:
        self.rung += workers

    def kill(self, worker: str, why: str) -> None:
        self.end(worker, -9, why)

    def end(self, worker: str, exit_code: int, note: str = "") -> None:
        del self.living[worker]
        self.ends[worker] = WorkerEnd(exit_code, note)

    def cancel(self) -> None: ...


class Passes:
    """A run of which prepare is committed, and its passes."""

    def __init__(self, folder: Path, **limits: object) -> None:
        folder.mkdir()
        run = imagined_run(folder)
        self.run = replace(run, config=replace(run.config, scheduler=LocalConfig()))
        self.processes = ScriptedProcesses(**limits)
        self.workers = ProcessWorkers(self.run, self.processes, invocation=1, lease=7)
        self.jobs = Jobs(self.run, self.workers, print)
        self.committed = {PREPARE}

    def look(self, *window: Task, new: Collection[Task] = ()) -> list[Ended]:
        self.jobs.query()
        tasks = window or (ROLLOUT, REWARD)
        return self.jobs.collect_ended(tasks, lambda tasks: self.committed.intersection(tasks), new=new)

    def begun(self) -> list[tuple[str, str]]:
        """Tasks and attempts that the journal says were begun."""
        rows = journal.read(self.run.paths.events)
        return [(row["task"], row["attempt"]) for row in rows if row["event"] == "launched"]

    def start(self, *tasks: Task) -> str:
        """Have tasks done, and return the newest worker."""
        seen = Observation(
            [ROLLOUT, REWARD], dict.fromkeys(self.committed), {}, self.jobs.live, self.jobs.failures
        )
        self.jobs.launch([Launch(task, "it is due") for task in tasks], seen)
        return list(self.processes.living)[-1]

    def claims(self, worker: str, task: Task, since: float = 900.0, number: int = 1) -> str:
        attempt, key = f"{number}-{worker}", task_key(task)
        write_beats(self.run.paths, beat(worker, task.job_kind, task=key, attempt=attempt, since=since))
        take(self.run.paths, Claim(task, number, attempt, worker, since, invocation=1))
        return attempt

    def says(self, worker: str, doing: Doing, job_kind: str = "rollout", **more: object) -> None:
        write_beats(self.run.paths, beat(worker, job_kind, doing, **more))


@pytest.fixture
def passes(tmp_path):
    made = []

    def make(**limits: object) -> Passes:
        made.append(Passes(tmp_path / "run", **limits))
        return made[-1]

    yield make
    for one in made:
        one.workers.close()


def test_a_worker_that_dies_before_it_takes_a_task_failed_what_it_was_started_for(passes):
    given = passes()
    given.look()
    worker = given.start(ROLLOUT)
    assert given.jobs.live == set()
    given.look()
    assert given.jobs.live == {ROLLOUT}
    given.says(worker, Doing.STARTING, task="1/rollout/0")
    given.processes.end(worker, 3)
    (ended,) = given.look()
    assert read_living(BeatReader(given.run.paths)) == {}
    assert (ended.failure.task, ended.failure.kind, ended.failure.attempt) == (ROLLOUT, FailureKind.KILLED, 1)
    assert ended.failure.log.endswith(f"/workers/{worker}.log")
    assert read_endings(given.run.paths, [1])[worker] == ended.ending
    assert given.jobs.failures == {ROLLOUT: [ended.failure]}
    assert given.jobs.live == set()
    assert given.look() == [], "once"
    again = given.start(ROLLOUT)
    given.processes.end(again, 3)
    (second,) = given.look()
    assert second.failure.attempt == 2


def test_a_worker_that_dies_when_its_task_is_done_or_after_others_failed_nothing(passes):
    given = passes()
    given.look()
    worker = given.start(ROLLOUT)
    given.processes.end(worker, -9)
    given.committed.add(ROLLOUT)
    assert given.look() == []
    worker = given.start(REWARD)
    given.says(worker, Doing.WAITING, "reward", tasks=2)
    given.look()
    given.processes.end(worker, -9)
    assert given.look() == []
    assert given.jobs.failures == {}


def test_a_task_that_takes_longer_than_the_time_limit_is_ended_with_its_worker(passes):
    given = passes()
    given.look()
    worker, now = given.start(ROLLOUT), time.time()
    given.claims(worker, ROLLOUT, since=now - 100.0 - LATE + 20.0)
    assert given.look() == []
    assert given.processes.living, "it is to end it itself"
    given.says(worker, Doing.BUSY, task="1/rollout/0", attempt=f"1-{worker}", since=now - 100.0 - LATE - 1.0)
    given.look()
    assert not given.processes.living
    (ended,) = given.look()
    assert ended.failure.message == "stopped at the time limit of 100 s"
    assert (ended.failure.kind, ended.ending.attempt) == (FailureKind.KILLED, f"1-{worker}")
    assert given.jobs.live == set()
    assert given.begun() == [("1/rollout/0", f"1-{worker}")]


def test_what_is_begun_and_committed_between_two_passes_is_in_the_journal_once(passes):
    given, measured = passes(), Task(2, Stage.EVALUATE)
    given.look()
    worker = given.start(ROLLOUT)
    given.claims(worker, ROLLOUT)
    given.look()
    given.claims(worker, measured, number=2)
    given.committed |= {ROLLOUT, measured}
    for _ in range(2):  # as records are read once more from time to time
        given.look(new=(measured,))
    given.look()
    assert given.begun() == [("1/rollout/0", f"1-{worker}"), ("2/evaluate/0", f"2-{worker}")]


def test_an_attempt_is_judged_once_also_if_another_has_done_its_task_and_the_run_has_moved_on(
    passes, monkeypatch
):
    given = passes()
    given.committed.add(ROLLOUT)
    given.look()
    first = given.start(REWARD)
    attempt = given.claims(first, REWARD)
    given.processes.end(first, -9)
    assert [one.ending.attempt for one in given.look()] == [attempt]
    won = SimpleNamespace(attempt=given.claims(given.start(REWARD), REWARD, number=2))
    monkeypatch.setattr(jobs, "read_record", lambda paths, task: won)
    given.look()
    given.committed.add(REWARD)
    assert given.look(Task(3, Stage.ROLLOUT, 0)) == []
    assert not read_endings(given.run.paths, [1])[attempt].is_redone


@pytest.mark.parametrize(("free", "leaves"), [(0.05, True), (0.5, False)])
def test_where_memory_is_short_the_longest_idle_worker_of_another_kind_leaves_first(
    passes, monkeypatch, free, leaves
):
    monkeypatch.setattr(process_workers, "free_share", lambda: free)
    given = passes()
    given.look()
    idle = given.start(ROLLOUT)
    given.says(idle, Doing.WAITING, tasks=1)
    given.committed.add(ROLLOUT)
    given.look()
    newest = given.start(REWARD)
    expected = (Handover(idle, "reward"),) if leaves else ()
    assert read_instructions(given.run.paths).handovers == expected
    assert given.processes.rung == [idle] * leaves
    assert (newest == idle) is leaves, "or a worker was started"
    given.processes.end(idle, 0)
    given.look()
    assert given.processes.living[given.start(REWARD)].first == REWARD
    assert read_instructions(given.run.paths).handovers == ()


def test_a_worker_that_leaves_as_code_changed_failed_nothing_and_another_does_its_task(passes):
    given = passes()
    given.look()
    old = given.start(ROLLOUT)
    given.says(old, Doing.LEAVING, reason=Reason.CHANGED)
    given.processes.end(old, 0)
    assert given.look() == []
    assert given.jobs.failures == {}
    new = given.start(ROLLOUT)
    assert new != old
    assert given.processes.living[new].first == ROLLOUT


@pytest.mark.parametrize(
    ("network", "starting", "waited", "rests"),
    [
        pytest.param(False, 0.0, 0.0, 1, id="computes long"),
        pytest.param(False, 0.0, 0.3, 0, id="waits for a core"),
        pytest.param(True, 0.0, 0.3, 1, id="waits for a file server"),
        pytest.param(True, 0.3, 0.3, 0, id="starts workers"),
    ],
)
def test_a_driver_rests_after_a_long_pass_but_not_for_the_start_of_its_fork_server(
    monkeypatch, network, starting, waited, rests
):
    """The server imports torch first, which takes seconds: no task is to wait for four times that. Nor is a
    GPU, because others compute on the driver's cores."""
    rested, passes = [], iter([0.3, 0.0])
    clock, computed = [0.0], [0.0]
    processes = ScriptedProcesses()

    def one_pass() -> Actions:
        clock[0] += (seconds := next(passes))
        computed[0] += max(0.0, seconds - waited)
        processes.starting_seconds += min(seconds, starting)
        return Actions()

    done = iter([Pass(None), Pass(Outcome.FAILED)])
    driver = SimpleNamespace(
        one_pass=one_pass, result_of=lambda actions: next(done), is_complete=False, lacks_rows_only=False
    )
    monkeypatch.setattr(local, "tell_of_pass", lambda *given: None)
    monkeypatch.setattr(local, "_let_states_finish", lambda *given: None)
    clocks = SimpleNamespace(monotonic=lambda: clock[0], thread_time=lambda: computed[0], sleep=rested.append)
    monkeypatch.setattr(local, "time", clocks)
    driver.run, driver.watcher = None, SimpleNamespace(note=print)
    lease = SimpleNamespace(beat=lambda: None, holder=SimpleNamespace(acquired=0.0))
    local._loop(driver, SimpleNamespace(processes=processes, is_network=network), lease)
    assert rested == [pytest.approx(1.2)] * rests
