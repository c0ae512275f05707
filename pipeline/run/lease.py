"""At most one driver advances a run: a numbered lease in ``<run>/locks``.

A driver takes the lease by compare-and-swap: it hard-links the next number, which fails if another was
faster, also over NFS. The highest number holds the lease until it is marked released or its holder is gone:
its process on the same host and in the same container, or, from elsewhere, its heartbeat (the file's
modification time). Numbers never go back, so that a driver that slept through its own expiry notices that it
was replaced. The holder of a lease that cannot be read is unknown; its heartbeat says whether there is one.
"""

import contextlib
import errno
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from pipeline.run.durable import link_once, replace_durably
from slurm.errors import UserError
from slurm.sharedfiles import from_json, make_folder, names_in, persistently, read_newest

HEARTBEAT_SECONDS = 10.0
_PATIENT_SECONDS = 0.2
_TOLD_AFTER_SECONDS = 5.0
_AT_WORK_SECONDS = 600.0
"""Seconds without a sign of its holder for which a lease is still renewed: hashing a large file may take
minutes, but who hangs must not hold it for ever."""
EXPIRY_SECONDS = 120.0
"""Seconds without a heartbeat after which a holder elsewhere is taken to be gone."""


class LeaseHeld(UserError, RuntimeError):
    """Another driver is active on this run directory."""


class LeaseLost(UserError, RuntimeError):
    """This driver was frozen for so long that another took its place."""


_LEASE = re.compile(r"[0-9]{6,15}\.json")


@dataclass(frozen=True)
class LeaseHolder:
    """Process that holds a lease."""

    host: str
    boot_id: str
    pid: int
    process_started: str
    """Start time of the process in clock ticks since boot: tells a reused pid from the holder's."""
    acquired: float
    """Unix time."""
    pid_namespace: str = ""
    """PID namespace: containers have numbers of their own. Empty in leases of versions that did not ask."""

    @staticmethod
    def this_process() -> "LeaseHolder":
        started, now = _start_ticks(os.getpid()), time.time()
        return LeaseHolder(socket.gethostname(), _boot_id(), os.getpid(), started, now, _pid_namespace())

    @property
    def is_visible(self) -> bool:
        """Whether the process can be looked for here: same host, boot and PID namespace."""
        is_here = self.boot_id == _boot_id() and self.host == socket.gethostname()
        return is_here and self.pid_namespace in ("", _pid_namespace())


@dataclass
class Lease:
    """A held lease."""

    path: Path
    holder: LeaseHolder
    _beaten: float = 0.0
    _seen_at: float = field(default_factory=time.monotonic)
    """When its holder last gave a sign (monotonic)."""

    @property
    def number(self) -> int:
        return int(self.path.stem)

    def beat(self) -> None:
        """Renew the heartbeat, which shows that the holder is alive, at most every HEARTBEAT_SECONDS.

        Raises:
            LeaseLost: a higher number exists.
        """
        self._seen_at = time.monotonic()
        if time.monotonic() - self._beaten < HEARTBEAT_SECONDS:
            return
        newest = _newest(self.path.parent)
        if newest is None and self.path.parent.is_dir() and link_once(self.path, _text(self.holder)):
            newest = self.path  # the file was removed, and the next number is free
        if newest != self.path:
            raise LeaseLost(f"{newest} was taken while this driver (pid {self.holder.pid}) stalled")
        persistently(self.path, lambda: os.utime(self.path))
        self._beaten = time.monotonic()

    def renew(self) -> bool:
        """Renew the heartbeat beside the holder, who may be busy for longer than it is good for, unless there
        was no sign of him for long. Returns whether he still holds the lease."""
        with contextlib.suppress(OSError):  # his own next write fails
            if _newest(self.path.parent) != self.path:
                return False
            if time.monotonic() - self._seen_at < _AT_WORK_SECONDS:
                os.utime(self.path)
        return True

    def release(self) -> None:
        """Let the next driver in at once. A lease that was lost is left to its new holder."""
        if _newest(self.path.parent) != self.path:
            return
        replace_durably(self.path, json.dumps(asdict(self.holder) | {"released": time.time()}) + "\n")


@contextlib.contextmanager
def hold(
    folder: Path, patience: float = 0.0, note: Callable[[str], None] = lambda _: None
) -> Iterator[Lease]:
    """Hold the lease for the duration of the block.

    Args:
        patience: seconds to wait for a holder whose block is short.
        note: called, once a wait is no longer short, with what is waited for.

    Raises:
        LeaseHeld: naming the holder's host, process and age.
    """
    lease, is_over = _acquire_by(folder, patience, note), threading.Event()
    threading.Thread(target=_renew, args=(lease, is_over), daemon=True).start()
    try:
        yield lease
    finally:
        is_over.set()
        lease.release()


def _renew(lease: Lease, is_over: threading.Event) -> None:
    while not is_over.wait(HEARTBEAT_SECONDS) and lease.renew():
        pass


