"""What is old goes beside the run: a driver that stays has it removed and packed by a thread of its own, so
that what is ready starts meanwhile."""

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

Work = Callable[[], Iterable[str]]
"""Removes and packs what is old at one moment. Returns lines for people."""


@dataclass
class Tidying:
    """Work of which one is done at a time; of several that wait only the last is done."""

    is_beside: bool = False
    """Whether a thread does it; else the caller."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _next: Work | None = None
    _thread: threading.Thread | None = None
    _said: list[str] = field(default_factory=list)
    _error: Exception | None = None
    """What ended the last work."""

    def begin(self, work: Work) -> None:
        """Have work done now, or after that at hand."""
        if not self.is_beside:
            self._said += work()
            return
        with self._lock:
            self._next = work
            if self._thread is None:
                self._thread = threading.Thread(target=self._do_all, name="tidying")
                self._thread.start()

    def said(self) -> Iterator[str]:
        """Yield the lines since the last call. Raises what ended work since then."""
        with self._lock:
            said, self._said = self._said, []
            error, self._error = self._error, None
        yield from said
        if error is not None:
            raise error

    def finish(self) -> bool:
        """Wait until all is done. Returns whether anything was running."""
        thread = self._thread
        if thread is None:
            return False
        thread.join()
        return True

    def _do_all(self) -> None:
        while (work := self._take()) is not None:
            said, error = list[str](), None
            try:
                said += work()
            except Exception as found:  # for who asks next: said() raises it
                error = found
            with self._lock:
                self._said += said
                self._error = error or self._error

    def _take(self) -> Work | None:
        """Return the next work; without any the thread ends, and is known to."""
        with self._lock:
            work, self._next = self._next, None
            if work is None:
                self._thread = None
            return work
