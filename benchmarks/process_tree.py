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
_GROWTH_GIB, _REST_FACTOR = 0.02, 20
"""To ask for proportional set sizes walks all page tables, and holds up who maps memory meanwhile: it is done
where resident sizes have grown by so much, and takes at most one part in so many of the time."""
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
        self._largest = 0.0
        self._next_memory = 0.0

    def run(self) -> None:
        while not self._done.wait(_EVERY):
            self.sample()

    def stop(self) -> None:
        self._done.set()
        self.join()

    def sample(self) -> None:
        processes, resident = psutil.Process().children(recursive=True), 0.0
        for process in processes:
            try:
                with process.oneshot():
                    spent = process.cpu_times()
                    resident += process.memory_info().rss / 2**30
                    self._by_process[process.pid, process.create_time()] = spent.user + spent.system
            except psutil.Error:  # it has ended; what was seen of it stays
                continue
        self.times.append(time.time())
        self.cpu.append(sum(self._by_process.values()))
        began = time.monotonic()
        if resident > self._largest + _GROWTH_GIB and began >= self._next_memory:
            self._largest = resident
            self.peak = max(self.peak, sum(_pss_gib(process.pid) for process in processes))
            now = time.monotonic()
            self._next_memory = now + _REST_FACTOR * (now - began)


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
