"""Calls of a user's function in threads, each call with a time limit.

The threads are daemons: one that is stuck keeps no process from ending. Code that never releases the
interpreter lock (a regular expression that backtracks without end) stops every Python thread, also the one
that checks the time; for that case faulthandler's watchdog, a C thread, ends the process.
"""

import faulthandler
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from stages.engines.base import Stopped

_POLL_SECONDS = 0.1
"""Seconds until a wait notices that a call is late, or that the process is to stop."""
_STANDARD_ERROR = 2


@dataclass(frozen=True)
class Answer:
    """The outcome of a call: its return value, or the exception that it raised."""

    returned: Any = None
    raised: BaseException | None = None


class Late(TimeoutError):
    """A call has exceeded its time limit."""

    def __init__(self, key: int) -> None:
        super().__init__(f"call {key} is late")
        self.key = key


class CallPool:
    """A pool of threads that call one function. The caller names each call by a key."""

    def __init__(self, function: Callable[[Any], Any], workers: int, seconds: float) -> None:
        """Set up ``workers`` threads; each call may take ``seconds``, time in the queue not counted."""
        self._function = function
        self._workers = workers
        self._seconds = seconds
        self._asked: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()
        self._answered: SimpleQueue[tuple[int, Answer]] = SimpleQueue()
        self._num_open = 0
        self._num_threads = 0
        self._lock = threading.Lock()
        self._began: dict[int, float] = {}
        self._is_closed = False

    def start(self, key: int, argument: Any) -> None:
        """Call the function as soon as a thread is free."""
        if self._num_threads < min(self._workers, self._num_open + 1):
            self._num_threads += 1
            threading.Thread(target=self._work, daemon=True).start()
        self._num_open += 1
        self._asked.put((key, argument))

    def answers(self, wait: bool, should_stop: Callable[[], bool]) -> dict[int, Answer]:
        """Return the answers, by key, of calls that ended since the last time.

        Args:
            wait: whether to wait for at least one, if there are open calls.

        Raises:
            Late: a call has taken longer than it may.
            Stopped: no call has ended yet, and ``should_stop`` holds.
        """
        found: dict[int, Answer] = {}
        while self._num_open:
            with self._lock:
                oldest = min(self._began, key=self._began.__getitem__, default=None)
                if oldest is not None and time.monotonic() - self._began[oldest] > self._seconds:
                    raise Late(oldest)
            try:
                is_waiting = wait and not found
                key, answer = self._answered.get(is_waiting, _POLL_SECONDS)
            except Empty:
                if not is_waiting:
                    break
                if should_stop():
                    raise Stopped from None
                continue
            found[key] = answer
            self._num_open -= 1
        return found

    def close(self) -> None:
        """Let idle threads end and stop the watchdog; calls that still run are not waited for."""
        for _ in range(self._num_threads):
            self._asked.put(None)
        with self._lock:
            self._is_closed = True
            faulthandler.cancel_dump_traceback_later()

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            key, argument = asked
            self._note(key, time.monotonic())
            try:
                answer = Answer(returned=self._function(argument))
            except BaseException as error:  # also SystemExit: the caller would wait for a thread that is gone
                answer = Answer(raised=error)
            self._note(key, None)
            self._answered.put((key, answer))

    def _note(self, key: int, began: float | None) -> None:
        """Note that a call begins, or ends (None); set the watchdog to twice the limit of the oldest."""
        with self._lock:
            if began is None:
                del self._began[key]
            else:
                self._began[key] = began
            if self._is_closed:
                return
            if self._began:
                left = min(self._began.values()) + 2 * self._seconds - time.monotonic()
                faulthandler.dump_traceback_later(max(left, 0.001), exit=True, file=_STANDARD_ERROR)
            else:
                faulthandler.cancel_dump_traceback_later()
