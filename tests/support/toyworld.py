"""A run with workers on the toy Slurm: driver, files and beats are the real ones; what Slurm, tasks and
workers do is decided by chance, within the rules of workers."""

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.noop import make_record
from pipeline.config.compose import from_mapping
from pipeline.config.conversion import plain
from pipeline.config.scheduler import resources_of
from pipeline.decide.choosing import is_only_by_pass
from pipeline.executors.slurm.crew import wanted_by
from pipeline.orchestrate.driver import Outcome
from pipeline.run.commits import CorruptData, check_sizes, hash_file, read_record
from pipeline.run.control import begin_invocation, read_control
from pipeline.run.directory import Run, create_run
from pipeline.run.endings import read_endings
from pipeline.run.failures import FailureKind
from pipeline.run.submissions import parse_job_name
from pipeline.run.tasks import Stage, Task, parse_task, task_key
from pipeline.workers.beats import Beat, Doing, Reason
from pipeline.workers.claims import Claim
from pipeline.workers.handover import read_instructions
from pipeline.workers.looking import Look
from pipeline.workers.outside import attempt_ids
from slurm.commands import SlurmTimeout
from slurm.query import QUEUE_FORMAT
from slurm.sharedfiles import sealed
from slurm.states import SlurmState
from slurm.submission import Refused
from tests.support.passes import in_job, pass_over
from tests.support.tables import IS_SOAK
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
    return 8 * number if IS_SOAK else number


class Killed(BaseException):
    """kill -9 of a driver."""


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
class Worker:
    """What a worker knows of itself."""

    name: str
    first: Task
    beat: Beat
    new_attempt: Callable[[int], str]
    claim: Claim | None = None
    has_begun: bool = False
    is_warned: bool = False


