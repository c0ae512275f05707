"""Ages of a run's files, where a site removes what was not used for long (storage.purge_days)."""

import contextlib
import os
import shlex
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.run.commits import CorruptData, kept_outputs, read_record
from pipeline.run.directory import Run
from pipeline.run.kept import identifying
from pipeline.run.plan import policy_maker, state_of
from pipeline.run.tasks import PREPARE

_DAY = 86_400.0
_SOON = 0.8
"""Part of the days without use after which a file is reported."""


@dataclass(frozen=True)
class Ages:
    """Files that were not used for long."""

    count: int
    """Number of those that are about to be removed, or may be at any time."""
    oldest: Path | None
    """The one that was not used for the longest time; None where there is no file."""
    days: float
    """Days since that was used."""


def ages_of(files: Iterable[Path], purge_days: float, now: float) -> Ages:
    """Return how many files were not used for most of the days after which they are removed, and the oldest.
    What is gone is left out.

    Args:
        now: unix time.
    """
    count, oldest, longest = 0, None, -1.0
    for path in files:
        with contextlib.suppress(OSError):
            status = path.lstat()
            days = max(0.0, now - max(status.st_mtime, status.st_atime)) / _DAY
            count += days >= _SOON * purge_days
            if days > longest:
                oldest, longest = path, days
    return Ages(count, oldest, max(longest, 0.0))


def needed_files(run: Run, updated: int) -> Iterator[Path]:
    """Yield the files without which the run cannot go on, or only after it has made them again.

    Args:
        updated: newest iteration whose update is committed.
    """
    yield from identifying(run.paths)
    newest = max(updated, run.plan.start)
    for task in dict.fromkeys((PREPARE, policy_maker(newest), state_of(newest))):
        with contextlib.suppress(CorruptData, OSError):
            if record := read_record(run.paths, task):
                yield run.paths.task(task).record
                yield from (run.paths.root / entry.path for entry in kept_outputs(run.paths, record))


def files_below(root: Path) -> Iterator[Path]:
    """Yield every file of a run directory."""
    for folder, _, names in os.walk(root):
        yield from (Path(folder, name) for name in names)


def aging(run: Run, updated: int) -> list[str]:
    """Return in words which files that the run needs are about to be removed; nothing where none are, or
    where storage.purge_days is not set."""
    days = run.config.storage.purge_days
    if days is None:
        return []
    found = ages_of(needed_files(run, updated), days, time.time())
    return [in_words(found, run, days, "that the run needs ")] if found.count else []


def in_words(found: Ages, run: Run, purge_days: int, which: str = "") -> str:
    """Return what is about to be removed, in words."""
    assert found.oldest is not None
    files = "1 file " if found.count == 1 else f"{found.count} files "
    oldest = f"{run.paths.relative(found.oldest)}: {found.days:.0f} days"
    return (
        f"{files}{which}may soon be removed, as unused (the oldest, {oldest}; storage.purge_days="
        f"{purge_days}); to keep the run, copy it to where nothing is: cp -a "
        f"{shlex.quote(str(run.paths.root))} ARCHIVE"
    )
