"""People's requests of a run on Slurm: its invocations of submit, run and resume, and its cancellation."""

import shlex
import time
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.config.conversion import converted, plain
from pipeline.run.owner import Owner
from pipeline.run.paths import RunPaths
from pipeline.run.twofold import read_either, why_spoilt, write_both
from slurm.errors import UserError


class SpoiltControl(UserError, ValueError):
    """The file of people's requests of a run cannot be read, nor can its copy."""


@dataclass(frozen=True)
class ByHand:
    """Cancellation of a run's jobs by Slurm's own commands, as with ``scancel -u USER``."""

    cancelled: int
    """Jobs that were cancelled; each array element counts, and driver jobs too."""
    jobs: int
    """Jobs that the run had then."""
    time: float = field(default=0.0, compare=False)
    """Unix time of the last of them."""

    @property
    def in_words(self) -> str:
        return f"{self.cancelled} of {self.jobs} jobs of the run were cancelled by hand (scancel)"


@dataclass(frozen=True)
class Control:
    """People's requests of a run on Slurm: content of ``<run>/slurm/control.json``."""

    invocation: int = 0
    """Number of invocations of submit, run and resume so far: each has a new budget of attempts."""
    cancelled: bool = False
    """Cancellation by a person: driver jobs that start nevertheless do nothing."""
    has_failed: bool = False
    """Failure of this invocation: a task was given up."""
    emptied: int = 0
    """Number of the newest invocation of which all jobs were cancelled, by ``cancel``, to go back or by hand.
    It is what was asked for, written before any of them has ended: how each ended, passes judge."""
    withdrawn: int = 0
    """Number of the newest invocation of which a pass has cancelled what waited, at the run's end."""
    begun: float = field(default=0.0, compare=False)
    """Unix time when the invocation began."""
    paused: ByHand | None = None
    """Cancellation by hand for which the run pauses: it counts as cancelled then, until it is submitted or
    resumed."""
    owner: Owner | None = None
    """User whose jobs do the run's tasks, and the cluster that has them; None until it is submitted."""
    former: tuple[Owner, ...] = ()
    """Owners that it was taken over from, oldest first: jobs of theirs that are left do nothing more."""

    def is_taken_over_from(self, own: Owner | None) -> bool:
        """Whether the run was taken over from the owner of a job (None: that is not known). Pure.

        Siblings of a federation have other names than the cluster that a job was submitted to: only a
        cluster that the run was taken from counts as another.
        """
        if own is None or self.owner is None or not self.former:
            return False
        was_own = any(one.cluster == own.cluster for one in self.former)
        return own.uid != self.owner.uid or (was_own and own.is_on_another_cluster(self.owner))


def read_control(paths: RunPaths) -> Control:
    """Return people's requests. The file is kept twice, because no other file says the same.

    Raises:
        SpoiltControl: a copy is there, but none that can be read.
    """
    found = read_either(paths.control, _parse)
    if isinstance(found, str):
        raise SpoiltControl(
            f"{found}, nor can its copy, so whether the run was cancelled is not known; remove both, "
            f"and then: slurm-ppo submit {shlex.quote(str(paths.root))}"
        )
    return found or Control()


def spoilt_control(paths: RunPaths) -> str | None:
    """Return what is wrong with one of the two files, in words; None where both say the same."""
    return why_spoilt(paths.control, _parse)


def mend_control(paths: RunPaths) -> str | None:
    """Write both files again where one is spoilt, for the holder of the run's lease. Returns what was wrong.

    Raises:
        SpoiltControl: neither can be read.
    """
    if why := spoilt_control(paths):
        write_control(paths, read_control(paths))
    return why


def _parse(content: dict[str, Any]) -> Control:
    return converted(Control, content)


def write_control(paths: RunPaths, control: Control) -> None:
    write_both(paths.control, paths.root, plain(control))


def begin_invocation(paths: RunPaths, owner: Owner | None = None) -> Control:
    """Note that a person asks for the run to go on, which gives it a new budget of attempts.

    Args:
        owner: who asks; a cluster that is not known is what it was.
    """
    before = read_control(paths)
    control = Control(
        before.invocation + 1,
        emptied=before.emptied,
        withdrawn=before.withdrawn,
        begun=time.time(),
        owner=_with_cluster(owner, before.owner) if owner else before.owner,
        former=before.former,
    )
    write_control(paths, control)
    return control


def _with_cluster(owner: Owner, before: Owner | None) -> Owner:
    """Return a user with the cluster that the run was on, where the current one is unknown."""
    if owner.cluster or before is None or before.uid != owner.uid:
        return owner
    return replace(owner, cluster=before.cluster)


def take_over(paths: RunPaths, owner: Owner, before: Owner) -> None:
    """Make a run another owner's, for the holder of its lease: from now on jobs of the one before do nothing
    more, and what becomes of them is no failure."""
    control = read_control(paths)
    emptied = max(control.emptied, control.invocation)
    write_control(paths, replace(control, owner=owner, former=(*control.former, before), emptied=emptied))
