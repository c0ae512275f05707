"""Verification of the files that a task reads; of a policy, once on each node.

All elements of an array read the same policy. The first of them on a node hashes it, which brings it into the
node's page cache, and leaves a note; the others wait for that, and believe the note while the files are those
that it names. A note is a hint: whatever is wrong with it, or with the folder of notes, the files are hashed.
"""

import contextlib
import fcntl
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import xxhash

from pipeline.run.commits import FileEntry, Record, check_digest
from pipeline.run.durable import digest_file, persistently, private_file
from pipeline.run.paths import RunPaths
from stages.logs import log

_SLOWEST = 200e6
"""Bytes per second below which one process no longer waits for another's reading."""
_PATIENCE = 10.0
"""Seconds that one waits in any case."""
_POLLS = (0.01, 1.0)
"""Bounds in seconds of the time between two looks, which is 2 % of the time waited."""
_LIFETIME = 24 * 3600.0
"""Age in seconds at which notes are removed."""
_SWEPT, _SWEEP_SECONDS = "swept", 3600.0
"""File that was written when old notes were last looked for, and the seconds until they are again: many runs
leave thousands of notes a day, and to look at each of them takes longer than to hash a small policy."""


def verify_files(paths: RunPaths, record: Record, entries: Sequence[FileEntry]) -> None:
    """Hash files of a commit. Raises CorruptData naming the first that is not what was committed."""
    for entry in entries:
        check_digest(record, entry, *digest_file(paths.root / entry.path))


def verify_once(paths: RunPaths, record: Record, entries: Sequence[FileEntry]) -> None:
    """Hash files of one folder of a commit, unless a task of this node has, and they are as they were then.

    Raises:
        CorruptData: naming the first that is not what was committed.
    """
    folder = _folder_of_notes()
    if folder is None:
        return verify_files(paths, record, entries)
    run = xxhash.xxh3_64_hexdigest(os.fsencode(paths.root.resolve()))
    note, seen = folder / f"{run}.{entries[0].folder.replace('/', '-')}", _description(paths, entries)
    if _is_noted(note, seen):
        return None
    patience = _PATIENCE + sum(entry.bytes for entry in entries) / _SLOWEST
    with _lock(note, patience, entries[0].folder) as is_locked:
        if is_locked and _is_noted(note, seen):
            return None
        verify_files(paths, record, entries)
        if is_locked and _description(paths, entries) == seen:
            with contextlib.suppress(OSError):
                _write(note, seen)
                _remove_old(folder)


def _description(paths: RunPaths, entries: Sequence[FileEntry]) -> bytes:
    """Return a note's text: which files had which hashes, all that shows a later change, and a checksum."""
    files = []
    for entry in entries:
        path = paths.root / entry.path
        status = persistently(path, path.stat)
        identity = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        files.append([str(path), *identity, entry.xxh3_128])
    text = json.dumps(files)
    return f"{text}\n{xxhash.xxh3_128_hexdigest(text.encode())}\n".encode()


def _folder_of_notes() -> Path | None:
    """Return this user's folder of notes on this node, made when it is missing; None where every
    candidate is writable by others.

    Its name has the id of the node's present boot: the temporary folder may be shared with other nodes, and
    numbers of devices and files may mean others after a boot.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        folder = Path(tempfile.gettempdir()) / f"slurm-ppo-verified-{os.geteuid()}.{boot}"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder if _is_own(folder.lstat(), stat.S_ISDIR, 0o077) else None
    except OSError:
        return None


def _is_own(status: os.stat_result, is_kind: Callable[[int], bool], forbidden: int) -> bool:
    """Whether it is of the right kind, this user's, and without any of the ``forbidden`` permissions."""
    return is_kind(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & forbidden


def _is_noted(note: Path, seen: bytes) -> bool:
    """Whether there is a note that says exactly this, and that no other user can have written."""
    try:
        with os.fdopen(os.open(note, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            return _is_own(os.fstat(file.fileno()), stat.S_ISREG, 0o022) and file.read() == seen
    except OSError:
        return False


def _write(note: Path, seen: bytes) -> None:
    folder = os.open(note.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with private_file(folder, note.name) as (private, file):
            os.fchmod(file.fileno(), 0o600)
            file.write(seen)
            file.flush()
            os.replace(private, note.name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def _lock(note: Path, patience: float, what: str) -> Iterator[bool]:
    """Hold a note's lock, which ends with the process that holds it. Yields whether it could be had."""
    try:
        descriptor = os.open(f"{note}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:
        yield False
        return
    try:
        yield _wait(descriptor, patience, what)
    finally:
        os.close(descriptor)


def _wait(descriptor: int, patience: float, what: str) -> bool:
    """Wait for a lock, at most ``patience`` seconds. Returns whether it was got."""
    start, is_told = time.monotonic(), False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            waited = time.monotonic() - start
        except OSError:  # a filesystem without locks
            return False
        if waited > patience:
            log.warning(
                f"another task of this node still verifies {what} after {waited:.0f} s: reading it too"
            )
            return False
        if not is_told:
            log.info(f"another task of this node verifies {what}: waiting, at most {patience:.0f} s")
            is_told = True
        time.sleep(min(max(_POLLS[0], waited / 50), _POLLS[1]))


def _remove_old(folder: Path) -> None:
    """Remove what was not written for a day, once in an hour: notes, their locks, and folders of earlier
    boots.

    A lock may be held: then two tasks read the same.
    """
    now, swept = time.time(), folder / _SWEPT
    if _written(swept) > now - _SWEEP_SECONDS:
        return
    swept.touch()
    for path in (*folder.iterdir(), *folder.parent.glob(f"{folder.name.partition('.')[0]}.*")):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.geteuid() and status.st_mtime < now - _LIFETIME:
                shutil.rmtree(path) if stat.S_ISDIR(status.st_mode) else path.unlink()


def _written(path: Path) -> float:
    """Return the unix time at which a file was last written; 0 if there is none."""
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0
