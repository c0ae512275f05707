"""Jobs as processes of this machine: a bounded number of them run at a time.

Processes are forked from a server that has imported the heavy libraries once, so that a job does not pay for
the imports. One that has done a job stays for the next of its pool, as long as that pays. Independent of PPO:
keys of jobs are opaque strings.
"""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from pipeline.executors.machine import free_memory
from pipeline.executors.orders import BEGUN, Order
from pipeline.executors.staying import LEAST_FREE, Idle, who_leaves
from pipeline.executors.teams import Team, fork, preload, signal_group, start_server
from pipeline.run.environment import COMMITTED, RELEASED
from pipeline.text import exit_in_words

_GRACE_SECONDS = 5.0
"""Seconds that processes may take to end when their job is cancelled, after another rank has failed, or when
they leave."""


@dataclass(frozen=True)
class Job:
    """One attempt at a task, as a job to run."""

    key: str
    pool: str
    """Name of the pool of slots that it belongs to. Processes that stay do jobs of one pool only."""
    arguments: tuple[str, ...]
    """Command-line arguments of the entry point."""
    log: Path
    """File for standard output and error; with several ranks, the first one's (see :func:`rank_log`)."""
    priority: int = 0
    """Order of starting where slots are few: lower numbers first."""
    ranks: int = 1
    """Number of processes that do the job together. If several, each gets its place in RANK, LOCAL_RANK,
    WORLD_SIZE and RENDEZVOUS_FILE."""


@dataclass(frozen=True)
class JobEnd:
    """End of a job. Evidence about the attempt, never about its result."""

    exit_code: int
    """Exit code, or minus the signal that ended it; with several ranks, that of the one that failed first, if
    any did."""
    note: str = ""
    """Further facts in words (a time limit, which rank failed)."""
    rank: int = 0
    """Rank that ``exit_code`` is of."""


def rank_log(log: Path, rank: int) -> Path:
    """Return the log of one rank: the job's own for the first, a file beside it for each of the others."""
    return log.with_suffix(f".rank-{rank}{log.suffix}") if rank else log


def was_killed(exit_code: int | None) -> bool:
    """Whether a signal from outside ended the process. SIGABRT is not one: a process aborts by itself."""
    return exit_code is not None and exit_code < 0 and exit_code != -signal.SIGABRT


@dataclass(frozen=True)
class LocalLimits:
    """Limits on how many jobs run at once, and for how long."""

    slots: int
    pools: Mapping[str, int]
    """Jobs of each pool that may run at once, by the pool's name."""
    time_limit: float
    """Seconds a job may run."""
    linger: Mapping[str, float] = field(default_factory=dict)
    """Seconds that an idle process stays for the next job of its pool, by the pool's name; the others leave
    after each job. An idle process takes no slot."""
    beside: frozenset[str] = frozenset()
    """Pools whose jobs take none of ``slots``."""


@dataclass
class _Running:
    job: Job
    team: Team
    rendezvous: Path
    deadline: float
    is_fresh: bool
    """Whether the processes were made for this job."""
    begun: set[int] = field(default_factory=set)
    """Ranks that have accepted the job, of processes that were not made for it."""
    done: set[int] = field(default_factory=set)
    """Ranks that have done their part, and stay."""
    known_unfinished: int = 0
    """Number of ranks whose part went on when the job was last looked at."""
    is_committed: bool = False
    """Whether its result is committed: it goes on to write what is left to save."""
    released: int = 0
    """Number of ranks that have given their devices back."""
    failed_rank: int | None = None
    """Rank that failed first; the others cannot go on without it."""

    def codes(self) -> list[int | None]:
        """Return the exit code of each rank's part of the job; None while it goes on."""
        codes = [process.exitcode for process in self.team.processes]
        for rank in range(len(codes)):  # after the exit codes: what a process has said before it ended counts
            for said in self.team.hear(rank):
                (self.begun if said == BEGUN else self.done).add(rank)
        return [0 if rank in self.done else code for rank, code in enumerate(codes)]

    @property
    def unfinished(self) -> list[ForkServerProcess]:
        """Processes whose part of the job goes on."""
        codes = zip(self.team.processes, self.codes(), strict=True)
        return [process for process, code in codes if code is None]

    @property
    def has_news(self) -> bool:
        """Whether a rank's part has ended since the job was last looked at."""
        return len(self.unfinished) < self.known_unfinished

    @property
    def is_refused(self) -> bool:
        """Whether a process was gone before it got the job: then it is no failure of the job's."""
        codes = self.codes()
        return not self.is_fresh and any(
            code is not None and rank not in self.begun for rank, code in enumerate(codes)
        )

    def listen(self) -> bool:
        """Hear the bell. Returns whether anything was rung since it was heard."""
        said = self.team.hear_bell()
        self.is_committed = self.is_committed or COMMITTED in said
        self.released += said.count(RELEASED)
        return bool(said)

    @property
    def is_released(self) -> bool:
        """Whether only files are still written: the job's slot is another job's."""
        return self.released >= self.job.ranks


