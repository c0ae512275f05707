"""Model directories that are there whole or not at all: built beside their place, and renamed."""

import errno
import fcntl
import glob
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.process import interruptible
from stages.context import UserError

_MAKING = ".making-"
_SETTLED_SECONDS = 60.0
"""Age from which on a folder to build in that is not locked counts as left behind."""
_INTERRUPTED = 130
_TAKEN = "{} exists; give a new directory"


def check_is_free(directory: Path) -> None:
    """Raise UserError for a directory that exists."""
    if os.path.lexists(directory):
        raise UserError(_TAKEN.format(directory))


def exit_code_of(directory: Path, make: Callable[[], Iterable[str]], *others: type[Exception]) -> int:
    """Carry out a command that makes a directory, and print what it returns. Returns the exit code: 2 where
    that cannot be done.

    Args:
        others: errors that are users' mistakes, besides UserError and OSError.
    """
    mistakes: tuple[type[Exception], ...] = (UserError, *others)
    try:
        with interruptible():
            said = list(make())
    except mistakes as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        where, why = error.filename or directory, error.strerror or error
        print(f"error: {where}: {why}; fix that, and run it again", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing is left", file=sys.stderr)
        return _INTERRUPTED
    print("\n".join(said))
    return 0


@contextmanager
def published(directory: Path) -> Iterator[Path]:
    """Give a folder to build in, which becomes the directory if the body ends well, and else is removed."""
    from stages.models.merging import settle  # with torch

    with scratch_beside(directory) as building:
        yield building
        settle(path for path in building.iterdir() if path.is_file())
        publish(building, directory)


@contextmanager
def scratch_beside(directory: Path) -> Iterator[Path]:
    """Give a folder beside a directory that is to be made, and remove it in the end. One that a killed call
    has left is removed by a later call."""
    remove_abandoned_beside(directory)
    building = directory.with_name(f".{directory.name}{_MAKING}{uuid.uuid4().hex[:8]}")
    building.mkdir()
    lock = os.open(building, os.O_RDONLY)
    try:
        with suppress(OSError):  # this filesystem has no locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield building
    finally:
        os.close(lock)
        shutil.rmtree(building, ignore_errors=True)


def publish(building: Path, directory: Path) -> None:
    """Put a folder that is whole in a directory's place. Raises UserError where another call was faster."""
    try:
        building.rename(directory)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):  # another call has been faster
            raise UserError(_TAKEN.format(directory)) from None
        raise


def remove_abandoned_beside(directory: Path) -> None:
    """Remove what builders of this directory that were killed on this machine have left."""
    for left in directory.parent.glob(f".{glob.escape(directory.name)}{_MAKING}*"):
        with suppress(OSError):  # another's, in use, or gone
            if time.time() - left.stat().st_mtime < _SETTLED_SECONDS:
                continue
            lock = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
            finally:
                os.close(lock)
