"""A run on disk: identity and frozen configuration, made once, loaded by everything else."""

import contextlib
import difflib
import os
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from pydantic import ValidationError

from pipeline.config.compose import from_mapping, to_yaml
from pipeline.config.conversion import from_yaml, in_words
from pipeline.config.issue import ConfigError
from pipeline.config.scheduler import SlurmConfig
from pipeline.config.schema import Config, WandbMode
from pipeline.run.changes import SettingsChange, read_changes, with_changes, without_changes
from pipeline.run.control import read_control
from pipeline.run.durable import link_once, replace_durably
from pipeline.run.identity import (
    Identity,
    Parent,
    RunError,
    config_hash,
    git_commit,
    identity_text,
    read_config,
    read_identity,
    version,
)
from pipeline.run.lease import Lease, LeaseHeld, acquire, holder_of
from pipeline.run.owner import Owner, who_acts, why_closed
from pipeline.run.paths import SWEEP_MANIFEST, RunPaths
from pipeline.run.plan import Plan
from pipeline.run.tasks import PREPARE
from pipeline.run.wandb_place import WandbPlace, settled
from slurm.sharedfiles import is_there, names_in

_MOST_NAMED, _LIKENESS = 2, 0.6
_LONGEST_SHOWN = 100


@dataclass(frozen=True)
class Run:
    """A run directory with its configuration."""

    paths: RunPaths
    config: Config
    """The configuration as it was frozen, with the changes since."""
    identity: Identity
    changes: tuple[SettingsChange, ...] = ()
    """Changes of its settings that ``config`` has, oldest first."""

    @property
    def cluster(self) -> str:
        """Name of the cluster that its jobs go to, where its settings name one; else empty."""
        return self.config.slurm.cluster if self.config.slurm else ""

    def who_acts(self) -> Owner:
        """Return who acts on it from here, on the cluster that is asked about it."""
        return who_acts(self.cluster)

    def with_settings(self, number: int) -> "Run":
        """Return the run as it was with the first so many changes of its settings; 0: as it began."""
        config = without_changes(self.config, self.changes[number:])
        return replace(self, config=config, changes=self.changes[:number])

    def with_newest_settings(self) -> "Run":
        """Return the run with what was changed of its settings since it was opened. Raises RunError."""
        changes = read_changes(self.paths)
        if changes == self.changes:
            return self
        return replace(self, config=_changed(self.with_settings(0).config, changes), changes=changes)

    @property
    def plan(self) -> Plan:
        parent = self.identity.parent
        return Plan.of(self.config, parent.iteration if parent else 0)


def slurm_settings(run: Run) -> SlurmConfig:
    """Return the scheduler's settings of a run on Slurm.

    Raises:
        RunError: it is a run on this machine, or in an allocation.
    """
    if not isinstance(run.config.scheduler, SlurmConfig):
        raise RunError(
            f"scheduler={run.config.scheduler.kind} has no queue to submit to; use slurm-ppo run, or "
            "resume RUN, and slurm-ppo plan to see what it would do; for jobs choose scheduler=slurm"
        )
    return run.config.scheduler


def create_run(config: Config) -> Run:
    """Make the run directory of a resolved configuration.

    A run in which nothing was ever committed is started over with the new settings.

    Raises:
        RunError: the directory holds a run or something else already, or another call is making one there.
    """
    with claimed_run(config) as (run, _):
        return run


@contextlib.contextmanager
def claimed_run(config: Config) -> Iterator[tuple[Run, Lease]]:
    """Make a run as :func:`create_run` (same errors), and hold its lease, against a second start."""
    paths = RunPaths(Path(config.run_dir))
    check_is_free(paths)
    check_is_outside_runs(paths.root)
    try:
        paths.root.mkdir(parents=True, exist_ok=True)
        lease = acquire(paths.locks)
    except LeaseHeld as error:
        why = f"another call is making a run in {paths.root}; choose another run_dir=... ({error})"
        raise RunError(why) from None
    except OSError as error:
        raise RunError(f"run_dir={paths.root} cannot be made: {error}") from None
    try:
        check_is_free(paths, lease)  # another driver may have come and gone since
        settings = paths.settings_copy, paths.settings
        for path in (*settings, paths.forecast, paths.run_copy, paths.run_json, paths.config_copy):
            path.unlink(missing_ok=True)
        yield write_run(paths, config, str(Path.cwd())), lease
    finally:
        lease.release()


