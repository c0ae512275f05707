"""What identifies a run: run.json and its frozen configuration's hash, each kept twice."""

import contextlib
import json
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from pipeline.config.conversion import converted
from pipeline.run.durable import replace_durably
from pipeline.run.paths import RunPaths
from pipeline.run.wandb_place import WandbPlace
from slurm.errors import UserError
from slurm.sharedfiles import checksum, from_json, read_newest, read_shared, unsealed

FORMAT = 1
"""Format of run directories: the one that 0.1.0 writes, and reads. None was released before it."""
_GIT_SECONDS = 10.0


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
    folder: str
    """Folder the run was started in, where rules are imported from."""
    parent: Parent | None = None
    """Origin of the run if it is a fork; None otherwise."""
    git_commit: str = ""
    """Git commit of ``folder`` when the run was made, with ``+`` if files differed; empty without git."""
    wandb: WandbPlace | None = None
    """Place on W&B; None where tracking.wandb.mode=disabled."""
    root: str = ""
    """Directory that the run was made in, or last went on in (:mod:`pipeline.run.place`); empty where it
    is unknown."""
    format: int = FORMAT


def identity_text(identity: Identity) -> str:
    """Return the content of run.json. A checksum tells that a bit has flipped: with another date templates
    would write other prompts."""
    content = asdict(identity)
    return json.dumps(content | {"checksum": checksum(content)}, indent=1) + "\n"


def read_identity(paths: RunPaths) -> Identity:
    """Read run.json, or its copy where it is gone or spoilt. Raises RunError where it is of a format that
    this version does not read; ValueError and OSError where neither can be read."""
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
    if not isinstance(content, dict) or not content.keys() & {"checksum", "format"}:
        raise ValueError("it holds no identity of a run")
    if "checksum" not in content:  # each of this format has one
        check_format(paths, content)
    content = unsealed(data)
    check_format(paths, content)
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
    """Raise RunError where a run's identity is of another format than this version's."""
    found, by = content.get("format"), content.get("version")
    if found == FORMAT and content.get("root") is not None:
        return
    has = f"format {found}" if found not in (None, FORMAT) else "the format of versions before 0.1.0"
    made_by = f"version {by}" if isinstance(by, str) else "the version"
    raise RunError(
        f"{paths.root} has {has}, and this version of slurm-ppo ({version()}) reads format "
        f"{FORMAT}: go on with {made_by} that made it, or start a run from its newest policy "
        "(model.policy=...)"
    )


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
