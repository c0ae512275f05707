"""Which waiting jobs start, on what, and which idle processes make place for them: one pure rule.

A machine is one node whose GPUs have names; an allocation of Slurm's is several, of which cores and memory
count too. What a job is given is its own until its processes are gone, or have said that it is free.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Need:
    """What a job holds on each of its nodes."""

    gpus: int = 0
    cpus: int = 0
    memory: int = 0
    """MiB."""
    nodes: int = 1

    @property
    def is_nothing(self) -> bool:
        return not (self.gpus or self.cpus or self.memory)


@dataclass(frozen=True)
class Share:
    """A part of a node."""

    node: str = ""
    gpus: tuple[str, ...] = ()
    """Names of its GPUs."""
    cpus: float = math.inf
    memory: float = math.inf
    """MiB."""

    def has(self, need: Need) -> bool:
        return len(self.gpus) >= need.gpus and self.cpus >= need.cpus and self.memory >= need.memory

    def cut(self, need: Need) -> "Share":
        """Return the part that a job gets of it."""
        return Share(self.node, self.gpus[: need.gpus], need.cpus, need.memory)

    def without(self, taken: "Share") -> "Share":
        gpus = tuple(name for name in self.gpus if name not in taken.gpus)
        return replace(self, gpus=gpus, cpus=self.cpus - taken.cpus, memory=self.memory - taken.memory)


Grant = tuple[Share, ...]
"""What a job is given: a share of each of its nodes."""


@dataclass(frozen=True)
class Waiting:
    """A job that has not started."""

    pool: str
    ranks: int = 1
    need: Need = Need()


@dataclass(frozen=True)
class Holder:
    """Processes that have done a job, and keep what they were given for the next one of their pool."""

    pool: str
    ranks: int = 1
    grant: Grant = ()


@dataclass(frozen=True)
class Room:
    """How many more jobs may run."""

    slots: int
    pools: Mapping[str, int]
    """How many more jobs of each pool may run."""
    beside: Collection[str] = ()
    """Pools whose jobs take none of ``slots``."""

    def has(self, pool: str) -> bool:
        return self.pools[pool] > 0 and (pool in self.beside or self.slots > 0)

    def without(self, pool: str) -> "Room":
        slots = self.slots if pool in self.beside else self.slots - 1
        return replace(self, slots=slots, pools={**self.pools, pool: self.pools[pool] - 1})


@dataclass
class Decision:
    """What is to be done now. Jobs and holders are given by their index."""

    starts: dict[int, Grant] = field(default_factory=dict)
    """Jobs that get new processes, and what those get."""
    takes: dict[int, int] = field(default_factory=dict)
    """Jobs that get the processes of a holder."""
    leaves: tuple[int, ...] = ()
    """Holders that make place for the first job that lacks it."""


def assign(
    waiting: Sequence[Waiting],
    idle: Sequence[Holder],
    nodes: Sequence[Share],
    held: Iterable[Share],
    coming: Iterable[Share],
    room: Room,
) -> Decision:
    """Decide for each waiting job, in order. The first that has a slot but lacks devices keeps those that are
    free from all later ones, so that it does not wait for ever while small jobs come and go.

    Args:
        idle: those that have been idle longest first.
        nodes: all there is.
        held: what is in use by jobs that run.
        coming: what is still held by processes that were told to leave.
    """
    coming = list(coming)
    free = unused(nodes, [*held, *coming, *(share for holder in idle for share in holder.grant)])
    done, is_blocked = Decision(), False
    for index, job in enumerate(waiting):
        if not room.has(job.pool) or (is_blocked and not job.need.is_nothing):
            continue
        holder = _holder_for(job, idle, done.takes.values())
        grant = None if holder is not None else place(job.need, free)
        if holder is not None:
            done.takes[index] = holder
        elif grant is not None:
            done.starts[index] = grant
            free = unused(free, grant)
        else:
            left = {n: one.grant for n, one in enumerate(idle) if n not in done.takes.values()}
            done.leaves, is_blocked = who_makes_place(job.need, joined(free, coming), left), True
            continue
        room = room.without(job.pool)
    return done


def place(need: Need, free: Sequence[Share]) -> Grant | None:
    """Return what a job gets of what is free; None where it does not fit. Of the nodes with room it takes the
    fullest, so that empty ones stay for jobs of several nodes."""
    fitting = [share for share in free if share.has(need)]
    if len(fitting) < need.nodes:
        return None
    fullest = sorted(fitting, key=lambda share: (len(share.gpus), share.cpus, share.memory))
    return tuple(share.cut(need) for share in fullest[: need.nodes])


def who_makes_place(need: Need, free: Sequence[Share], holders: Mapping[int, Grant]) -> tuple[int, ...]:
    """Return the holders that have to leave so that a job fits, none more than needed and those first that
    come first. None: it fits as it is, or would not fit if all left."""
    leaving: list[int] = []

    def fits(gone: Iterable[int]) -> bool:
        return place(need, joined(free, [share for one in gone for share in holders[one]])) is not None

    for one in holders:
        if fits(leaving):
            break
        leaving.append(one)
    if not fits(leaving):
        return ()
    for one in list(leaving):
        if fits(rest := [other for other in leaving if other != one]):
            leaving = rest
    return tuple(leaving)


def unused(nodes: Sequence[Share], taken: Iterable[Share]) -> list[Share]:
    """Return what is left of each node."""
    left = {share.node: share for share in nodes}
    for share in taken:
        left[share.node] = left[share.node].without(share)
    return list(left.values())


def joined(free: Sequence[Share], more: Iterable[Share]) -> list[Share]:
    """Return the shares of each node with what comes to it."""
    found = {share.node: share for share in free}
    for share in more:
        has = found[share.node]
        sums = has.cpus + share.cpus, has.memory + share.memory
        found[share.node] = Share(share.node, (*has.gpus, *share.gpus), *sums)
    return list(found.values())


def _holder_for(job: Waiting, idle: Sequence[Holder], taken: Collection[int]) -> int | None:
    """Return the processes that have been idle shortest, of those that can do the job: the one that has been
    idle longest is the first to leave."""
    for place_, holder in reversed([*enumerate(idle)]):
        if place_ not in taken and (holder.pool, holder.ranks) == (job.pool, job.ranks):
            return place_
    return None
