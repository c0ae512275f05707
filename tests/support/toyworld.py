"""A run on the toy Slurm, with the real driver and its files: tasks and Slurm do what chance decides.

What workers do is in tests/support/toyworkers.py.
"""

import contextlib
import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.noop import make_record
from pipeline.config.compose import from_mapping
from pipeline.executors.slurm.exit_reasons import Accounts
from pipeline.executors.slurm.passes import leased_pass, until_settled
from pipeline.orchestrate.driver import Outcome, Pass
from pipeline.run.commits import CorruptData, check_sizes, hash_file, read_record
from pipeline.run.control import begin_invocation
from pipeline.run.directory import Run, create_run
from pipeline.run.failures import FailureKind
from pipeline.run.submissions import chunk_size_for, parse_job_name
from pipeline.run.tasks import Stage, Task, parse_task, task_key
from pipeline.workers.looking import Look
from slurm.commands import SlurmTimeout
from slurm.query import QUEUE_FORMAT
from slurm.signals import Errands
from slurm.states import SlurmState
from slurm.submission import Refused
from tests.support.toyslurm import Element, ToySlurm

MISHAPS = {
    # what happens to a running element: Slurm's state, exit code, what the task says
    "error": (SlurmState.FAILED, 1, FailureKind.ERROR),
    "kill -9": (SlurmState.FAILED, 137, None),
    "out of memory": (SlurmState.OUT_OF_MEMORY, 0, None),
    "timeout": (SlurmState.TIMEOUT, 0, None),
    "warned in vain": (SlurmState.FAILED, 5, FailureKind.TIMEOUT),
    "paused": (SlurmState.FAILED, 5, FailureKind.PAUSED),
    "preempted": (SlurmState.PREEMPTED, 0, FailureKind.TIMEOUT),
    "node lost": (SlurmState.NODE_FAIL, 0, None),
    "launch failed": (SlurmState.LAUNCH_FAILED, 0, None),
}


SECONDS, OLDEST, MIN_JOB_AGE = 1.0, 12.0, 300.0
"""Seconds from one thing that happens to the next; that a look at the queue may be old; and for which Slurm
remembers jobs that have ended."""


def trials(number: int) -> int:
    """Number of worlds to try, which chance decides; eight times as many in ``make soak``."""
    return 8 * number if "SOAK_ROUNDS" in os.environ else number


class Killed(BaseException):
    """kill -9 of a driver."""


class StandsStill(AssertionError):
    """Nothing runs and nothing can start, but the run is not at its end."""


@dataclass(frozen=True)
class Luck:
    """What may go wrong, and how often."""

    mishaps: int = 0
    """With tasks, in all."""
    rot: int = 0
    """Commits that are spoilt."""
    disturbances: int = 0
    """Elements cancelled or requeued, ended jobs forgotten, passes out of turn."""
    kills: int = 0
    """Of drivers, between any two of Slurm's commands; answers of sbatch that are lost too."""
    is_hurried: bool = False
    """Whether things go on happening while a driver is at work."""
    may_need_guard: bool = False


