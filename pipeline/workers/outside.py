"""What a worker is given by what starts it: its name, what it may ask Slurm, whom to wake. Stages know
nothing of Slurm, or of the driver on this machine, but through this.
"""

import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pipeline.config.scheduler import ResourcesConfig
from pipeline.config.types import Linger
from pipeline.run import journal
from pipeline.run.attempts import new_attempt
from pipeline.run.directory import Run
from pipeline.run.environment import FAILED, PARENT_PIPE, WAITS
from pipeline.run.pass_requests import PassRunner, read_last, request_pass
from pipeline.run.paths import RunPaths
from pipeline.run.plan import Plan, policy_maker
from pipeline.run.records import recorded
from pipeline.run.submissions import is_driver_job
from pipeline.run.tasks import Stage, Task, parse_task, task_key, task_of
from pipeline.workers.beats import SILENT_SECONDS, Beat, Doing, LiveWorkers
from pipeline.workers.overdue import is_overdue, seconds_of_iterations
from pipeline.workers.slots import Slots
from slurm.requests import find_requests, request_end
from slurm.ringing import elements_to_ring, ring
from slurm.tasklist import ELIGIBLE, KNOWN, STARTED, attempt_id

WORKER = "SLURM_PPO_WORKER"
"""Variable with what the driver tells a worker that it has started itself, as JSON (:class:`Posting`)."""
_PATIENCE = 20.0
"""Seconds that an answer of Slurm may take."""


@dataclass(frozen=True)
class Posting:
    """What a driver tells a worker that it starts as processes of this machine, or as a job step."""

    name: str
    linger: Linger
    """Seconds that it waits for an input; 0: it leaves when no task is ready."""
    does_one_task: bool
    """Whether it leaves after one task, even if another is ready."""
    task_seconds: float
    """Seconds that a task may take."""
    known: int = 0
    """As :attr:`WorkerHost.known`."""
    is_scarce: bool = False
    """Whether it holds what others may need, so that the driver is to know when it waits."""
    slots: int | None = None
    """Tasks that are done at once; None: any number."""
    slots_file: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def resources(self) -> ResourcesConfig:
        """Return what decides how long it stays, as for a job of Slurm."""
        minutes, seconds = divmod(round(self.task_seconds), 60)
        time = f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
        return ResourcesConfig(linger=self.linger, start_early=not self.does_one_task, task_time=time)


@dataclass(frozen=True)
class Queue:
    """What a worker needs to know of Slurm's queue."""

    ends: float | None = None
    """Unix time of the worker's own end; None if unknown or never."""
    lacking_room: frozenset[str] = frozenset()
    """Names of the user's jobs that wait for room, of this run and of others; without driver jobs, which ask
    for so little that no worker leaves for them."""


@dataclass(frozen=True)
class WorkerHost:
    """What a worker is given by what starts it."""

    name: str
    """The worker's name (:mod:`pipeline.workers.beats`)."""
    new_attempt: Callable[[int], str]
    """Returns an attempt's id from its number."""
    queued_seconds: float | None = None
    nodes: str = ""
    """As beats have them (:attr:`pipeline.workers.beats.Beat.nodes`)."""
    known: int = 0
    """Number of the newest claim on its first task that the pass which gave it that knew of."""
    ask_queue: Callable[[], Queue | None] = lambda: None
    """Returns the queue; None where it cannot be asked."""
    committed: Callable[[Task], None] = lambda task: None
    """Is called after each commit: a worker that waits for it may be woken, and rows be written."""
    failed: Callable[[bool], None] = lambda stays: None
    """Is called after each attempt that failed, with whether this process goes on: what follows is for a pass
    to decide."""
    wanted: Callable[[], None] = lambda: None
    """Is called where a job may wait for the place of this process: one of another run, or of this one while
    there is nothing to do for who has just started. A pass finds who makes place."""
    waits: Callable[[], None] = lambda: None
    """Is called each second or so of a wait."""
    leaves: Callable[[bool], None] = lambda is_to_be_seen: None
    """Is called before its end, when its beat says that it leaves: with whether a pass has to see that."""
    settings: ResourcesConfig | None = None
    """What is set for staying; None: as the run's configuration says."""
    slots: Slots | None = None
    """Slots of which it holds one while it is at a task; None: it needs none."""
    keeps: bool = True
    """Whether it keeps what it has loaded from task to task, also where it is about to leave."""


def started_at(environment: Mapping[str, str], now: float) -> float:
    """Return when this process's job started (unix time): if its script says so, before what that sets up."""
    said = environment.get(STARTED, "")
    return min(now, float(said)) if said.isdecimal() else now


