"""After a worker on Slurm has committed: whoever waits for that is rung, and a pass is asked for."""

import time
from collections.abc import Collection
from dataclasses import dataclass, field

from pipeline.run.bookkeeping import Bookkeeper
from pipeline.run.directory import Run
from pipeline.run.plan import Plan
from pipeline.run.records import recorded
from pipeline.run.tasks import Task, parse_task
from pipeline.workers.beats import Crew, Doing
from slurm.ringing import arrays_to_ring, ring

_SHORT_WAIT = 2.0
"""Seconds of waiting up to which a worker looks so often that it sees a commit sooner than a ring comes."""


@dataclass
class Afterwards:
    """What a worker does for others."""

    run: Run
    name: str
    """The worker's own."""
    keeper: Bookkeeper = field(init=False)
    crew: Crew = field(init=False)

    def __post_init__(self) -> None:
        self.keeper, self.crew = Bookkeeper(self.run.paths), Crew(self.run.paths)

    def committed(self, task: Task) -> None:
        """Ring those who wait for this commit, and ask for a pass."""
        waiting = self._waiting(time.time())
        kinds = {(t.iteration, t.job_kind) for t in map(parse_task, filter(None, set(waiting.values())))}
        readers = readers_of(self.run.plan, task, kinds)
        inputs = {source for reader in readers for source in self.run.plan.inputs(reader)}
        there = set(recorded(self.run.paths, inputs))
        ready = {(t.iteration, t.job_kind) for t in readers if there.issuperset(self.run.plan.inputs(t))}
        woken = {key for key in waiting.values() if key and _kind_of(key) in ready}
        if said := ring(arrays_to_ring(waiting, woken)):
            print(f"those who wait were not rung: {said}", flush=True)
        self.keeper.ask()

    def _waiting(self, now: float) -> dict[str, str]:
        """Return the tasks that others have waited for, for a while, by the worker's name."""
        live = self.crew.live(now).values()
        others = (beat for beat in live if beat.doing is Doing.WAITING and beat.worker != self.name)
        return {beat.worker: beat.task for beat in others if now - beat.since > _SHORT_WAIT}


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
