"""CPU seconds and memory of a command and of all processes that it starts, sampled over time."""

import bisect
import ctypes
import os
import resource
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_EVERY = 0.2
"""Seconds between samples."""
_CHANGE_GIB = 0.25
"""To ask for a proportional set size walks page tables, and holds up who maps memory meanwhile: it is done
where a resident size has changed by so much. In between, what is more or less is private."""
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Sampled:
    """What a command has used."""

    output: str
    """Standard output."""
    times: Sequence[float]
    """Unix times of the samples."""
    cpu: Sequence[float]
    """CPU seconds of all processes up to each, those that have ended included."""
    total_cpu: float
    """CPU seconds at the end, as the kernel has counted them."""
    peak_gib: float
    """Largest sum of proportional set sizes (PSS): pages that processes share count once."""

    def cpu_until(self, moment: float) -> float:
        """Return CPU seconds up to a Unix time, between samples by interpolation."""
        after = bisect.bisect_left(self.times, moment)
        if after in (0, len(self.times)):
            return self.cpu[max(0, after - 1)]
        before = after - 1
        share = (moment - self.times[before]) / (self.times[after] - self.times[before])
        return self.cpu[before] + share * (self.cpu[after] - self.cpu[before])

    def cpu_between(self, start: float, end: float) -> float:
        """Return CPU seconds of a span of Unix times."""
        return self.cpu_until(end) - self.cpu_until(start)


class _Sampler(threading.Thread):
    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.times: list[float] = []
        self.cpu: list[float] = []
        self.peak = 0.0
        self._done = threading.Event()
        self._by_process: dict[tuple[int, float], float] = {}
        self._shared: dict[tuple[int, float], tuple[float, float]] = {}
        """Resident size at which a process was asked for its proportional one, and by what that is less."""

    def run(self) -> None:
        while not self._done.wait(_EVERY):
            self.sample()

    def stop(self) -> None:
        self._done.set()
        self.join()

    def sample(self) -> None:
        resident: dict[tuple[int, float], float] = {}
        for process in psutil.Process().children(recursive=True):
            try:
                with process.oneshot():
                    key, spent = (process.pid, process.create_time()), process.cpu_times()
                    resident[key] = process.memory_info().rss / 2**30
                    self._by_process[key] = spent.user + spent.system
            except psutil.Error:  # it has ended; what was seen of it stays
                continue
        self.times.append(time.time())
        self.cpu.append(sum(self._by_process.values()))
        self.peak = max(self.peak, sum(size - self._shared_of(key, size) for key, size in resident.items()))

    def _shared_of(self, key: tuple[int, float], size: float) -> float:
        """Return by how much a proportional set size is less than a resident one, of about the same time."""
        at, shared = self._shared.get(key, (-_CHANGE_GIB, 0.0))
        if abs(size - at) >= _CHANGE_GIB and (pss := _pss_gib(key[0])):
            at, shared = self._shared[key] = size, max(0.0, size - pss)
        return shared


def _pss_gib(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # it has ended
        return 0.0
    return int(text.split("\nPss:")[1].split()[0]) / 2**20


def run_sampled(command: Sequence[str], environment: Mapping[str, str]) -> Sampled:
    """Run a command and wait for all that it starts, orphans included.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans become children of this process
    before, sampler = _children_cpu(), _Sampler()
    sampler.start()
    try:
        done = subprocess.run(
            command, env=os.environ | dict(environment), stdout=subprocess.PIPE, text=True, check=True
        )
        _wait_for_orphans()
    finally:
        sampler.stop()
    total = _children_cpu() - before
    return Sampled(done.stdout, sampler.times, sampler.cpu, total, sampler.peak)


def _wait_for_orphans() -> None:
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        return


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
