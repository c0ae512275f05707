"""The attempts at a run's tasks, by workers that claim them; and what an executor does for that: a provider.

What is the same on one machine, in an allocation and on Slurm is here: claims are read and matched with what
workers say, those that came to nothing are judged once, and how many workers there are to be, and which make
place, is decided (:mod:`pipeline.decide`) and published.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from pipeline.decide.crew import Crew, failed_claims, held_tasks
from pipeline.decide.ended import Beats, broken_attempts
from pipeline.decide.judging import Judgement, Signs, ending_of
from pipeline.decide.reconcile import Launch, Observation
from pipeline.decide.situation import Situation, at_hand, tasks_only_by_pass
from pipeline.decide.staffing import Staffing, staff
from pipeline.run.commits import CorruptData, read_record
from pipeline.run.directory import Run
from pipeline.run.endings import (
    NO_ENDINGS,
    Ending,
    Endings,
    Evidence,
    failures_of,
    mend_endings,
    note_endings,
    retraction,
)
from pipeline.run.failures import Failure
from pipeline.run.paths import RunPaths
from pipeline.run.records import unwritten_tasks
from pipeline.run.tasks import Stage, Task, parse_task
from pipeline.workers.beats import Doing, mark_gone
from pipeline.workers.claims import (
    Claim,
    Known,
    claims_of,
    newest_numbers,
    reported_failure,
    tasks_with_retries,
)
from pipeline.workers.handover import Instructions, publish_instructions

CommittedOf = Callable[[Collection[Task]], Collection[Task]]
"""Function that returns the committed ones of some tasks; called once for all, as it lists folders."""
Failures = Mapping[Task, Sequence[Failure]]
"""Attempts that ended without a commit in this invocation, oldest first."""


@dataclass(frozen=True)
class Ended:
    """An attempt that ended without a commit since the last look."""

    failure: Failure
    ending: Ending
    """The same as the store has it."""
    suspect: Task | None
    """The input that the attempt found to be at fault."""


@dataclass(frozen=True)
class Sight:
    """Workers of a run at one moment, as their provider sees them."""

    time: float = 0.0
    """Unix time of the look."""
    crew: Crew = field(default_factory=Crew)
    beats: Beats = field(default_factory=dict)
    endings: Endings = NO_ENDINGS
    """How attempts at the tasks of interest ended, as far as it is judged."""


class Provider(Protocol):
    """Processes of workers: an executor is a class with these. It decides nothing."""

    @property
    def invocation(self) -> int:
        """Number of the present invocation of submit, run or resume."""

    def look(self) -> None:
        """Ask what lives. Precedes reading commits, so that the commit of what has ended is seen."""

    def see(self, tasks: Collection[Task], claims: Sequence[Claim], newest: Task | None) -> Sight:
        """List what lives, as of the last look, and read what it says: after claims were read, as a worker
        says what it will do before it claims it.

        Args:
            tasks: those at hand.
            newest: the newest committed update, whose attempt may still be live.
        """

    def look_again(self, claims: Sequence[Claim], committed: Collection[Task]) -> bool:
        """Look once more where the last look may be too old to judge by. Whether it did."""

    def may_judge(self, claim: Claim) -> bool:
        """Whether the attempt of a failed claim is one of this provider's, and all evidence of its end is
        there."""

    def explain(self, failed: Sequence[Claim]) -> list[Ended]:
        """Say why the attempts of claims ended, in their order, by evidence of their workers' ends."""

    def explain_unclaimed(self, claims: Sequence[Claim], committed_of: CommittedOf) -> list[Ended]:
        """Say why workers ended that never claimed anything, each once: failures of what they were for."""

    def situation(self, common: Situation, seen: Observation) -> Situation:
        """Complete a situation by what its kind of machine has: places, limits, expectations."""

    def start(self, decided: Staffing, failures: Failures, known: Mapping[Task, int]) -> Instructions:
        """Start workers as decided, and cancel what only waits for its start. Returns what to publish.

        Args:
            known: number of the newest claim on each task that has any.
        """

    def conclude(self, decided: Staffing, leaving: Collection[str]) -> None:
        """Ring idle workers that make place now, by name, and ensure that there is a next pass."""


