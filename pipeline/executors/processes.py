"""Workers as processes of this machine: started on what they are given, heard, and ended.

What they do they find themselves (:mod:`stages.workers`); who is started, and who makes place, is decided by
passes. So this knows neither tasks nor commits: a worker has a name, a job kind and words.
"""

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from pipeline.decide.judging import was_killed
from pipeline.executors.forking import KILLED_SECONDS, Rank, fork, preload, signal_group
from pipeline.executors.limits import Grant, Limits, Started, WorkerEnd
from pipeline.process import joined_within
from pipeline.run.environment import RELEASED
from pipeline.run.paths import rank_log
from pipeline.text import exit_in_words

_MOST_BYTES = 4096
"""Bytes read from a pipe at once; the ranks of a worker write one or two for each task."""

_ENDING_SECONDS = 0.05
"""Seconds for which the end of a worker is awaited that has committed: it takes less, and a pass that begins
before it finds no place, and keeps waiting what gets its place."""


@dataclass
class Team:
    """The processes that are one worker, by rank."""

    started: Started
    grant: Grant
    rendezvous: Path
    processes: Sequence[ForkServerProcess]
    pipe: Connection
    """End from which the bytes that ranks write are read."""
    released: int = 0
    """Number of ranks that have released their devices."""
    failed_rank: int | None = None
    """Rank that failed first; the others cannot go on without it."""
    deadline: float = float("inf")
    """Time (monotonic) at which it is killed."""
    note: str = ""
    """Why that is, in words."""
    clean: set[int] = field(default_factory=set)
    """Ranks that have ended and whose left-over processes were killed."""

    @property
    def living(self) -> list[ForkServerProcess]:
        return [process for process in self.processes if process.exitcode is None]

    @property
    def sentinels(self) -> list[int]:
        """What is ready when a rank ends, of those whose end was not noted yet."""
        return [process.sentinel for rank, process in enumerate(self.processes) if rank not in self.clean]

    @property
    def held(self) -> Grant:
        """What no other worker may use."""
        return () if self.released >= len(self.processes) else self.grant

    def listen(self) -> None:
        """Read what the ranks have written."""
        while not self.pipe.closed and self.pipe.poll():
            written = os.read(self.pipe.fileno(), _MOST_BYTES)
            self.released += written.count(RELEASED) if not self.started.stays else 0
            if not written:  # all its processes are gone
                self.pipe.close()

    def check(self, grace: float) -> None:
        """Note which rank failed first, and give the others ``grace`` seconds. Where several failed since the
        last look, take one that was killed: the others' errors only say that their peer is gone. What ranks
        that have ended left behind is killed, as it keeps memory: once, as process ids are reused."""
        codes = [process.exitcode for process in self.processes]
        for rank, code in enumerate(codes):
            if code is not None and rank not in self.clean:
                signal_group(self.processes[rank], signal.SIGKILL)
                self.clean.add(rank)
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed and self.failed_rank is None:
            self.failed_rank = next((rank for rank in failed if was_killed(codes[rank])), failed[0])
            self.deadline = min(self.deadline, time.monotonic() + grace)

    def signal(self, number: signal.Signals) -> None:
        for process in self.living:
            signal_group(process, number)

    def end(self) -> WorkerEnd:
        """Kill what is left, with all that the processes have started. Returns how it ended."""
        for process in self.living:
            signal_group(process, signal.SIGKILL)
            joined_within(process, KILLED_SECONDS)
        codes, ranks = [_code(process) for process in self.processes], len(self.processes)
        self.check(0.0)
        for process in self.processes:
            if process.exitcode is not None:
                process.close()
        self.pipe.close()
        self.rendezvous.unlink(missing_ok=True)
        rank = self.failed_rank or 0
        note = f"rank {rank} of {ranks} {exit_in_words(codes[rank])}" if ranks > 1 and codes[rank] else ""
        return WorkerEnd(codes[rank], self.note or note, rank)


def _code(process: ForkServerProcess) -> int:
    """Return the exit code of a process that has ended, or was killed and hangs in the kernel."""
    return -signal.SIGKILL if process.exitcode is None else process.exitcode


