"""What this machine has: free memory, and GPUs."""

from collections.abc import Iterator
from pathlib import Path


def has_gpus(devices: Path = Path("/dev")) -> bool:
    """Whether there is a GPU of NVIDIA's or AMD's. Opens no driver."""
    return any(devices.glob("nvidia[0-9]*")) or (devices / "kfd").exists()


def free_memory(
    meminfo: Path = Path("/proc/meminfo"),
    membership: Path = Path("/proc/self/cgroup"),
    groups: Path = Path("/sys/fs/cgroup"),
) -> float:
    """Return the share of the memory that is free: the machine's, or that of a control group of this process
    with a limit, whichever is less. 1 where nothing can be read."""
    return min([1.0, *_of_machine(meminfo), *_of_groups(membership, groups)])


def _of_machine(meminfo: Path) -> Iterator[float]:
    try:
        words = [line.split() for line in meminfo.read_text().splitlines()]
    except OSError:
        return
    sizes = {word[0]: float(word[1]) for word in words if len(word) > 1}
    if sizes.get("MemTotal:") and "MemAvailable:" in sizes:
        yield sizes["MemAvailable:"] / sizes["MemTotal:"]


def _of_groups(membership: Path, root: Path) -> Iterator[float]:
    """Yield the share that is free in each control group with a limit of memory, of either version."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        folder = root / "memory" if controllers else root
        limit, usage = ("limit_in_bytes", "usage_in_bytes") if controllers else ("max", "current")
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts) + 1):
            group = folder.joinpath(*parts[:depth])
            most, used = _number(group / f"memory.{limit}"), _number(group / f"memory.{usage}")
            if most and used is not None:
                yield 1 - max(0.0, used - _cached(group)) / most


def _cached(group: Path) -> float:
    """Return the bytes of files in memory that nobody uses now: they are given up where memory is short."""
    try:
        words = [line.split() for line in (group / "memory.stat").read_text().splitlines()]
    except OSError:
        return 0.0
    sizes = {name: float(value) for name, value in words}
    return sizes.get("total_inactive_file", sizes.get("inactive_file", 0.0))


def _number(path: Path) -> float | None:
    """Return a file's number; None where there is no file, or no limit."""
    try:
        return float(path.read_text())
    except (OSError, ValueError):  # "max"
        return None
