"""How much memory a process may still take: of its machine, and of the control groups that it is in."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_MEMBERSHIP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
_KIB = 1024


@dataclass(frozen=True)
class Bound:
    """Something that bounds the memory of a process. In bytes."""

    size: float
    free: float
    """Free, or taken by files only, which are given up where memory is short."""


def free_share(meminfo: Path = _MEMINFO, membership: Path = _MEMBERSHIP, groups: Path = _GROUPS) -> float:
    """Return the share that is free, of the machine or of a control group of this process with a limit,
    whichever is less. 1 where nothing can be read."""
    return min((bound.free / bound.size for bound in bounds(meminfo, membership, groups)), default=1.0)


def free_bytes(meminfo: Path = _MEMINFO, membership: Path = _MEMBERSHIP, groups: Path = _GROUPS) -> float:
    """Return the bytes that are free in the machine and in each control group of this process with a limit.
    0 where nothing can be read."""
    return min((bound.free for bound in bounds(meminfo, membership, groups)), default=0.0)


def bounds(meminfo: Path, membership: Path, groups: Path) -> Iterator[Bound]:
    """Yield the machine, and each control group with a limit of memory, of either version."""
    sizes = {name.rstrip(":"): value * _KIB for name, value in _numbers(meminfo).items()}
    if sizes.get("MemTotal") and "MemAvailable" in sizes:
        yield Bound(sizes["MemTotal"], sizes["MemAvailable"])
    for group, limit, usage in _groups(membership, groups):
        size, used = _number(group / f"memory.{limit}"), _number(group / f"memory.{usage}")
        if size and used is not None:
            files = _numbers(group / "memory.stat")
            unused = files.get("total_inactive_file", files.get("inactive_file", 0.0))
            yield Bound(size, min(size, max(0.0, size - used + unused)))


def _groups(membership: Path, root: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield the folders of the control groups that this process is in and of those around them, and the names
    of their limit and their usage."""
    for line in _lines(membership):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        names = ("limit_in_bytes", "usage_in_bytes") if controllers else ("max", "current")
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts) + 1):
            yield (root / "memory" if controllers else root).joinpath(*parts[:depth]), *names


def _numbers(path: Path) -> dict[str, float]:
    """Return the second words of a file's lines, which are numbers, by the first ones."""
    words = (line.split() for line in _lines(path))
    return {word[0]: float(word[1]) for word in words if len(word) > 1}


def _lines(path: Path) -> list[str]:
    """Return a file's lines; none where it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> float | None:
    """Return a file's number; None where there is no file, or no limit."""
    try:
        return float(path.read_text())
    except (OSError, ValueError):  # "max"
        return None