def _acquire_by(folder: Path, patience: float, note: Callable[[str], None]) -> Lease:
    begun, is_told = time.monotonic(), False
    while True:
        try:
            return acquire(folder)
        except LeaseHeld as error:
            waited = time.monotonic() - begun
            if waited >= patience:
                raise
            if waited >= _TOLD_AFTER_SECONDS and not is_told:
                note(f"waiting up to {patience:.0f} s: {error}")
                is_told = True
            time.sleep(_PATIENT_SECONDS)


def acquire(folder: Path) -> Lease:
    """Take the lease.

    Raises:
        LeaseHeld: there is a holder.
        OSError: the folder is a link, or cannot be made.
    """
    make_folder(folder)
    if folder.is_symlink():
        raise OSError(errno.ELOOP, "it is a link; nothing outside of the run is touched", str(folder))
    newest = _newest(folder)
    if newest is not None and (why := _held_because(newest)):
        raise LeaseHeld(why)
    number = 1 if newest is None else int(newest.stem) + 1
    holder = LeaseHolder.this_process()
    path = folder / f"{number:06d}.json"
    if not link_once(path, _text(holder)):
        raise LeaseHeld(_held_because(path) or f"another driver took {path} just now; try again")
    if _newest(folder) != path:  # others came and went since we looked, and removed the name we then took
        path.unlink(missing_ok=True)
        raise LeaseHeld(f"another driver took a lease in {folder} just now; try again")
    for older in _leases(folder):
        if int(older.stem) < number:
            with contextlib.suppress(OSError):  # what is no file is left
                older.unlink()
    return Lease(path, holder)


def free_number(folder: Path) -> int | None:
    """Return the number of the newest lease, 0 where there is none; None while it is held.

    If the next number is got later, the lease was not held meanwhile.
    """
    newest = _newest(folder)
    if newest is None:
        return 0
    return None if _held_because(newest) else int(newest.stem)


def holder_of(folder: Path) -> str | None:
    """Return in words which driver advances the run, or None."""
    newest = _newest(folder)
    return _held_because(newest) if newest else None


def is_spoilt(folder: Path) -> bool:
    """Whether the newest lease cannot be read, so that who holds it is not known."""
    newest = _newest(folder)
    try:
        if newest is not None:
            _holder(read_newest(newest))
    except FileNotFoundError:  # released and pruned since it was listed
        return False
    except ValueError:
        return True
    return False


def _held_because(path: Path) -> str | None:
    """Return why the lease at ``path`` is still held, in words, or None when it is free."""
    try:
        beat_age = time.time() - persistently(path, path.stat).st_mtime
        holder = _holder(read_newest(path))
    except FileNotFoundError:  # released and pruned since it was listed
        return None
    except ValueError as error:
        return _held_by_the_unknown(path, beat_age, error)
    if holder is None:
        return None
    if holder.is_visible:
        if _start_ticks(holder.pid) != holder.process_started:
            return None
    elif beat_age > EXPIRY_SECONDS:
        return None
    age = time.time() - holder.acquired
    return (
        f"a driver is active on this run: host {holder.host}, process {holder.pid}, "
        f"since {age:.0f} s, last heartbeat {max(0.0, beat_age):.0f} s ago ({path}); wait for it or stop it"
    )


def _holder(data: bytes) -> LeaseHolder | None:
    """Return the holder of a lease, or None where it was released. Raises ValueError."""
    content = from_json(data)
    if not isinstance(content, dict):
        raise ValueError("it holds no JSON object")
    if "released" in content:
        return None
    kinds: dict[str, Any] = {one.name: one.type for one in fields(LeaseHolder)}
    wrong = [name for name, value in content.items() if not isinstance(value, kinds.get(name, ()))]
    missing = kinds.keys() - content.keys() - {"pid_namespace"}
    if wrong or missing:
        raise ValueError(f"it holds no holder: {', '.join(sorted([*wrong, *missing]))}")
    return LeaseHolder(**content)


def _held_by_the_unknown(path: Path, beat_age: float, error: ValueError) -> str | None:
    """Say that a spoilt lease is held while it may be being renewed."""
    if beat_age > EXPIRY_SECONDS:
        return None
    return (
        f"the lease {path} cannot be read ({error}); unless it is renewed, the next driver takes it "
        f"over in {EXPIRY_SECONDS - beat_age:.0f} s"
    )


def _text(holder: LeaseHolder) -> str:
    return json.dumps(asdict(holder)) + "\n"


def _newest(folder: Path) -> Path | None:
    return max(_leases(folder), key=lambda path: int(path.stem), default=None)


def _leases(folder: Path) -> list[Path]:
    return [folder / name for name in names_in(folder) if _LEASE.fullmatch(name)]


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())


def _start_ticks(pid: int) -> str:
    """Return field 22 of /proc/PID/stat, or an empty string when there is no such process (or a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] == "Z" else fields[19]
