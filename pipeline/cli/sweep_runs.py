"""The runs of a sweep as processes: a bounded number at once; they end with the command that started them."""

import contextlib
import ctypes
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.executors.devices import ONLY
from pipeline.process import interruptible, signal_session
from pipeline.run.lease import Lease
from pipeline.sweep.manifest import Point, log_of
from pipeline.sweep.naming import in_words
from pipeline.text import exit_in_words, printable

_PARENT = "SLURM_PPO_SWEEP_PROCESS"
"""Variable with the process id of the command that carries out a sweep."""
_PR_SET_PDEATHSIG = 1
_LOOK_SECONDS = 1.0
STOP_SECONDS = 60.0
"""Seconds that a run may take to end in order, once it is told to, beside what its tasks get."""
NOT_COMPLETE = 3
"""Exit code of a run that was interrupted, or is left alone."""
LEFT_ALONE = "left alone: "
"""Begin of the line that says why a run is left alone."""
_TOLD = re.compile(rf"\d\d:\d\d:\d\d |error: |{LEFT_ALONE}")
"""Begin of the lines of a run's log that are shown: what happens, with the time, errors, and that."""
_HOW = {0: "done", NOT_COMPLETE: "not complete"}


@dataclass(frozen=True)
class End:
    """End of the process of a point's run."""

    point: Point
    code: int
    """Exit code, or minus the signal that ended it."""
    said: str
    """Its last error, or how it ended."""
    log: Path


def end_with_parent() -> None:
    """End this process, in order, when the command that carries out the sweep is gone, however it ended."""
    if (parent := os.environ.get(_PARENT)) is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        sys.exit("the command that carries out the sweep is gone")


@dataclass
class _Child:
    point: Point
    place: str
    """Place among those that are due, such as 2/6."""
    process: "subprocess.Popen[bytes]"
    log: Path
    read: int
    """Bytes of the log that were shown, or were there before."""
    pidfd: int
    gpus: tuple[str, ...]
    error: str = ""

    def new_lines(self, is_over: bool = False) -> Iterator[str]:
        """Yield whole lines of the log since the last call; at the end also one without its end."""
        with self.log.open("rb") as file:
            file.seek(self.read)
            content = file.read()
        whole = content if is_over else content[: content.rfind(b"\n") + 1]
        self.read += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            if line.startswith("error: "):
                self.error = self.error or printable(line.removeprefix("error: "))
            yield printable(line)


@dataclass
class Runner:
    """Carries out points, each as a process ``slurm-ppo sweep SWEEP --point NAME``."""

    root: Path
    folder: Path
    """Folder the runs are started in, where rules are imported from."""
    at_once: int
    lease: Lease
    gpus: Sequence[Sequence[str]] = ()
    """GPUs of each run that goes on at once; none where runs are given none."""
    keys: Sequence[str] = ()
    """All keys that are swept: names of settings differ from theirs."""
    stop_seconds: float = STOP_SECONDS
    """Seconds that a run may take to end in order."""
    _children: list[_Child] = field(default_factory=list)
    _is_stopping: bool = False

    def carry_out(self, points: Sequence[Point]) -> list[End]:
        """Carry out points in their order. Returns the ends of those that were begun: all, without Ctrl-C or
        the warning that an allocation is about to end.

        One that fails does not stop the others.
        """
        waiting = deque(enumerate(points, 1))
        ends: list[End] = []
        try:
            with interruptible(signal.SIGUSR2):  # what sbatch --signal=B:USR2@SECONDS sends
                while waiting or self._children:
                    self.lease.beat()
                    while waiting and len(self._children) < self.at_once:
                        number, point = waiting.popleft()
                        self._begin(point, f"{number}/{len(points)}")
                    ends += self._look(_LOOK_SECONDS)
        except KeyboardInterrupt:
            ends += self._stop()
        finally:
            for child in self._children:
                signal_session(child.process.pid)
        return ends

    def _free_gpus(self) -> tuple[str, ...]:
        """Return GPUs that no run has; none where runs are given none."""
        return next(
            (tuple(part) for part in self.gpus if tuple(part) not in [c.gpus for c in self._children]), ()
        )

    def _begin(self, point: Point, place: str) -> None:
        gpus = self._free_gpus()
        log = log_of(self.root, point)
        log.parent.mkdir(exist_ok=True)
        words = [sys.executable, "-P", "-m", "pipeline", "sweep", str(self.root), "--point", point.name]
        with log.open("ab") as output:
            process = subprocess.Popen(
                words,
                cwd=self.folder,
                env=os.environ | {_PARENT: str(os.getpid())} | ({ONLY: ",".join(gpus)} if gpus else {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for this process, which passes it on
            )
        child = _Child(point, place, process, log, log.stat().st_size, os.pidfd_open(process.pid), gpus)
        self._children.append(child)
        self._say(child, f"{in_words(point.settings, self.keys)}; log: {shlex.quote(str(log))}")

    def _look(self, seconds: float) -> list[End]:
        """Wait for an end, show what the runs say. Returns the ends that there were."""
        select.select([child.pidfd for child in self._children], [], [], seconds)
        ends = []
        for child in list(self._children):
            code = child.process.poll()
            for line in child.new_lines(is_over=code is not None):
                if _TOLD.match(line):
                    self._say(child, line)
            if code is not None:
                ends.append(self._ended(child, code))
        return ends

    def _ended(self, child: _Child, code: int) -> End:
        os.close(child.pidfd)
        self._children.remove(child)
        if self._is_stopping and code == -signal.SIGTERM:
            code = NOT_COMPLETE  # it had not come so far that it ends in order
        how = _HOW.get(code) or child.error or exit_in_words(code)
        self._say(child, "failed" if how == child.error else how)
        return End(child.point, code, how, child.log)

    def _stop(self) -> list[End]:
        """Tell all runs to end in order, and wait for them; a second Ctrl-C kills them."""
        self._is_stopping = True
        for child in self._children:
            child.process.terminate()
        ends: list[End] = []
        with contextlib.suppress(KeyboardInterrupt):
            until = time.monotonic() + self.stop_seconds
            while self._children and time.monotonic() < until:
                ends += self._look(_LOOK_SECONDS)
        return ends

    def _say(self, child: _Child, text: str) -> None:
        print(f"[{child.place}] {text}", file=sys.stderr, flush=True)