@dataclass
class World:
    """A run, the toy, and chance."""

    run: Run
    slurm: ToySlurm
    chance: random.Random
    luck: Luck
    fails_benchmarks: bool = False
    """Whether the user's program never gives numbers."""
    outcome: Outcome | None = None
    is_driving: bool = False
    guards: int = 0
    """How often nothing but the guard could go on. Only a driver that was killed may be the cause."""
    looks: list[Look] = field(default_factory=list)
    """Looks at the queue that others have taken, of which passes may use one."""
    spent: Counter[str] = field(default_factory=Counter)
    story: list[str] = field(default_factory=list)

    @property
    def array_size(self) -> int:
        """The longest array that a stage is cut into."""
        return chunk_size_for(self.slurm.max_array_size)

    # --- what people and drivers do ---

    def submit(self) -> None:
        begin_invocation(self.run.paths)
        self.outcome = None
        self.advance("person")

    def advance(self, who: str, is_worker: bool = False) -> bool:
        """A pass, which may use a look at the queue that is some seconds old if a worker has asked for it.
        False if it came to a bad end."""
        seen = self.chance.choice([None, *self.looks]) if is_worker else None
        age = "of now" if seen is None else f"{time.time() - seen.asked:g} s old"
        self.is_driving, self.story = True, [*self.story, f"{who} advances, with a look {age}"]
        try:
            self.outcome = pass_over(self.run, self.story, seen).outcome or self.outcome
            return True
        except (Killed, Refused, SlurmTimeout) as error:
            self.story.append(f"{who} ends: {error!r}")
            return False
        finally:
            self.is_driving = False

    def look(self) -> None:
        """Somebody looks at the queue. Time goes on."""
        time.sleep(SECONDS)
        shown = self.slurm.run_quietly(["squeue", f"--Format={QUEUE_FORMAT}"])
        kept = [seen for seen in self.looks if time.time() - seen.asked < OLDEST]
        self.looks = [*kept, Look(time.time(), shown)]

    def command_comes(self, program: str) -> None:
        self.maybe_kill(program, "before")

    def command_went(self, program: str) -> None:
        self.maybe_kill(program, "after")
        if self.luck.is_hurried and self.is_driving:
            for _ in range(self.chance.randrange(3)):
                self.happen()
        self.check_once_at_a_time()

    def maybe_kill(self, program: str, when: str) -> None:
        if self.is_driving and self.may("kills", 0.1):
            self.story.append(f"killed {when} {program}")
            if program == "sbatch" and when == "after" and self.chance.random() < 0.5:
                raise SlurmTimeout([program], None, "Socket timed out on send/recv operation")
            raise Killed(program)

    def may(self, what: str, probability: float) -> bool:
        """Whether it happens now; counted."""
        happens = self.spent[what] < getattr(self.luck, what) and self.chance.random() < probability
        self.spent[what] += happens
        return happens

    # --- what happens by itself ---

    def live_on(self) -> None:
        """Until the run is complete, or is given up."""
        for _ in range(3000):
            if self.outcome is not None:
                return
            if not self.happen() and self.outcome is None:
                self.wake_guard()
        raise AssertionError("it goes on for ever\n" + self.told())

    def happen(self) -> bool:
        """One thing. False if nothing but a guard could go on."""
        raise NotImplementedError

    def is_guard(self, element: Element) -> bool:
        """Whether it waits for its time, and not for a moment as what Slurm could not start."""
        return bool(element.job.begin) and is_driver(element)

    def disturb(self) -> None:
        if not self.may("disturbances", 0.1):
            return
        alive = [e for e in self.slurm.elements() if not e.has_ended and not is_driver(e)]
        running = [e for e in alive if not e.is_pending]
        what = self.chance.choice(["cancel", "requeue", "forget", "advance"])
        if what == "cancel" and alive:
            self.slurm.end(self.tell("scancel", self.chance.choice(alive)), SlurmState.CANCELLED)
        if what == "requeue" and running:
            self.slurm.requeue(self.tell("requeue", self.chance.choice(running)))
        if what == "forget" and not self.is_driving:  # a pass is shorter than MinJobAge
            self.story.append("ended jobs are forgotten")
            time.sleep(MIN_JOB_AGE)
            self.looks.clear()
            self.slurm.forget_ended()
        if what == "advance" and not self.is_driving and self.outcome is None:
            self.advance("somebody", is_worker=True)

    def wake_guard(self) -> None:
        guards = [e for e in self.slurm.elements(SlurmState.PENDING) if self.is_guard(e)]
        if not self.luck.kills and not self.luck.may_need_guard:
            raise StandsStill
        self.guards += 1
        self.start(guards[0]) if guards else self.submit()

    def tell(self, what: str, element: Element) -> Element:
        self.story.append(f"{what}: {element}")
        return element

    def start(self, element: Element) -> None:
        """A driver job starts."""
        self.slurm.start(self.tell("starts", element))
        with in_job(element):
            is_fine = self.advance(str(element.job.name))
        self.slurm.end(element, SlurmState.COMPLETED if is_fine else SlurmState.FAILED, not is_fine)

    # --- what tasks do ---

    def task(self, element: Element) -> Task:
        return task_of(self.run, element)

    def inputs(self, element: Element) -> tuple[Task, ...]:
        return self.run.plan.inputs(self.task(element))

    def record(self, task: Task):
        """A commit that verifies, or None."""
        try:
            record = read_record(self.run.paths, task)
            if record is not None:
                check_sizes(self.run.paths, record)
            return record
        except CorruptData:
            return None

    def commit(self, task: Task, attempt: str) -> None:
        paths = self.run.paths.task(task)
        paths.folder.mkdir(parents=True, exist_ok=True)
        paths.data(attempt).write_text(f"the result of {task}")
        read = {task_key(source): self.record(source).fingerprint for source in self.run.plan.inputs(task)}
        made = make_record(task)
        record = replace(
            made,
            metrics={**made.metrics, "responses": 1.0, "response_tokens": 1.0},
            attempt=attempt,
            rows=1,
            outputs=(hash_file(self.run.paths, paths.data(attempt)),),
            inputs=read,
            promises_state=task.stage is Stage.UPDATE,
        )
        if not paths.record.exists():
            paths.record.write_text(json.dumps(record.to_json()))

    def spoil(self) -> None:
        """A commit that somebody is still to read."""
        plan = self.run.plan
        undone = [task for task in plan.all_tasks() if self.record(task) is None]
        read = sorted({source for task in undone for source in plan.inputs(task)} - set(undone))
        if read:
            record = self.record(self.chance.choice(read))
            self.story.append(f"spoilt: {record.task}")
            (self.run.paths.root / record.outputs[0].path).write_text("")

    def write_failure(self, task: Task, number: int, said: FailureKind, suspect: Task | None) -> None:
        """What a failed attempt says of itself."""
        path = self.run.paths.task(task).failure(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"kind": said, "message": "made up", "suspect": suspect and task_key(suspect)}
        path.write_text(json.dumps(content))

    # --- what must hold ---

    def check_once_at_a_time(self) -> None:
        """Nothing is done twice at once."""
        raise NotImplementedError

    def check_is_complete(self) -> None:
        assert self.outcome is Outcome.COMPLETE, self.told()
        rows = [json.loads(line) for line in self.run.paths.metrics.read_text().splitlines()]
        assert [row["iteration"] for row in rows] == list(range(1, self.run.plan.iterations + 1))
        assert not self.slurm.elements(SlurmState.PENDING), self.told()

    def told(self) -> str:
        queue = [str(e) for e in self.slurm.elements() if not e.has_ended]
        return "\n".join([*self.story[-60:], "--- queue", *queue])


