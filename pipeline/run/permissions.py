"""Whether this user may write all that going on with a run writes: asked before anything is changed."""

import errno
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from pipeline.run.identity import RunError
from pipeline.run.owner import owner_by_id
from pipeline.run.paths import OWN_NAMES, RunPaths

_WRITTEN = OWN_NAMES - {"superseded", "wandb", "cache"}
"""Names of a run's own folders, without what was moved aside and what people see: nothing stops for these."""
_SHARED_LOGS = ("guard/guard.log", "passes/passes.log")
_DEEP = ("slurm", "logs", "iterations")
"""Folders whose own folders are written into."""


def check_may_write(paths: RunPaths) -> None:
    """Check that this user may write what a pass writes, before one fails half-way. Raises RunError; OSError
    where the filesystem takes nothing."""
    found = next((path for path in written(paths) if not os.access(path, os.W_OK)), None)
    if found is None:
        return
    if os.statvfs(found).f_flag & os.ST_RDONLY:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(found))
    status = found.stat()
    owner, me = owner_by_id(status.st_uid).user, owner_by_id(os.getuid()).user
    whose = "yours" if owner == me else f"{owner}'s"
    raise RunError(
        f"{me} may not write {found} ({whose}, mode {status.st_mode & 0o7777:o}); let {owner} type: "
        f"chmod -R g+rwX {shlex.quote(str(paths.root))}"
    )


def written(paths: RunPaths) -> Iterator[Path]:
    """Yield folders in which a pass and its jobs make files, and files that they append to, as far as they
    are there."""
    yield paths.root
    for folder in _folders(paths.root):
        if folder.name in _WRITTEN:
            yield folder
            yield from _newest(folder) if folder.name in _DEEP else ()
    logs = (paths.log_root / name for name in _SHARED_LOGS)
    appended = (paths.events, paths.metrics, paths.spans, paths.evaluations, paths.slurm_log, *logs)
    yield from (path for path in appended if path.exists())


def _newest(folder: Path) -> Iterator[Path]:
    """Yield the folders in a folder; of those of iterations the newest, which is written to now."""
    inner = _folders(folder)
    numbered = [one for one in inner if one.name[0].isdecimal()]
    yield from (one for one in inner if one not in numbered)
    for newest in numbered[-1:]:
        yield newest
        yield from _folders(newest)


def _folders(folder: Path) -> list[Path]:
    with os.scandir(folder) as found:
        return sorted(Path(one.path) for one in found if one.is_dir(follow_symlinks=False))
