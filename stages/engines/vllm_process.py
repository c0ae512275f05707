"""vLLM's engine in a process of its own, which gives all its memory back when it ends.

It ends with the task, however that ended, and leaves a note of what went wrong in it: vLLM itself only says
that something has.
"""

import atexit
import builtins
import contextlib
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.executor import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from pipeline.process import end_with_parent
from stages.logs import log
from stages.models.numerics import be_deterministic

NOTE = "SLURM_PPO_ENGINE_NOTE"
"""Variable with the path of the note."""
_LOGGER = "vllm.v1.engine.core"
"""Logger of the exceptions that end vLLM's engine process, or a call to it."""
_LOOK_SECONDS = 0.1
_END_SECONDS = 60.0
"""Seconds for which the end of a process is waited for, vLLM's own five included."""


class OwnUniProcExecutor(UniProcExecutor):
    """Executor of a model that one process computes with."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        set_up_process()
        super().__init__(vllm_config)

    def shutdown(self) -> None:
        """End the process: what vLLM and Python would take apart, for seconds, ends with it."""
        atexit._run_exitfuncs()  # multiprocessing's, which knows of semaphores
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


class OwnMultiprocExecutor(MultiprocExecutor):
    """Executor of a model that is split over several processes. These end with the engine's."""

    def __init__(self, vllm_config: VllmConfig, monitor_workers: bool = True) -> None:
        set_up_process()
        super().__init__(vllm_config, monitor_workers)


_OWN: dict[type[Executor], type[Executor]] = {
    UniProcExecutor: OwnUniProcExecutor,
    MultiprocExecutor: OwnMultiprocExecutor,
}


def own_executor(chosen: type[Executor]) -> type[Executor]:
    """Return the class to use in place of the executor that vLLM has chosen."""
    return _OWN[chosen]


def set_up_process() -> None:
    """Prepare vLLM's process, in which this runs before a model is loaded."""
    end_with_parent(signal.SIGKILL)
    task = multiprocessing.parent_process()
    if task is not None and not task.is_alive():  # it ended before that
        os._exit(1)
    be_deterministic()
    logging.getLogger(_LOGGER).addHandler(_Noting())


class _Noting(logging.Handler):
    """Writes the type and the text of the last exception that was logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info and record.exc_info[1]
        if isinstance(error, Exception):
            with contextlib.suppress(OSError):  # then vLLM's own words remain
                Path(os.environ[NOTE]).write_text(json.dumps([type(error).__name__, str(error)]))


@contextlib.contextmanager
def as_here(note: Path) -> Iterator[None]:
    """Raise what has gone wrong in vLLM's process as it would be raised in this one.

    Raises:
        RuntimeError: the process has ended, and has not said why.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except Exception as error:
        if (noted := _take(note)) is not None:
            raise noted from error
        if isinstance(error, EngineDeadError):
            raise RuntimeError("vLLM's process has ended, and has not said why: it was killed") from error
        raise


def _take(note: Path) -> Exception | None:
    """Return the exception of a note, which is removed; one of an unknown type as a RuntimeError."""
    try:
        name, text = json.loads(note.read_text())
        note.unlink()
    except (OSError, ValueError):
        return None
    found = torch.OutOfMemoryError if name == "OutOfMemoryError" else getattr(builtins, name, None)
    if found in (torch.OutOfMemoryError, AttributeError, NotImplementedError, RuntimeError, ValueError):
        made: Exception = found(text)
        return made
    return RuntimeError(f"{name}: {text}")


def shut_down(client: Any) -> None:
    """End vLLM's process, and return once its memory is free: vLLM itself kills, after some seconds, one that
    does not end, and goes on.

    Args:
        client: its ``SyncMPClient``.
    """
    processes, until = client.resources.engine_manager.processes, time.monotonic() + _END_SECONDS
    client.shutdown()
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    if left := [str(process.pid) for process in processes if process.is_alive()]:
        log.warning(
            f"vLLM's process {', '.join(left)} was killed and has not ended within {_END_SECONDS:g} s: "
            "it may hold memory that the next engine needs"
        )


def answer_when_ended(client: Any) -> None:
    """Let all that waits for vLLM's process fail when it has ended: of one that was killed vLLM leaves calls,
    and the next step, waiting without end.

    Args:
        client: its ``SyncMPClient``.
    """
    threading.Thread(target=_fail_calls, args=(client,), daemon=True, name="engine-calls").start()


def _fail_calls(client: Any) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    wait([process.sentinel for process in client.resources.engine_manager.processes])
    is_known = False
    while not is_known:  # from then on vLLM refuses calls
        is_known = client.resources.engine_dead
        for future in list(client.utility_results.values()):
            if not future.done():
                future.set_exception(EngineDeadError())
        time.sleep(_LOOK_SECONDS)
    client.outputs_queue.put_nowait(EngineDeadError())
