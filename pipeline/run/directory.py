"""A run on disk: identity and frozen configuration, made once, loaded by everything else."""

import contextlib
import difflib
import json
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import xxhash
from pydantic import ValidationError

from pipeline.config.compose import from_mapping, to_yaml
from pipeline.config.conversion import converted, from_yaml, in_words
from pipeline.config.former import as_it_was_meant
from pipeline.config.issue import ConfigError
from pipeline.config.scheduler import SlurmConfig
from pipeline.config.schema import Config, WandbMode
from pipeline.run.control import read_control
from pipeline.run.durable import link_once, replace_durably
from pipeline.run.lease import Lease, LeaseHeld, acquire, holder_of
from pipeline.run.owner import Owner, who_acts, why_closed
from pipeline.run.paths import SWEEP_MANIFEST, RunPaths
from pipeline.run.plan import Plan
from pipeline.run.tasks import PREPARE
from pipeline.run.wandb_place import WandbPlace, settled
from slurm.errors import UserError
from slurm.sealing import checksum, from_json, unsealed
from slurm.sharedfiles import is_there, names_in, read_newest, read_shared

FORMAT = 2
"""Format of the run directories that this version writes. 1: a trainer's state is committed with its policy;
2: behind it, with a record of its own."""
_GIT_SECONDS = 10.0
_MOST_NAMED, _LIKENESS = 2, 0.6
_LONGEST_SHOWN = 100


class RunError(UserError, ValueError):
    """A run directory is missing, taken or unreadable."""


@dataclass(frozen=True)
class Parent:
    """Origin of a fork."""

    id: str
    path: str
    """Run directory of the parent when the fork was made."""
    iteration: int
    """Iteration of the policy that the fork goes on from; its own first iteration is the next."""


@dataclass(frozen=True)
class Identity:
    """Content of ``run.json``."""

    id: str
    """Stable id, also on W&B."""
    name: str
    created: float
    """Unix time."""
    config_hash: str
    """xxh3_128 of config.yaml, which is frozen."""
    version: str
    """Version of slurm-ppo that made the run."""
    folder: str = ""
    """Folder the run was started in, where rules are imported from."""
    parent: Parent | None = None
    """Origin of the run if it is a fork; None otherwise."""
    git_commit: str = ""
    """Git commit of ``folder`` when the run was made, with ``+`` if files differed; empty without git."""
    format: int = 1
    """Format of the run directory (:data:`FORMAT`); the newest of all versions that have written to it."""
    wandb: WandbPlace | None = None
    """Place on W&B; None where tracking.wandb.mode=disabled, or an earlier version made the run."""
    root: str = ""
    """Directory that the run was made in, or last went on in (:mod:`pipeline.run.place`); empty in runs of
    versions that did not note it."""


@dataclass(frozen=True)
class Run:
    """A run directory with its frozen configuration."""

    paths: RunPaths
    config: Config
    identity: Identity

    @property
    def cluster(self) -> str:
        """Name of the cluster that its jobs go to, where its settings name one; else empty."""
        return self.config.slurm.cluster if self.config.slurm else ""

    def who_acts(self) -> Owner:
        """Return who acts on it from here, on the cluster that is asked about it."""
        return who_acts(self.cluster)

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
            f"scheduler={run.config.scheduler.kind} has no queue to submit to; type slurm-ppo run, or "
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
    """Make a run as :func:`create_run` (same errors), and hold its lease: nobody else starts it over."""
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
        check_is_free(paths, lease)  # somebody may have come and gone since
        for path in (paths.run_copy, paths.run_json, paths.config_copy):
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
        format=FORMAT,
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
    """Whether something is there; false in a folder that may not be looked into."""
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
    what = "holds no run" if root.exists() else "is no run directory: nothing is there"
    return RunError(
        f"{shown(root)} {what}{near_runs(root)}; give the directory of a run, or settings as KEY=VALUE"
    )


def near_runs(root: Path, is_one: Callable[[Path], bool] = is_run) -> str:
    """Return the runs that may have been meant, as the end of a message; empty where there are none.

    Args:
        is_one: says whether a folder is of the kind that is meant.
    """
    with contextlib.suppress(OSError, ValueError):
        found = {entry.name: entry for entry in root.absolute().parent.iterdir() if is_one(entry)}
        near = difflib.get_close_matches(root.name, found, n=_MOST_NAMED, cutoff=_LIKENESS)
        if near:
            return f"; did you mean {' or '.join(shown(root.parent / name) for name in near)}?"
    return ""


