"""People's requests of a run on Slurm: its invocations of submit, run and resume, and its cancellation."""

import shlex
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field

from pipeline.config.conversion import converted, plain
from pipeline.run.durable import replace_durably
from pipeline.run.paths import RunPaths
from slurm.errors import UserError
from slurm.sealing import sealed, unsealed
from slurm.sharedfiles import read_newest


class SpoiltControl(UserError, ValueError):
    """The file of people's requests of a run cannot be read, nor can its copy."""


@dataclass(frozen=True)
class Control:
    """People's requests of a run on Slurm: content of ``<run>/slurm/control.json``."""

    invocation: Annotated[int, Field(alias="call")] = 0
    """Number of invocations of submit, run and resume so far: each has a new budget of attempts."""
    cancelled: bool = False
    """Cancellation by a person: driver jobs that start nevertheless do nothing."""
    has_failed: bool = False
    """Failure of this invocation: a task was given up."""
    retracted: tuple[tuple[str, str], ...] = ()
    """Pairs (task key, reason) of commits that were taken back in this invocation."""
    begun: float = field(default=0.0, compare=False)
    """Unix time when the invocation began."""


def read_control(paths: RunPaths) -> Control:
    """Return people's requests. The file is kept twice, because no other file says the same.

    Raises:
        SpoiltControl: a copy is there, but none that can be read.
    """
    why = ""
    for path in _controls(paths):
        try:
            return converted(Control, unsealed(read_newest(path)))
        except FileNotFoundError:
            continue
        except (ValueError, TypeError) as error:
            why = f"{path} cannot be read ({' '.join(str(error).split())})"
    if why:
        raise SpoiltControl(
            f"{why}, nor can its copy, so whether the run was cancelled is not known; remove both, and then: "
            f"slurm-ppo submit {shlex.quote(str(paths.root))}"
        )
    return Control()


def write_control(paths: RunPaths, control: Control) -> None:
    paths.control.parent.mkdir(parents=True, exist_ok=True)
    for path in _controls(paths):
        replace_durably(path, sealed(plain(control)))


def _controls(paths: RunPaths) -> tuple[Path, Path]:
    return paths.control, paths.control.with_suffix(".copy.json")


def begin_invocation(paths: RunPaths) -> Control:
    """Note that a person asks for the run to go on, which gives it a new budget of attempts."""
    control = Control(read_control(paths).invocation + 1, begun=time.time())
    write_control(paths, control)
    return control
