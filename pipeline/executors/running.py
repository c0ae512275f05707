"""A job, the limits on jobs, and what is known of a job while it runs."""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from pipeline.executors.assignment import Grant, Need, Share
from pipeline.executors.orders import BEGUN
from pipeline.executors.teams import Team
from pipeline.run.environment import COMMITTED, RELEASED


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
    nodes: tuple[Share, ...] = (Share(),)
    """What there is to give to jobs."""
    needs: Mapping[str, Need] = field(default_factory=dict)
    """What a job of each pool holds; the others hold nothing."""
    show: Callable[[Grant], Mapping[str, str]] = lambda grant: {}
    """Function that returns the environment variables that tell a job what it was given."""
    grace: float | None = None
    """Seconds that processes may take to end when their job is cancelled. Default: a few."""

    def need(self, pool: str) -> Need:
        return self.needs.get(pool, Need())

    def stays(self, pool: str) -> bool:
        """Whether processes of a pool stay after a job."""
        return self.linger.get(pool, 0.0) > 0


@dataclass
class Running:
    """A job and its processes."""

    job: Job
    team: Team
    rendezvous: Path
    deadline: float
    is_fresh: bool
    """Whether the processes were made for this job."""
    stays: bool = False
    """Whether the processes may do another one, with what they were given."""
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

    @property
    def held(self) -> Grant:
        """What no other job may use. Processes that stay keep their devices, and what is on them."""
        return () if self.is_released and not self.stays else self.team.grant


def note_failure(running: Running, codes: Sequence[int | None], grace: float) -> None:
    """Note which rank failed first, and shorten the job's deadline. Where several failed since the last look,
    take one that was killed: the others' errors only say that their peer is gone.
    """
    if running.failed_rank is not None:
        return
    failed = [rank for rank, code in enumerate(codes) if code]
    if failed:
        killed = [rank for rank in failed if was_killed(codes[rank])]
        running.failed_rank = (killed or failed)[0]
        running.deadline = min(running.deadline, time.monotonic() + grace)


def rank_variables(rank: int, size: int, rendezvous: Path) -> dict[str, str]:
    """Return the environment variables of one of several ranks. They clear a master address in the user's own
    environment, which is not for these ranks.
    """
    if size == 1:
        return {}
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    return place | {"RENDEZVOUS_FILE": str(rendezvous), "MASTER_ADDR": "", "MASTER_PORT": ""}
