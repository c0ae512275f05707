"""What workers conclude from what they see, whatever clocks say, and how often they look while they wait."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pipeline.config.scheduler import ResourcesConfig
from pipeline.decide.choosing import Chosen, Step, choose
from pipeline.run.attempts import new_attempt
from pipeline.run.directory import Run
from pipeline.run.paths import RunPaths
from pipeline.run.tasks import PREPARE, Stage, Task, task_key
from pipeline.workers.beats import SILENT_SECONDS, Beat, Doing, LiveWorkers, Reason, write_beat
from pipeline.workers.claims import Claim, attempts_of, claims_of, take
from pipeline.workers.outside import WorkerHost
from stages.attempts.arguments import Arguments
from stages.workers.pulling import Pulling
from stages.workers.pulse import Pulse
from stages.workers.waiting import Waiting
from tests.support import reportrun

ROLLOUT, UPDATE = Task(1, Stage.ROLLOUT), Task(1, Stage.UPDATE)
LINGER = 60.0


def beat(worker: str, task: Task | None = None, **more: object) -> Beat:
    """A worker of another node, which is at a task or waits."""
    doing = {"doing": Doing.BUSY, "task": task_key(task), "attempt": f"1-{worker}"} if task else {}
    return replace(
        Beat(worker, "rollout", "another", 7, 0.0, Doing.WAITING, beat=time.time()), **doing, **more
    )


def claim(worker: str, task: Task = ROLLOUT, number: int = 1, **more: object) -> Claim:
    return replace(Claim(task, number, f"{number}-{worker}", worker, time.time()), **more)


def look_for_work(run: Run, task: Task, **resources: object) -> Pulling:
    """A worker that begins to look, in this process and without its pulse."""
    own, settings = beat("9_0r0"), ResourcesConfig(linger=LINGER, **resources)
    arguments, outside = Arguments(task, run.paths.root, "1", None), WorkerHost(own.worker, new_attempt)
    return Pulling(run, arguments, outside, settings, Pulse(run.paths, own))


def commit(paths: RunPaths, *tasks: Task) -> None:
    """What listings show of commits."""
    for task in tasks:
        paths.task(task).folder.mkdir(parents=True, exist_ok=True)
        paths.task(task).record.touch()


@pytest.fixture
def run(tmp_path) -> Run:
    """One of two shards, whose prompts are there."""
    made = reportrun.make_run(tmp_path / "run", num_shards=2)
    commit(made.paths, PREPARE)
    return made


# --- who is at what ---


def test_a_run_that_is_resumed_while_it_goes_on_leaves_tasks_to_whoever_is_at_them(tmp_path):
    paths = RunPaths(tmp_path)
    busy, failed = claim("4_0r0", invocation=1), claim("4_1r0", number=2, invocation=1)
    at_work = {busy.worker: beat(busy.worker, ROLLOUT)}
    (running,) = attempts_of(paths, [busy, failed], at_work, invocation=2)
    assert running.is_running
    assert attempts_of(paths, [busy, failed], {}, invocation=2) == (), "what failed before counts no more"


def test_workers_of_a_node_whose_clock_is_behind_live_as_long_as_they_beat(tmp_path):
    crew, behind = LiveWorkers(RunPaths(tmp_path)), time.time() - 10 * SILENT_SECONDS
    for seconds in range(0, 10 * int(SILENT_SECONDS), 20):
        write_beat(crew.paths, beat("4_0r0", ROLLOUT, beat=behind + seconds))
        if seconds == 0:
            write_beat(crew.paths, beat("4_1r0", ROLLOUT, beat=time.time() + 10 * SILENT_SECONDS))
        live = crew.live(float(seconds))
        assert "4_0r0" in live
        assert ("4_1r0" in live) == (seconds <= SILENT_SECONDS), "its clock is ahead, and it beats no more"


def test_who_saves_what_it_has_is_not_overtaken(run, monkeypatch):
    """On GPUs others take tasks over that have lasted for twice the median, here 10 s, without progress: a
    save that is first seen, of whatever time by the clock of the file server."""
    now, paths = time.time(), run.paths
    slow = at_work_for(paths, 1000.0)
    idle = look_for_work(run, Task(1, Stage.ROLLOUT, 1), gpus_per_node="1")
    saved = paths.task(ROLLOUT).partial_record(slow.attempt)
    for seconds_before in (90.0, 0.0, -90.0):
        saved.touch()
        os.utime(saved, (now - seconds_before, now - seconds_before))
        assert choose(idle.look(), idle.worker).step is Step.WAIT
    with monkeypatch.context() as later:
        later.setattr(time, "time", lambda: now + 20.0)
        assert choose(idle.look(), idle.worker) == Chosen(Step.TAKE, ROLLOUT)
    on_cpus = look_for_work(run, Task(1, Stage.ROLLOUT, 1))
    assert choose(on_cpus.look(), on_cpus.worker).step is Step.WAIT


@pytest.mark.parametrize("ahead", [-90.0, 0.0, 90.0])
def test_how_long_a_task_has_lasted_is_known_whatever_the_clock_of_its_node_says(run, ahead):
    at_work_for(run.paths, 15.0, ahead)
    idle = look_for_work(run, Task(1, Stage.ROLLOUT, 1), gpus_per_node="1")
    assert choose(idle.look(), idle.worker).step is Step.WAIT, "not twice the median yet"


@pytest.mark.parametrize("ahead", [-90.0, 0.0, 90.0])
def test_a_slow_task_is_taken_over_whatever_the_clock_of_its_node_says(run, ahead):
    at_work_for(run.paths, 25.0, ahead)
    idle = look_for_work(run, Task(1, Stage.ROLLOUT, 1), gpus_per_node="1")
    assert choose(idle.look(), idle.worker) == Chosen(Step.TAKE, ROLLOUT)


def at_work_for(paths: RunPaths, seconds: float, ahead: float = 0.0) -> Claim:
    """Have a worker of another node, with its own clock, at the first of two shards; the other is done."""
    now = time.time() + ahead
    made = claim("4_0r0", time=now - seconds)
    assert take(paths, made)
    write_beat(paths, beat("4_0r0", ROLLOUT, busy_seconds=100.0, tasks=10, beat=now))
    commit(paths, Task(1, Stage.ROLLOUT, 1))
    return made


def test_claims_of_iterations_that_are_over_are_forgotten(tmp_path):
    paths, known = RunPaths(tmp_path), {}
    tasks = [Task(k, Stage.ROLLOUT, shard) for k in (1, 2) for shard in range(3)]
    for task in tasks:
        take(paths, claim("4_0r0", task))
    assert len(claims_of(paths, tasks, known)) == len(known) == 6
    claims_of(paths, tasks[3:], known)
    assert {one.task for one in known.values()} == set(tasks[3:])


# --- how often they look ---


@dataclass
class Clock:
    """Time that waiting alone spends, and a worker's signals."""

    wall: float = 1e9
    monotonic: float = 1000.0
    processor: float = 0.0
    looks: int = 0
    look_seconds: float = 0.0
    """Seconds of a processor that a look takes."""
    news: float = 3600.0
    """Seconds after which Linux tells of something new."""
    warned: bool = False
    meanwhile: Callable[[], None] = lambda: None

    def wait(self, seconds: float, notices: object = None) -> bool:
        spent = min(seconds, self.news) if notices else seconds
        self.wall, self.monotonic = self.wall + spent, self.monotonic + spent
        self.meanwhile()
        return False

    def names_in(self, folder: Path) -> set[str]:
        self.looks += 1
        self.processor += self.look_seconds
        return {"shard-00000.json"}


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "time", lambda: made.wall)
    monkeypatch.setattr(time, "monotonic", lambda: made.monotonic)
    monkeypatch.setattr(time, "thread_time", lambda: made.processor)
    return made


