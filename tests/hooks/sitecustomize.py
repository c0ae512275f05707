"""Kills a process of a run at a chosen point of the commit protocol. Loaded through PYTHONPATH by test_kill.

KILL_AT is one of
    before-link:SUFFIX   the record of path SUFFIX is about to be published: data durable, task not done
    after-link:SUFFIX    it has just been published
    before-fsync:SUFFIX  a file whose path ends in or contains SUFFIX is written but not flushed
    driver:N             the driver's N-th fsync
Each fires once per run: KILL_MARKER is the file that remembers.
"""

import os
import signal
from pathlib import Path

_kind, _, _where = os.environ.get("KILL_AT", "").partition(":")
_marker = Path(os.environ.get("KILL_MARKER", "/nonexistent"))
_link, _fsync = os.link, os.fsync
_driver = os.getpid()
_count = 0


def _die() -> None:
    if not _marker.exists():
        _marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def link(source, target, **options):
    matches = _kind.endswith("link") and str(target).endswith(_where)
    if matches and _kind == "before-link":
        _die()
    _link(source, target, **options)
    if matches and _kind == "after-link":
        _die()


def fsync(descriptor):
    global _count
    if _kind == "before-fsync" and _where in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
        _die()
    if _kind == "driver" and os.getpid() == _driver:
        _count += 1
        if _count == int(_where):
            _die()
    _fsync(descriptor)


if _kind:
    os.link, os.fsync = link, fsync