def of_environment(run: Run, job_kind: str, environment: Mapping[str, str], started: float) -> WorkerHost:
    """Return the surroundings of an array element, or where there is no Slurm those of a process.

    Args:
        started: unix time at which the job started.
    """
    if WORKER in environment:
        return of_driver(Posting(**json.loads(environment[WORKER])), job_kind, environment)
    if "SLURM_ARRAY_JOB_ID" not in environment:
        return WorkerHost(f"{os.uname().nodename}-{os.getpid()}", new_attempt)
    job, index = environment["SLURM_ARRAY_JOB_ID"], environment["SLURM_ARRAY_TASK_ID"]
    restarts = int(environment.get("SLURM_RESTART_COUNT", "0"))
    eligible = 0.0 if restarts else float(environment.get(ELIGIBLE, "0"))
    name = f"{job}_{index}r{restarts}"
    afterwards = CommitHooks(run, name)
    return WorkerHost(
        name,
        attempt_ids(job, index, restarts),
        queued_seconds=max(0.0, started - eligible) if eligible else None,
        nodes=environment.get("SLURM_JOB_NODELIST", ""),
        known=int(environment.get(KNOWN, "0")),
        ask_queue=lambda: slurm_queue(run.paths, job, int(index)),
        committed=afterwards.committed,
        failed=afterwards.failed,
        wanted=afterwards.wanted,
        waits=afterwards.waits,
        leaves=afterwards.leaves,
    )


def of_driver(posting: Posting, job_kind: str, environment: Mapping[str, str]) -> WorkerHost:
    """Return the surroundings of a worker that a driver has started itself. Tasks notify
    it of commits (:mod:`stages.process.parent`)."""
    pipe, stage = int(environment.get(PARENT_PIPE) or -1), task_of(0, job_kind).stage

    def notify_driver(what: bytes) -> None:
        if pipe >= 0:
            with contextlib.suppress(OSError):  # the driver is gone, and this process about to be
                os.write(pipe, what)

    slots = None if posting.slots is None else Slots(Path(posting.slots_file), posting.slots)
    return WorkerHost(
        posting.name,
        new_attempt,
        nodes=environment.get("SLURM_STEP_NODELIST", ""),
        known=posting.known,
        failed=lambda stays: notify_driver(FAILED),
        waits=lambda: notify_driver(WAITS) if posting.is_scarce and posting.linger else None,
        settings=posting.resources,
        slots=slots,
        keeps=posting.linger != 0 or stage is not Stage.UPDATE,
    )


def attempt_ids(job: str, index: str, restarts: int) -> Callable[[int], str]:
    """Return a function that makes ids for the attempts of one worker from their numbers.

    A number counts attempts at one task, so attempts at two tasks may have the same: the position among the
    worker's own tells them apart.
    """
    positions = itertools.count()
    return lambda number: attempt_id(number, job, index, restarts, next(positions))


def slurm_queue(paths: RunPaths, array: str, index: int) -> Queue | None:
    """Look at Slurm's queue for a worker's own element, and for others that wait; None where nothing is known
    of it, as where there is no client and no other process looks."""
    from pipeline.workers.looking import WORKER_AGE, look  # submitting jobs alone needs more of this
    from slurm.commands import SlurmError, SlurmMissing
    from slurm.reasons import lacks_room
    from slurm.states import Phase, phase_of

    try:
        elements = look(paths, WORKER_AGE, _PATIENCE).elements
    except (SlurmError, SlurmMissing):
        return None
    own = next((e for e in elements if (e.array_id, e.index) == (array, index) and e.started), None)
    if own is None:  # it has started since
        return None
    pending = (e for e in elements if phase_of(e.state) is Phase.PENDING and not is_driver_job(e.name))
    full = (e for e in pending if lacks_room(e.reason))
    waiting = frozenset(f"{e.array_id}_{e.index}" for e in full)
    return Queue(own.started + own.time_limit if own.started and own.time_limit else None, waiting)


# --- after a commit --------------------------------------------------------------------------------------

# What a worker on Slurm does for others: it notifies those who wait for what it has committed, and requests
# passes after a commit, after a failure and where there was none for long. None of it is worth a worker's
# end: where a disk takes nothing the log says what was left undone.


_SHORT_WAIT = 2.0
"""Seconds of waiting up to which a worker looks so often that it sees a commit sooner than a signal comes."""
_LOOK_SECONDS = 10.0
"""Seconds between two looks at how old the newest pass is."""
_ROWS_BYTES = 1 << 16
"""Bytes read from the end of metrics.jsonl, which hold its last rows."""