@pytest.fixture
def waiting(run, clock, monkeypatch) -> Waiting:
    """An update's, for the second of two rewards."""
    found = look_for_work(run, UPDATE).waiting
    found.wakeup = clock
    monkeypatch.setattr(found, "_names_in", clock.names_in)
    return found


CHOICE = Chosen(Step.WAIT, UPDATE, (frozenset(Task(1, Stage.REWARD, shard) for shard in (0, 1)),))


def wait_on(waiting: Waiting) -> Iterator[Reason | None]:
    """Wait, with a look at everything now and then."""
    while (reason := waiting.go_on(CHOICE, is_first=False)) is None:
        yield None
    yield reason


@pytest.mark.parametrize("is_network", [False, True])
def test_a_clock_that_is_set_back_neither_prolongs_a_wait_nor_has_it_look_more_often(
    waiting, clock, is_network
):
    waiting.is_network = is_network
    began, looks, reasons = clock.monotonic, [], []
    for reason in wait_on(waiting):
        clock.wall -= 120.0
        looks.append(clock.looks)
        reasons.append(reason)
        assert clock.monotonic - began < 2 * LINGER
    assert reasons[-1] is Reason.LONG
    assert not is_network or looks[-1] - looks[-2] < looks[1] - looks[0], "and more rarely each time"


def test_shards_that_come_one_by_one_do_not_keep_a_core_busy(waiting, clock):
    """Linux tells of each; here a look takes as long as with some ten thousand of them."""
    waiting.is_network, clock.news = False, 0.001
    clock.look_seconds, waiting.look_seconds = 0.02, 0.2
    began = clock.monotonic
    everything = sum(1 for _ in wait_on(waiting))
    seconds = clock.monotonic - began
    assert clock.processor <= 0.1 * seconds + 2 * everything * clock.look_seconds
    assert everything * waiting.look_seconds <= 0.15 * seconds, "looks at everything"
