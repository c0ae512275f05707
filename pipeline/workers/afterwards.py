"""What a worker on Slurm does for others: it rings those who wait for what it has committed, and asks for
passes, after a commit, after a failure and where there was none for long.

None of it is worth a worker's end. Where a disk takes nothing the log says what was left undone: who waits
looks by himself, and others make passes too.
"""

import contextlib
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from pipeline.run import journal
from pipeline.run.bookkeeping import Bookkeeper, ask_for_pass, read_last
from pipeline.run.directory import Run
from pipeline.run.plan import Plan, policy_maker
from pipeline.run.records import recorded
from pipeline.run.tasks import Task, parse_task, task_key
from pipeline.workers.beats import Beat, Doing
from pipeline.workers.living import SILENT_SECONDS, Crew
from pipeline.workers.overdue import is_overdue, seconds_of_iterations
from slurm.requests import find_requests, request_end
from slurm.ringing import elements_to_ring, ring

_SHORT_WAIT = 2.0
"""Seconds of waiting up to which a worker looks so often that it sees a commit sooner than a ring comes."""
_LOOK_SECONDS = 10.0
"""Seconds between two looks at how old the newest pass is."""
_ROWS_BYTES = 1 << 16
"""Bytes read from the end of metrics.jsonl, which hold its last rows."""


@dataclass
class Afterwards:
    """What a worker does for others."""

    run: Run
    name: str
    """The worker's own."""
    began: float = field(default_factory=time.time)
    """Unix time from which on it looks after passes: not before it has waited for one."""
    keeper: Bookkeeper = field(init=False)
    crew: Crew = field(init=False)
    calm_until: float = 0.0
    """Time (monotonic) until which nobody is looked for who might wait."""

    def __post_init__(self) -> None:
        self.keeper, self.crew = Bookkeeper(self.run.paths), Crew(self.run.paths)
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
                    ask_for_pass(paths)
        with self._going_on("no pass was started"):
            self.keeper.tend()

    def wanted(self) -> None:
        """Ask for a pass: somebody may wait for a place that one of the run's workers can make."""
        with self._going_on("no pass was asked for"):
            self.keeper.ask()

    def leaves(self, is_to_be_seen: bool) -> None:
        """Before the end: see to a pass that sees that the worker leaves, or has seen what it did."""
        with self._going_on("no pass was waited for"):
            self.keeper.leave(is_to_be_seen, lambda: self._is_seen_to(is_to_be_seen))
        if (fifo := find_requests()) is not None:
            request_end(fifo)

    def committed(self, task: Task) -> None:
        """Ring those who wait for this commit, and ask for a pass."""
        with self._going_on("those who wait were not rung"):
            if time.monotonic() > self.calm_until:
                self._ring(task)
        with self._going_on("no pass was asked for"):
            self.keeper.ask()

    def failed(self, stays: bool) -> None:
        """Ask for a pass: only passes count failures, and some tasks no worker takes by itself any more.

        Args:
            stays: whether this process goes on, so that it may have one for passes.
        """
        with self._going_on("no pass was asked for"):
            self.keeper.ask() if stays else ask_for_pass(self.run.paths)

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
        """Ring those who have waited for a commit for a while."""
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
            print(f"those who wait were not rung: {said}", flush=True)

    def _is_seen_to(self, is_soon: bool) -> bool:
        """Whether another one starts what passes are asked for: all who wait do soon, and who is at the last
        update does after it, which is enough for whom nobody is to follow. Of several who leave at once the
        last to say so finds nobody: it says so before it looks. A batch script starts no pass that would
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
    """Return the seconds in which nobody will have waited for long. Pure.

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
