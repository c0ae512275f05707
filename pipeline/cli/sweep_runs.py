"""The runs of a sweep as processes: a bounded number at once; they end with the command that started them."""

import contextlib
import os
import re
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
from pipeline.process import end_with_parent, interruptible, signal_session
from pipeline.run.lease import Lease
from pipeline.sweep.manifest import SweepPoint, log_of
from pipeline.sweep.naming import in_words
from pipeline.text import exit_in_words, printable

_PARENT = "SLURM_PPO_SWEEP_PROCESS"
"""Variable with the process id of the command that carries out a sweep."""
_LOOK_SECONDS = 1.0
STOP_SECONDS = 60.0
"""Seconds that a run may take to end after a signal, beside what its tasks get."""
NOT_COMPLETE = 3
"""Exit code of a run that was interrupted, or is left alone."""
LEFT_ALONE = "left alone: "
"""Begin of the line that says why a run is left alone."""
_TOLD = re.compile(rf"\d\d:\d\d:\d\d |error: |{LEFT_ALONE}")
"""Begin of the lines of a run's log that are shown: what happens, with the time, errors, and that."""
_HOW = {0: "done", NOT_COMPLETE: "not complete"}


def end_with_sweep() -> None:
    """End this process, in order, when the command that carries out the sweep is gone, however it ended."""
    if (parent := os.environ.get(_PARENT)) is None:
        return
    end_with_parent(signal.SIGTERM)
    if os.getppid() != int(parent):
        sys.exit("the command that carries out the sweep is gone")


@dataclass
class PointRun:
    """The process of a point's run."""

    point: SweepPoint
    place: str
    """Place among those that are due, such as 2/6."""
    process: "subprocess.Popen[bytes]"
    log: Path
    read: int
    """Bytes of the log that were shown, or were there before."""
    gpus: tuple[str, ...]
    error: str = ""
    """Its first error, in words."""
    code: int = 0
    """Exit code, or minus the signal that ended it, once it has ended."""

    @property
    def said(self) -> str:
        """Its error, or how it ended."""
        return _HOW.get(self.code) or self.error or exit_in_words(self.code)

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
    _running: list[PointRun] = field(default_factory=list)
    _is_stopping: bool = False

    def carry_out(self, points: Sequence[SweepPoint]) -> list[PointRun]:
        """Carry out points in their order. Returns those that were begun: all, without Ctrl-C or the warning
        that an allocation is about to end.

        One that fails does not stop the others.
        """
        waiting = deque(enumerate(points, 1))
        ended: list[PointRun] = []
        try:
            with interruptible(signal.SIGUSR2):  # what sbatch --signal=B:USR2@SECONDS sends
                while waiting or self._running:
                    self.lease.beat()
                    while waiting and len(self._running) < self.at_once:
                        number, point = waiting.popleft()
                        self._begin(point, f"{number}/{len(points)}")
                    ended += self._look()
        except KeyboardInterrupt:
            ended += self._stop()
        finally:
            for run in self._running:
                signal_session(run.process.pid)
        return ended

    def _begin(self, point: SweepPoint, place: str) -> None:
        taken = [run.gpus for run in self._running]
        gpus = next((given for part in self.gpus if (given := tuple(part)) not in taken), ())
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
        run = PointRun(point, place, process, log, log.stat().st_size, gpus)
        self._running.append(run)
        self._say(run, f"{in_words(point.settings, self.keys)}; log: {shlex.quote(str(log))}")

    def _look(self) -> list[PointRun]:
        """Wait until the first of the runs has ended, for a second at most, and show what all of them say.
        Returns those that have ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._running[0].process.wait(_LOOK_SECONDS)
        codes = [(run, run.process.poll()) for run in self._running]
        for run, code in codes:
            for line in run.new_lines(is_over=code is not None):
                if _TOLD.match(line):
                    self._say(run, line)
            if code is not None:
                self._running.remove(run)
                # Stopped before it had come so far that it ends in order, it is interrupted, not failed.
                run.code = NOT_COMPLETE if self._is_stopping and code == -signal.SIGTERM else code
                self._say(run, "failed" if run.said == run.error else run.said)
        return [run for run, code in codes if code is not None]

    def _stop(self) -> list[PointRun]:
        """Tell all runs to end in order, and wait for them; a second Ctrl-C kills them."""
        self._is_stopping = True
        for run in self._running:
            run.process.terminate()
        ended: list[PointRun] = []
        with contextlib.suppress(KeyboardInterrupt):
            until = time.monotonic() + self.stop_seconds
            while self._running and time.monotonic() < until:
                ended += self._look()
        return ended

    def _say(self, run: PointRun, text: str) -> None:
        print(f"[{run.place}] {text}", file=sys.stderr, flush=True)