@dataclass
class CommitHooks:
    """What a worker does for others."""

    run: Run
    name: str
    """The worker's own."""
    began: float = field(default_factory=time.time)
    """Unix time from which on it looks after passes: not before it has waited for one."""
    keeper: PassRunner = field(init=False)
    crew: LiveWorkers = field(init=False)
    calm_until: float = 0.0
    """Time (monotonic) until which it does not look for workers that might wait."""

    def __post_init__(self) -> None:
        self.keeper, self.crew = PassRunner(self.run.paths), LiveWorkers(self.run.paths)
        self._looks = 0.0
        self._undone = ""

    def waits(self) -> None:
        """Now and then in a wait: ask for a pass if the newest is too old; start one that is asked for."""
        now, paths = time.time(), self.run.paths
        if not 0 <= now - self._looks < _LOOK_SECONDS:
            self._looks = now
            with contextlib.suppress(OSError):
                taken = seconds_of_iterations(journal.read_tail(paths.metrics, _ROWS_BYTES))
                if is_overdue(max(read_last(paths).newest, self.began), now, taken):
                    request_pass(paths)
        with self._going_on("no pass was started"):
            self.keeper.poll()

    def wanted(self) -> None:
        """Request a pass: a job may wait for a place that one of the run's workers can make."""
        with self._going_on("no pass was requested"):
            self.keeper.request()

    def leaves(self, is_to_be_seen: bool) -> None:
        """Before the end: request a pass that sees that the worker leaves, or has seen what it did."""
        with self._going_on("no pass was waited for"):
            self.keeper.leave(is_to_be_seen, lambda: self._is_seen_to(is_to_be_seen))
        if (fifo := find_requests()) is not None:
            request_end(fifo)

    def committed(self, task: Task) -> None:
        """Notify those who wait for this commit, and request a pass."""
        with self._going_on("waiting workers were not notified"):
            if time.monotonic() > self.calm_until:
                self._ring(task)
        with self._going_on("no pass was requested"):
            self.keeper.request()

    def failed(self, stays: bool) -> None:
        """Ask for a pass: only passes count failures, and some tasks no worker takes by itself any more.

        Args:
            stays: whether this process goes on, so that it may have one for passes.
        """
        with self._going_on("no pass was requested"):
            self.keeper.request() if stays else request_pass(self.run.paths)

    @contextlib.contextmanager
    def _going_on(self, undone: str) -> Iterator[None]:
        """Go on after an error of the disk; say once what was left undone."""
        try:
            yield
        except OSError as error:
            said, self._undone = self._undone, f"{undone}: {error}"
            if said != self._undone:
                with contextlib.suppress(OSError):  # a full disk takes no line
                    print(self._undone, flush=True)

    def _ring(self, task: Task) -> None:
        """Notify those who have waited for a commit for a while."""
        now, others = time.time(), self._others()
        self.calm_until = time.monotonic() + calm(now, (beat.since for beat in others))
        waiting = {beat.worker: beat.task for beat in others if now - beat.since > _SHORT_WAIT}
        if not waiting:
            return
        kinds = {(t.iteration, t.job_kind) for t in map(parse_task, filter(None, set(waiting.values())))}
        readers = readers_of(self.run.plan, task, kinds)
        inputs = {source for reader in readers for source in self.run.plan.inputs(reader)}
        there = set(recorded(self.run.paths, inputs))
        ready = {(t.iteration, t.job_kind) for t in readers if there.issuperset(self.run.plan.inputs(t))}
        woken = {key for key in waiting.values() if key and _kind_of(key) in ready}
        if said := ring(elements_to_ring(waiting, woken)):
            print(f"waiting workers were not notified: {said}", flush=True)

    def _is_seen_to(self, is_soon: bool) -> bool:
        """Whether another one starts what passes are asked for: all who wait do soon, and who is at the last
        update does after it, which is enough where none is to follow. Of several who leave at once the
        last to say so finds none: it says so before it looks. A batch script starts no pass that would
        outlive its own worker."""
        if find_requests() is not None:
            return False
        last, now = task_key(policy_maker(self.run.plan.iterations)), time.time()
        others = (b for b in self._live() if b.worker != self.name and abs(now - b.beat) < SILENT_SECONDS)
        return any(
            beat.doing is Doing.WAITING or (beat.doing is Doing.BUSY and beat.task == last and not is_soon)
            for beat in others
        )

    def _others(self) -> list[Beat]:
        """Return the newest beats of the others that wait."""
        return [beat for beat in self._live() if beat.doing is Doing.WAITING and beat.worker != self.name]

    def _live(self) -> Collection[Beat]:
        return self.crew.live(time.monotonic()).values()


def calm(now: float, since: Iterable[float]) -> float:
    """Return the seconds in which no worker will have waited for long. Pure.

    Args:
        now: unix time.
        since: unix times since when those wait who do so now.
    """
    return max(0.0, min([_SHORT_WAIT, *(begin + _SHORT_WAIT - now for begin in since)]))


def readers_of(plan: Plan, task: Task, kinds: Collection[tuple[int, str]]) -> list[Task]:
    """Return the tasks that read a task's result, of the kinds (iteration, job kind) that are waited for: a
    worker takes whichever of them is ready. Pure."""
    iterations = sorted({iteration for iteration, _ in kinds})
    waited_for = (
        t
        for i in iterations
        for t in (*plan.tasks(i), *plan.benchmark_of(i))
        if (t.iteration, t.job_kind) in kinds
    )
    return [reader for reader in waited_for if task in plan.inputs(reader)]


def _kind_of(key: str) -> tuple[int, str]:
    task = parse_task(key)
    return task.iteration, task.job_kind