def shown(path: Path) -> str:
    """Return a path as a one-line message shows it: printable, and cut if it is long."""
    text = "".join(letter if letter.isprintable() else "?" for letter in str(path))
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def load_run(root: Path) -> Run:
    """Open an existing run.

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
        return Run(paths, _config_of(text), identity)
    except ConfigError as error:
        raise RunError(f"{paths.config_yaml} is of another version of slurm-ppo: {error}") from None


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
    return from_mapping(as_it_was_meant(from_yaml(text)))


def identity_text(identity: Identity) -> str:
    """Return the content of run.json.

    Programs of format 1 pass over keys that they do not know, and would damage the run. They refuse a version
    that is no string. A checksum tells that a bit has flipped: with another date templates would write other
    prompts.
    """
    content = asdict(identity) | {"version": {"slurm-ppo": identity.version}}
    return json.dumps(content | {"checksum": checksum(content)}, indent=1) + "\n"


def read_identity(paths: RunPaths) -> Identity:
    """Read run.json, or its copy where it is gone or spoilt. Raises RunError where it is of a later format
    than this version knows; ValueError and OSError where neither can be read."""
    try:
        return identity_in(paths, paths.run_json)
    except RunError:
        raise
    except (FileNotFoundError, ValueError) as error:
        try:
            return identity_in(paths, paths.run_copy)
        except FileNotFoundError:
            raise error from None


def identity_in(paths: RunPaths, path: Path) -> Identity:
    """Read a run's identity from one of its two files. Raises as :func:`read_identity`."""
    data = read_shared(path)
    content = from_json(data)
    if isinstance(content, dict):
        if isinstance(made_by := content.get("version"), dict):
            content["version"] = made_by.get("slurm-ppo")
        check_format(paths, content)
        unsealed(data)
    return converted(Identity, content)


def read_config(paths: RunPaths) -> bytes:
    """Return the text of config.yaml, or of its copy where it is gone. Raises FileNotFoundError where both
    are."""
    try:
        return read_newest(paths.config_yaml)
    except FileNotFoundError:
        with contextlib.suppress(FileNotFoundError):
            return read_newest(paths.config_copy)
        raise


def check_format(paths: RunPaths, content: Mapping[str, Any]) -> None:
    """Raise RunError where a run's identity is of a later format than this version knows."""
    found = content.get("format", 1)
    if isinstance(found, int) and found > FORMAT:
        raise RunError(
            f"{paths.root} has format {found}, and this version of slurm-ppo ({version()}) knows formats up "
            f"to {FORMAT}; go on with the version that made it ({content.get('version')}), or a later one"
        )


def upgrade(run: Run) -> Run:
    """Raise the format of a run that an earlier version made, before anything is added to it: that version
    must refuse what it cannot read. For the holder of the lease; returns the run as it is now."""
    if run.identity.format >= FORMAT:
        return run
    identity = replace(run.identity, format=FORMAT)
    write_identity(run.paths, identity)
    return replace(run, identity=identity)


def write_identity(paths: RunPaths, identity: Identity) -> None:
    """Write run.json and its copy again, for the holder of the lease."""
    text = identity_text(identity)
    for path in (paths.run_json, paths.run_copy):
        replace_durably(path, text)


def git_commit(folder: str) -> str:
    """Return the commit checked out in ``folder``, with ``+`` if tracked files differ; empty without one."""
    ask = ["git", "-C", folder]
    try:
        head = _output([*ask, "rev-parse", "HEAD"])
        return head + ("+" if _output([*ask, "status", "--porcelain", "--untracked-files=no"]) else "")
    except (OSError, subprocess.SubprocessError):  # no git, no repository, or one that takes too long
        return ""


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True)
    return done.stdout.strip()


def config_hash(text: str) -> str:
    """Return the hash of config.yaml's text that run.json holds."""
    return xxhash.xxh3_128_hexdigest(text.encode())


def version() -> str:
    """Return the version of the installed slurm-ppo; ``source`` where it is not installed."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed_version

    try:
        return installed_version("slurm-ppo")
    except PackageNotFoundError:
        return "source"


def imagined_run(config: Config) -> Run:
    """Return a run as it would be made, with zeros for its id, without making it."""
    identity = Identity("0" * 12, config.name, time.time(), "", version(), str(Path.cwd()))
    return Run(RunPaths(Path(config.run_dir)), config, identity)


def resume_command(run: Run) -> str:
    return f"slurm-ppo resume {shlex.quote(str(run.paths.root))}"
