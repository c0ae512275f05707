"""Packing logs: those of an iteration, and its batch scripts, become an archive with its row, if it has many
shards.

Its shards stay files meanwhile. What a worker prints between tasks is packed once its job has ended, as later
archives of the same iteration. Few logs stay as they are: files are handier, and it is many that count.
"""

import contextlib
import itertools
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from pipeline.config.job_kinds import DRIVERS
from pipeline.run import journal
from pipeline.run.archiving import (
    Original,
    link_archive,
    originals_in,
    remove_empty,
    remove_held,
    remove_private,
)
from pipeline.run.commits import is_of_the_past
from pipeline.run.directory import Run
from pipeline.run.durable import naming, opened_folder
from pipeline.run.inside import is_inside
from pipeline.run.packed import BadArchive, log_archives, next_log_archive
from pipeline.run.paths import RunPaths
from pipeline.run.plan import policy_maker
from pipeline.run.tasks import Stage, task_of
from slurm.sharedfiles import names_in

MANY = 64
"""Number of sharded tasks of an iteration from which on its logs are packed."""
_FEWEST = 16
"""Least number of logs that are worth an archive."""
_MOST = 2000
"""Most logs of an iteration that are packed by one call, as whoever calls holds the run's lease."""
_RECENT = 20
"""Number of newest iterations that are looked at: a pass costs the same however long the run is."""


def pack_logs(run: Run, newest: int, in_use: Callable[[], Collection[str]] = tuple) -> Iterator[str]:
    """Pack the logs of the newest iterations up to ``newest``, which has a row, but for their updates'.

    Costs one listing where all is packed. Yields a line for each iteration whose logs cannot be packed.

    Args:
        in_use: lookup of the files, by paths relative to the run, that stay as they are: a job may still
            write them. Called only where something is to be packed.

    Raises:
        OSError: the disk is full, for example. All that was not packed is still there.
    """
    sharded = [kind for kind in run.plan.job_kinds if task_of(1, kind).stage.is_sharded]
    if len(sharded) * run.plan.num_shards < MANY:
        return
    kinds = (*sharded, Stage.EVALUATE, *sorted(DRIVERS))  # an update writes on, behind its policy
    listed = names_in(run.paths.log_root)
    for iteration in range(max(run.plan.start, newest - _RECENT) + 1, newest + 1):
        left = [name for kind in kinds if (name := f"{iteration:05d}-{kind}") in listed]
        if left:
            try:
                _pack(run.paths, iteration, [run.paths.log_root / name for name in left], in_use())
            except BadArchive as error:
                yield f"the logs of iteration {iteration} are not packed: {error}"


def _pack(paths: RunPaths, iteration: int, folders: list[Path], in_use: Collection[str]) -> None:
    """Pack the logs in some folders, if they are many. Idempotent: a log that was packed and is still there,
    as its driver was killed, goes first.

    Raises:
        BadArchive: an archive that is there, or was just written, cannot be read.
    """
    target = next_log_archive(paths, iteration)
    if not is_inside(paths.root, target):
        raise BadArchive(f"{target.parent} is a link, and nothing outside of the run is touched")
    attempts = [path / name for path in folders for name in sorted(names_in(path))]
    with contextlib.ExitStack() as opened:
        found = originals_in(paths, [*attempts, paths.submissions(iteration)], opened)
        closed = (o for o in found if o.path not in in_use and _is_for_people(o))
        originals = list(itertools.islice(closed, _MOST))
        if len(originals) < _FEWEST:
            return
        history: int = opened.enter_context(opened_folder(target.parent))
        for archive in log_archives(paths, iteration):
            remove_held(history, archive.name, originals)
        left = [original for original in originals if _is_there(original)]
        if len(left) >= _FEWEST:
            _pack_into(target, history, left)
        if not is_of_the_past(paths, policy_maker(iteration), history):
            remove_empty([*attempts, *folders])
            journal.event(paths.events, "logs_packed", iteration=iteration, files=len(originals))


def _pack_into(target: Path, history: int, logs: list[Original]) -> None:
    """Write an archive, unless another driver does, and remove what it holds."""
    remove_private(history, target.name)
    with naming(target):
        link_archive(history, target.name, logs)
    if target.name in os.listdir(history):
        remove_held(history, target.name, logs)


def _is_for_people(original: Original) -> bool:
    """Whether it is a log, or a batch script, of which Slurm has its own copy; the rest of a submission is
    read by every pass."""
    return original.path.startswith("logs/") or original.name.endswith(".sh")


def _is_there(original: Original) -> bool:
    try:
        os.stat(original.name, dir_fd=original.folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
