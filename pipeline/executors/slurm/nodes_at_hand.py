"""Nodes of a run's partitions, and whether others have jobs there: asked now and then, and kept between
passes in ``RUN/slurm/nodes.json``."""

import contextlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.config.conversion import converted, plain
from pipeline.decide.places import KEPT_SECONDS, Need, is_contended
from pipeline.run.durable import replace_durably
from pipeline.run.paths import RunPaths
from slurm.commands import NotStarted, SlurmError, SlurmMissing
from slurm.nodes import Node, read_nodes
from slurm.query import Element
from slurm.sharedfiles import make_folder, read_newest, sealed, unsealed

_AGAIN_SECONDS = 30.0
"""Seconds until sinfo is asked again where it gave no answer."""


@dataclass(frozen=True)
class _Kept:
    asked: float = -math.inf
    """Unix time."""
    partitions: tuple[str, ...] = ()
    nodes: tuple[Node, ...] = ()
    others_seen: float | None = None
    """Unix time at which other people's jobs last held places there; None: never."""


@dataclass(frozen=True)
class AtHand:
    """What a pass knows of the nodes that jobs of the run may run on."""

    nodes: tuple[Node, ...] = ()
    """None where they are not known."""
    is_contended: bool = False
    """Whether other people use them, too."""


def nodes_of(paths: RunPaths, needs: Iterable[Need], now: float, own: Iterable[Element] = ()) -> AtHand:
    """Return the nodes that jobs may run on: where sinfo does not answer the last ones, or none.

    Args:
        now: unix time.
        own: all jobs of this user that run or wait, not long ago.
    """
    partitions = tuple(sorted({name for need in needs for name in need.partitions}))
    kept = _read(paths)
    known = kept if kept is not None and kept.partitions == partitions else _Kept(partitions=partitions)
    if 0 <= now - known.asked < KEPT_SECONDS:
        return _at_hand(known, now)
    try:
        found = read_nodes(partitions)
        is_used = found.allocated > sum(element.cpus or 0 for element in own)
        known = _Kept(now, partitions, found.nodes, now if is_used else known.others_seen)
    except NotStarted:  # this pass has no time for it; the next one asks
        return _at_hand(known, now)
    except (SlurmError, SlurmMissing, ValueError):  # an answer that is not understood is none
        known = replace(known, asked=now - KEPT_SECONDS + _AGAIN_SECONDS)
    path = _file(paths)
    with contextlib.suppress(OSError):  # asked again by the next pass
        make_folder(path.parent, paths.root)
        replace_durably(path, sealed(plain(known)))
    return _at_hand(known, now)


def _at_hand(known: _Kept, now: float) -> AtHand:
    return AtHand(known.nodes, is_contended(known.others_seen, now))


def _read(paths: RunPaths) -> _Kept | None:
    try:
        return converted(_Kept, unsealed(read_newest(_file(paths))))
    except (OSError, ValueError, TypeError):
        return None


def _file(paths: RunPaths) -> Path:
    return paths.slurm / "nodes.json"