class Processes:
    """Provider of workers that are processes of this machine; ``entry`` is a ``module:function`` that takes
    the words of one."""

    def __init__(self, entry: str, modules: Sequence[str], limits: Limits) -> None:
        self._entry, self.limits = entry, limits
        preload(modules)
        self.starting_seconds = 0.0
        """Seconds spent in starting workers: the first waits until the server has imported its modules."""
        self._teams: dict[str, Team] = {}
        self._ended: dict[str, WorkerEnd] = {}

    @property
    def living(self) -> Mapping[str, Started]:
        """Workers of which a process lives, oldest first."""
        return {name: team.started for name, team in self._teams.items()}

    def nodes_of(self, worker: str) -> tuple[str, ...]:
        """Return the nodes on which a worker holds its places yet."""
        return tuple(share.node for share in self._teams[worker].held)

    def start(self, worker: Started, words: Sequence[str], variables: Mapping[str, str]) -> bool:
        """Start a worker. False where its kind has as many as it may, or it has no place."""
        kind, most = worker.job_kind, self.limits.most(worker.job_kind)
        there = Counter(team.started.job_kind for team in self._teams.values())
        taken = [(team.started.job_kind, team.held) for team in self._teams.values()]
        grant = self.limits.grant(kind, taken)
        if grant is None or (most is not None and there[kind] >= most):
            return False
        worker.log.parent.mkdir(parents=True, exist_ok=True)
        rendezvous = worker.log.with_suffix(".rendezvous")
        given, size = {**os.environ, **variables, **self.limits.show(grant)}, self.limits.ranks.get(kind, 1)
        command = tuple(self.limits.command(worker, words, variables))
        ranks = [
            Rank(command, {**given, **rank_variables(n, size, rendezvous)}, rank_log(worker.log, n))
            for n in range(size)
        ]
        began = time.monotonic()
        processes, pipe = fork(self._entry, ranks)
        self.starting_seconds += time.monotonic() - began
        self._teams[worker.name] = Team(worker, grant, rendezvous, processes, pipe)
        return True

    def collect_ended(self) -> Mapping[str, WorkerEnd]:
        """Return, by name, how the workers ended that have since this was last called."""
        for name, team in list(self._teams.items()):
            team.check(self.limits.grace)
            if not team.living or time.monotonic() >= team.deadline:
                self._ended[name] = team.end()
                del self._teams[name]
                remove_if_empty(team.started.log, len(team.processes))
        ended, self._ended = self._ended, {}
        return ended

    def wait(self, seconds: float) -> None:
        """Return when a rank writes or ends, or after ``seconds``. A worker that has written and does not
        stay is about to end: where nothing can start before, wait a moment for that too."""
        heard, until = self._wait_for_any(seconds), time.monotonic() + _ENDING_SECONDS
        while heard and not any(team.started.stays for team in heard) and self._is_full():
            heard = self._wait_for_any(until - time.monotonic())

    def _wait_for_any(self, seconds: float) -> Sequence[Team]:
        """Wait as :meth:`wait`. Return those that wrote; none if anything has ended, or nothing has come."""
        now = time.monotonic()
        until = min(
            [now + min(seconds, self.limits.look_seconds), *(t.deadline for t in self._teams.values())]
        )
        pipes = {t.pipe: t for t in self._teams.values() if not t.pipe.closed}
        ends = [sentinel for team in self._teams.values() for sentinel in team.sentinels]
        ready = wait_for_any([*pipes, *ends], timeout=max(0.0, until - now))
        for team in self._teams.values():
            team.listen()
        heard = [pipes[one] for one in ready if isinstance(one, Connection)]
        return heard if len(heard) == len(ready) else ()

    def _is_full(self) -> bool:
        """Whether no worker of a kind that needs a place would find one, and all that follow need one."""
        limits, taken = self.limits, [(t.started.job_kind, t.held) for t in self._teams.values()]
        return limits.all_need_places and not any(limits.grant(kind, taken) for kind in limits.needs)

    def ring(self, workers: Collection[str]) -> None:
        """Have workers that wait look again."""
        for first in (self._teams[name].processes[0] for name in workers):
            if first.exitcode is None and first.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(first.pid, signal.SIGUSR1)

    def kill(self, worker: str, why: str) -> None:
        """Kill a worker at once; what it says of its end is ``why``."""
        team = self._teams[worker]
        team.note, team.deadline = why, time.monotonic()

    def cancel(self, but: Collection[str] = ()) -> None:
        """End all workers, but for some, and wait for that; none of them is reported by
        :meth:`collect_ended`."""
        stopped = {name: team for name, team in self._teams.items() if name not in but}
        for team in stopped.values():
            team.signal(signal.SIGTERM)
        until = time.monotonic() + self.limits.grace
        for process in [process for team in stopped.values() for process in team.living]:
            process.join(max(0.0, until - time.monotonic()))
        for name, team in stopped.items():
            team.end()
            del self._teams[name]
            remove_if_empty(team.started.log, len(team.processes))


def remove_if_empty(log: Path, ranks: int) -> None:
    """Remove the logs of a worker in which nothing is: what its tasks print goes to logs of theirs."""
    for path in (rank_log(log, rank) for rank in range(ranks)):
        if path.exists() and not path.stat().st_size:
            path.unlink()


def rank_variables(rank: int, size: int, rendezvous: Path) -> dict[str, str]:
    """Return the environment variables of one of several ranks. They clear a master address in the user's own
    environment, which is not for these ranks.
    """
    if size == 1:
        return {}
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    return place | {"RENDEZVOUS_FILE": str(rendezvous), "MASTER_ADDR": "", "MASTER_PORT": ""}