@contextlib.contextmanager
def in_job(element: Element) -> Iterator[None]:
    """Have the environment that Slurm gives an element."""
    given = {
        "SLURM_ARRAY_JOB_ID": element.job.id,
        "SLURM_ARRAY_TASK_ID": str(element.index),
        "SLURM_JOB_NAME": element.job.name,
    }
    before = {name: os.environ.pop(name, None) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def is_driver(element: Element) -> bool:
    return element.job.work["module"] == "pipeline"


def task_of(run: Run, element: Element) -> Task:
    words = element.job.work["elements"][str(element.index)]
    name = parse_job_name(element.job.name)
    assert name
    assert name.run_id == run.identity.id
    return parse_task(f"{name.iteration}/{name.job_kind}/{words[words.index('--shard') + 1]}")


@dataclass
class Watcher:
    """Writes the story."""

    story: list[str]

    def note(self, text: str) -> None:
        self.story.append(f"  {text}")

    def progress(self, *_: object) -> None: ...

    def row(self, row: object) -> None: ...


class Lease:
    def beat(self) -> None: ...


def pass_over(run: Run, story: list[str], seen: Look | None = None) -> Pass:
    """Make a pass, by a look at the queue, and others as they are due at once."""
    watcher, looks = Watcher(story), [seen]
    errands = Errands(watcher.note)

    def make(accounts: Accounts) -> Pass:
        look = looks.pop() if looks else None
        return leased_pass(run, watcher, Lease(), errands, accounts, look)

    return until_settled(make, watcher.note)


def make_world(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    luck: Luck,
    measured_every: int = 0,
    settings: Mapping[str, Any] | None = None,
    **scheduler: object,
) -> World:
    """A run of a few iterations that nobody has submitted.

    Args:
        measured_every: iterations between policies that a program measures; 0: none.
        settings: what chance does not decide, by section.
    """
    chance = random.Random(seed)
    given = {"kind": "slurm", "python": "/py", "max_attempts": 40}
    slurm = ToySlurm(has_accounting=chance.random() < 0.7, refuses_unknown=chance.random() < 0.5)
    slurm.max_array_size = chance.choice([1001, 1001, 2])
    slurm.take_the_place(monkeypatch)
    monkeypatch.setattr("submitit.SlurmExecutor.affinity", lambda: 2)
    shards = chance.randint(1, 4)
    config = {
        "run_dir": str(root),
        "iterations": chance.randint(1, 4),
        "model": {"policy": "/policy"},
        "data": {"prompts": "/prompts", "prompts_per_iteration": 4 * shards, "heldout": "/heldout"},
        "rollout": {"num_shards": shards},
        "reward": {"components": {"r": {"kind": "rule", "function": "a:b"}}},
        "evaluate": {"every": chance.randint(0, 2)},
    }
    config["data"]["heldout"] = "/heldout" if config["evaluate"]["every"] else None
    if measured_every:
        words = ["measure", "{policy}", "{output}"]
        config["evaluate"] |= {"command": words, "command_every": measured_every}
    for pool in ("big", "b_2")[: chance.choice([0, 0, 1, 2])]:
        config["reward"]["components"][pool] = {"kind": "rule", "function": "a:b", "pool": pool}
        given["pools"] = given.get("pools", {}) | {pool: {}}
    config["scheduler"] = given | scheduler
    for name, value in (settings or {}).items():
        config[name] = {**config.get(name, {}), **value} if isinstance(value, Mapping) else value
    world = World(create_run(from_mapping(config)), slurm, chance, luck)
    slurm.before, slurm.after = world.command_comes, world.command_went
    return world


def live_to_the_end(world: World) -> World:
    """Have a run go on until it is complete; where it does not, its story is told with the error."""
    try:
        world.submit()
        world.live_on()
        world.check_is_complete()
    except Exception as error:
        error.add_note(world.told())
        raise
    return world
