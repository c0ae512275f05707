"""Workers that end with the driver: processes of this machine, or job steps of an allocation.

They find their tasks themselves, as workers on Slurm do (:mod:`stages.workers`).
"""

import itertools
import math
import os
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.config.types import Linger
from pipeline.decide.crew import Crew, Worker, wanted_workers
from pipeline.decide.device_faults import LOG_LINES
from pipeline.decide.ended import Beats
from pipeline.decide.judging import Gone, Signs, judge_process
from pipeline.decide.reconcile import Observation, reason_to_launch
from pipeline.decide.situation import Situation
from pipeline.decide.staffing import Staffing
from pipeline.decide.staying import who_gives_memory
from pipeline.executors.limits import Started, WorkerEnd
from pipeline.executors.processes import Processes
from pipeline.memory import free_share
from pipeline.orchestrate.jobs import CommittedOf, Ended, Failures, Sight, ended_of
from pipeline.run import journal
from pipeline.run.commits import CorruptData, read_record
from pipeline.run.directory import Run
from pipeline.run.endings import failures_of, read_endings
from pipeline.run.failures import read_said
from pipeline.run.invocation import worker_arguments
from pipeline.run.paths import rank_log
from pipeline.run.tasks import Stage, Task, parse_task, task_key
from pipeline.workers.beats import BeatReader, Doing, forget_old, mark_gone
from pipeline.workers.claims import Claim
from pipeline.workers.filesystems import is_network
from pipeline.workers.handover import Handover, Instructions
from pipeline.workers.outside import WORKER, Posting

_KEPT = 50
"""Number of workers whose last words are kept."""
_TOLD_ITERATIONS = 8
"""Iterations for which an attempt is known as told: commits of as many may be read once more."""
_LATE_SECONDS = 60.0
"""Seconds beyond the time limit after which a task that its worker has not ended is ended with it."""
_LEAVING_SECONDS = 60.0
"""Seconds after which a worker that has said that it leaves is killed."""
_OF_THIS_MACHINE = "/dev/shm"
"""Folder that no other machine shares and no program cleans; TMPDIR may be both."""