@dataclass
class World:
    """A run, the toy, and chance. Elements go on from task to task by claims; each that commits or leaves
    asks for a pass."""

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
    workers: dict[Element, Worker] = field(default_factory=dict)
    every_worker: list[Worker] = field(default_factory=list)
    """Those too that have ended."""
    claims: dict[Task, list[Claim]] = field(default_factory=dict)
    kinds: dict[str, FailureKind | None] = field(default_factory=dict)
    """What failed attempts said, by attempt."""
    clock: float = 0.0
    poison: Task | None = None
    """Task that fails in every worker."""
    most: Counter[str] = field(default_factory=Counter)
    """Most workers that there were at once, by job kind."""

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
        self.disturb()
        self.look()
        for element in [e for e in self.workers if e.state is not SlurmState.RUNNING]:
            if claim := self.workers.pop(element).claim:
                self.kinds.setdefault(claim.attempt, None)
        running = list(self.workers)
        free = [e for e in self.slurm.elements(SlurmState.PENDING) if e.is_free and not self.is_guard(e)]
        if self.is_driving:
            free = [e for e in free if not is_driver(e)]
        if not running and not free:
            return False
        element = self.chance.choice(running + free)
        self.start(element) if element in free else self.step(element)
        return True

    def start(self, element: Element) -> None:
        if is_driver(element):
            self.start_driver(element)
            return
        self.slurm.start(self.tell("starts", element))
        name, first = f"{element.job.id}_{element.index}r{element.restarts}", task_of(self.run, element)
        ids = attempt_ids(element.job.id, str(element.index), element.restarts)
        worker = Worker(name, first, Beat(name, first.job_kind, "node", 1, self.now()), ids)
        self.workers[element] = worker
        self.every_worker.append(worker)
        if self.chance.random() < 0.8:
            self.say(worker, Doing.STARTING)

    def now(self) -> float:
        self.clock += 1.0
        return self.clock + 4_000_000_000.0

    def say(self, worker: Worker, doing: Doing, task: Task | None = None, **more: object) -> None:
        now, key = self.now(), task_key(task) if task else ""
        given = {"reason": None, "attempt": "", **more}
        worker.beat = replace(worker.beat, doing=doing, since=now, beat=now, task=key, **given)
        self.write_beat(worker)

    def fall_silent(self, worker: Worker, seconds: float) -> None:
        """A worker hangs: its last beat is so long ago."""
        worker.beat = replace(worker.beat, beat=time.time() - seconds)
        self.write_beat(worker)

    def write_beat(self, worker: Worker) -> None:
        path = self.run.paths.slurm / "workers" / f"{worker.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(sealed(plain(worker.beat)))

    def step(self, element: Element) -> None:
        """One step of a worker: it ends a task, takes one, waits or leaves."""
        worker = self.workers[element]
        if worker.claim is not None:
            self.end_task(element, worker, worker.claim)
        elif worker.is_warned:
            self.leave(element, Reason.WARNED)
        elif task := self.choose(worker):
            self.take(worker, task)
        elif worker.name in self.making_place():
            self.leave(element, Reason.NEEDED)
        elif self.is_done(worker) or self.chance.random() < 0.15:
            self.leave(element, Reason.LONG)
        elif worker.beat.doing is not Doing.WAITING:
            self.say(worker, Doing.WAITING, worker.first)

    def take(self, worker: Worker, task: Task) -> None:
        of_task = self.claims.setdefault(task, [])
        number = len(of_task) + 1
        invocation = read_control(self.run.paths).invocation
        claim = Claim(task, number, worker.new_attempt(number), worker.name, self.now(), invocation)
        self.say(worker, Doing.BUSY, task, attempt=claim.attempt)
        of_task.append(claim)
        worker.claim, worker.has_begun = claim, True
        self.story.append(f"{worker.name} takes {task} ({claim.number})")

    def end_task(self, element: Element, worker: Worker, claim: Claim) -> None:
        if self.may("rot", 0.05):
            self.spoil()
        if self.may("mishaps", 0.35):
            what = self.chance.choice(sorted(MISHAPS))
            state, code, said = MISHAPS[what]
            self.story.append(f"mishap of {worker.name}: {what}")
            self.say_failure(claim, said)
            self.slurm.end(element, state, code)
            return
        missing = [s for s in self.run.plan.inputs(claim.task) if self.record(s) is None]
        worker.claim = None
        if missing:
            self.say_failure(claim, FailureKind.INPUTS, missing[0])
        elif claim.task == self.poison or (self.fails_benchmarks and claim.task.stage is Stage.BENCHMARK):
            self.say_failure(claim, FailureKind.ERROR)
        else:
            if self.record(claim.task) is None:
                self.commit(claim.task, claim.attempt)
            measured = claim.task.job_kind != worker.first.job_kind
            beat = worker.beat
            worker.beat = replace(beat, tasks=beat.tasks + 1, measured=beat.measured + measured)
        if resources_of(self.run.config.scheduler, worker.first.job_kind).does_one_task:
            self.leave(element, Reason.ONE)
            return
        self.say(worker, Doing.WAITING, claim.task)
        if not self.is_driving and self.chance.random() < 0.3:
            self.advance(f"{worker.name} has done {claim.task}, and a pass", is_worker=True)

    def say_failure(self, claim: Claim, said: FailureKind | None, suspect: Task | None = None) -> None:
        self.kinds[claim.attempt] = said
        if said is not None:
            self.write_failure(claim.task, claim.number, said, suspect)

    def leave(self, element: Element, reason: Reason) -> None:
        """The beat first; then a pass that sees it; then the end."""
        worker = self.workers.pop(element)
        self.say(worker, Doing.LEAVING, reason=reason)
        self.tell(f"leaves ({reason})", element)
        if not self.is_driving:
            self.advance(f"{worker.name} leaves, and a pass", is_worker=True)
        self.slurm.end(element, SlurmState.COMPLETED)

    def get_signal(self, element: Element, name: str) -> None:
        """A warning: one that does nothing leaves, another one after its task. (A pass is at work.)"""
        worker = self.workers.get(element)
        if name != "USR2" or worker is None:
            return
        if worker.claim is None:
            self.leave(element, Reason.WARNED)
        else:
            worker.is_warned = True

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
            raise AssertionError("nothing runs and nothing can start, but the run is not at its end")
        self.guards += 1
        self.start(guards[0]) if guards else self.submit()

    def tell(self, what: str, element: Element) -> Element:
        self.story.append(f"{what}: {element}")
        return element

    def start_driver(self, element: Element) -> None:
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

    # --- what workers see ---

    def making_place(self) -> set[str]:
        return {one.worker for one in read_instructions(self.run.paths).handovers}

    def stays(self, element: Element) -> bool:
        return element in self.workers and self.workers[element].name not in self.making_place()

    def running_claims(self) -> set[Task]:
        return {worker.claim.task for worker in self.workers.values() if worker.claim}

    def choose(self, worker: Worker) -> Task | None:
        candidates = [t for t in self.run.plan.all_tasks() if t.job_kind == worker.first.job_kind]
        busy = self.running_claims()
        ready = [t for t in candidates if t not in busy and not self.exists(t) and self.has_inputs(t)]
        if not worker.has_begun and worker.first in ready:
            return worker.first
        free = [task for task in ready if not self.is_left(task)]
        own = [task for task in free if task.shard == worker.first.shard]
        return next(iter((*own, *free, *self.to_measure(worker))), None)

    def to_measure(self, worker: Worker) -> list[Task]:
        """What a worker of rollouts does besides, where the last pass has said so and nobody has tried it."""
        if worker.first.stage is not Stage.ROLLOUT or not read_instructions(self.run.paths).measures:
            return []
        undone = [task for task in self.run.plan.evaluation_tasks() if not self.exists(task)][:1]
        is_able = worker.has_begun and worker.name not in self.making_place()
        return [t for t in undone if is_able and self.has_inputs(t) and t not in self.claims]

    def exists(self, task: Task) -> bool:
        return self.run.paths.task(task).record.exists()

    def has_inputs(self, task: Task) -> bool:
        return all(map(self.exists, self.run.plan.inputs(task)))

    def is_left(self, task: Task) -> bool:
        """As pipeline.decide.choosing decides, which does not know invocations."""
        failed = [self.kinds.get(claim.attempt) for claim in self.claims.get(task, ())]
        return is_only_by_pass(failed, self.run.config.attempts_of(task.job_kind))

    def is_done(self, worker: Worker) -> bool:
        """Whether no task of its kind is left in the run."""
        if self.has_to_measure(worker):
            return False
        mine = (t for t in self.run.plan.all_tasks() if t.job_kind == worker.first.job_kind)
        return all(map(self.exists, mine))

    def has_to_measure(self, worker: Worker) -> bool:
        """Whether it is the one that stays for the last evaluations."""
        measures = worker.first.stage is Stage.ROLLOUT and read_instructions(self.run.paths).measures
        first = min((w.name for w in self.workers.values() if w.first.stage is Stage.ROLLOUT), default="")
        return measures and worker.name == first and not self.exists(self.run.plan.evaluation_tasks()[-1])

    def tasks_with_retries(self, paths: object, tasks: Iterable[Task]) -> list[Task]:
        return [task for task in tasks if len(self.claims.get(task, ())) > 1]

    def claims_of(
        self, paths: object, tasks: Iterable[Task], known: object
    ) -> Mapping[Task, tuple[Claim, ...]]:
        return {task: tuple(self.claims[task]) for task in tasks if task in self.claims}

    # --- what must hold ---

    def check_failures_are_told(self) -> None:
        """Every attempt that failed was told of, whoever did its task meanwhile; and none that committed."""
        endings = read_endings(self.run.paths, range(self.run.plan.iterations + 1))
        assert set(self.kinds) <= endings.keys(), self.told()
        records = filter(None, map(self.record, self.run.plan.all_tasks()))
        assert endings.keys().isdisjoint(record.attempt for record in records), self.told()

    def check_once_at_a_time(self) -> None:
        """Never more workers than wanted, but for those that have said that they leave, or make place: a pass
        says so when it has submitted what they make it for."""
        alive = [e for e in self.slurm.elements() if not e.has_ended and not is_driver(e)]
        here = [e for e in alive if e.is_pending or self.stays(e)]
        wanted = wanted_by(self.run.config.scheduler, self.run.plan)
        for job_kind, count in Counter(str(task_of(self.run, e).job_kind) for e in here).items():
            assert self.is_driving or count <= wanted[job_kind], self.told()
            self.most[job_kind] = max(count, self.most[job_kind])
        doing = [worker.claim.task for worker in self.workers.values() if worker.claim]
        assert len(doing) == len(set(doing)), self.told()

    def check_is_complete(self) -> None:
        assert self.outcome is Outcome.COMPLETE, self.told()
        rows = [json.loads(line) for line in self.run.paths.metrics.read_text().splitlines()]
        assert [row["iteration"] for row in rows] == list(range(1, self.run.plan.iterations + 1))
        assert not self.slurm.elements(SlurmState.PENDING), self.told()

    def told(self) -> str:
        queue = [str(e) for e in self.slurm.elements() if not e.has_ended]
        return "\n".join([*self.story[-60:], "--- queue", *queue])


def is_driver(element: Element) -> bool:
    return element.job.work["module"] == "pipeline"


def task_of(run: Run, element: Element) -> Task:
    words = element.job.work["elements"][str(element.index)]
    name = parse_job_name(element.job.name)
    assert name
    assert name.run_id == run.identity.id
    return parse_task(f"{name.iteration}/{name.job_kind}/{words[words.index('--shard') + 1]}")


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
    slurm.before, slurm.after, slurm.on_signal = world.command_comes, world.command_went, world.get_signal
    monkeypatch.setattr("pipeline.orchestrate.jobs.claims_of", world.claims_of)
    monkeypatch.setattr("pipeline.orchestrate.jobs.tasks_with_retries", world.tasks_with_retries)
    return world


def live_to_the_end(world: World, is_submitted: bool = False) -> None:
    """Have a run go on until it is complete; where it does not, its story is told with the error."""
    try:
        if not is_submitted:
            world.submit()
        world.live_on()
        world.check_is_complete()
        world.check_failures_are_told()
    except Exception as error:
        error.add_note(world.told())
        raise
