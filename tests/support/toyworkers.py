"""A run with workers on the toy Slurm: the driver is the real one, and so are its files and the beats; what
workers do is decided by chance, within the rules of workers."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import pytest

from pipeline.config.conversion import plain
from pipeline.config.scheduler import resources_of
from pipeline.executors.slurm.crew import wanted_by
from pipeline.run.control import read_control
from pipeline.run.endings import read_endings
from pipeline.run.failures import FailureKind
from pipeline.run.tasks import Stage, Task, task_key
from pipeline.workers.beats import Beat, Doing, Reason
from pipeline.workers.choosing import is_left_to_passes
from pipeline.workers.claims import Claim
from pipeline.workers.handover import read_told
from pipeline.workers.outside import attempt_ids
from slurm.sealing import sealed
from slurm.states import SlurmState
from tests.support.toyslurm import Element
from tests.support.toyworld import MISHAPS, Luck, World, is_driver, make_world, task_of


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
class WorkerWorld(World):
    """Elements go on from task to task by claims; each that commits or leaves asks for a pass."""

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

    # --- what happens ---

    def happen(self) -> bool:
        self.slurm.look()
        self.disturb()
        self.slurm.look()
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
            super().start(element)
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

    # --- what workers see ---

    def making_place(self) -> set[str]:
        return {one.worker for one in read_told(self.run.paths).handovers}

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
        if worker.first.stage is not Stage.ROLLOUT or not read_told(self.run.paths).measures:
            return []
        undone = [task for task in self.run.plan.evaluation_tasks() if not self.exists(task)][:1]
        is_able = worker.has_begun and worker.name not in self.making_place()
        return [t for t in undone if is_able and self.has_inputs(t) and t not in self.claims]

    def exists(self, task: Task) -> bool:
        return self.run.paths.task(task).record.exists()

    def has_inputs(self, task: Task) -> bool:
        return all(map(self.exists, self.run.plan.inputs(task)))

    def is_left(self, task: Task) -> bool:
        """As pipeline.workers.choosing decides, which does not know invocations."""
        failed = [self.kinds.get(claim.attempt) for claim in self.claims.get(task, ())]
        return is_left_to_passes(failed, self.run.config.attempts_of(task.job_kind))

    def is_done(self, worker: Worker) -> bool:
        """Whether no task of its kind is left in the run."""
        if self.has_to_measure(worker):
            return False
        mine = (t for t in self.run.plan.all_tasks() if t.job_kind == worker.first.job_kind)
        return all(map(self.exists, mine))

    def has_to_measure(self, worker: Worker) -> bool:
        """Whether it is the one that stays for the last evaluations."""
        measures = worker.first.stage is Stage.ROLLOUT and read_told(self.run.paths).measures
        first = min((w.name for w in self.workers.values() if w.first.stage is Stage.ROLLOUT), default="")
        return measures and worker.name == first and not self.exists(self.run.plan.evaluation_tasks()[-1])

    def tried_again(self, paths: object, tasks: Iterable[Task]) -> list[Task]:
        return [task for task in tasks if len(self.claims.get(task, ())) > 1]

    def claims_of(self, paths: object, tasks: Iterable[Task]) -> Mapping[Task, tuple[Claim, ...]]:
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


def make_worker_world(
    root, monkeypatch: pytest.MonkeyPatch, seed: int, luck: Luck, **more: object
) -> WorkerWorld:
    """A run with workers that nobody has submitted."""
    plain_world = make_world(root, monkeypatch, seed, luck, **more)
    world = WorkerWorld(plain_world.run, plain_world.slurm, plain_world.chance, luck)
    slurm = world.slurm
    slurm.before, slurm.after, slurm.on_signal = world.command_comes, world.command_went, world.get_signal
    monkeypatch.setattr("pipeline.executors.slurm.worker_jobs.claims_of", world.claims_of)
    monkeypatch.setattr("pipeline.executors.slurm.worker_jobs.tried_again", world.tried_again)
    return world
