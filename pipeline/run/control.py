"""A person's invocations of submit and resume on a Slurm run: their number, and whether it was cancelled."""

import shlex
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.config.conversion import converted, plain
from pipeline.run.durable import replace_durably
from pipeline.run.paths import RunPaths
from slurm.errors import UserError
from slurm.sealing import sealed, unsealed
from slurm.sharedfiles import read_newest


class SpoiltControl(UserError, ValueError):
    """What people have asked of a run cannot be read."""


@dataclass(frozen=True)
class Control:
    """What people have asked of a run on Slurm: ``<run>/slurm/control.json``."""

    call: int = 0
    """Counts calls of submit, run and resume: each has a new budget of attempts."""
    cancelled: bool = False
    """Driver jobs that start nevertheless do nothing."""
    has_failed: bool = False
    """A task was given up in this call."""
    retracted: tuple[tuple[str, str], ...] = ()
    """(task key, reason) of commits that were taken back in this call."""
    begun: float = field(default=0.0, compare=False)
    """When the call began, unix time."""

    def as_failed(self) -> "Control":
        return replace(self, has_failed=True)


def read_control(paths: RunPaths) -> Control:
    """What people have asked; the file is there twice, for no other file says the same.

    Raises:
        SpoiltControl: both are spoilt.
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


def begin_call(paths: RunPaths) -> Control:
    """A person asks for the run to go on: a new budget of attempts."""
    control = Control(read_control(paths).call + 1, begun=time.time())
    write_control(paths, control)
    return control
