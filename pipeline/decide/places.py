"""Places of jobs on nodes: what certainly fits, and whose end would make room. Pure.

Of the nodes only the sizes are known, and what jobs of the same user hold there. Other people's jobs are not
looked at: what is said to have room may have none, which Slurm tells by why a job waits; what is said to be
full is full.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from slurm.nodes import Node

KEPT_SECONDS = 600.0
"""Seconds for which is used what is known of nodes: they come and go, but why jobs wait is seen anyway."""
_CONTENDED_SECONDS = 86_400.0
"""Seconds for which it counts that others had jobs on the nodes: people come back the next morning."""


@dataclass(frozen=True)
class Need:
    """What a job asks for."""

    partitions: frozenset[str]
    """Partitions that it may run in; an empty name is the default one."""
    cpus: int = 1
    """CPUs on each node."""
    gpus: int = 0
    """GPUs on each node."""
    memory: int = 0
    """MiB on each node; 0 where it is not said."""
    num_nodes: int = 1

    def fits(self, node: Node) -> bool:
        """Whether its part for one node fits into what a node has."""
        enough = self.cpus <= node.cpus and self.gpus <= node.gpus and self.memory <= node.memory
        return enough and not self.partitions.isdisjoint(node.partitions)


@dataclass(frozen=True)
class Held:
    """What a job holds on one node."""

    node: str
    need: Need


Room = Mapping[str, Node]
"""What is left of each node, by its name."""


def room_of(nodes: Iterable[Node], held: Iterable[Held] = ()) -> dict[str, Node]:
    """Return what jobs leave of each node."""
    room = {node.name: node for node in nodes}
    for one in held:
        if one.node in room:
            room[one.node] = less(room[one.node], one.need)
    return room


def less(node: Node, need: Need) -> Node:
    """Return a node without what a job takes."""
    return with_more(node, need, -1)


def more(node: Node, need: Need) -> Node:
    """Return a node with what a job gives back."""
    return with_more(node, need, 1)


def with_more(node: Node, need: Need, jobs: int) -> Node:
    """Return a node with what so many jobs give back, or with less where they are fewer than none."""
    cpus, gpus = node.cpus + jobs * need.cpus, node.gpus + jobs * need.gpus
    return Node(node.name, node.partitions, cpus, gpus, node.memory + jobs * need.memory)


def place(room: Room, need: Need) -> dict[str, Node] | None:
    """Return what is left once a job has taken its place; None where it has none."""
    chosen: list[Node] = []
    for node in room.values():
        if need.fits(node):
            chosen.append(node)
            if len(chosen) == need.num_nodes:
                return {**room, **{node.name: less(node, need) for node in chosen}}
    return None


def place_all(room: Room, need: Need, number: int) -> Room | None:
    """Return what is left once so many jobs of a kind have taken their places, as :func:`place` gives them;
    None where not all have one."""
    if need.num_nodes > 1:
        placed, rest = _place_one_by_one(room, need, number)
        return rest if placed == number else None
    left = dict(room)
    for node in room.values():
        if not number:
            break
        if need.fits(node):
            here = min(number, _count_on(node, need))
            left[node.name] = with_more(node, need, -here)
            number -= here
    return None if number else left


def _place_one_by_one(room: Room, need: Need, most: int) -> tuple[int, Room]:
    """Place jobs until one more finds no place. Returns how many have one, and what they leave."""
    for number in range(most):
        left = place(room, need)
        if left is None:
            return number, room
        room = left
    return most, room


def count(room: Room, need: Need, most: int) -> int:
    """Count the jobs of a kind that fit at once, up to ``most``."""
    left = dict(room)
    if need.num_nodes > 1:
        return _place_one_by_one(left, need, most)[0]
    found = 0
    for node in left.values():
        if need.fits(node):
            found += _count_on(node, need)
        if found >= most:
            return most
    return found


def _count_on(node: Node, need: Need) -> int:
    """Count the jobs of a kind that fit on one node."""
    pairs = ((node.cpus, need.cpus), (node.gpus, need.gpus), (node.memory, need.memory))
    return min(has // asks for has, asks in pairs if asks)


def is_contended(others_seen: float | None, now: float) -> bool:
    """Whether other people may take what the run gives up.

    Args:
        others_seen: when their jobs last held something on its nodes (unix time); None: never.
    """
    return others_seen is not None and now - others_seen < _CONTENDED_SECONDS


@dataclass(frozen=True)
class Candidate:
    """A worker that may make room."""

    name: str
    nodes: tuple[str, ...]
    """Names of the nodes that it runs on."""
    need: Need
    """What it holds on each."""


def make_room(room: Room, need: Need, candidates: Sequence[Candidate]) -> tuple[Candidate, ...] | None:
    """Choose whose end makes room for a job: as few as do, on as many nodes as it asks for.

    Args:
        candidates: those that may be chosen, best first.

    Returns:
        The chosen; None where the end of all of them would not do.
    """
    here = defaultdict[str, list[Candidate]](list)
    for one in candidates:
        for name in one.nodes:
            here[name].append(one)
    names = room.keys() if need.num_nodes > 1 else here.keys() & room.keys()
    found = (_make_room_on(room[name], need, here.get(name, ())) for name in names)
    position = {one.name: number for number, one in enumerate(candidates)}
    fitting = sorted(
        (chosen for chosen in found if chosen is not None),
        key=lambda chosen: (len(chosen), [position[one.name] for one in chosen]),
    )
    if len(fitting) < need.num_nodes:
        return None
    return tuple(dict.fromkeys(one for chosen in fitting[: need.num_nodes] for one in chosen))


def _make_room_on(node: Node, need: Need, candidates: Sequence[Candidate]) -> tuple[Candidate, ...] | None:
    """Choose whose end makes room on one node, of those that are there; none where there is room; None where
    there is no way."""
    if need.partitions.isdisjoint(node.partitions):
        return None
    chosen: list[Candidate] = []
    for one in candidates:
        if need.fits(node):
            break
        node = more(node, one.need)
        chosen.append(one)
    if not need.fits(node):
        return None
    return tuple(_without_spare(node, need, chosen))


def _without_spare(node: Node, need: Need, chosen: Sequence[Candidate]) -> Iterable[Candidate]:
    """Leave out those without whose end there is room all the same."""
    kept = list(chosen)
    for one in chosen:
        without = less(node, one.need)
        if need.fits(without):
            node = without
            kept.remove(one)
    return kept


def with_end_of(room: Room, ended: Collection[Candidate]) -> dict[str, Node]:
    """Return what there is once some workers have ended."""
    left = dict(room)
    for one in ended:
        for name in one.nodes:
            if name in left:
                left[name] = more(left[name], one.need)
    return left
