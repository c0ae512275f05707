"""Checks of what the commit protocol needs of a filesystem, tried out in the very folder.

``commits.py`` publishes by ``link``, replaces by ``rename`` and flushes files and folders; ``lease.py``
compares the file server's clock with this machine's.
"""

import contextlib
import functools
import mmap
import multiprocessing
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from pipeline.checks.disk import WRITING
from pipeline.checks.finding import Check, CheckGroup, Finding, milliseconds, ok, problem, warning
from pipeline.checks.running import scratch
from pipeline.run.lease import EXPIRY_SECONDS
from pipeline.workers.filesystems import mount_of
from slurm.sharedfiles import STALE, persistently, read_newest

_FORK = multiprocessing.get_context("fork")
_ROUNDS = 50
_RACE_SECONDS = 8.0
_REPLACEMENTS = 200
_FLUSHES = 5
_SLOW_FLUSH_SECONDS = 1.0
_NOTICED_SKEW_SECONDS = 5.0
_NAME_BYTES = 200
"""Longest file name the program creates (temporary copy of a partial save)."""
_REMOTE = frozenset({"lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "9p", "pvfs2", "wekafs", "panfs"})
SYNCHRONISE = "let the administrators synchronise clocks (NTP)"
_ELSEWHERE = "choose a run_dir on another filesystem, such as your project's NFS, Lustre, GPFS or BeeGFS"


def file_checks(folder: Path, is_shared: bool) -> list[Check]:
    """Return a check for each thing that is needed, of a folder that compute nodes may have to see."""
    looks: dict[str, Callable[[Path], Finding]] = {
        "hard links": check_links,
        "renaming": check_rename,
        "flushing": check_flush,
        "exclusive creation": check_exclusive,
        "clock of the file server": check_clock,
        "symbolic links": check_symlinks,
        "permissions": check_modes,
        "long names": check_names,
        "memory maps": check_mmap,
    }
    place = str(folder)

    def within(look: Callable[[Path], Finding]) -> Finding:
        with scratch(folder) as made:
            return look(made)

    def tried(look: Callable[[Path], Finding]) -> Finding:
        return persistently(folder, lambda: within(look), STALE)

    return [
        Check(CheckGroup.FILES, "filesystem", lambda: check_kind(folder, is_shared), place=place),
        *(
            Check(CheckGroup.FILES, title, functools.partial(tried, look), place=place, needs=WRITING)
            for title, look in looks.items()
        ),
    ]


def check_kind(folder: Path, is_shared: bool) -> Finding:
    mount, kind = mount_of(folder)
    found = f"{folder} is on {kind}, mounted at {mount}"
    if is_shared and kind in ("tmpfs", "ramfs", "overlay"):
        return problem("filesystem", f"{found}: only this machine has it", _ELSEWHERE)
    return ok("filesystem", found + tried_on(kind))


def tried_on(kind: str) -> str:
    """Say whether our own tests run on a kind of filesystem that a network is behind."""
    if kind == "fuse.glusterfs":
        return "; the tests of slurm-ppo run on GlusterFS 10.3"
    remote = kind.startswith(("nfs", "fuse.")) or kind in _REMOTE
    return "; the tests of slurm-ppo do not run on that kind, so what follows counts" if remote else ""


def check_links(place: Path) -> Finding:
    """Race two processes to link the same name: exactly one must win, every time."""
    file, name = place / "private", place / "published"
    file.write_text("x")
    try:
        os.link(file, name)
    except OSError as error:
        return problem("hard links", f"link fails: {error.strerror}", _ELSEWHERE)
    with contextlib.suppress(FileExistsError):
        os.link(file, name)
        return problem("hard links", "link replaced a name that was taken", _ELSEWHERE)
    if (links := file.stat().st_nlink) != 2:
        return problem("hard links", f"a linked file shows {links} links, not 2", _ELSEWHERE)
    wins = race(place, _ROUNDS)
    bad = sum(winners != 1 for winners in wins)
    if bad or len(wins) < _ROUNDS:
        facts = f"of {len(wins)} names that two processes raced for, {bad} were got by both or by none"
        return problem("hard links", facts, _ELSEWHERE, rounds=len(wins), bad=bad)
    facts = f"of two processes that raced for {len(wins)} names, one got each"
    return ok("hard links", facts, rounds=len(wins), bad=0)


def race(place: Path, rounds: int) -> list[int]:
    """Count how many of two processes got each name."""
    shared = mmap.mmap(-1, 4096)
    racers = [_FORK.Process(target=_race, args=(place, me, rounds, shared)) for me in (0, 1)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(_RACE_SECONDS + 1)
    done = min(shared[0], shared[1])
    return [shared[1000 + turn] + shared[2000 + turn] for turn in range(done)]


def _race(place: Path, me: int, rounds: int, shared: mmap.mmap) -> None:
    until = time.monotonic() + _RACE_SECONDS
    for turn in range(rounds):
        mine = place / f"{me}-{turn}"
        mine.write_text(str(me))
        shared[10 + me] = turn + 1
        while shared[10 + 1 - me] <= turn:
            if time.monotonic() > until:
                return
            time.sleep(0)
        with contextlib.suppress(FileExistsError):
            os.link(mine, place / f"name-{turn}")
            shared[1000 * (1 + me) + turn] = 1
        shared[me] = turn + 1


def check_rename(place: Path) -> Finding:
    """Read a name while it is replaced: every read must give the old file or the new one, whole."""
    target, size = place / "target", 4096
    target.write_bytes(b"0" * size)
    writer = _FORK.Process(target=_replace, args=(target, size))
    writer.start()
    reads = bad = again = 0
    content = b"?"
    until = time.monotonic() + _RACE_SECONDS
    while writer.is_alive() and time.monotonic() < until:
        try:
            content = target.read_bytes()
        except OSError:  # a stale handle: all that reads what others replace tries again
            again += 1
            with contextlib.suppress(OSError):
                content = read_newest(target)
        bad += content != content[:1] * size
        content, reads = b"?", reads + 1
    writer.join(1)
    if bad or writer.exitcode != 0:
        facts = f"of {reads} reads during {_REPLACEMENTS} replacements {bad} saw no file or a part of one"
        return problem("renaming", facts, _ELSEWHERE, reads=reads, bad=bad)
    facts = f"{reads} reads during {_REPLACEMENTS} replacements saw whole files"
    facts += f", {again} of them when they tried again" if again else ""
    return ok("renaming", facts, reads=reads, bad=0, again=again)


def _replace(target: Path, size: int) -> None:
    for turn in range(_REPLACEMENTS):
        private = target.with_name(f".private-{turn}")
        private.write_bytes(b"%d" % (turn % 10) * size)
        private.replace(target)


def check_flush(place: Path) -> Finding:
    files, folders = [], []
    for turn in range(_FLUSHES):
        with (place / f"file-{turn}").open("wb") as file:
            file.write(b"x" * 4096)
            file.flush()
            files.append(_timed(file.fileno()))
        descriptor = os.open(place, os.O_RDONLY)
        try:
            folders.append(_timed(descriptor))
        except OSError as error:
            return problem("flushing", f"a folder cannot be flushed: {error.strerror}", _ELSEWHERE)
        finally:
            os.close(descriptor)
    of_file, of_folder = median(files), median(folders)
    facts = f"{milliseconds(of_file)} for a small file, {milliseconds(of_folder)} for its folder"
    numbers = {"file_seconds": of_file, "folder_seconds": of_folder}
    if max(of_file, of_folder) > _SLOW_FLUSH_SECONDS:
        advice = "the file server is slow now; every commit waits for two flushes of each"
        return warning("flushing", facts, advice, **numbers)
    return ok("flushing", facts, **numbers)


def _timed(descriptor: int) -> float:
    started = time.perf_counter()
    os.fsync(descriptor)
    return time.perf_counter() - started


def check_exclusive(place: Path) -> Finding:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    os.close(os.open(place / "file", flags))
    try:
        os.close(os.open(place / "file", flags))
    except FileExistsError:
        return ok("exclusive creation", "a name that is taken is refused")
    return problem("exclusive creation", "a name that was taken was created again", _ELSEWHERE)


def check_clock(place: Path) -> Finding:
    file = place / "file"
    file.touch()
    before = time.time()
    os.utime(file)
    return judge_skew(clock_skew(file, before, time.time()))


def clock_skew(file: Path, before: float, after: float) -> float:
    """Return the seconds by which the file server's clock is ahead of this machine's.

    ``file`` was touched between ``before`` and ``after``: 0 where the difference is within that time.
    """
    touched = file.stat().st_mtime
    nearest = min(max(touched, before), after)
    return touched - nearest


def judge_skew(skew: float) -> Finding:
    """Judge the skew: other hosts take a lease to be lost after EXPIRY_SECONDS without a heartbeat. Pure."""
    title = "clock of the file server"
    how = "ahead of" if skew > 0 else "behind"
    facts = f"{abs(skew):.2f} s {how} this machine's" if abs(skew) >= 0.005 else "agrees with this machine's"
    if abs(skew) > EXPIRY_SECONDS / 2:
        facts += f"; a driver's lease expires after {EXPIRY_SECONDS:g} s"
        return problem(title, facts, SYNCHRONISE, skew_seconds=skew)
    if abs(skew) > _NOTICED_SKEW_SECONDS:
        advice = "times in reports are off by as much; NTP is not in order"
        return warning(title, facts, advice, skew_seconds=skew)
    return ok(title, facts, skew_seconds=skew)


def check_symlinks(place: Path) -> Finding:
    (place / "target").write_text("x")
    private, link = place / ".link", place / "link"
    try:
        for _ in range(2):  # made, then replaced
            private.symlink_to("target")
            private.replace(link)
    except OSError as error:
        return problem("symbolic links", f"they fail: {error.strerror}", _ELSEWHERE)
    return ok("symbolic links", f"made and replaced; {link.name} leads to {link.readlink()}")


def check_modes(place: Path) -> Finding:
    mask = os.umask(0)
    os.umask(mask)
    file = place / "file"
    file.touch()
    expected, found = 0o666 & ~mask, stat.S_IMODE(file.stat().st_mode)
    file.chmod(0o600)
    changed = stat.S_IMODE(file.stat().st_mode)
    facts = f"a new file is {found:03o} with umask {mask:03o}"
    if found == expected and changed == 0o600:
        return ok("permissions", facts)
    advice = "others may or may not read the run; an ACL or mount option decides"
    return warning("permissions", f"{facts}, {changed:03o} after chmod 600", advice)


def check_names(place: Path) -> Finding:
    most = os.pathconf(place, "PC_NAME_MAX")
    try:
        (place / ("." + "n" * (_NAME_BYTES - 1))).touch()
    except OSError as error:
        facts = f"a hidden name of {_NAME_BYTES} bytes fails: {error.strerror} (the limit is {most})"
        return problem("long names", facts, _ELSEWHERE, limit_bytes=most)
    facts = f"hidden names of {_NAME_BYTES} bytes are taken, {most} at most"
    return ok("long names", facts, limit_bytes=most)


def check_mmap(place: Path) -> Finding:
    file, content = place / "file", os.urandom(1 << 20)
    file.write_bytes(content)
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            is_same = mapped[:] == content
    except OSError as error:
        if error.errno in STALE:
            raise
        return problem("memory maps", f"they fail: {error.strerror}; weights are read by them", _ELSEWHERE)
    if not is_same:
        return problem("memory maps", "what was written is not what is read", _ELSEWHERE)
    return ok("memory maps", f"{len(content) >> 20} MiB read back")
