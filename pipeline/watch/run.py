"""``slurm-ppo watch`` of a run: on a screen with keys, or as lines that say what changed."""

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from rich.text import Text

from pipeline.config.job_kinds import parts_of
from pipeline.executors.slurm.queue import RunQueue, look_at_queue
from pipeline.run.directory import Run
from pipeline.run.packed import BadArchive
from pipeline.run.tasks import task_of
from pipeline.status.lanes import ShardState
from pipeline.status.log_files import end_of
from pipeline.status.logs import log_to_show
from pipeline.status.snapshot import StatusReader, read_status
from pipeline.status.state import Status
from pipeline.status.text import About, Sentence, describe, lane_in_words, said, standing
from pipeline.text import clock
from pipeline.watch.event_lines import event_lines
from pipeline.watch.loop import SILENT_SECONDS, Background, Seen, look_on
from pipeline.watch.screen import LogEnd, Page, ScreenState, chosen, screen
from pipeline.watch.terminal import STEPS, Window, show
from slurm.sharedfiles import PASSING

_NEWS = (
    *(About.STATE, About.SILENCE, About.OWNER, About.AWAITED, About.PAUSE, About.HELD, About.BUDGET),
    About.ADVICE,
)
"""What is worth a line when it is said first; the rest is of events and rows."""
STAGE_KEYS = {"r": "rollout", "s": "score", "w": "reward", "u": "update", "e": "evaluate"}


_DISK_SECONDS = 2.0
"""Seconds between looks at the run directory, or the interval for Slurm where that is shorter."""
_LOG_LINES = 200
_TRIED_AGAIN = {ShardState.FAILED, ShardState.AGAIN}


