"""Check of the filesystem of runs: a file of a policy's size, written durably and read by another process."""

import contextlib
import multiprocessing
import os
import time
from pathlib import Path

from pipeline.run.durable import digest_file, fsync_path
from stages.rehearsal.answers import CheckFailed, CheckInput, Shown

SENT = "from-the-command"
"""Name of a file that the command has written on another machine; beside it lies its digest."""
_READ_SECONDS = 120
_SLOW_GB = 0.01
"""GB/s below which a policy of 15 GB takes longer than 25 minutes."""
_SLOW = "choose a run_dir on the cluster's fast filesystem (scratch, Lustre), or ask its administrators"


def storage(given: CheckInput) -> Shown:
    """Write and flush a file, have another process read it, and read the one of another machine."""
    path = given.folder / f"policy-file-{os.uname().nodename}-{os.getpid()}"
    try:
        seconds, digest = written(path, given.num_mib)
        speeds = {"written": given.num_mib * 2**20 / 1e9 / seconds}
        speeds["read by another process"] = read_elsewhere(path, digest)
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    sent = given.folder / SENT
    if sent.exists():
        speeds["read from another node"] = read_speed(sent, sent.with_suffix(".digest").read_text())
    return judged(speeds, given.num_mib)


def judged(speeds: dict[str, float], num_mib: int) -> Shown:
    """Judge GB/s by what was done. Raises CheckFailed where one is too slow. Pure."""
    measured = ", ".join(f"{what} at {speed:.2f} GB/s" for what, speed in speeds.items())
    if min(speeds.values()) < _SLOW_GB:
        raise CheckFailed(f"{measured} ({num_mib} MiB)", _SLOW)
    names = {f"{what.replace(' ', '_')}_gb_per_s": speed for what, speed in speeds.items()}
    return Shown(f"{num_mib} MiB {measured}", names)


def written(path: Path, num_mib: int) -> tuple[float, str]:
    """Write random bytes and make them durable. Returns seconds and digest."""
    piece, began = os.urandom(1 << 20), time.perf_counter()
    with path.open("wb") as file:
        for _ in range(num_mib):
            file.write(piece)
    fsync_path(path)
    seconds = time.perf_counter() - began
    return seconds, digest_file(path)[1]


def read_elsewhere(path: Path, digest: str) -> float:
    """Return the GB/s at which another process reads a file."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(path, digest, there), daemon=True)
    process.start()
    there.close()
    if not here.poll(_READ_SECONDS):
        process.kill()
        raise CheckFailed(f"reading {path.name} took longer than {_READ_SECONDS} s", _SLOW)
    answer = here.recv()
    if isinstance(answer, str):
        raise CheckFailed(answer, _SLOW)
    return float(answer)


def _answer(path: Path, digest: str, connection: "multiprocessing.connection.Connection") -> None:
    try:
        connection.send(read_speed(path, digest))
    except (OSError, CheckFailed) as error:
        connection.send(str(error))


def read_speed(path: Path, digest: str) -> float:
    """Return GB/s of a read whose pages this machine has given up. Raises CheckFailed for other bytes."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.perf_counter()
    size, found = digest_file(path)
    if found != digest:
        raise CheckFailed(
            f"{path.name} has other bytes than were written",
            "report it to the administrators: data is damaged",
        )
    return size / 1e9 / (time.perf_counter() - began)
