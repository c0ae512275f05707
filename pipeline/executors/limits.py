"""Workers as processes of a machine or steps of an allocation: how many there are, and what each holds."""

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.config.types import Linger
from pipeline.decide.places import Held, Need, place, room_of
from pipeline.run.lease import HEARTBEAT_SECONDS
from pipeline.run.tasks import Task
from slurm.nodes import Node

HERE = "here"
"""Name of the only node of a run on this machine."""
PARTITION = frozenset({""})
IN_TURN = (
    "stages that take turns at one place gain nothing by older responses; set it to 0, or give each stage a "
    "place of its own"
)
"""Reason, as the rest of a sentence, for which rollout.staleness is refused where stages take turns."""


@dataclass(frozen=True)
class Started:
    """A worker that was started."""

    name: str
    first: Task
    """Task that it was started for."""
    log: Path
    """File for what it prints outside of tasks; of several ranks, the first one's."""
    folder: str = "."
    """Folder that the run was started from."""
    stays: bool = True
    """Whether it keeps its devices from task to task. Else they are free once it has written RELEASED."""
    since: float = field(default_factory=time.time)
    """Unix time of its start."""

    @property
    def job_kind(self) -> str:
        return self.first.job_kind


@dataclass(frozen=True)
class WorkerEnd:
    """End of a worker's processes. Evidence about its attempt, never about its result."""

    exit_code: int
    """Exit code, or minus the signal that ended it; with several ranks, that of the one that failed first, if
    any did."""
    note: str = ""
    """Further facts in words (a time limit, which rank failed)."""
    rank: int = 0
    """Rank that ``exit_code`` is of."""


@dataclass(frozen=True)
class Share:
    """What a worker holds of one node."""

    node: str
    gpus: tuple[str, ...] = ()
    """Names of its GPUs."""


Grant = tuple[Share, ...]
"""What a worker is given for its life: a share of each of its nodes."""


@dataclass(frozen=True)
class Limits:
    """Limits on workers, and on the tasks that they do."""

    workers: Mapping[str, int]
    """Most workers of each job kind; of those that are not named as many as find a place."""
    time_limit: float
    """Seconds a task may take."""
    slots: int | None = None
    """Tasks that are done at once; None: as many as there are workers."""
    beside: Collection[str] = ()
    """Job kinds whose tasks take none of ``slots``."""
    linger: Mapping[str, Linger] = field(default_factory=dict)
    """Seconds that an idle worker of a job kind stays; the others leave when no task is ready for them."""
    of_one_task: Collection[str] = ()
    """Job kinds whose workers leave after one task."""
    nodes: tuple[Node, ...] = ()
    """Nodes on which workers have places; none where they need none."""
    gpus: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of the GPUs of each node."""
    needs: Mapping[str, Need] = field(default_factory=dict)
    """What a worker of each job kind holds on each of its nodes; the others hold nothing."""
    all_need_places: bool = False
    """Whether a worker of any job kind for which others wait has needs."""
    show: Callable[[Grant], Mapping[str, str]] = lambda grant: {}
    """Function that returns the environment variables that tell a worker what it was given."""
    command: Callable[[Started, Sequence[str], Mapping[str, str]], Sequence[str]] = (
        lambda worker, words, told: words
    )
    """Function that returns the words of the entry point from a worker's arguments and the variables that it
    gets; by default these arguments."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Processes of this machine that are one worker; of the kinds that are not named it is one."""
    grace: float = 5.0
    """Seconds that processes may take to end once they are asked to, or after another rank has failed."""
    look_seconds: float = HEARTBEAT_SECONDS
    """Seconds after which the driver looks for what no process has signalled."""

    def most(self, job_kind: str) -> int | None:
        return self.workers.get(job_kind)

    def grant(self, job_kind: str, taken: Iterable[tuple[str, Grant]]) -> Grant | None:
        """Return what a worker gets of what is free: of the nodes with room the fullest, so that empty ones
        stay for workers of several nodes. None where it has no place.

        Args:
            taken: job kinds of the workers that are there, and what they have.
        """
        need = self.needs.get(job_kind)
        if need is None:
            return ()
        having = [(kind, grant) for kind, grant in taken if kind in self.needs]
        room = room_of(self.nodes, [Held(s.node, self.needs[kind]) for kind, grant in having for s in grant])
        room = dict(sorted(room.items(), key=lambda item: (item[1].gpus, item[1].cpus, item[1].memory)))
        left = place(room, need)
        if left is None:
            return None
        used = {name for _, grant in having for share in grant for name in share.gpus}
        chosen = [name for name in room if left[name] != room[name]]
        return tuple(Share(name, self._free(name, used)[: need.gpus]) for name in chosen)

    def _free(self, node: str, used: Collection[str]) -> tuple[str, ...]:
        return tuple(name for name in self.gpus.get(node, ()) if name not in used)


def need_of(gpus: int = 0, cpus: int = 0, memory: int = 0, num_nodes: int = 1) -> Need:
    """Return what a worker holds on each of its nodes, which are all alike for it."""
    return Need(PARTITION, cpus, gpus, memory, num_nodes)


def node_of(name: str, gpus: int, cpus: int, memory: float = math.inf) -> Node:
    """Return a node; memory that is not counted is without a bound. In MiB."""
    return Node(name, PARTITION, cpus, gpus, 2**62 if math.isinf(memory) else int(memory))