@dataclass
class Jobs:
    """Attempts at a run's tasks."""

    run: Run
    provider: Provider
    note: Callable[[str], None]
    failures: Failures = field(default_factory=dict)
    held: Mapping[Task, str] = field(default_factory=dict)
    """Tasks that a worker does or begins with, and which (:func:`held_tasks`)."""
    claims: Sequence[Claim] = ()
    """Claims on the tasks at hand."""
    sight: Sight = field(default_factory=Sight)
    _known: Known = field(default_factory=dict)
    _tasks: Collection[Task] = ()
    """Tasks that the last pass has looked at: they may have been committed since."""

    @property
    def live(self) -> Collection[Task]:
        """Tasks with an attempt that is queued or running."""
        return self.held.keys()

    @property
    def saving(self) -> frozenset[Task]:
        """Updates whose attempts are not over: they run, or their worker writes the state that they left
        beside its next task."""
        beats = (self.sight.beats.get(worker.name) for worker in self.sight.crew.workers)
        keys = {beat.saving for beat in beats if beat is not None and beat.saving}
        running = (task for task in self.live if task.stage is Stage.UPDATE)
        return frozenset([*map(parse_task, keys), *running])

    def query(self) -> None:
        """Ask what runs."""
        self.provider.look()

    def collect_ended(
        self,
        tasks: Sequence[Task],
        committed_of: CommittedOf,
        newest: Task | None = None,
        new: Collection[Task] = (),
    ) -> list[Ended]:
        """Return the attempts that the last query showed as ended and that left no commit.

        Args:
            newest: the newest committed update, whose attempt may still be live.
            new: tasks whose commits were read since the last pass: some may never have been at hand.
        """
        paths = self.run.paths
        considered = {*at_hand(self.run.plan, tasks), *([newest] if newest else ())}
        for spoilt in mend_endings(paths, {task.iteration for task in considered} | {0}):
            self.note(f"{spoilt}; it was written again from what the other says")
        retried = tasks_with_retries(paths, unwritten_tasks(self.run.plan, paths, newest))
        looked_at, self._tasks = sorted({*considered, *retried, *self._tasks, *new}), considered
        committed = self._read(looked_at, committed_of, newest)
        if self.provider.look_again(self.claims, committed):
            committed = self._read(looked_at, committed_of, newest)
        found = self._judge_claims(committed)
        found += self.provider.explain_unclaimed(self.claims, committed_of)
        note_endings(paths, (ended.ending for ended in found))
        endings = self.sight.endings.adding(ended.ending for ended in found)
        self.failures = failures_of(paths, endings, self.provider.invocation)
        self.held = held_tasks(self.claims, self.sight.crew, committed)
        return found

    def _read(self, tasks: Sequence[Task], committed_of: CommittedOf, newest: Task | None) -> set[Task]:
        """Read claims, beats and commits, in this order: a worker beats after it has claimed, and moves on
        after it has committed. Returns the committed ones of some tasks."""
        found = claims_of(self.run.paths, tasks, self._known).values()
        self.claims = [claim for of_task in found for claim in of_task]
        self.sight = self.provider.see(self._tasks, self.claims, newest)
        return set(committed_of(tasks))

    def _judge_claims(self, committed: Collection[Task]) -> list[Ended]:
        """Explain claims that came to nothing, each once."""
        sight, paths = self.sight, self.run.paths
        broken = find_broken(paths, self.claims, sight.beats, committed, sight.endings)
        failed = failed_claims(self.claims, sight.crew, committed, sight.endings, broken)
        failed = [claim for claim in failed if self.provider.may_judge(claim)]
        explained = self.provider.explain(failed)  # raises where one is there after all
        for worker in {claim.worker for claim in failed} - {w.name for w in sight.crew.workers}:
            mark_gone(paths, worker)
        return [
            replace(ended, ending=replace(ended.ending, is_redone=claim.task in committed))
            for ended, claim in zip(explained, failed, strict=True)
        ]

    def note_retracted(self, failure: Failure, attempt: str, halvings: int) -> None:
        """Count a commit that was taken back as a failure of its task.

        Args:
            attempt: id of the attempt that had made it; empty where its record cannot be read.
            halvings: number of times that the attempt's batch budget was halved.
        """
        ended = retraction(failure, attempt, self.provider.invocation, time.time(), halvings)
        note_endings(self.run.paths, ended)
        self.failures = {**self.failures, failure.task: [*self.failures.get(failure.task, ()), failure]}

    def launch(self, launches: Sequence[Launch], seen: Observation) -> None:
        """Have workers do what is due, and publish who makes place. Called in each pass that gives nothing
        up, also where nothing is due."""
        common = self._situation(seen, tuple(launch.task for launch in launches))
        decided = staff(self.provider.situation(common, seen))
        new = self.provider.start(decided, self.failures, newest_numbers(self.claims))
        with contextlib.suppress(OSError):  # who cannot read it stays
            publish_instructions(self.run.paths, new)
        idle = {worker.name for worker in self.sight.crew.workers if worker.doing is Doing.WAITING}
        leaving = (one.worker for one in new.handovers if one.at <= self.sight.time)
        self.provider.conclude(decided, idle.intersection(leaving))

    def _situation(self, seen: Observation, ready: Sequence[Task]) -> Situation:
        """Return what is the same for all providers."""
        return Situation(
            plan=self.run.plan,
            tasks=at_hand(self.run.plan, seen.tasks),
            crew=self.sight.crew,
            held=self.held,
            committed=seen.committed.keys() - seen.corrupt.keys() | set(seen.passed),
            ready=ready,
            wanted={},
            now=self.sight.time,
            only_by_pass=tasks_only_by_pass(self.failures, self.run.config.attempts_of),
            tried={claim.task for claim in self.claims},
        )


def ended_of(paths: RunPaths, signs: Signs, verdict: Judgement) -> Ended:
    """Return a judged attempt as an ended one."""
    ending, said = ending_of(signs, verdict, time.time()), signs.said
    suspect = said.suspected if said and ending.evidence is Evidence.FAILURE_FILE else None
    return Ended(ending.failure(paths), ending, suspect)


def find_broken(
    paths: RunPaths,
    claims: Sequence[Claim],
    beats: Beats,
    committed: Collection[Task],
    judged: Collection[str],
) -> set[str]:
    """Find the attempts that failed at tasks which others have done since the last pass.

    Args:
        judged: ids of the attempts whose end is known already.
    """
    claimed = Counter(claim.task for claim in claims)
    winners = {}
    for task in (task for task, count in claimed.items() if count > 1 and task in committed):
        with contextlib.suppress(CorruptData):
            if record := read_record(paths, task):
                winners[task] = record.attempt
    unjudged = (claim for claim in claims if claim.attempt not in judged)
    return broken_attempts(unjudged, beats, winners, lambda claim: reported_failure(paths, claim) is not None)
