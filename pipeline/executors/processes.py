"""Jobs as processes of this machine: a bounded number of them run at a time.

Processes are forked from a server that has imported the heavy libraries once, so that a job does not pay for
the imports. One that has done a job stays for the next of its pool, as long as that pays. Independent of PPO:
keys of jobs are opaque strings.
"""

import os
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait as wait_for_any

from pipeline.executors.assignment import Decision, Grant, Holder, Room, Waiting, assign
from pipeline.executors.orders import Order
from pipeline.executors.running import (
    Job,
    JobEnd,
    LocalLimits,
    Running,
    note_failure,
    rank_log,
    rank_variables,
)
from pipeline.executors.staying import LEAST_FREE, Idle, who_leaves
from pipeline.executors.teams import Team, fork, preload, signal_group, start_server
from pipeline.memory import free_share
from pipeline.text import exit_in_words

_GRACE_SECONDS = 5.0
"""Seconds that processes may take to end when their job is cancelled, after another rank has failed, or when
they leave."""


class LocalExecutor:
    """Queue that runs jobs in processes; ``entry`` is a ``module:function`` that takes a process's
    :class:`~pipeline.executors.orders.Orders`."""

    def __init__(self, entry: str, modules: Sequence[str], limits: LocalLimits) -> None:
        self._entry = entry
        self._limits = limits
        preload(modules)
        self._queue: list[Job] = []
        self._running: dict[str, Running] = {}
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
            note_failure(running, codes, _GRACE_SECONDS)
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
            or (bool(rung) and self._free_slots() > 0)
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
        until = time.monotonic() + (self._limits.grace or _GRACE_SECONDS)
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
        decision, teams = self._decide(), [team for team, _ in self._idle]
        taken = {index: teams[place] for index, place in decision.takes.items()}
        self._let_go(decision.leaves)
        self._idle = [(team, since) for team, since in self._idle if team not in taken.values()]
        waiting = []
        for index, job in enumerate(self._queue):
            if index in taken:
                self._running[job.key] = self._start(job, taken[index])
            elif index in decision.starts and self._has_memory(job):
                self._running[job.key] = self._start(job, None, decision.starts[index])
            else:
                waiting.append(job)
        self._queue = waiting

    def _decide(self) -> Decision:
        """Decide which queued jobs start, by :func:`assign`."""
        limits, running = self._limits, self._running.values()
        in_pools = Counter(one.job.pool for one in running)
        pools = {pool: most - in_pools[pool] for pool, most in limits.pools.items()}
        return assign(
            [Waiting(job.pool, job.ranks, limits.need(job.pool)) for job in self._queue],
            [Holder(team.pool, len(team.processes), team.grant) for team, _ in self._idle],
            limits.nodes,
            [share for one in running for share in one.held],
            [share for team, _ in self._leaving for share in team.grant],
            Room(self._free_slots(), pools, limits.beside),
        )

    def _free_slots(self) -> int:
        beside = self._limits.beside
        taken = (not one.is_released and one.job.pool not in beside for one in self._running.values())
        return self._limits.slots - sum(taken)

    def _has_memory(self, job: Job) -> bool:
        """Whether there is memory for new processes beside idle ones; if not, one of those leaves."""
        if not (self._idle or self._leaving) or (free := free_share()) >= LEAST_FREE:
            return True
        if not self._leaving:  # else its memory is about to be free
            now = time.monotonic()
            self._let_go(who_leaves(self._idle_ones(), self._limits.linger, now, job.pool, free))
        return not self._leaving

    def _idle_ones(self) -> list[Idle]:
        return [Idle(team.pool, since) for team, since in self._idle]

    def _start(self, job: Job, team: Team | None, grant: Grant = ()) -> Running:
        """Give a job to processes that are idle, or to new ones, which get ``grant``."""
        job.log.parent.mkdir(parents=True, exist_ok=True)
        rendezvous = job.log.with_suffix(f".{os.urandom(4).hex()}.rendezvous")
        shown = self._limits.show(team.grant if team else grant)
        stays = self._limits.stays(job.pool)
        orders = [
            Order(
                job.arguments,
                str(rank_log(job.log, rank)),
                {**os.environ, **shown, **rank_variables(rank, job.ranks, rendezvous)},
                stays=stays,
            )
            for rank in range(job.ranks)
        ]
        is_fresh = team is None
        if team is None:
            team = fork(job.pool, self._entry, orders, grant)
        else:
            team.give(orders)
        deadline = time.monotonic() + self._limits.time_limit
        return Running(job, team, rendezvous, deadline, is_fresh, stays, known_unfinished=job.ranks)

    def _start_again(self, running: Running) -> None:
        """Queue a job for other processes, where one was gone before it got it."""
        del self._running[running.job.key]
        running.team.kill()
        running.rendezvous.unlink(missing_ok=True)
        self._queue = sorted([running.job, *self._queue], key=lambda job: job.priority)

    def _end(self, running: Running) -> JobEnd:
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