@dataclass
class ProcessWorkers:
    """Provider of workers that are processes of this driver."""

    run: Run
    processes: Processes
    invocation: int
    lease: int
    """Number of the driver's lease: names of its workers begin with it."""
    crew: Crew = field(default_factory=Crew)
    _beats: Beats = field(default_factory=dict)
    _failures: Failures = field(default_factory=dict)
    _ends: dict[str, WorkerEnd] = field(default_factory=dict)
    """How workers of this driver ended."""
    _all: dict[str, Started] = field(default_factory=dict)
    _unjudged: set[str] = field(default_factory=set)
    """Workers that ended since the last pass."""
    _told: dict[str, int] = field(default_factory=dict)
    """Attempts whose begin is in the journal, and their iterations."""
    _news: tuple[frozenset[Task], int] = (frozenset(), 0)
    """Commits and number of failures, as of the last pass."""
    _has_news: bool = False

    def __post_init__(self) -> None:
        self._numbers, self._reader = itertools.count(1), BeatReader(self.run.paths)
        self.is_network = is_network(self.run.paths.root)
        own = _OF_THIS_MACHINE if os.access(_OF_THIS_MACHINE, os.W_OK) else None
        self._folder = tempfile.TemporaryDirectory(prefix="slurm-ppo-", dir=own)
        for worker, beat in self._reader.read().items():
            if beat.doing is not Doing.LEAVING:  # it died with its driver
                mark_gone(self.run.paths, worker)
        forget_old(self.run.paths, lambda worker: False, _KEPT)
        self._reader.wanted = lambda worker: worker in self._all

    # --- what lives ---

    def look(self) -> None:
        ended = self.processes.collect_ended()
        self._ends |= ended
        self._unjudged |= ended.keys()

    def see(self, tasks: Collection[Task], claims: Sequence[Claim], newest: Task | None) -> Sight:
        """List what lives and what it says. What has worked on a task for too long is killed."""
        self._beats = self._reader.read()
        self.crew = Crew([self._worker(name, started) for name, started in self.processes.living.items()])
        concerned = (*tasks, *(claim.task for claim in claims))
        endings = read_endings(self.run.paths, {task.iteration for task in concerned} | {0})
        self._failures = failures_of(self.run.paths, endings, self.invocation)
        self._tell_of_new([claim for claim in claims if claim.worker in self._all])
        self._end_overdue()
        return Sight(time.time(), self.crew, self._beats, endings)

    def _worker(self, name: str, started: Started) -> Worker:
        nodes, beat = self.processes.nodes_of(name), self._beats.get(name)
        if beat is None:
            return Worker(name, started.first, since=started.since, nodes=nodes)
        task = parse_task(beat.task) if beat.task else None
        return Worker(name, started.first, beat.doing, task, beat.since, nodes, beat.tasks > 0)

    def _tell_of_new(self, claims: Sequence[Claim]) -> None:
        """Write into the journal which attempts have begun."""
        new = [claim for claim in claims if claim.attempt not in self._told]
        current = {claim.attempt: claim.task.iteration for claim in claims}
        since = max(current.values(), default=0) - _TOLD_ITERATIONS
        self._told = {one: at for one, at in self._told.items() if at >= since} | current
        rows = [
            {
                **journal.event_row("launched", task=task_key(one.task), attempt=one.attempt),
                **{"reason": reason_to_launch(self._failures.get(one.task, ())), "time": one.time},
            }
            for one in sorted(new, key=lambda claim: claim.time)
        ]
        if rows:
            journal.append(self.run.paths.events, *rows)  # one flush, however many shards

    def _end_overdue(self) -> None:
        """Kill workers whose task takes longer than it may, where they have not ended it themselves."""
        limit, now = self.processes.limits.time_limit, time.time()
        most = {Doing.WAITING: math.inf, Doing.LEAVING: _LEAVING_SECONDS}
        for worker in self.crew.workers:
            if now - worker.since > most.get(worker.doing, limit + _LATE_SECONDS):
                seconds = min(limit, most.get(worker.doing, limit))
                self.processes.kill(worker.name, f"stopped at the time limit of {seconds:g} s")

    def look_again(self, claims: Sequence[Claim], committed: Collection[Task]) -> bool:
        return False  # ends are seen at once

    # --- evidence of ends ---

    def may_judge(self, claim: Claim) -> bool:
        """Those of several ranks when all of these are gone, as only then is known which of them failed."""
        is_over = claim.worker in self._ends
        return claim.worker in self._all and (is_over or self._ranks(claim.task.job_kind) == 1)

    def explain(self, failed: Sequence[Claim]) -> list[Ended]:
        went_on = WorkerEnd(1)
        return [
            self._explain(
                claim.task,
                claim.attempt,
                claim.number,
                self._ends.get(claim.worker, went_on),
                halvings=claim.halvings,
            )
            for claim in failed
        ]

    def explain_unclaimed(self, claims: Sequence[Claim], committed_of: CommittedOf) -> list[Ended]:
        gone = sorted(self._unjudged - {claim.worker for claim in claims})
        self._unjudged = set()
        for name in gone:
            if name in self._beats and self._beats[name].doing is not Doing.LEAVING:
                mark_gone(self.run.paths, name)
        failed = [name for name in gone if self._ends[name].exit_code and not self._has_worked(name)]
        committed = committed_of([self._all[name].first for name in failed])
        return [self._fell(name) for name in failed if self._all[name].first not in committed]

    def _has_worked(self, name: str) -> bool:
        return name in self._beats and self._beats[name].tasks > 0

    def _fell(self, name: str) -> Ended:
        """Explain the end of a worker that had taken no task."""
        worker = self._all[name]
        number = len(self._failures.get(worker.first, ())) + 1
        return self._explain(worker.first, name, number, self._ends[name], worker.log)

    def _explain(
        self,
        task: Task,
        attempt: str,
        number: int,
        end: WorkerEnd,
        log: Path | None = None,
        halvings: int = 0,
    ) -> Ended:
        """
        Args:
            log: of a worker that had taken no task.
        """
        paths, ranks = self.run.paths, self._ranks(task.job_kind)
        said = None if log else read_said(paths, task, number)
        shown = rank_log(log or paths.task(task).log(number), end.rank)
        gone = Gone(
            task,
            number,
            job=None,
            index=0,
            attempt=attempt,
            restart=0,
            log=paths.relative(shown),
            invocation=self.invocation,
            halvings=halvings,
        )
        log_end = "" if said else "\n".join(journal.tail(shown, LOG_LINES))
        verdict = judge_process(task, said, end.exit_code, end.note, ranks, log_end)
        return ended_of(paths, Signs(gone, said=said), verdict)

    def _ranks(self, job_kind: str) -> int:
        return self.processes.limits.ranks.get(job_kind, 1)

    # --- who is started, and who makes place ---

    def situation(self, common: Situation, seen: Observation) -> Situation:
        limits = self.processes.limits
        news = frozenset(seen.committed), sum(map(len, seen.failures.values()))
        self._has_news, self._news = news != self._news, news
        return replace(
            common,
            wanted=wanted_workers(self.run.plan, limits.most),
            needs=limits.needs,
            nodes=limits.nodes,
            of_one_task=limits.of_one_task,
        )

    def start(self, decided: Staffing, failures: Failures, known: Mapping[Task, int]) -> Instructions:
        wanted = [task for request in decided.requests for task in request.tasks]
        return Instructions((*decided.end_idle, *self._start(wanted, known)))

    def _start(self, tasks: Sequence[Task], known: Mapping[Task, int]) -> Iterator[Handover]:
        """Start a worker for each task, in their order, as far as there is place. The first that lacks its
        place keeps what is free from all later ones, so that it does not wait for ever while small ones come
        and go. Where memory is short yield who makes place instead."""
        limits, is_blocked = self.processes.limits, False
        for task in tasks:
            kind = task.job_kind
            if is_blocked and kind in limits.needs:
                continue
            if (giver := who_gives_memory(self._idle, kind, free_share())) is not None:
                if all(worker.stays for worker in self.crew.workers):  # else memory is about to be free
                    yield Handover(giver, kind)
                return
            if not self._start_one(task, known.get(task, 0)):
                is_blocked = is_blocked or kind in limits.needs

    @property
    def _idle(self) -> Sequence[Worker]:
        """Workers that wait, those first that have for longest."""
        waiting = [worker for worker in self.crew.workers if worker.doing is Doing.WAITING]
        return sorted(waiting, key=lambda worker: worker.since)

    def _start_one(self, task: Task, known: int) -> bool:
        name = f"local-{self.lease:06d}-{next(self._numbers):07d}r0"
        linger = self.processes.limits.linger.get(task.job_kind, 0)
        log = self.run.paths.log_root / "workers" / f"{name}.log"
        worker = Started(name, task, log, self.run.identity.folder, stays=linger != 0)
        posting = self._posting(worker, linger, known)
        has_place = self.processes.start(
            worker, worker_arguments(self.run, task), {WORKER: posting.to_json()}
        )
        if has_place:
            self._all[name] = worker
        return has_place

    def _posting(self, worker: Started, linger: Linger, known: int) -> Posting:
        limits, kind = self.processes.limits, worker.job_kind
        return Posting(
            name=worker.name,
            linger=linger,
            # An update that does not stay gives its GPUs back before it has ended.
            does_one_task=kind in limits.of_one_task or (not worker.stays and kind == Stage.UPDATE),
            task_seconds=limits.time_limit,
            known=known,
            is_scarce=kind in limits.needs,
            slots=None if kind in limits.beside else limits.slots,
            slots_file=str(Path(self._folder.name, "slots")),
        )

    def conclude(self, decided: Staffing, leaving: Collection[str]) -> None:
        """Ring workers that make place; on a network filesystem, where no file wakes them, all that wait, if
        there is anything new."""
        is_for_all = self.is_network and self._has_news
        self.processes.ring([worker.name for worker in self._idle] if is_for_all else sorted(leaving))
        forget_old(self.run.paths, self.processes.living.__contains__)

    def close(self) -> None:
        """End all workers."""
        self.processes.cancel()
        self._folder.cleanup()

    def committed_ones(self) -> list[str]:
        """Return the workers that only save what their committed result left."""
        return [worker.name for worker in self.crew.workers if self._has_committed(worker)]

    def _has_committed(self, worker: Worker) -> bool:
        beat = self._reader.read().get(worker.name)
        if beat is not None and beat.doing is Doing.WAITING and beat.saving:
            return True
        if beat is None or beat.doing is not Doing.BUSY or worker.task is None:
            return False
        try:
            record = read_record(self.run.paths, parse_task(beat.task))
        except CorruptData:
            return False
        return record is not None and record.attempt == beat.attempt
