"""A worker's pulse: the file in which it says what it does, kept fresh by a thread."""

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.run.commits import Record
from pipeline.run.paths import RunPaths
from pipeline.workers.beats import BEAT_SECONDS, Beat, Doing, Reason, write_beat
from stages.process import background

_SUMS = {
    Doing.STARTING: "startup_seconds",
    Doing.BUSY: "busy_seconds",
    Doing.WAITING: "waiting_seconds",
    Doing.LEAVING: "waiting_seconds",  # for a pass that sees it leave
}


@dataclass
class Pulse:
    """What a worker says of itself. The thread that writes it also ends a task that takes too long."""

    paths: RunPaths
    beat: Beat
    period: float = BEAT_SECONDS
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stirred: threading.Event = field(default_factory=threading.Event)
    _alarm: tuple[float, Callable[[], None]] | None = None

    def start(self) -> None:
        """Write the first beat and begin with the regular ones."""
        self.say()
        background.hear_of_end(self.say)
        threading.Thread(target=self._run, name="pulse", daemon=True).start()
        atexit.register(self._end)

    def say(self, **changes: Any) -> None:
        """Write a beat with these fields changed. A disk that takes none does not stop the worker."""
        with self._lock:
            self._change(changes)
            with contextlib.suppress(OSError):
                write_beat(self.paths, self.beat)

    def note(self, **changes: Any) -> None:
        """Change these fields of what is said next: to replace a file takes a disk milliseconds."""
        with self._lock:
            self._change(changes)

    def end_attempt(self, own: Record | None, is_own: bool) -> None:
        """Note that an attempt is over, and what it took.

        Args:
            own: its record, if it committed.
            is_own: whether the task was of the worker's own kind, and not one that it does besides.
        """
        startup = own.metrics.get("startup_seconds", 0.0) if own and not self.beat.tasks else 0.0
        before = self.beat.busy_seconds
        self.note(doing=Doing.WAITING, task="", attempt="")
        beat, is_done = self.beat, own is not None
        startup = min(startup, beat.busy_seconds)
        self.note(
            tasks=beat.tasks + is_done,
            startup_seconds=beat.startup_seconds + startup,
            busy_seconds=beat.busy_seconds - startup,
        )
        if not is_own:
            seconds = beat.measuring_seconds + beat.busy_seconds - before
            self.note(measured=beat.measured + is_done, measuring_seconds=seconds)

    def _change(self, changes: Mapping[str, Any]) -> None:
        now, written = time.time(), background.at_work()
        saving = (written.task, written.attempt) if written else ("", "")
        beat = with_elapsed(self.beat, now, changes.get("doing"))
        self.beat = replace(beat, **changes, beat=now, saving=saving[0], saving_attempt=saving[1])

    def fall_silent(self) -> None:
        """Say nothing at the end: what was said last stands until Slurm knows that the job has ended."""
        atexit.unregister(self._end)

    def set_alarm(self, seconds: float | None, act: Callable[[], None] = lambda: None) -> None:
        """Have ``act`` called in the thread after so many seconds; None: never. Replaces the last one."""
        self._alarm = None if seconds is None else (time.monotonic() + seconds, act)
        self._stirred.set()

    def _run(self) -> None:
        while self.beat.doing is not Doing.LEAVING:
            alarm = self._alarm
            left = self.period if alarm is None else alarm[0] - time.monotonic()
            if self._stirred.wait(max(0.0, min(self.period, left))):
                self._stirred.clear()
            elif alarm is not None and alarm is self._alarm and alarm[0] <= time.monotonic():
                self._alarm = None
                alarm[1]()
            else:
                self.say()

    def _end(self) -> None:
        """Say how long leaving took, and that the worker leaves where it has not said so."""
        if os.getpid() == self.beat.pid:  # not that of a process that was forked from it
            has_said = self.beat.doing is Doing.LEAVING
            self.say(doing=Doing.LEAVING, reason=self.beat.reason if has_said else Reason.FAILED, until=None)


def with_elapsed(beat: Beat, now: float, doing: Doing | None) -> Beat:
    """Add the time since the last change to the sum that it belongs to, where something else begins. Pure."""
    if doing is None or beat.doing not in _SUMS:
        return beat
    name = _SUMS[beat.doing]
    return replace(beat, since=now, **{name: getattr(beat, name) + max(0.0, now - beat.since)})
