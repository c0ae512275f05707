"""How far a simulated run is: commits, attempts, and what is ready. What a run has on disk, without the disk.

Nothing here grows with the run and is looked through: an event costs as much in the last iteration as in the
first.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from pipeline.decide.passages import Passage, passages
from pipeline.decide.situation import at_hand
from pipeline.orchestrate.driver import around
from pipeline.run.failures import Failure, FailureKind
from pipeline.run.plan import Plan, policy_maker
from pipeline.run.records import Frontier
from pipeline.run.tasks import PREPARE, Task, task_key
from pipeline.workers.claims import Attempt, Claim

_KEPT_ROWS = 16
"""Iterations of which passages are kept: more than estimates look at."""


@dataclass(frozen=True)
class Done:
    """A commit. Nothing is ever stale here: the same inputs give the same bytes."""

    time: float
    fingerprint: str = ""
    inputs: Mapping[str, str] = field(default_factory=dict)


@dataclass
class SimulatedProgress:
    """Commits and attempts of a run."""

    plan: Plan
    committed: dict[Task, Done] = field(default_factory=dict)
    frontier: Frontier = field(default_factory=lambda: Frontier(-1, 0))
    open: dict[str, dict[Task, None]] = field(default_factory=dict)
    """Tasks by job kind whose inputs are there and that no worker is at."""
    opened: Counter[str] = field(default_factory=Counter)
    """How often a task of a job kind has become open."""
    attempts: dict[Task, list[Attempt]] = field(default_factory=dict)
    """At tasks that are not committed, or whose state is still being written."""
    claims: dict[Task, list[Claim]] = field(default_factory=dict)
    failures: dict[Task, list[Failure]] = field(default_factory=dict)
    """Those that passes have counted."""
    judged: set[str] = field(default_factory=set)
    """Attempts whose end a pass has counted."""
    ended: dict[str, FailureKind] = field(default_factory=dict)
    """Why attempts failed, by their ids."""
    passages: deque[Passage] = field(default_factory=deque)
    rows: int = -1
    """Newest iteration that has a row."""
    begun: dict[Task, float] = field(default_factory=dict)
    """When the attempt that won began."""
    computing: dict[Task, float] = field(default_factory=dict)
    """When it had loaded what it needs."""
    window: tuple[Task, ...] = ()
    """Tasks that a pass considers."""
    tasks: tuple[Task, ...] = ()
    """These and those of the iteration after them."""
    _around: tuple[Task, ...] = ()
    """These and what they read."""
    _entered: int = -1
    _missing: dict[Task, int] = field(default_factory=dict)
    _readers: dict[Task, list[Task]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._evaluations, self._benchmarks = self.plan.evaluation_tasks(), self.plan.benchmark_tasks()
        self._enter(1 + self.plan.staleness)
        self._look_around()

    # --- what changes ---

    def commit(self, task: Task, now: float) -> None:
        self.committed[task] = Done(now)
        self.open.get(task.job_kind, {}).pop(task, None)
        for reader in self._readers.pop(task, ()):
            self._missing[reader] -= 1
            if not self._missing[reader]:
                self._open(reader)
        self._move()

    def claim(self, claim: Claim) -> None:
        self.claims.setdefault(claim.task, []).append(claim)
        self.attempts.setdefault(claim.task, []).append(Attempt(claim, True))
        self.open.get(claim.task.job_kind, {}).pop(claim.task, None)

    def end(self, claim: Claim, failure: FailureKind | None = None, is_known: bool = True) -> None:
        """Note the end of an attempt.

        Args:
            failure: why it failed; None: it did not.
            is_known: whether others see it already. A kill becomes known by a pass.
        """
        if failure is not None:
            self.ended[claim.attempt] = failure
        if is_known:
            self.close(claim)

    def close(self, claim: Claim) -> None:
        """Publish the end of an attempt."""
        task, failure = claim.task, self.ended.get(claim.attempt)
        found = self.attempts.get(task, [])
        for place, attempt in enumerate(found):
            if attempt.claim.attempt == claim.attempt:
                found[place] = replace(attempt, is_running=False, failure=failure)
        if not any(attempt.is_running for attempt in found):
            if task in self.committed:
                self.attempts.pop(task, None)
            elif found and not self._missing.get(task):
                self._open(task)

    def _open(self, task: Task) -> None:
        self.open.setdefault(task.job_kind, {})[task] = None
        self.opened[task.job_kind] += 1

    def _enter(self, iteration: int) -> None:
        """Take the tasks up to an iteration into account: count the inputs of each that are missing."""
        for at in range(self._entered + 1, min(iteration, self.plan.iterations) + 1):
            for task in (*self.plan.tasks(at), *self.plan.benchmark_of(at)):
                missing = [source for source in self.plan.inputs(task) if source not in self.committed]
                self._missing[task] = len(missing)
                for source in missing:
                    self._readers.setdefault(source, []).append(task)
                if not missing:
                    self._open(task)
            self._entered = at

    def _move(self) -> None:
        """Move the frontier along."""
        plan, found = self.plan, self.frontier
        updated = found.updated
        if updated < 0 and PREPARE in self.committed:
            updated = plan.start
        while 0 <= updated < plan.iterations and policy_maker(updated + 1) in self.committed:
            updated += 1
        evaluated, benchmarked = found.evaluated, found.benchmarked
        while evaluated < len(self._evaluations) and self._evaluations[evaluated] in self.committed:
            evaluated += 1
        while benchmarked < len(self._benchmarks) and self._benchmarks[benchmarked] in self.committed:
            benchmarked += 1
        if (moved := Frontier(updated, evaluated, benchmarked)) != found:
            self.frontier = moved
            self._enter(updated + 2 + plan.staleness)
            self._look_around()

    def _look_around(self) -> None:
        self.window = self.frontier.window(self.plan)
        self.tasks = at_hand(self.plan, self.window)
        self._around = around(self.plan, self.tasks)

    # --- what is seen ---

    @property
    def is_over(self) -> bool:
        return self.frontier.is_committed(self.plan)

    def at(self, task: Task) -> float | None:
        """Return when a task was committed."""
        done = self.committed.get(task)
        return None if done is None else done.time

    def iteration_seconds(self) -> list[float]:
        """Return the seconds from one policy to the next, from the first on."""
        versions = range(self.plan.start + 1, self.plan.iterations + 1)
        times = [self.at(policy_maker(version)) for version in versions]
        ends = [self.at(PREPARE) or 0.0, *(time for time in times if time is not None)]
        return [after - before for before, after in pairwise(ends)]

    def seen(self) -> dict[Task, Done]:
        """Return the commits of the tasks at hand, those after them, and what they read."""
        return {task: self.committed[task] for task in self._around if task in self.committed}

    def claims_on(self, tasks: Iterable[Task]) -> list[Claim]:
        return [claim for task in tasks for claim in self.claims.get(task, ())]

    # --- rows ---

    def write_rows(self) -> None:
        """Write the rows that are due, from which estimates are made, and forget what is over."""
        while self.rows < self.plan.iterations and all(
            task in self.committed for task in self.plan.tasks(self.rows + 1)
        ):
            self.rows += 1
            if self.rows > self.plan.start:
                self.passages.extend(passages([self._line(self.rows)]))
            while len(self.passages) > _KEPT_ROWS * len(self.plan.job_kinds):
                self.passages.popleft()
            self._forget(self.rows - 1)

    def _line(self, iteration: int) -> dict[str, object]:
        """Return the line of ``spans.jsonl`` of an iteration."""
        by_kind: dict[str, list[Task]] = {}
        for task in self.plan.tasks(iteration):
            by_kind.setdefault(task.job_kind, []).append(task)
        tasks = [task for found in by_kind.values() for task in found]
        return {
            "iteration": iteration,
            "stages": {kind: self._stage(found) for kind, found in by_kind.items()},
            "attempts": {
                "job_kind": [task.job_kind for task in tasks],
                "end": ["committed" for _ in tasks],
                "ready": [self._ready(task) for task in tasks],
                "computing": [self.computing[task] for task in tasks],
                "ended": [self.committed[task].time for task in tasks],
            },
        }

    def _stage(self, tasks: Sequence[Task]) -> dict[str, float]:
        return {
            "ready": min(map(self._ready, tasks)),
            "started": min(self.begun[task] for task in tasks),
            "ended": max(self.committed[task].time for task in tasks),
        }

    def _ready(self, task: Task) -> float:
        """Return when the inputs of a task were there."""
        return max(self.committed[source].time for source in self.plan.inputs(task))

    def _forget(self, iteration: int) -> None:
        """Forget the attempts of an iteration that is over. Its commits are kept."""
        for task in (
            (*self.plan.tasks(iteration), *self.plan.benchmark_of(iteration)) if iteration >= 0 else ()
        ):
            for claim in self.claims.pop(task, ()):
                self.judged.discard(claim.attempt)
                self.ended.pop(claim.attempt, None)
            for kept in (self.begun, self.computing, self.failures, self._missing):
                kept.pop(task, None)


def attempt_id(worker: str, task: Task, number: int) -> str:
    return f"{number}-{worker}.{task_key(task)}"
