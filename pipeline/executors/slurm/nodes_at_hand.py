"""Nodes of a run's partitions: asked now and then, and kept between passes in ``RUN/slurm/nodes.json``."""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.conversion import converted, plain
from pipeline.orchestrate.places import Need
from pipeline.run.durable import replace_durably
from pipeline.run.paths import RunPaths
from slurm.commands import NotStarted, SlurmError, SlurmMissing
from slurm.nodes import Node, read_nodes
from slurm.sealing import sealed, unsealed
from slurm.sharedfiles import make_folder, read_newest

_KEPT_SECONDS = 600.0
"""Seconds for which an answer of sinfo counts: nodes come and go, but why jobs wait is seen anyway."""
_AGAIN_SECONDS = 30.0
"""Seconds until sinfo is asked again where it gave no answer."""


@dataclass(frozen=True)
class _Kept:
    asked: float
    """Unix time."""
    partitions: tuple[str, ...]
    nodes: tuple[Node, ...]


def nodes_of(paths: RunPaths, needs: Iterable[Need], now: float) -> tuple[Node, ...]:
    """Return the nodes that jobs may run on: where sinfo does not answer the last ones, or none.

    Args:
        now: unix time.
    """
    partitions = tuple(sorted({name for need in needs for name in need.partitions}))
    kept = _read(paths)
    known = kept if kept is not None and kept.partitions == partitions else None
    if known is not None and 0 <= now - known.asked < _KEPT_SECONDS:
        return known.nodes
    asked = now
    try:
        nodes = tuple(read_nodes(partitions))
    except NotStarted:  # this pass has no time for it; the next one asks
        return known.nodes if known else ()
    except (SlurmError, SlurmMissing, ValueError):  # an answer that is not understood is none
        nodes, asked = known.nodes if known else (), now - _KEPT_SECONDS + _AGAIN_SECONDS
    path = _file(paths)
    with contextlib.suppress(OSError):  # asked again by the next pass
        make_folder(path.parent)
        replace_durably(path, sealed(plain(_Kept(asked, partitions, nodes))))
    return nodes


def _read(paths: RunPaths) -> _Kept | None:
    try:
        return converted(_Kept, unsealed(read_newest(_file(paths))))
    except (OSError, ValueError, TypeError):
        return None


def _file(paths: RunPaths) -> Path:
    return paths.slurm / "nodes.json"