class Readers(Background[Status]):
    """Two threads that read, and the log that is wanted."""

    def __init__(self, run: Run, interval: float, ask: Callable[[Run], RunQueue] | None = None) -> None:
        super().__init__(min(_DISK_SECONDS, interval))
        self.run = run
        self.log: LogEnd | None = None
        self.wanted: tuple[int, str] | None = None
        """Key of the lane whose log is wanted."""
        who = functools.cache(run.who_acts)  # the cluster that is asked from here stays the same
        self._ask = ask or (lambda run: look_at_queue(run, max_age=interval, who=who))
        self._ask_seconds = interval
        self._queue: RunQueue | None = None
        self._answered: float | None = None
        self._hurry = threading.Event()
        self._reader = StatusReader(run)
        self._count = 0
        """Number of answers of Slurm; of looks, where there is no Slurm."""
        self._ended_at: tuple[str, int] | None = None
        """State that showed the end, and the count when it showed first."""

    def targets(self) -> Sequence[Callable[[], None]]:
        """Return what threads do."""
        return [self._read_on, *([self._ask_on] if self.run.config.slurm else [])]

    def stop(self) -> None:
        super().stop()
        self._hurry.set()

    def want_log(self, lane: tuple[int, str] | None) -> None:
        """Read the log of this lane now, and from now on."""
        if lane != self.wanted:
            self.wanted = lane
            self._hurry.set()

    def _ask_on(self) -> None:
        while not self._stop.is_set():
            if not self.is_paused:
                self._take(self._ask(self.run))
            self._stop.wait(self._ask_seconds)

    def _take(self, queue: RunQueue) -> None:
        """Keep what Slurm has answered; if it has not, what was shown last stays."""
        if queue.unanswered is not None:
            self._queue = replace(self._queue or RunQueue(), unanswered=queue.unanswered, asked=None)
            self._count += 1
            return
        is_new = self._queue is None or queue.asked is None or queue.asked != self._queue.asked
        self._queue, self._answered = queue, queue.asked or time.time()
        self._count += is_new  # others' answers may be shown more than once

    def rest(self, seconds: float) -> None:
        """Rest, but read a log at once on request."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not self._stop.is_set():
            if self._hurry.wait(left):
                self._hurry.clear()
                self._read_log()
                self.arrived.set()

    def look(self) -> None:
        """Read once; what the file system refuses is reported, and tried again, if it has ever shown the run
        or may pass.

        Raises:
            OSError: the run cannot be read until a person fixes it.
        """
        try:
            look = self._reader.read(self._queue, self._answered)
        except OSError as error:
            if self.seen.look is None and error.errno not in PASSING:
                raise
            self.seen = replace(self.seen, trouble=f"cannot read the run now: {error}")
            return
        self.seen = Seen(look, is_settled=self._settle(look))
        self._read_log()

    def _read_log(self) -> None:
        """Read the log that is wanted now."""
        key, look = self.wanted, self.seen.look
        try:
            self.log = self._log_end(key, look) if key and look else None
        except (OSError, BadArchive) as error:
            self.seen = replace(self.seen, trouble=f"cannot read the log now: {error}")

    def _log_end(self, key: tuple[int, str], look: Status) -> LogEnd:
        paths, (iteration, job_kind) = self.run.paths, key
        has_failed = any(lane.key == key and _TRIED_AGAIN & set(lane.shards) for lane in look.lanes)
        log = log_to_show(paths, iteration, job_kind, look.events, has_failed)
        if log is None:
            folder = paths.logs(task_of(iteration, job_kind))
            return LogEnd(key, f"{job_kind} of iteration {iteration} has no log yet", str(folder), ())
        return LogEnd(key, log.name, str(log.path), tuple(end_of(paths, log, _LOG_LINES)) or ("(empty)",))

    def _settle(self, look: Status) -> bool:
        """Whether the run has ended. That no process works for a moment, between two drivers, is no end."""
        is_local = look.slurm is None
        if is_local:
            self._count += 1
        if not look.has_ended or (is_local and look.driver):
            self._ended_at = None
            return False
        if look.state == "complete":
            return True
        if self._ended_at is None or self._ended_at[0] != look.state:
            self._ended_at = look.state, self._count
        return self._count > self._ended_at[1]


def watch(run: Run, interval: float) -> str:
    """Show the run until it has ended, or the person quits. Changes nothing in the run directory.

    Args:
        interval: seconds between two questions to Slurm.

    Returns:
        The run's state, as :attr:`pipeline.status.state.Status.state`.
    """
    reading = Readers(run, interval)
    has_ended = look_on(reading, "the run", lambda: show(RunWindow(reading)), changes)
    status = read_status(run) if has_ended else reading.seen.look
    if status is None:
        return "unknown"
    goes_on = "; it goes on without this view" if status.state == "running" else ""
    print(describe(status) if has_ended else f"{standing(status)}{goes_on}")
    return status.state


# --- a line for each change ------------------------------------------------------------------------------


def changes(before: Status | None, after: Status) -> list[str]:
    """Return lines on what has changed between two looks; none where nothing has. Pure."""
    now, new = clock(after.time), _new(before, after)
    first = [one.text for one in new if one.about in _NEWS]
    if before and _is_silent(before) and not _is_silent(after):
        first.append("Slurm answers again")
    last = [*_lanes(before, after), *(one.text for one in new if one.about is About.WORKERS)]
    events = map(str, _events(before, after))
    return [*(f"{now} {line}" for line in first), *events, *(f"{now} {line}" for line in last)]


def _new(before: Status | None, after: Status) -> list[Sentence]:
    known = {one.news for one in said(before, len(before.advice))} if before else set()
    return [one for one in said(after, len(after.advice)) if one.news not in known]


def _is_silent(status: Status) -> bool:
    return bool(status.slurm and status.slurm.unanswered)


def _events(before: Status | None, after: Status) -> Iterator[object]:
    """Yield events and rows since the look before; at first none, for the past is in the run directory."""
    if before is None:
        return
    last = max((event["time"] for event in before.events), default=0.0)
    events = [event for event in after.events if event["time"] > last]
    known = max((row.get("iteration", 0) for row in before.rows), default=0)
    rows = [row for row in after.rows if row.get("iteration", 0) > known]
    yield from event_lines(events, rows, after.created, after.iterations)


def _lanes(before: Status | None, after: Status) -> Iterator[str]:
    known = {lane.key: lane_in_words(lane) for lane in before.lanes} if before else {}
    for lane in after.lanes:
        words = lane_in_words(lane)
        if known.get(lane.key, "") != words:
            yield words


# --- a screen --------------------------------------------------------------------------------------------


class RunWindow(Window[Readers]):
    """A run, with the keys of its lanes and pages."""

    def __init__(self, reading: Readers) -> None:
        super().__init__(reading)
        self.view = ScreenState()
        self._frozen: Status | None = None

    def content(self, width: int, height: int) -> tuple[object, ...]:
        return self._look(), self._view()

    def lines(self, width: int, height: int) -> Sequence[Text]:
        return screen(self._look(), self._view(), width, height)

    def _look(self) -> Status | None:
        return self._frozen if self.view.is_paused else self.reading.seen.look

    def _view(self) -> ScreenState:
        trouble, began = self.reading.seen.trouble, self.reading.began
        if began and (silent := time.monotonic() - began) > SILENT_SECONDS:
            trouble = f"the file system has not answered for {10 * int(silent // 10)} s"
        log = self.view.log if self.view.is_paused else self.reading.log
        is_wanted = log is not None and log.lane == self._wanted()
        return replace(self.view, log=log if is_wanted else None, trouble=trouble)

    def _wanted(self) -> tuple[int, str] | None:
        return self.view.selected if self.view.page is Page.LOG else None

    def take(self, keys: Sequence[str]) -> bool:
        """Do what the keys say. Returns whether to go on."""
        for key in keys:
            if key == "q":
                return False
            if key == "p":
                self._frozen = self.reading.seen.look
                self.view = replace(self.view, is_paused=not self.view.is_paused, log=self.reading.log)
                self.reading.is_paused = self.view.is_paused
            else:
                self.view = pressed(self.view, self._look(), key)
            self.reading.want_log(self._wanted())
        return True


def pressed(view: ScreenState, look: Status | None, key: str) -> ScreenState:
    """Return the view after a key. Pure."""
    if key == "?":
        return replace(view, page=Page.RUN if view.page is Page.HELP else Page.HELP)
    if key == "\x1b" or (key == "l" and view.page is Page.LOG):
        return replace(view, page=Page.RUN)
    lanes = look.lanes if look else ()
    now = chosen(look, view)
    if now is None:
        return view
    if key == "l":  # the log stays when the run has gone on to other lanes
        return replace(view, page=Page.LOG, selected=now.key)
    if key in STEPS:
        index = max(0, min(len(lanes) - 1, lanes.index(now) + STEPS[key]))
        return replace(view, selected=lanes[index].key)
    stage = STAGE_KEYS.get(key)
    after = lanes.index(now) + 1  # the same key again goes to the next of its kind
    others = [*lanes[after:], *lanes[:after]]
    found = next((lane for lane in others if parts_of(lane.key[1])[0] == stage), None)
    return replace(view, selected=found.key) if found else view
