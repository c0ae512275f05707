"""Workers of several ranks: the first finds the tasks, and tells the others through a store.

The others wait in a call of the store, a socket: never in a collective, which would spin on their GPUs.
"""

import json
import signal
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from pipeline.run.attempts import AttemptId
from pipeline.run.paths import RunPaths
from pipeline.run.tasks import parse_task, task_key
from pipeline.workers.beats import Reason
from stages.attempts.arguments import Arguments
from stages.workers.loop import Source
from stages.workers.surroundings import Output

_LONGEST = timedelta(days=30)
"""Time for which a rank waits for the first: as long as it lives. If it dies the store's connection ends."""

_OF_ALL = (Reason.WARNED, Reason.GREW)
"""Reasons for which a rank asks the first that all of them leave, once the task at hand is done."""


class Store(Protocol):
    """What is used of torch's stores."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def add(self, key: str, amount: int, /) -> int: ...

    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...


class Leading:
    """Source of the first rank: tells the others what it got, and leaves when one of them has to."""

    def __init__(self, source: Source, store: Store) -> None:
        self._source, self._store, self._told = source, store, 0

    def next(self) -> Arguments | None:
        for reason in _OF_ALL:
            if self._store.add(_wish(reason), 0):
                self._source.leave(reason)
        given = self._source.next()
        self._store.set(f"task/{self._told}", in_words(given))
        self._told += 1
        return given

    def ended(self, arguments: Arguments, exit_code: int) -> None:
        self._source.ended(arguments, exit_code)

    def leave(self, reason: Reason) -> None:
        self._source.leave(reason)

    def left(self) -> None:
        self._source.left()


class Following:
    """Source of every other rank."""

    def __init__(self, store: Store) -> None:
        self._store, self._heard = store, 0
        self._output = Output()
        self._has_failed = False

    def next(self) -> Arguments | None:
        if self._has_failed:
            return None
        key = f"task/{self._heard}"
        for number in (signal.SIGTERM, signal.SIGUSR2):  # the first rank is warned too, and says what follows
            signal.signal(number, signal.SIG_IGN)
        self._store.wait([key], _LONGEST)
        self._heard += 1
        given = out_of_words(self._store.get(key).decode())
        if given is not None and not given.loads:
            files = RunPaths(given.run_dir).task(given.task)
            self._output.turn_to(files.log(AttemptId.parse(given.attempt).number), given.run_dir)
        return given

    def ended(self, arguments: Arguments, exit_code: int) -> None:
        self._output.turn_back()

    def leave(self, reason: Reason) -> None:
        """Ask the first rank that all leave: the others would wait for a rank that is gone. After a failure
        leave at once, with an exit code that ends them."""
        if reason in _OF_ALL:
            self._store.add(_wish(reason), 1)
        else:
            self._has_failed = True

    def left(self) -> None:
        """The first rank says it for all."""


def _wish(reason: Reason) -> str:
    return f"leave/{reason}"


def meet(environment: Mapping[str, str]) -> Store:
    """Return the store of this element's ranks: rank 0 listens, and says where in a file that is gone again
    when all have met.

    Raises:
        TimeoutError: the others did not come.
    """
    from stages.ranks import MEETING_SECONDS, Place, find_store, open_store  # imports torch

    place, path = Place.of(environment), Path(environment["RENDEZVOUS_FILE"] + ".tasks")
    if place.rank:
        store, _ = find_store(path, place, MEETING_SECONDS)
        store.set(f"here/{place.rank}", "")
        return store
    store = open_store(path, MEETING_SECONDS)
    store.wait([f"here/{rank}" for rank in range(1, place.size)], timedelta(seconds=MEETING_SECONDS))
    path.unlink(missing_ok=True)
    return store


def in_words(given: Arguments | None) -> str:
    if given is None:
        return "null"
    words = {"task": task_key(given.task), "run_dir": str(given.run_dir), "attempt": given.attempt}
    failure = str(given.failure_file) if given.failure_file else None
    ways = {"stays": given.stays, "loads": given.loads}
    return json.dumps({**words, "failure_file": failure, "patience": given.patience, **ways})


def out_of_words(text: str) -> Arguments | None:
    """Invert :func:`in_words`."""
    given = json.loads(text)
    if given is None:
        return None
    failure = Path(given["failure_file"]) if given["failure_file"] else None
    task, run_dir = parse_task(given["task"]), Path(given["run_dir"])
    ways = given["stays"], given["loads"]
    return Arguments(task, run_dir, given["attempt"], failure, given["patience"], *ways)
