"""Folders that checks write into: hidden, one for each check, and gone afterwards."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = ".slurm-ppo-doctor-"


@contextlib.contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """Make a new folder in ``folder`` for the block. Raises OSError where nothing can be made there."""
    made = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getppid()}-", dir=folder))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def remove_leftovers(folder: Path, pid: int) -> None:
    """Remove the folders of checks that process ``pid`` had to kill."""
    for left in folder.glob(f"{PREFIX}{pid}-*"):
        shutil.rmtree(left, ignore_errors=True)


def filesystem_of(path: Path) -> tuple[str, str]:
    """Return where the folder's filesystem is mounted, and its type."""
    resolved, best = os.path.realpath(path), ("/", "unknown")
    for line in Path("/proc/mounts").read_text().splitlines():
        mount, kind = line.split()[1:3]
        mount = mount.encode().decode("unicode_escape")  # blanks are written as \040
        is_above = resolved == mount or resolved.startswith(mount.rstrip("/") + "/")
        if is_above and len(mount) >= len(best[0]):
            best = (mount, kind)
    return best
