"""A run on disk: made once, loaded by everything else."""

import json
import os
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from pipeline.commits import link_once, replace_durably
from pipeline.compose import ConfigError, from_mapping, to_yaml
from pipeline.config import Config
from pipeline.conversion import converted, from_yaml
from pipeline.lease import holder_of
from pipeline.paths import RunPaths
from pipeline.plan import Plan
from pipeline.tasks import PREPARE

_GIT_SECONDS = 10.0


class RunError(ValueError):
    """A run directory is missing, taken or unreadable."""


@dataclass(frozen=True)
class Parent:
    """Where a fork comes from."""

    id: str
    path: str
    """Its run directory when the fork was made."""
    iteration: int
    """The fork goes on from the policy of this iteration, with the next one."""


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
    """None unless the run is a fork."""
    git_commit: str = ""
    """Of ``folder`` when the run was made, with ``+`` behind it if files differed; empty without git."""


@dataclass(frozen=True)
class Run:
    """A run directory with its frozen configuration."""

    paths: RunPaths
    config: Config
    identity: Identity

    @property
    def plan(self) -> Plan:
        parent = self.identity.parent
        return Plan.of(self.config, parent.iteration if parent else 0)


def create_run(config: Config) -> Run:
    """Make the run directory of a resolved configuration.

    A run in which nothing was ever committed is started over with the new settings.

    Raises:
        RunError: the directory holds a run or something else already.
    """
    paths = RunPaths(Path(config.run_dir))
    check_is_free(paths)
    try:
        paths.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"run_dir={paths.root} cannot be made: {error}") from None
    paths.run_json.unlink(missing_ok=True)
    return write_run(paths, config, str(Path.cwd()))


def write_run(paths: RunPaths, config: Config, folder: str, parent: Parent | None = None) -> Run:
    """Write a new run's configuration and identity. Raises RunError where another call has just done so."""
    text = to_yaml(config)
    replace_durably(paths.config_yaml, text)
    identity = Identity(
        id=os.urandom(6).hex(),
        name=config.name,
        created=time.time(),
        config_hash=_hash(text),
        version=version(),
        folder=folder,
        parent=parent,
        git_commit=git_commit(folder),
    )
    if not link_once(paths.run_json, json.dumps(asdict(identity), indent=1) + "\n"):
        raise RunError(f"another call is making a run in {paths.root} just now; choose another run_dir=...")
    return Run(paths, config, identity)


def check_is_free(paths: RunPaths) -> None:
    """Raises RunError, with the legal next moves, unless a run may begin there."""
    if paths.run_json.exists():
        holder = holder_of(paths.locks)
        if holder or paths.task(PREPARE).record.exists() or _is_queued(paths) or _is_fork(paths):
            raise RunError(
                f"{paths.root} already holds a run. To continue it: slurm-ppo resume {paths.root}. "
                "To start another: choose run_dir=... or name=..." + (f" ({holder})" if holder else "")
            )
        return
    # A call that was killed before it wrote run.json may have left its configuration behind.
    others = [p.name for p in paths.root.glob("[!.]*")] if paths.root.exists() else []
    if set(others) - {paths.config_yaml.name}:
        raise RunError(f"{paths.root} exists and holds other files; choose another run_dir=...")


def _is_fork(paths: RunPaths) -> bool:
    """A fork has a committed policy from the start."""
    return paths.policies.exists() and not paths.task(PREPARE).record.exists()


def _is_queued(paths: RunPaths) -> bool:
    """Whether jobs of the run may be in Slurm's queue: a run started over would be handed their results."""
    if not paths.control.exists():
        return False
    control = json.loads(paths.control.read_text())
    return not (control["cancelled"] or control["has_failed"])


def is_run(root: Path) -> bool:
    """Whether the directory holds a run."""
    return RunPaths(root).run_json.is_file()


def load_run(root: Path) -> Run:
    """Open an existing run.

    Raises:
        RunError: there is no run, or its files were changed.
    """
    paths = RunPaths(root.absolute())
    try:
        identity = converted(Identity, json.loads(paths.run_json.read_text()))
        text = paths.config_yaml.read_text()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RunError(
            f"{root} is not a run directory: {error.filename} does not exist. "
            "Start a run with: slurm-ppo run experiment=... run_dir=..."
        ) from None
    except (PermissionError, ValueError) as error:  # any other OSError may pass, and is not the user's
        raise RunError(f"{paths.run_json} cannot be read: {' '.join(str(error).split())}") from None
    if _hash(text) != identity.config_hash:
        raise RunError(
            f"{paths.config_yaml} was changed since the run began, so its results would not belong together. "
            "Restore it, or start a new run with the new settings."
        )
    try:
        return Run(paths, from_mapping(from_yaml(text)), identity)
    except ConfigError as error:
        raise RunError(f"{paths.config_yaml} is of another version of slurm-ppo: {error}") from None


def git_commit(folder: str) -> str:
    """The commit that is checked out there, with ``+`` if tracked files differ; empty without one."""
    ask = ["git", "-C", folder]
    try:
        head = _output([*ask, "rev-parse", "HEAD"])
        return head + ("+" if _output([*ask, "status", "--porcelain", "--untracked-files=no"]) else "")
    except (OSError, subprocess.SubprocessError):  # no git, no repository, or one that takes too long
        return ""


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True)
    return done.stdout.strip()


def _hash(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())


def version() -> str:
    """Of the installed slurm-ppo."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed_version

    try:
        return installed_version("slurm-ppo")
    except PackageNotFoundError:
        return "source"
