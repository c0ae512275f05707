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
from slurm.sharedfiles import make_folder, read_newest


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
    emptied: int = 0
    """Number of the newest invocation of which all jobs were cancelled, by ``cancel`` or to go back."""
    begun: float = field(default=0.0, compare=False)
    """Unix time when the invocation began."""


def read_control(paths: RunPaths) -> Control:
    """Return people's requests. The file is kept twice, because no other file says the same.

    Raises:
        SpoiltControl: a copy is there, but none that can be read.
    """
    spoilt = None
    for path in _controls(paths):
        match _read(path):
            case Control() as control:
                return control
            case str() as why:
                spoilt = why
    if spoilt:
        raise SpoiltControl(
            f"{spoilt}, nor can its copy, so whether the run was cancelled is not known; remove both, "
            f"and then: slurm-ppo submit {shlex.quote(str(paths.root))}"
        )
    return Control()


def spoilt_control(paths: RunPaths) -> str | None:
    """Return what is wrong with one of the two files, in words; None where both say the same."""
    first, copy = map(_read, _controls(paths))
    for path, found in zip(_controls(paths), (first, copy), strict=True):
        if isinstance(found, str):
            return found
        if found is None and first != copy:
            return f"{path} is missing"
    return None if first == copy else f"{_controls(paths)[1]} is older than what it is a copy of"


def mend_control(paths: RunPaths) -> str | None:
    """Write both files again where one is spoilt, for the holder of the run's lease. Returns what was wrong.

    Raises:
        SpoiltControl: neither can be read.
    """
    if why := spoilt_control(paths):
        write_control(paths, read_control(paths))
    return why


def _read(path: Path) -> Control | str | None:
    """Return what a file says, why it cannot be read, or None where there is none."""
    try:
        return converted(Control, unsealed(read_newest(path)))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        return f"{path} cannot be read ({' '.join(str(error).split())})"


def write_control(paths: RunPaths, control: Control) -> None:
    make_folder(paths.control.parent, paths.root)
    for path in _controls(paths):
        replace_durably(path, sealed(plain(control)))


def _controls(paths: RunPaths) -> tuple[Path, Path]:
    return paths.control, paths.control.with_suffix(".copy.json")


def begin_invocation(paths: RunPaths) -> Control:
    """Note that a person asks for the run to go on, which gives it a new budget of attempts."""
    before = read_control(paths)
    control = Control(before.invocation + 1, emptied=before.emptied, begun=time.time())
    write_control(paths, control)
    return control
