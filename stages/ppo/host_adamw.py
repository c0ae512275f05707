"""DeepSpeed's AdamW on the host's cores, which a C++ compiler builds at first use."""

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from torch import nn

from pipeline.config.update import UpdateConfig
from stages.context import UserError
from stages.logs import log

_BUILD_SECONDS = 900.0
"""Seconds that another process may take to compile."""
_FRESH_SECONDS = 300.0
"""Age of torch's lock up to which it may be that of a process on a node whose locks are not seen here."""


def host_adamw(
    parameters: Iterable[nn.Parameter], peak: float, config: UpdateConfig
) -> torch.optim.Optimizer:
    """Make AdamW for the host.

    Raises:
        UserError: it cannot be compiled, or another process takes too long for that.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    # ninja comes with DeepSpeed, but PATH leads to it only where the environment is activated.
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
    given = {"betas": config.betas, "eps": config.epsilon, "weight_decay": config.weight_decay}
    with _building_alone():
        try:
            return DeepSpeedCPUAdam(parameters, peak, **given)
        except RuntimeError as error:
            raise UserError(
                "update.offload_optimizer=true needs DeepSpeed's AdamW for CPUs, which a C++ compiler builds "
                f"at first use, and that failed: {error.__cause__ or error}. Load a compiler module or "
                "install g++; or set update.offload_optimizer=false"
            ) from error


@contextlib.contextmanager
def _building_alone() -> Iterator[None]:
    """Hold the folder of the build. Torch's own lock in it stays if a builder is killed, and torch then waits
    without end; one that the system holds for a process ends with it."""
    from torch.utils.cpp_extension import _get_build_directory

    folder = Path(_get_build_directory("cpu_adam", verbose=False))
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(FileLock(folder / "builder.lock", timeout=_BUILD_SECONDS, poll_interval=0.5))
        except Timeout as error:
            raise UserError(
                f"update.offload_optimizer=true waited {_BUILD_SECONDS:.0f} s for another process to compile "
                f"DeepSpeed's AdamW in {folder}; see whether it hangs"
            ) from error
        except NotImplementedError:  # a filesystem without locks: torch's lock is all there is
            pass
        _end_wait_for(folder / "lock")
        yield


def _end_wait_for(lock: Path) -> None:
    """Wait for torch's lock while it is fresh, then remove it: its process has ended."""
    while (age := _age(lock)) is not None:
        if age > _FRESH_SECONDS:
            log.warning(f"removed {lock}: the process that compiled DeepSpeed's AdamW has ended on the way")
            lock.unlink(missing_ok=True)
            return
        time.sleep(1.0)


def _age(path: Path) -> float | None:
    """Return the seconds since a file was written; None where there is none."""
    with contextlib.suppress(FileNotFoundError):
        return time.time() - path.stat().st_mtime
    return None
