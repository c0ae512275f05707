"""Kills a process of a run at a chosen point of the commit protocol. Interpreters load it through PYTHONPATH;
forks of tests/support/warm.py do where KILL_AT is in their environment.

KILL_AT is one of
    before-link:SUFFIX   the record of path SUFFIX is about to be published: data durable, task not done
    after-link:SUFFIX    it has just been published
    before-fsync:SUFFIX  a file whose path ends in or contains SUFFIX is written but not flushed
    driver:N             the driver's N-th fsync
Each fires once per run: KILL_MARKER is the file that remembers.

With STALE_BELOW=FOLDER, for test_sharedfiles, of the files below it that a process opens the first and every
third after it fails once as if its handle were stale; STALE_TOLD is the file that lists them.

With DISK_FULL, for test_ways_on, jobs can write no new file as long as the file is there that it names; with
PLAIN_VLLM the engine of vLLM is tests/support/plain_vllm.py.

With NODE_IS_HOST, for test_worker_faults, each node of a practice cluster is a host of its own to its
processes: they do not see by process ids that one of another node has ended.
"""

import errno
import importlib.util
import io
import os
import signal
import sys
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
    folder = options.get("dst_dir_fd")
    path = str(target) if folder is None else f"{Path(f'/proc/self/fd/{folder}').readlink()}/{target}"
    matches = _kind.endswith("link") and path.endswith(_where)
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


_stale_below = os.environ.get("STALE_BELOW")
_open, _io_open = os.open, io.open
_was_stale = set()


def _stale_at_first(path, folder=None):
    """Raise ESTALE on the first opening of some files."""
    if folder is not None:
        path = f"{Path(f'/proc/self/fd/{folder}').readlink()}/{path}"
    path = os.path.abspath(os.fspath(path))  # noqa: PTH100  as quick as can be
    if not path.startswith(f"{_stale_below}/") or (os.getpid(), path) in _was_stale:
        return
    _was_stale.add((os.getpid(), path))
    if len(_was_stale) % 3 == 1:
        told = _open(os.environ["STALE_TOLD"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(told, path.encode() + b"\n")
        os.close(told)
        raise OSError(errno.ESTALE, "Stale file handle", path)


def stale_open(path, flags, mode=0o777, *, dir_fd=None):
    if not flags & (os.O_WRONLY | os.O_CREAT):
        _stale_at_first(path, dir_fd)
    return _open(path, flags, mode, dir_fd=dir_fd)


def stale_io_open(file, mode="r", *arguments, **options):
    if mode in ("r", "rb") and not isinstance(file, int):
        _stale_at_first(file)
    return _io_open(file, mode, *arguments, **options)


if _stale_below:
    os.open, io.open = stale_open, stale_io_open


if "NODE_IS_HOST" in os.environ and "SLURMD_NODENAME" in os.environ:
    _host = os.uname()
    _node = os.uname_result((_host.sysname, os.environ["SLURMD_NODENAME"], *_host[2:]))
    os.uname = lambda: _node


def fsync_if_there_is_room(descriptor):
    path = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
    if os.path.exists(os.environ["DISK_FULL"]) and not path.endswith(".jsonl"):  # noqa: PTH110
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
    _fsync(descriptor)


if "DISK_FULL" in os.environ and "SLURM_JOB_ID" in os.environ:
    os.fsync = fsync_if_there_is_room


class _Finder:
    @staticmethod
    def find_spec(name, path, target=None):
        if name == "stages.engines.vllm":
            file = Path(__file__).parents[1] / "plain_vllm.py"
            return importlib.util.spec_from_file_location(name, file)
        return None


if "PLAIN_VLLM" in os.environ:
    sys.meta_path.insert(0, _Finder)
