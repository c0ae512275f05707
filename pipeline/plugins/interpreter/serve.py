"""An environment in an interpreter of its own: answers requests of :mod:`pipeline.plugins.hosted`.

Run as ``PYTHON serve.py PARENT``. A request is a line of JSON on standard input, and so is an answer on what
was standard output when this began; what the environment prints goes to standard error. Conversations go on
in threads, everything else in the main thread. Imports nothing but the standard library, from Python 3.10 on.
"""

import ctypes
import importlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any

_PR_SET_PDEATHSIG = 1
"""Option of prctl(2) that sets which signal this process gets when its parent ends."""
_GROUP = "slurm_ppo.environments"
"""Entry point group of environments."""


def from_file(path: str, name: str) -> ModuleType:
    """Import a module from its file, whose folder is not searched for others."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


contract: Any = from_file(str(Path(__file__).with_name("contract.py")), "slurm_ppo_contract")


class Served:
    """The environment that is asked."""

    def __init__(self) -> None:
        self._function: Callable[..., Any] | None = None
        self._environment: Any = None
        self._tasks: Iterator[Any] = iter(())

    def load(self, source: str, file: str | None) -> dict[str, Any]:
        """Import ``source``, if it comes along with slurm-ppo from ``file``. Returns what is wrong."""
        target = source if ":" in source else _registered(source)
        if not target:
            return {
                "wrong": f"no package of {sys.prefix} has an environment of this name; write module:function"
            }
        module_name, _, attribute = target.partition(":")
        try:
            module = from_file(file, f"slurm_ppo_{Path(file).stem}") if file else None
            found: Any = module or importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            is_own = f"{module_name}.".startswith(f"{error.name}.")
            return {"missing": error.name or "", "is_own": is_own, "text": str(error)}
        for part in attribute.split("."):
            if not hasattr(found, part):
                return {"wrong": f"module {module_name!r} has no {attribute!r}"}
            found = getattr(found, part)
        if not callable(found):
            return {"wrong": "is not a function"}
        self._function = found
        return {}

    def open(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Make the environment. Returns what it can do."""
        assert self._function
        self._environment = contract.Environment(self._function(**arguments))
        return {"has_step": self._environment.has_step, "compares": self._environment.compares}

    def tasks(self, size: int, seed: int, heldout: bool) -> None:
        """Begin to make tasks."""
        self._tasks = iter(self._environment.tasks(size, seed, heldout))

    def next(self) -> Any:
        """Return the next task's values, what is wrong with it, or None: there are no more."""
        task = next(self._tasks, None)
        return vars(task) if isinstance(task, contract.MadeTask) else task

    def scores(self, rows: list[dict[str, Any]]) -> list[Any]:
        """Return a number for each response, or the text of what is none in a list."""
        return [_scalar(value) for value in self._environment.scores(rows)]

    def step(self, messages: list[dict[str, Any]], metadata: Any) -> Any:
        """Return the messages to continue with, None to stop."""
        returned = self._environment.step(messages, metadata)
        if contract.plain_json(returned) is None:
            shown = contract.quoted(returned)
            raise contract.DescribedError(f"returned {shown}, which JSON text cannot give back as it is")
        return returned


def _registered(name: str) -> str:
    """Return what an installed package has registered under a name; empty if none has."""
    found = importlib.metadata.entry_points(group=_GROUP, name=name)
    return min((point.value for point in found), default="")


def _scalar(value: Any) -> Any:
    """Return a score as a number, or in a list the text of what is no number."""
    if isinstance(value, str):
        return value
    try:
        return float(value)
    except OverflowError:
        return float("inf")
    except Exception:
        return [contract.quoted(value)]


class Answers:
    """Where answers go. Nothing of a process that the environment has forked goes there."""

    def __init__(self, file: Any) -> None:
        self._file, self._lock, self._pid = file, Lock(), os.getpid()

    def give(self, call: Callable[..., Any], request: dict[str, Any]) -> None:
        """Call, and write what came of it."""
        answer: dict[str, Any] = {"id": request["id"]}
        try:
            answer["value"] = call(**request["arguments"])
        except BaseException as error:  # also SystemExit: the message has to name the task
            answer |= {"error": contract.raised(error), "trace": traceback.format_exc()}
        if os.getpid() != self._pid:
            os._exit(0)
        with self._lock:
            self._file.write(json.dumps(answer) + "\n")
            self._file.flush()


def end_with(parent: int) -> None:
    """Have the kernel end this process when its parent ends, however that may be."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def main() -> None:
    """Answer requests until there are no more."""
    end_with(int(sys.argv[1]))
    requests, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    begin = json.loads(requests.readline())
    sys.path[:1] = begin["path"]  # in place of the folder of this file
    sys.argv[:] = [""]
    served, given = Served(), Answers(answers)
    with ThreadPoolExecutor(max_workers=begin["threads"]) as pool:
        for line in requests:
            request = json.loads(line)
            call = getattr(served, request["call"])
            if request["call"] == "step":
                pool.submit(given.give, call, request)
            else:
                given.give(call, request)
    os._exit(0)  # whatever threads the environment has


if __name__ == "__main__":
    main()
