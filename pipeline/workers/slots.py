"""Slots: how many tasks of one machine go on at once, of all stages together.

Each is a byte of one file, locked by the worker that holds it. The kernel gives a lock back when its process
ends, however it ends, and no process that was forked from it has it.
"""

import contextlib
import errno
import fcntl
import os
from pathlib import Path

_WANTED, _WIDTH = 1 << 20, 1 << 10
"""First byte of the marks of those who wait for a slot, and number of marks for each urgency."""
_TAKEN = (errno.EACCES, errno.EAGAIN)


class Slots:
    """The slots of a run, as one worker sees them: it holds one of them, or none."""

    def __init__(self, file: Path, number: int) -> None:
        """
        Args:
            file: on a filesystem of this machine; one for all of a run's workers.
            number: of slots.
        """
        self._file, self._number = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), number

    def take(self, urgency: int) -> bool:
        """Take a slot. False where none is free, or someone more urgent waits for one: try again.

        Args:
            urgency: who has a lower number gets a slot first.
        """
        self._unlock(_WANTED)
        if self._is_free(_WANTED, urgency * _WIDTH) and self._lock_one_of(0, self._number):
            return True
        self._lock_one_of(_WANTED + urgency * _WIDTH, _WIDTH)
        return False

    def give_back(self) -> None:
        """Hold no slot, and wait for none."""
        self._unlock(0)

    def _lock_one_of(self, first: int, number: int) -> bool:
        return any(self._lock(fcntl.LOCK_EX, byte, 1) for byte in range(first, first + number))

    def _is_free(self, first: int, number: int) -> bool:
        """Whether no other process has a lock there; 0 bytes are free."""
        if number and (is_free := self._lock(fcntl.LOCK_SH, first, number)):
            self._unlock(first, number)
        return not number or is_free

    def _lock(self, kind: int, first: int, number: int) -> bool:
        try:
            fcntl.lockf(self._file, kind | fcntl.LOCK_NB, number, first)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            return False
        return True

    def _unlock(self, first: int, number: int = 0) -> None:
        """Give locks back; 0 bytes: all from there on."""
        with contextlib.suppress(OSError):
            fcntl.lockf(self._file, fcntl.LOCK_UN, number, first)
