"""The files of a cluster: its folder, its record (name, ports, layout), its daemons' configuration."""

import dataclasses
import json
import os
import pwd
import random
import shutil
import socket
import tempfile
from pathlib import Path

from slurm.devcluster import machines, network, programs
from slurm.devcluster.errors import DevclusterError
from slurm.devcluster.layout import (
    Layout,
    Ports,
    PracticeIdentity,
    cgroup_conf,
    gres_conf,
    identity_from_json,
    layout_from_json,
    slurm_conf,
    slurmdbd_conf,
)

RECORD = "cluster.json"
_FOLDERS = ("state", "spool", "log", "dev", "tmp")
# A Unix socket's path has at most 107 characters; the longest of ours is a step's below spool/<node>/.
_LONGEST_ROOT = 50
# Below the numbers that Linux hands out to outgoing connections.
_PORTS = range(20_000, 32_000)


def claim(folder: Path) -> None:
    """Take a new or empty folder. Of several concurrent callers, one succeeds."""
    if (folder / RECORD).exists():
        raise DevclusterError(
            f"{folder} holds a cluster already; slurm-ppo devcluster down {folder} removes it"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DevclusterError(f"{folder} is not an empty folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise DevclusterError(f"{folder} cannot be made ({error.strerror}); choose another folder") from None
    try:
        (folder / "run").mkdir()
    except FileExistsError:
        raise DevclusterError(f"another cluster is being started in {folder}") from None


def identity(folder: Path, layout: Layout) -> PracticeIdentity:
    """Choose a name, free ports and a short path."""
    token = os.urandom(3).hex()
    return PracticeIdentity(
        name=f"dev{token}",
        root=_short_path(folder, token),
        user=_user(),
        host=socket.gethostname().partition(".")[0],
        ports=_free_ports(layout),
        version=programs.slurm_version(),
    )


def write(folder: Path, chosen: PracticeIdentity, layout: Layout, accounting: bool) -> None:
    """Write every file that must exist before the first daemon starts; first the record for :func:`read`."""
    record = {
        "identity": dataclasses.asdict(chosen) | {"root": str(chosen.root)},
        "layout": dataclasses.asdict(layout),
        "accounting": accounting,
    }
    _write(folder / f"{RECORD}.new", json.dumps(record, indent=1))
    (folder / f"{RECORD}.new").rename(folder / RECORD)
    for name in _FOLDERS:
        (folder / name).mkdir()
    _write(folder / ".gitignore", "*\n")
    _write(folder / "slurm.conf", slurm_conf(chosen, layout, accounting))
    _write(folder / "gres.conf", gres_conf(chosen, layout))
    _write(folder / "cgroup.conf", cgroup_conf(chosen))
    _write(folder / "slurmdbd.conf", slurmdbd_conf(chosen))
    _write(folder / "munge.key", os.urandom(128))
    if layout.network_filesystem:
        network.write(chosen, chosen.ports.filesystem)
    if layout.has_clocks:
        machines.write_clocks(chosen.root, layout.nodes)
    for node in layout.nodes:
        (folder / "spool" / node.name).mkdir()
        (folder / "dev" / node.name).mkdir()
        for index in range(node.gpus):
            (folder / "dev" / node.name / f"gpu{index}").symlink_to(os.devnull)


def read(folder: Path) -> tuple[PracticeIdentity, Layout, bool]:
    """Read the identity, layout and use of accounting that :func:`write` was given."""
    try:
        record = json.loads((folder / RECORD).read_text())
        layout = layout_from_json(record["layout"])
        return identity_from_json(record["identity"]), layout, record["accounting"]
    except (FileNotFoundError, NotADirectoryError):
        raise DevclusterError(f"no development cluster in {folder}") from None
    except PermissionError:
        raise DevclusterError(f"the development cluster in {folder} is another user's") from None
    except (ValueError, KeyError, TypeError):
        raise DevclusterError(
            f"{folder / RECORD} is not what slurm-ppo devcluster wrote; end the daemons with the ids in "
            f"{folder / 'run'}, if there are any, and remove the folder"
        ) from None


def remove(folder: Path, chosen: PracticeIdentity | None) -> None:
    """Remove the folder, and the short path to it."""
    if chosen and chosen.root != folder and chosen.root.is_symlink():
        chosen.root.unlink()
    shutil.rmtree(folder)


def _write(path: Path, content: str | bytes) -> None:
    path.touch(mode=0o600)  # slurmdbd and munged insist
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def _short_path(folder: Path, token: str) -> Path:
    """Return the folder, or a link to it if its path is too long for sockets or Slurm cannot read it."""
    plain = str(folder).isascii() and all(sign.isalnum() or sign in "/._-+" for sign in str(folder))
    if plain and len(str(folder)) <= _LONGEST_ROOT:
        return folder
    link = Path(tempfile.gettempdir()) / f"slurm-ppo-{token}"
    link.symlink_to(folder)
    return link


def _user() -> str:
    # Not $USER: after a switch of users it may still name the one before.
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _free_ports(layout: Layout) -> Ports:
    """Choose free ports at random, so that concurrent starts hardly ever collide."""
    candidates = iter(random.SystemRandom().sample(_PORTS, 1000))

    def free() -> int:
        return next(port for port in candidates if _is_free(port))

    return Ports(free(), free(), {node.name: free() for node in layout.nodes}, free())


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
