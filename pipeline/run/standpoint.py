"""From where a run on Slurm is looked at or acted on: as its owner on its cluster, or from elsewhere."""

import errno
import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.run.control import read_control
from pipeline.run.directory import Run, resume_command
from pipeline.run.identity import RunError
from pipeline.run.owner import Owner, owner_by_id, who_acts
from pipeline.run.paths import OWN_NAMES, RunPaths
from pipeline.run.submissions import cluster_of
from slurm.sharedfiles import is_there, names_in


@dataclass(frozen=True)
class Elsewhere:
    """Standpoint of who is not a run's owner, or not on its cluster."""

    owner: Owner
    """Whose the run is."""
    me: Owner
    """Who looks or acts."""

    @property
    def is_on_another_cluster(self) -> bool:
        return self.me.is_on_another_cluster(self.owner)

    @property
    def is_other_user(self) -> bool:
        return self.me.uid != self.owner.uid

    @property
    def reason(self) -> str:
        """Why the run's jobs are not one's own, as the rest of a sentence about the run."""
        by = f"was submitted by {self.owner.user}" if self.is_other_user else "was submitted"
        if self.is_on_another_cluster:
            return f"{by} to cluster {self.owner.cluster}, and this machine asks {self.me.cluster}"
        return f"{by}, whose jobs are not {self.me.user}'s to end or replace"

    @property
    def why_hidden(self) -> str:
        """Why Slurm does not show the run's jobs here, as a sentence."""
        if self.is_on_another_cluster:
            return f"the run {self.reason}"
        return f"Slurm shows jobs of {self.owner.user} to {self.owner.user} alone"

    @property
    def as_owner(self) -> str:
        """Who may type a command, and where, in words."""
        who = f"ask {self.owner.user} to run this" if self.is_other_user else "run this"
        return f"{who} on a machine of {self.owner.cluster}" if self.is_on_another_cluster else who


class NotOurs(RunError):
    """The run's jobs are another user's, or on another cluster: nothing is done to it."""


def owner_of(paths: RunPaths) -> Owner | None:
    """Return a run's owner: who submitted it last, or took it over; None before the first submission."""
    if not is_there(paths.control):
        return None
    owner = read_control(paths).owner or owner_by_id(paths.control.stat().st_uid)
    return owner if owner.cluster else Owner(owner.user, owner.uid, cluster_of(paths))


def standpoint(paths: RunPaths, who: Callable[[], Owner] = who_acts) -> Elsewhere | None:
    """Return from where a run is looked at; None as its owner on its cluster, as far as that is known.

    Args:
        who: says who looks; asks Slurm for the cluster's name, and is only called where that counts.
    """
    owner = owner_of(paths)
    if owner is None or (owner.uid == os.getuid() and not owner.cluster):
        return None
    found = Elsewhere(owner, who())
    return found if found.is_other_user or found.is_on_another_cluster else None


def check_is_ours(paths: RunPaths, who: Callable[[], Owner] = who_acts) -> None:
    """Refuse to act on a run whose jobs are another user's, or on another cluster. Raises NotOurs.

    Args:
        who: as for :func:`standpoint`.
    """
    if (found := standpoint(paths, who)) is not None:
        raise NotOurs(f"{paths.root} {found.reason}: {found.as_owner}, or {way_on(paths.root)}")


def to_resume(run: Run, *options: str) -> str:
    """Return the command that resumes a run; of one that is another user's, or on another cluster, with who
    can type it, and what this user can do instead."""
    command = " ".join([resume_command(run), *options])
    if (found := standpoint(run.paths, run.who_acts)) is None:
        return command
    resume = asked_of(found.owner.user, found.owner.cluster, found.is_other_user, command)
    return f"{resume}, or {way_on(run.paths.root)}"


def asked_of(owner: str, cluster: str, is_other_user: bool, command: str) -> str:
    """Say how a command that only a run's owner may type, on its cluster, gets typed. Pure."""
    return f"ask {owner} for {command}" if is_other_user else f"on a machine of {cluster}: {command}"


def way_on(root: Path) -> str:
    """Return what a user other than the owner can do: take the run over if he may write to it, else
    go on in a run of his own."""
    place = shlex.quote(str(root))
    if os.access(root, os.W_OK):
        return f"take the run over: slurm-ppo resume {place} --take-over"
    if names_in(RunPaths(root).policies):
        return f"go on in a run of your own: slurm-ppo fork {place} NEW_RUN"
    return "start a run of your own: slurm-ppo submit ... run_dir=NEW_RUN"


# --- who may write ---------------------------------------------------------------------------------------

# Asked before anything is changed: whether this user may write all that going on with a run writes.


_WRITTEN = OWN_NAMES - {"superseded", "wandb", "tensorboard", "mlflow", "cache"}
"""Names of a run's own folders, without what was moved aside and what people see: nothing stops for these."""
_SHARED_LOGS = ("guard/guard.log", "passes/passes.log")
_DEEP = ("slurm", "logs", "iterations")
"""Folders whose own folders are written into."""


def check_may_write(paths: RunPaths) -> None:
    """Check that this user may write what a pass writes, before one fails half-way. Raises RunError; OSError
    where the filesystem takes nothing."""
    found = next((path for path in written(paths) if not os.access(path, os.W_OK)), None)
    if found is None:
        return
    if os.statvfs(found).f_flag & os.ST_RDONLY:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(found))
    status = found.stat()
    owner, me = owner_by_id(status.st_uid).user, owner_by_id(os.getuid()).user
    whose = "yours" if owner == me else f"{owner}'s"
    raise RunError(
        f"{me} may not write {found} ({whose}, mode {status.st_mode & 0o7777:o}); ask {owner} to run: "
        f"chmod -R g+rwX {shlex.quote(str(paths.root))}"
    )


def written(paths: RunPaths) -> Iterator[Path]:
    """Yield folders in which a pass and its jobs make files, and files that they append to, as far as they
    are there."""
    yield paths.root
    for folder in _folders(paths.root):
        if folder.name in _WRITTEN:
            yield folder
            yield from _newest(folder) if folder.name in _DEEP else ()
    logs = (paths.log_root / name for name in _SHARED_LOGS)
    appended = (paths.events, paths.metrics, paths.spans, paths.evaluations, paths.slurm_log, *logs)
    yield from (path for path in appended if path.exists())


def _newest(folder: Path) -> Iterator[Path]:
    """Yield the folders in a folder; of those of iterations the newest, which is written to now."""
    inner = _folders(folder)
    numbered = [one for one in inner if one.name[0].isdecimal()]
    yield from (one for one in inner if one not in numbered)
    for newest in numbered[-1:]:
        yield newest
        yield from _folders(newest)


def _folders(folder: Path) -> list[Path]:
    with os.scandir(folder) as found:
        return sorted(Path(one.path) for one in found if one.is_dir(follow_symlinks=False))
