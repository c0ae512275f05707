"""How much memory a process may still take of its host."""

from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")


def room_of_host() -> float:
    """Return the bytes that are free on this host and in the control groups of this process (its job's)."""
    return min([_available(Path("/proc/meminfo")), *_rooms(Path("/proc/self/cgroup"), _GROUPS)])


def _available(meminfo: Path) -> float:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return float(line.split()[1]) * 1024
    return 0.0


def _rooms(membership: Path, root: Path) -> Iterator[float]:
    """Yield what each control group with a limit of memory has left, of either version."""
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        names = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes")
            if controllers
            else ("memory.max", "memory.current")
        )
        if controllers and "memory" not in controllers.split(","):
            continue
        folder = root / "memory" if controllers else root
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts) + 1):
            limit, usage = (_number(folder.joinpath(*parts[:depth], name)) for name in names)
            if limit is not None and usage is not None:
                yield max(0.0, limit - usage + _cached(folder.joinpath(*parts[:depth], "memory.stat")))


def _cached(path: Path) -> float:
    """Return the bytes of files in memory that nobody uses now, in a control group and those below it: they
    count as used, and are given up where memory is short."""
    try:
        sizes = dict(line.split() for line in path.read_text().splitlines())
    except OSError:
        return 0.0
    return float(sizes.get("total_inactive_file", sizes.get("inactive_file", 0)))


def _number(path: Path) -> float | None:
    """Return a file's number; None where there is no file, or no limit."""
    try:
        return float(path.read_text())
    except (OSError, ValueError):  # "max"
        return None