class LocalExecutor:
    """Queue that runs jobs in processes; ``entry`` is a ``module:function`` that takes a process's
    :class:`~pipeline.executors.orders.Orders`."""

    def __init__(self, entry: str, modules: Sequence[str], limits: LocalLimits) -> None:
        self._entry = entry
        self._limits = limits
        preload(modules)
        self._queue: list[Job] = []
        self._running: dict[str, _Running] = {}
        self._idle: list[tuple[Team, float]] = []
        """Processes without a job, and since when."""
        self._leaving: list[tuple[Team, float]] = []
        """Processes that were told to leave, and until when they may take."""

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs; they start as slots become free, by priority, then in this order."""
        start_server()  # its imports go on while the driver does; a run that is done needs none
        self._queue = sorted([*self._queue, *jobs], key=lambda job: job.priority)

    def collect_ended(self) -> Mapping[str, JobEnd]:
        """Return, by key, the jobs that have ended since this was last asked."""
        ended = {}
        for key, running in list(self._running.items()):
            codes = running.codes()
            running.known_unfinished = codes.count(None)
            if running.is_refused:
                self._start_again(running)
                continue
            _note_failure(running, codes)
            running.team.remove_leftovers()
            if None not in codes or time.monotonic() >= running.deadline:
                ended[key] = self._end(running)
                del self._running[key]
        return ended

    @property
    def is_busy(self) -> bool:
        """Whether a job runs that was not collected."""
        return bool(self._running)

    def wait(self, seconds: float) -> None:
        """Start the jobs that fit; return when a job or one of its ranks ends, when a job has committed and
        another fits beside it, or after ``seconds``."""
        # Not before: what the caller submits in answer to an ended job may be more urgent than what waits.
        self._start_what_fits()
        until = time.monotonic() + seconds
        is_over = False
        while not is_over and (left := until - time.monotonic()) > 0:
            is_over = self._wait_for_news(left)

    def _wait_for_news(self, seconds: float) -> bool:
        """Wait for anything to happen. Returns whether it is of interest to the caller."""
        running = [(one, one.codes()) for one in self._running.values()]
        if any(codes.count(None) < one.known_unfinished for one, codes in running):
            return True  # else who is not waited for any more would be slept through
        unreleased = [one for one, _ in running if not one.is_released and not one.team.bell.closed]
        calls = [call for one, codes in running for call in one.team.calls(codes)]
        calls += [one.team.bell for one in unreleased]
        calls += [process.sentinel for team, _ in (*self._idle, *self._leaving) for process in team.living]
        now = time.monotonic()
        until = min([now + seconds, *(one.deadline for one, _ in running), *self._times_to_leave()])
        ready = wait_for_any(calls, timeout=max(0.0, until - now))
        rung = [one for one in unreleased if one.listen()]
        has_left = self._see_off()
        return (
            has_left
            or (bool(rung) and self._has_slot())
            or not ready
            or any(one.has_news for one, _ in running)
        )

    def _times_to_leave(self) -> list[float]:
        """Return when processes that are idle or leaving have to be gone."""
        linger = self._limits.linger
        return [*(since + linger[team.pool] for team, since in self._idle), *(t for _, t in self._leaving)]

    def cancel(self, spares_committed: bool = False) -> None:
        """Stop every running job, drop the queued ones, and end idle processes.

        Args:
            spares_committed: let jobs go on that only save what their committed result left.
        """
        self._queue.clear()
        self._let_go(range(len(self._idle)))
        for one in self._running.values():
            one.listen()
        stopped = [one for one in self._running.values() if not (spares_committed and one.is_committed)]
        for running in stopped:
            running.team.let_go()
            running.team.terminate()
        until = time.monotonic() + _GRACE_SECONDS
        for process in [process for running in stopped for process in running.team.living]:
            process.join(max(0.0, until - time.monotonic()))
            signal_group(process, signal.SIGKILL)
            process.join()
        self.collect_ended()
        self._queue.clear()  # a job that its process had not begun was queued again
        self._let_go(range(len(self._idle)))
        self._see_off()
        while self._leaving:
            wait_for_any([one.sentinel for team, _ in self._leaving for one in team.living], timeout=0.1)
            self._see_off()

    def _start_what_fits(self) -> None:
        self._see_off()
        waiting = []
        for job in self._queue:
            if self._fits(job) and self._has_room(job):
                self._running[job.key] = self._start(job)
            else:
                waiting.append(job)
        self._queue = waiting

    def _fits(self, job: Job) -> bool:
        in_pool = sum(running.job.pool == job.pool for running in self._running.values())
        has_slot = job.pool in self._limits.beside or self._has_slot()
        return has_slot and in_pool < self._limits.pools[job.pool]

    def _has_slot(self) -> bool:
        """Whether a slot is free."""
        beside = self._limits.beside
        taken = (not one.is_released and one.job.pool not in beside for one in self._running.values())
        return sum(taken) < self._limits.slots

    def _has_room(self, job: Job) -> bool:
        """Whether there is a process for the job, or memory for one; if not, an idle process leaves."""
        is_ready = any(team.pool == job.pool for team, _ in self._idle)
        if is_ready or not (self._idle or self._leaving) or (free := free_memory()) >= LEAST_FREE:
            return True
        if not self._leaving:  # else its memory is about to be free
            now = time.monotonic()
            self._let_go(who_leaves(self._idle_ones(), self._limits.linger, now, job.pool, free))
        return not self._leaving

    def _idle_ones(self) -> list[Idle]:
        return [Idle(team.pool, since) for team, since in self._idle]

    def _start(self, job: Job) -> _Running:
        job.log.parent.mkdir(parents=True, exist_ok=True)
        rendezvous = job.log.with_suffix(f".{os.urandom(4).hex()}.rendezvous")
        orders = [
            Order(
                job.arguments,
                str(rank_log(job.log, rank)),
                dict(os.environ) | rank_variables(rank, job.ranks, rendezvous),
                stays=self._limits.linger.get(job.pool, 0.0) > 0,
            )
            for rank in range(job.ranks)
        ]
        team = self._take_idle(job)
        is_fresh = team is None
        if team is None:
            team = fork(job.pool, self._entry, orders)
        else:
            team.give(orders)
        deadline = time.monotonic() + self._limits.time_limit
        return _Running(job, team, rendezvous, deadline, is_fresh, known_unfinished=job.ranks)

    def _take_idle(self, job: Job) -> Team | None:
        """Return the processes that have been idle shortest, of those that can do the job: the one that has
        been idle longest is the first to leave."""
        for place, (team, _) in reversed([*enumerate(self._idle)]):
            if team.pool == job.pool and len(team.processes) == job.ranks and team.is_whole():
                return self._idle.pop(place)[0]
        return None

    def _start_again(self, running: _Running) -> None:
        """Queue a job for other processes, where one was gone before it got it."""
        del self._running[running.job.key]
        running.team.kill()
        running.rendezvous.unlink(missing_ok=True)
        self._queue = sorted([running.job, *self._queue], key=lambda job: job.priority)

    def _end(self, running: _Running) -> JobEnd:
        codes, note, team = running.codes(), "", running.team
        if None in codes and running.failed_rank is None:
            note = f"stopped at the time limit of {self._limits.time_limit:g} s"
        if len(running.done) == running.job.ranks and team.is_whole():
            team.hear_bell()  # what was said of this job
            self._idle.append((team, time.monotonic()))
        else:
            ends = team.kill()
            codes = [end if code is None else code for code, end in zip(codes, ends, strict=True)]
        running.rendezvous.unlink(missing_ok=True)
        if running.failed_rank is None:
            return JobEnd(next((code for code in codes if code), 0), note)
        exit_code, ranks = codes[running.failed_rank], running.job.ranks
        assert exit_code is not None
        note = f"rank {running.failed_rank} of {ranks} {exit_in_words(exit_code)}" if ranks > 1 else ""
        return JobEnd(exit_code, note, running.failed_rank)

    def _let_go(self, places: Sequence[int]) -> None:
        """Tell idle processes to leave."""
        until = time.monotonic() + _GRACE_SECONDS
        for place in sorted(places, reverse=True):
            team, _ = self._idle.pop(place)
            team.let_go()
            self._leaving.append((team, until))

    def _see_off(self) -> bool:
        """Let idle processes go whose time is over, and clear away what has left or died. Returns whether the
        place of one that had to leave is free."""
        now = time.monotonic()
        self._let_go(who_leaves(self._idle_ones(), self._limits.linger, now))
        broken = [(team, now) for team, _ in self._idle if not team.is_whole()]
        self._idle = [(team, since) for team, since in self._idle if team.is_whole()]
        gone = [(team, until) for team, until in self._leaving if not team.living or now >= until]
        self._leaving = [one for one in self._leaving if one not in gone]
        for team, _ in (*broken, *gone):
            team.kill()
        return bool(gone)


def _note_failure(running: _Running, codes: Sequence[int | None]) -> None:
    """Note which rank failed first, and shorten the job's deadline. Where several failed since the last look,
    take one that was killed: the others' errors only say that their peer is gone.
    """
    if running.failed_rank is not None:
        return
    failed = [rank for rank, code in enumerate(codes) if code]
    if failed:
        killed = [rank for rank in failed if was_killed(codes[rank])]
        running.failed_rank = (killed or failed)[0]
        running.deadline = min(running.deadline, time.monotonic() + _GRACE_SECONDS)


def rank_variables(rank: int, size: int, rendezvous: Path) -> dict[str, str]:
    """Return the environment variables of one of several ranks. They clear a master address in the user's own
    environment, which is not for these ranks.
    """
    if size == 1:
        return {}
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    return place | {"RENDEZVOUS_FILE": str(rendezvous), "MASTER_ADDR": "", "MASTER_PORT": ""}
