"""Environments in an interpreter of their own: their packages may be others than those of this one.

A process of that interpreter runs :mod:`pipeline.plugins.interpreter.serve` and makes one environment.
Requests and answers are lines of JSON. It ends with the thread that has started it, at the latest.
"""

import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from pipeline.plugins.interpreter.contract import DescribedError, MadeTask
from pipeline.plugins.load import VERIFIERS, MissingImport, PluginError, is_ready
from pipeline.process import signal_session

_LAST_WORDS_SECONDS = 1.0
"""Seconds in which answers of a process that has ended are read."""
_OF_THIS_PROJECT = Path("pipeline", "plugins", "load.py")
"""File below each folder of this project that may be searched for modules."""
_SERVE = str(Path(__file__).parent / "interpreter" / "serve.py")


class HostedEnvironment:
    """An environment in another process, asked as :class:`.contract.Environment` is."""

    def __init__(self, child: "Child", arguments: Mapping[str, Any]) -> None:
        self._child = child
        abilities = child.call("open", arguments=arguments)
        self.has_step: bool = abilities["has_step"]
        self.compares: bool = abilities["compares"]

    def tasks(self, size: int, seed: int, heldout: bool) -> Iterator[MadeTask | str]:
        """Yield tasks in plain values, or what is wrong with one."""
        self._child.call("tasks", size=size, seed=seed, heldout=heldout)
        while (task := self._child.call("next")) is not None:
            yield task if isinstance(task, str) else MadeTask(**task)

    def scores(self, rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return what the environment says of responses to one task, which may be no numbers."""
        found = self._child.call("scores", rows=[dict(row) for row in rows])
        return [_NoNumber(value[0]) if isinstance(value, list) else value for value in found]

    def step(self, messages: list[dict[str, Any]], metadata: Any) -> Any:
        """Return the messages to continue a conversation with, or None to stop. Any thread may call this."""
        return self._child.call("step", messages=messages, metadata=metadata)

    @property
    def has_ended(self) -> bool:
        """Whether the environment's process is no more."""
        return self._child.has_ended

    def close(self) -> None:
        """End the process."""
        self._child.close()


class _NoNumber:
    """A score that is none, of a type that only the environment's process has."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


class Child:
    """A process of an environment's interpreter.

    Args:
        python: the interpreter. Default: this one.
        threads: calls of ``step`` that it takes at once.
    """

    def __init__(self, python: str | None, threads: int) -> None:
        self._ids, self._waiting = count(), dict[int, Future[Any]]()
        self._lock = threading.Lock()
        self.has_ended, self._end = False, ""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        self._process = subprocess.Popen(
            [python or sys.executable, _SERVE, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=environment | {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"},
            start_new_session=True,  # Ctrl-C is for this process, which ends the other
        )
        self._write({"path": own_folders(), "threads": threads})
        reader = threading.Thread(target=self._read, daemon=True)
        reader.start()
        threading.Thread(target=self._await_end, args=(reader,), daemon=True).start()

    def call(self, method: str, **arguments: Any) -> Any:
        """Ask, and wait for the answer. Raises DescribedError: the environment's code raised an exception, or
        its process has ended."""
        future: Future[Any] = Future()
        with self._lock:
            key = next(self._ids)
            self._waiting[key] = future
        if self.has_ended or not self._write({"id": key, "call": method, "arguments": arguments}):
            self._fail_all()
        answer = future.result()
        if "error" in answer:
            error = DescribedError(answer["error"])
            if answer["trace"]:
                error.add_note(f"In its process: {answer['trace']}")
            raise error
        return answer["value"]

    def close(self) -> None:
        """End the process, whatever it does, and those that it has started."""
        signal_session(self._process.pid)
        self._process.wait()

    def _write(self, value: Mapping[str, Any]) -> bool:
        assert self._process.stdin
        text = json.dumps(value) + "\n"
        try:
            with self._lock:
                self._process.stdin.write(text)
                self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            self._process.wait()
            return False
        return True

    def _read(self) -> None:
        assert self._process.stdout
        try:
            for line in self._process.stdout:
                answer = json.loads(line)
                self._resolve(answer["id"], answer)
        except (ValueError, TypeError, KeyError):
            self._end = "was answered by something else than Python"
            self._process.kill()

    def _resolve(self, key: int, answer: Any) -> None:
        with self._lock:
            future = self._waiting.pop(key, None)
        if future:
            future.set_result(answer)

    def _await_end(self, reader: threading.Thread) -> None:
        """Wait for the process to end, and fail what waits for it then: a process that it has forked may keep
        the pipe open."""
        self._process.wait()
        reader.join(_LAST_WORDS_SECONDS)
        self._fail_all()

    def _fail_all(self) -> None:
        self.has_ended = True
        end = self._end or f"ended its process ({_in_words(self._process.wait())})"
        for key in list(self._waiting):
            self._resolve(key, {"error": end, "trace": ""})


def connect(key: str, source: str, python: str | None, threads: int = 1) -> "partial[HostedEnvironment]":
    """Start a process and import an environment's source there. Returns what makes the environment of its
    arguments, given by name.

    Raises:
        PluginError: there is no such source, or no such interpreter.
        MissingImport: the source imports what the interpreter does not have.
        DescribedError: the import raises an exception.
    """
    target = READY.get(source, source)
    try:
        child = Child(python, threads)
    except OSError as error:
        raise PluginError(f"{key}={source}: {python} cannot be run: {error.strerror}") from error
    try:
        lacks = child.call("load", source=target, file=_file_of(target) if is_ready(target) else None)
    except DescribedError:
        child.close()
        raise
    if lacks:
        child.close()
    if "wrong" in lacks:
        raise PluginError(f"{key}={source}: {lacks['wrong']}")
    if lacks:
        where = f"of {python or sys.executable}, in the folder that the run was started in and in PYTHONPATH"
        why = f"no module {lacks['missing']!r}; modules are looked for among the packages {where}"
        raise (PluginError if lacks["is_own"] else MissingImport)(
            f"{key}={source}: {lacks['text'] if is_ready(target) else why}"
        )
    return partial(_made, child)


READY = {
    "reasoning_gym": "stages.rewards.gym:ReasoningGym",
    VERIFIERS: "stages.rewards.verifiers:VerifiersEnvironment",
}
"""Environments that come along, which any interpreter imports from their files."""


def _made(child: Child, /, **arguments: Any) -> HostedEnvironment:
    return HostedEnvironment(child, arguments)


def own_folders() -> list[str]:
    """Return where modules of the user's own are looked for: what this interpreter searches, but for its
    packages and folders of this project."""
    packages = {Path(one).resolve() for one in (sys.prefix, sys.base_prefix)}
    found = [Path(one or ".").absolute() for one in sys.path]
    own = [one for one in found if packages.isdisjoint([one, *one.resolve().parents])]
    return [str(one) for one in own if not (one / _OF_THIS_PROJECT).exists()]


def _file_of(target: str) -> str:
    spec = importlib.util.find_spec(target.partition(":")[0])
    assert spec
    assert spec.origin
    return spec.origin


def _in_words(code: int) -> str:
    from pipeline.plugins.sandbox import in_words

    return in_words(code)
