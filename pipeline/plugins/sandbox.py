"""Calls of plug-ins in processes of their own: one that hangs is killed, one that crashes harms no other.

The code that runs in them is :mod:`pipeline.plugins.called`. They are new interpreters, not forks:
this process may hold threads, locks and a GPU, which no fork survives.
"""

import contextlib
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, TimeoutError, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any

from pipeline.plugins.called import STUCK, Plugin, PluginFailure, load, prepare
from pipeline.plugins.load import PluginError
from pipeline.process import uninterrupted

_POLL_SECONDS = 0.2
"""Seconds between checks whether all processes have ended before they took a call."""
_START_SECONDS = 30.0
"""Seconds that a process may take to start on a busy machine, besides its plug-in's import."""
_QUIET_SECONDS = 3.0
"""Seconds after which a message names the import that is waited for."""
_SHOWN_SECONDS = 0.2
"""Most seconds until a process that is being started appears among this one's children."""


class _Processes(SpawnContext):
    """Starts the processes of one pool, and knows them from others that this one has started."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[SpawnProcess] = []

    def Process(self, *arguments: Any, **settings: Any) -> SpawnProcess:  # type: ignore[override]
        process = SpawnProcess(*arguments, **settings)
        self.started = [one for one in self.started if one.is_alive()] + [process]
        return process


@dataclass(frozen=True)
class Calls:
    """Processes that have imported a plug-in."""

    plugin: Plugin
    workers: int
    """Number of processes."""
    pool: Any
    processes: _Processes
    folder: tempfile.TemporaryDirectory[str]
    """Folder with a file for each process that has started, and :attr:`stuck`."""

    @property
    def stuck(self) -> Path:
        """File of the traceback of an import that took too long."""
        return Path(self.folder.name, STUCK)

    def of(self, plugin: Plugin) -> "Calls":
        """Return the same processes, for another function of the same module."""
        return replace(self, plugin=plugin)

    def ask(self, seconds: float, function: Callable[..., Any], *arguments: Any) -> Any:
        """Schedule ``function(plugin, *arguments)`` on the first free process, and return its future.
        Raises PluginError where the processes have ended at its import."""
        try:
            with uninterrupted({signal.SIGINT}):  # the first call starts processes; Ctrl-C is for this one
                return self.pool.schedule(function, args=(self.plugin, *arguments), timeout=seconds)
        except RuntimeError:
            raise self._unusable() from None

    def call(self, seconds: float, function: Callable[..., Any], *arguments: Any) -> Any:
        """Ask, and wait for the answer. Raises PluginError."""
        return self.answer(self.ask(seconds, function, *arguments), seconds)

    def answer(self, future: Any, seconds: float) -> Any:
        """Return the call's result, or the PluginFailure it ended in. Answers are to be taken in the order of
        asking: then only what was asked before can keep a call waiting. An import that takes seconds is named
        on standard error.

        Raises:
            PluginError: no process got as far as to call the function.
        """
        from pebble import ProcessExpired

        begun, is_told = time.monotonic(), False
        until = begun + _START_SECONDS + self.plugin.import_limit + seconds
        while not future.done():
            if time.monotonic() > until or not self.pool.active:
                raise self._unusable()
            wait([future], _POLL_SECONDS)
            if not is_told and time.monotonic() - begun > _QUIET_SECONDS and self._is_importing():
                is_told = True
                print(self._awaited(), file=sys.stderr, flush=True)
        try:
            return future.result()
        except ProcessExpired as error:
            return PluginFailure(f"ended its process ({in_words(error.exitcode)})")
        except TimeoutError:
            return PluginFailure(f"gave no answer within {seconds:g} s (time_limit)", is_late=True)
        except (BrokenProcessPool, CancelledError):
            raise self._unusable() from None

    def prepare(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """Have a rule prepare itself in each process, within the time that its import may take.

        Args:
            columns: what it prepares itself for, by argument.
        """
        seconds = 2 * self.plugin.import_limit  # its own, and that of another which it waits for
        given = columns, self.folder.name, self.workers
        asked = [self.ask(seconds, prepare, *given) for _ in range(self.workers)]
        for one in asked:
            self.answer(one, seconds)

    def _is_importing(self) -> bool:
        """Whether a process has begun to import the plug-in and has not ended it."""
        files = (Path(self.folder.name, str(one.pid)) for one in self.processes.started if one.is_alive())
        return any(file.exists() and file.stat().st_size == 0 for file in files)

    def _awaited(self) -> str:
        plugin = self.plugin
        limit = f"it is given up after {plugin.import_limit:g} s"
        return f"waiting for the import of {plugin.key}={plugin.name}; {limit}"

    def _unusable(self) -> PluginError:
        what = "its import ended the process"
        if trace := self.stuck.read_text():
            lines = re.findall(r'File "([^<].*)", line (\d+)', trace)
            where = f", at {lines[0][0]}:{lines[0][1]}" if lines else ""
            what = f"its import took longer than {self.plugin.import_limit:g} s{where}"
        return PluginError(f"{self.plugin.key}={self.plugin.name}: {what}")

    def close(self) -> None:
        """Stop the processes, whatever they do."""
        with self.folder:
            self._wait_for_starts()
            self.pool.stop()
            self.pool.join()

    def _wait_for_starts(self) -> None:
        """Wait for all processes to start: one that is stopped while it starts would complain in the log."""
        begun = time.monotonic()
        while (waited := time.monotonic() - begun) < _START_SECONDS:
            started = {name.name for name in Path(self.folder.name).iterdir()}
            alive = [process for process in tuple(self.processes.started) if process.is_alive()]
            # One that is being started is not alive for a moment, nor is one that has ended.
            has_all = len(alive) >= self.workers or waited > _SHOWN_SECONDS
            if has_all and all(str(process.pid) in started for process in alive):
                return
            time.sleep(0.01)


def start_calls(plugin: Plugin, workers: int) -> Calls:
    """Start processes for a plug-in, at its first call. Who starts them closes them."""
    from pipeline.plugins.pool import Pool

    # Else strings hash differently in each process, and a sum over a set of words comes out differently.
    os.environ["PYTHONHASHSEED"] = "0"
    resource_tracker.ensure_running()  # it lets Ctrl-C through when it starts
    folder = tempfile.TemporaryDirectory()
    Path(folder.name, STUCK).touch()
    processes = _Processes()
    pool = Pool(workers, context=processes, initializer=load, initargs=(plugin, folder.name))
    return Calls(plugin, workers, pool, processes, folder)


@contextlib.contextmanager
def open_calls(plugin: Plugin, workers: int) -> Iterator[Calls]:
    """Start processes for a plug-in, and stop them in the end whatever they do."""
    calls = start_calls(plugin, workers)
    try:
        yield calls
    finally:
        calls.close()


def in_words(exit_code: int) -> str:
    return f"exit code {exit_code}" if exit_code >= 0 else f"signal {signal.Signals(-exit_code).name}"
