"""Whether the run that a directory's identity names is still where it was. Imports little: lists ask too."""

from pathlib import Path

from pipeline.run.paths import RunPaths
from slurm.sharedfiles import from_json, read_plainly


def find_original(known: str, here: Path, run_id: str) -> Path | None:
    """Return the directory of the run that the one in ``here`` is a copy of; None where it is the run itself,
    or was moved (:mod:`pipeline.run.place`).

    Args:
        known: directory that the run's identity names; empty: it names none.

    Raises:
        OSError: whether the run is there still cannot be seen now.
    """
    if not known or known == str(here):
        return None
    there = Path(known)
    try:
        return there if _holds(there, run_id) and not is_one(there, here) else None
    except PermissionError:  # it is there, and another user's: a colleague's copy
        return there
    except (FileNotFoundError, NotADirectoryError):
        return None


def _holds(root: Path, run_id: str) -> bool:
    """Whether a run of this id is there, whatever else of it is spoilt. Raises OSError where nothing is."""
    root.stat()
    for path in (RunPaths(root).run_json, RunPaths(root).run_copy):
        try:
            content = from_json(read_plainly(path))
        except PermissionError:
            raise
        except (OSError, ValueError):
            continue
        if isinstance(content, dict):
            return content.get("id") == run_id
    return False


def is_one(first: Path, second: Path) -> bool:
    """Whether two paths lead to one directory, perhaps by two mounts of a filesystem: its numbers of inodes
    are the same by each, and those of a copy are not. Raises OSError where one of them is not there."""
    if first.samefile(second):
        return True
    pairs = ((first, second), (RunPaths(first).run_json, RunPaths(second).run_json))
    try:
        return all(one.stat().st_ino == other.stat().st_ino for one, other in pairs)
    except FileNotFoundError:
        return False