def write_run(
    paths: RunPaths,
    config: Config,
    folder: str,
    parent: Parent | None = None,
    place: WandbPlace | None = None,
) -> Run:
    """Write a new run's configuration and identity. Raises RunError where another has just done so.

    Args:
        place: the parent's on W&B.
    """
    text, wandb = to_yaml(config), config.tracking.wandb
    is_tracked = wandb.mode is not WandbMode.DISABLED
    identity = Identity(
        id=os.urandom(6).hex(),
        name=config.name,
        created=time.time(),
        config_hash=config_hash(text),
        version=version(),
        folder=folder,
        parent=parent,
        git_commit=git_commit(folder),
        wandb=settled(wandb, config.name, os.environ, Path(folder), place) if is_tracked else None,
        root=str(paths.root.absolute()),
    )
    if not link_once(paths.run_json, identity_text(identity)):
        raise RunError(f"another call is making a run in {paths.root} just now; choose another run_dir=...")
    # After the identity: an invocation that came too late must not write its settings beside the winner's.
    replace_durably(paths.config_yaml, text)
    replace_durably(paths.config_copy, text)
    replace_durably(paths.run_copy, identity_text(identity))
    if config.slurm:
        make_slurm_log(paths)
    return Run(paths, config, identity)


def make_slurm_log(paths: RunPaths) -> None:
    """Make the file that Slurm opens for jobs of stages, as it starts no job whose output it cannot open: one
    that is there can be opened on a full disk too, and on nodes that have not seen newer folders yet."""
    paths.log_root.mkdir(exist_ok=True)
    paths.slurm_log.touch()


def check_is_free(paths: RunPaths, own: Lease | None = None) -> None:
    """Refuse a directory where no run may begin. Raises RunError, with the legal next moves.

    Args:
        own: the lease that the caller holds, if any.
    """
    if is_run(paths.root):
        holder = None if own else holder_of(paths.locks)
        # A fork has no prompts yet, but a committed policy from the start.
        is_begun = is_there(paths.task(PREPARE).record) or is_there(paths.policies)
        if holder or is_begun or _is_queued(paths):
            command = f"slurm-ppo resume {shlex.quote(str(paths.root))}"
            raise RunError(
                f"run_dir already holds a run. To continue it: {command}. "
                "To start another: choose run_dir=... or name=..." + (f" ({holder})" if holder else "")
            )
        return
    # An invocation that was killed while it started a run over may have left config.yaml without run.json.
    others = [p.name for p in paths.root.glob("[!.]*")] if paths.root.is_dir() else []
    if set(others) - {paths.config_yaml.name, paths.config_copy.name, paths.locks.name}:
        raise RunError(f"{paths.root} exists and holds other files; choose another run_dir=...")


def check_is_outside_runs(root: Path) -> None:
    """Refuse a place inside a run's directory, as it is written and with its links followed: what lies there
    belongs to that run, is copied, cleaned and counted with it. Raises RunError."""
    place = root.absolute()
    for above in dict.fromkeys((*place.parents, *Path(os.path.realpath(place)).parents)):
        if _is_seen(RunPaths(above).run_json) or _is_seen(RunPaths(above).run_copy):
            raise RunError(
                f"{shown(root)} lies inside the directory of another run, {shown(above)}; choose a folder "
                f"outside of it, such as {shown(above.with_name(place.name))}"
            )


def check_can_be_made(root: Path) -> None:
    """Try to make a run's directory there, leaving nothing behind. Raises RunError where none can be made."""
    check_is_outside_runs(root)
    there = next(path for path in (root, *root.parents) if _is_seen(path))
    if not there.is_dir():
        kind = "a file" if there.is_file() else "a device"
        raise RunError(f"run_dir={root}: {there} is {kind}, not a directory; choose another run_dir=...")
    try:
        Path(tempfile.mkdtemp(prefix=".slurm-ppo-", dir=there)).rmdir()
    except OSError as error:
        why = f"{there} takes no new directory ({error.strerror})"
        raise RunError(f"run_dir={root}: {why}; choose another run_dir=...") from None


def _is_seen(path: Path) -> bool:
    """Whether something is there; false in a folder that may not be read."""
    with contextlib.suppress(PermissionError):
        return path.exists()
    return False


def _is_queued(paths: RunPaths) -> bool:
    """Whether jobs of the run may be in Slurm's queue: a run started over would be handed their results."""
    if not is_there(paths.control):
        return False
    control = read_control(paths)
    return not (control.cancelled or control.has_failed)


def is_run(root: Path) -> bool:
    """Whether the directory holds a run."""
    paths = RunPaths(root)
    return is_there(paths.run_json) or is_there(paths.run_copy)


def no_setting(word: str) -> RunError:
    """Return the error for a word among settings that sets nothing: usually a mistyped run directory."""
    root = Path(word)
    if is_run(root):
        place = shlex.quote(word)
        return RunError(
            f"{shown(root)} holds a run, and settings are wanted here, as KEY=VALUE; to continue the run: "
            f"slurm-ppo resume {place}"
        )
    what = "holds no run" if root.exists() else "is not a run directory: nothing is there"
    return RunError(
        f"{shown(root)} {what}{near_runs(root)}; give the directory of a run, or settings as KEY=VALUE"
    )


