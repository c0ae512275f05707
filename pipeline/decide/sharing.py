"""How many workers of each job kind a run is to have where not all of them find a place. Pure.

Two ways are compared by the seconds that an iteration takes. Kinds may **share** the places: each has some
of its own, where its workers stay, and takes the longer the fewer these are. Or they **take turns**: each has
all places in its turn, and pays for a start-up in every iteration. Where tasks are short beside a start-up
sharing wins, where they are long taking turns does. Either way no kind has workers that an iteration would
hardly be longer without.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

from pipeline.decide.places import Need, Room, count, place_all

_WORTH = 0.02
"""Share of an iteration that further workers of a kind are to save: what saves less only holds places."""
_WORTH_EARLY = 0.03
"""Share of an iteration that the early starts of all its kinds are to save together: each of them comes late
in its turn."""


@dataclass(frozen=True)
class Work:
    """Work of one job kind in an iteration."""

    need: Need
    wanted: int
    """Most workers that have something to do at once."""
    tasks: int
    """Its tasks in an iteration."""
    seconds: float | None
    """Seconds that these take one after the other; None if unknown."""
    coming_back: float | None
    """Seconds until a worker of it is there that is not: in the queue, and to start. None if unknown."""
    ahead: int = 0
    """Further iterations that other kinds may be at meanwhile (rollout.staleness)."""


def targets(works: Mapping[str, Work], room: Room, slots: float = math.inf) -> dict[str, int]:
    """Return the most workers that each job kind is to have at once.

    Args:
        works: by job kind.
        room: what nodes have for this run when none of its jobs is there; empty where they are not known.
        slots: elements that the queue takes of all these kinds together, at least one.
    """
    alone = {kind: int(min(slots, _alone(work, room))) for kind, work in works.items()}
    if _fit(works, alone, room, slots):
        return alone
    shared = _shared(works, alone, room, slots)
    in_turn = _seconds(works, alone) + _starts(works) / _at_once(works)  # which a turn may be of
    if shared is None or _period(works, shared) > in_turn:
        return alone
    return shared


def _alone(work: Work, room: Room) -> int:
    """Return how many workers of a kind have places alone. Where that is none, all: the
    nodes may not say all, and a job that never fits is for Slurm to refuse."""
    return count(room, work.need, work.wanted) or work.wanted if room else work.wanted


def _fit(works: Mapping[str, Work], numbers: Mapping[str, int], room: Room, slots: float) -> bool:
    """Whether so many workers of each kind may be there at once, by the queue and by nodes that are known."""
    if sum(numbers.values()) > slots:
        return False
    return not room or fits_all({kind: work.need for kind, work in works.items()}, numbers, room)


def fits_all(needs: Mapping[str, Need], numbers: Mapping[str, int], room: Room) -> bool:
    """Whether so many workers of each kind have places at once, those that ask for most first.

    Args:
        needs: what one of each kind asks for.
        numbers: of each kind; of those that are not named there are none.
    """
    left = room
    kinds = sorted(numbers, key=lambda kind: _size(needs[kind]), reverse=True)
    for need, alike in groupby(kinds, key=lambda kind: needs[kind]):
        found = place_all(left, need, sum(numbers[kind] for kind in alike))
        if found is None:
            return False
        left = found
    return True


def _size(need: Need) -> tuple[int, int, int, int]:
    return need.num_nodes, need.gpus, need.cpus, need.memory


def _shared(
    works: Mapping[str, Work], most: Mapping[str, int], room: Room, slots: float
) -> dict[str, int] | None:
    """Divide the places so that an iteration takes least; None where not every kind has one, or it is not
    known how long its tasks take. Each further place goes to the kind that gains most by it; with staleness
    to the one that takes longest, as the others work meanwhile."""
    numbers = dict.fromkeys(works, 1)
    if any(work.seconds is None for work in works.values()) or not _fit(works, numbers, room, slots):
        return None
    growing = [kind for kind in works if most[kind] > 1]
    while growing:
        value = _gain if _at_once(works) == 1 else _passage
        best = max(growing, key=lambda kind: value(works[kind], numbers[kind]))
        tried = numbers | {best: numbers[best] + 1}
        if not _fit(works, tried, room, slots):
            growing.remove(best)
            continue
        numbers = tried
        growing = [kind for kind in growing if numbers[kind] < most[kind]]
    return numbers


def _gain(work: Work, number: int) -> float:
    """Return what another worker saves of a stage, as if its tasks could be divided: of those that save
    nothing alone several may save much."""
    return (work.seconds or 0.0) / (number * (number + 1))


def _passage(work: Work, number: int) -> float:
    """Return the seconds of a stage in an iteration, with so many workers: each has one task at a time."""
    return round_of(work) * math.ceil(work.tasks / number)


def round_of(work: Work) -> float:
    """Return the seconds of one task of a kind; 0 if unknown."""
    return (work.seconds or 0.0) / work.tasks


def _seconds(works: Mapping[str, Work], numbers: Mapping[str, int]) -> float:
    return sum(_passage(work, numbers[kind]) for kind, work in works.items())


def _at_once(works: Mapping[str, Work]) -> int:
    """Return the number of iterations that kinds may be at, each at another."""
    return 1 + max((work.ahead for work in works.values()), default=0)


def _period(works: Mapping[str, Work], numbers: Mapping[str, int]) -> float:
    """Return the seconds from one policy to the next where all kinds have workers at once."""
    longest = max(_passage(work, numbers[kind]) for kind, work in works.items())
    return max(longest, _seconds(works, numbers) / _at_once(works))


def _starts(works: Mapping[str, Work]) -> float:
    """Return the seconds of an iteration in which kinds that take turns start up."""
    costs = [work.coming_back for work in works.values()]
    return math.inf if None in costs else sum(cost or 0.0 for cost in costs)


def groups(works: Mapping[str, Work], room: Room) -> list[dict[str, Work]]:
    """Divide job kinds into those that may need the same places: their partitions have nodes in common."""
    found: list[tuple[set[str], dict[str, Work]]] = []
    for kind, work in works.items():
        nodes = {name for name, node in room.items() if work.need.fits(node)} or {f"of {kind}"}
        mine = {kind: work}
        for other, theirs in [one for one in found if one[0] & nodes]:
            found.remove((other, theirs))
            nodes, mine = nodes | other, theirs | mine
        found.append((nodes, mine))
    return [works for _, works in found]


def targets_by_group(works: Mapping[str, Work], room: Room, slots: float = math.inf) -> dict[str, int]:
    """Return :func:`targets` for each group of kinds that may need the same places: of all kinds together
    where the queue does not take the workers of all groups."""
    found: dict[str, int] = {}
    for group in groups(works, room):
        found |= targets(group, room)
    return found if sum(found.values()) <= slots else targets(works, room, slots)


def is_worthwhile(seconds: float | None, works: Mapping[str, Work], most: Mapping[str, int]) -> bool:
    """Whether seconds that a stage takes less matter beside an iteration; where anything is unknown they do.

    Args:
        works: of the kinds that an iteration is a chain of.
        most: workers of each kind.
    """
    is_unknown = seconds is None or any(work.seconds is None for work in works.values())
    return is_unknown or (seconds or 0.0) * len(works) >= _WORTH_EARLY * _seconds(works, most)


def worthwhile(works: Mapping[str, Work], most: Mapping[str, int]) -> dict[str, int]:
    """Return the least numbers of workers with which no stage takes much longer than with ``most``: by a
    fiftieth of an iteration. Where it is not known what takes how long, that is ``most``.

    Args:
        works: of the kinds that an iteration is a chain of.
    """
    if any(work.seconds is None for work in works.values()):
        return dict(most)
    allowed = _WORTH * _seconds(works, most)
    return {**most, **{kind: _least(work, most[kind], allowed) for kind, work in works.items()}}


def _least(work: Work, most: int, allowed: float) -> int:
    """Return the least number of workers whose rounds take no longer than those of ``most`` and what is
    allowed."""
    seconds = round_of(work)
    if not seconds:
        return most
    rounds = int((_passage(work, most) + allowed) / seconds)
    return min(most, math.ceil(work.tasks / max(1, rounds)))