def near_runs(root: Path, is_one: Callable[[Path], bool] = is_run) -> str:
    """Return the runs that may have been meant, as the end of a message; empty where there are none.

    Args:
        is_one: says whether a folder is of the kind that is meant.
    """
    with contextlib.suppress(OSError, ValueError):
        found = [entry.name for entry in root.absolute().parent.iterdir() if _is_readable(entry, is_one)]
        near = difflib.get_close_matches(root.name, found, n=_MOST_NAMED, cutoff=_LIKENESS)
        if near:
            return f"; did you mean {' or '.join(shown(root.parent / name) for name in near)}?"
    return ""


def _is_readable(entry: Path, is_one: Callable[[Path], bool]) -> bool:
    """Whether it is one, as far as can be seen: a link to itself is none, and hides no other."""
    with contextlib.suppress(OSError):
        return is_one(entry)
    return False


def shown(path: Path) -> str:
    """Return a path as a one-line message shows it: printable, and cut if it is long."""
    text = "".join(letter if letter.isprintable() else "?" for letter in str(path))
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def load_run(root: Path, settings: int | None = None) -> Run:
    """Open an existing run.

    Args:
        settings: number of changes of its settings to apply, as of a worker that began with so many. None:
            all of them.

    Raises:
        RunError: there is no run, or its files were changed.
    """
    paths = RunPaths(root.absolute())
    try:
        identity = read_identity(paths)
        text = read_config(paths).decode()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _no_run(root, Path(str(error.filename)).name) from None
    except ValidationError as error:
        raise RunError(f"{paths.run_json} cannot be read: {in_words(error)}") from None
    except RunError:
        raise
    except (PermissionError, ValueError) as error:  # any other OSError may pass, and is not the user's
        if isinstance(error, PermissionError) and (closed := why_closed(paths.run_json)):
            raise RunError(closed) from None
        raise RunError(f"{paths.run_json} cannot be read: {' '.join(str(error).split())}") from None
    if config_hash(text) != identity.config_hash:
        restore = "Restore it" + (f" from {paths.config_copy.name}" if is_there(paths.config_copy) else "")
        raise RunError(
            f"{paths.config_yaml} was changed since the run began, so its results would not belong together. "
            f"{restore}, or start a new run with the new settings."
        )
    try:
        changes = () if settings == 0 else read_changes(paths)[:settings]
        return Run(paths, _changed(_config_of(text), changes), identity, changes)
    except ConfigError as error:
        raise RunError(f"{paths.config_yaml} is of another version of slurm-ppo: {error}") from None


def _changed(config: Config, changes: tuple[SettingsChange, ...]) -> Config:
    """Apply changes. Raises ConfigError for one that was made by another version, of a key that is not known
    here."""
    try:
        return with_changes(config, changes)
    except KeyError as error:
        raise ConfigError(f"{error.args[0]}: was changed, and is no key here") from None


def _no_run(root: Path, missing: str) -> RunError:
    """Return the error for a place without a run's identity, with what may have been meant, or is left."""
    if (root / SWEEP_MANIFEST).exists():
        return RunError(
            f"{root} is a sweep, and one run is wanted; its runs: slurm-ppo status {root}; to continue "
            f"them all: slurm-ppo sweep {root}"
        )
    if left := _left_by_a_purge(RunPaths(root)):
        return RunError(
            f"{shown(root)} held a run, and its {missing} and the copy of it are gone; what is left: {left}\n"
            "put the file back from an archive, or start a run from its newest policy (model.policy); "
            f"to end its jobs: slurm-ppo cancel {shlex.quote(str(root))}"
        )
    why = "it is a file" if root.exists() else "nothing is there"
    if root.is_dir():
        why = f"it holds no {missing}"
    return RunError(
        f"{shown(root)} is not a run directory: {why}{near_runs(root) or '.'} "
        "Start a run with: slurm-ppo run experiment=... run_dir=..."
    )


def _left_by_a_purge(paths: RunPaths) -> str:
    """Return what is left of a run whose identity is gone, in words; empty where there was none."""
    names = names_in(paths.root) if paths.root.is_dir() else set()
    if paths.iterations.name not in names and not is_there(paths.control):
        return ""
    policies = sorted(name for name in names_in(paths.policies) if name[:1].isdecimal() and "." in name)
    newest = f"policies up to {paths.policies.name}/{policies[-1]}" if policies else "no policy"
    return f"{newest}{' and its rows' if paths.metrics.name in names else ''}"


@lru_cache(maxsize=2)
def _config_of(text: str) -> Config:
    """Parse a configuration; cached, as a process that does many tasks of a run asks for each."""
    return from_mapping(from_yaml(text))


def imagined_run(config: Config) -> Run:
    """Return a run as it would be made, with zeros for its id, without making it."""
    identity = Identity("0" * 12, config.name, time.time(), "", version(), str(Path.cwd()))
    return Run(RunPaths(Path(config.run_dir)), config, identity)


def resume_command(run: Run) -> str:
    return f"slurm-ppo resume {shlex.quote(str(run.paths.root))}"
