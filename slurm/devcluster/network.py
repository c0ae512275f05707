"""A network filesystem of a cluster's own: GlusterFS, one brick, and a mount for each node and for its user.

A node's mount lies in a mount namespace of its own, at the same path as everybody's, so that nodes share no
client cache. The clients of nodes hold their namespaces; ``slurmd`` and its jobs enter them. There is no
glusterd: both sides read the volume from a file, so nothing of ours lies outside of the cluster's folder, and
nothing is left of a namespace once its processes have ended.
"""

import ctypes
import os
import subprocess
import uuid
from pathlib import Path

from slurm.devcluster import programs
from slurm.devcluster.errors import DevclusterError
from slurm.devcluster.layout import PracticeIdentity, filled

SHARED = "shared"
"""Name of the mount's folder in the cluster's folder."""
CACHE_SECONDS = 3
"""Seconds for which clients cache names, attributes, contents, and that something is missing."""
BRICK = "glusterfsd"
OUTSIDE = "glusterfs"
"""Name of the client whose mount the user sees, outside of the nodes."""
_DETACH = 2  # MNT_DETACH of umount2: it does not wait for open files


def client_of(node: str) -> str:
    """Return the name of a node's client."""
    return f"{OUTSIDE}-{node}"


def check() -> None:
    """Raise DevclusterError unless this process may mount FUSE filesystems."""
    if os.geteuid() != 0:
        raise DevclusterError("a network filesystem needs root, who may mount; leave the option out")
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        raise DevclusterError(f"a network filesystem needs /dev/fuse: {error.strerror}") from None
    tried = subprocess.run(
        [programs.program("unshare"), "--mount", "true"], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        raise DevclusterError(f"a network filesystem needs mount namespaces: {tried.stderr.strip()}")


def write(identity: PracticeIdentity, port: int) -> None:
    """Create the brick, the mount's folder, and the volume files of server and client."""
    root = identity.root
    (root / SHARED).mkdir()
    (root / "brick").mkdir()
    volume = uuid.uuid4()
    try:
        os.setxattr(root / "brick", "trusted.glusterfs.volume-id", volume.bytes)
    except OSError as error:
        raise DevclusterError(f"{root} takes no extended attributes of GlusterFS: {error.strerror}") from None
    (root / "brick.vol").write_text(filled("brick.vol", root=root, volume=volume, port=port))
    (root / "client.vol").write_text(filled("client.vol", port=port, cache_seconds=CACHE_SECONDS))


def brick_command(identity: PracticeIdentity) -> list[str]:
    """Return the server's command line."""
    root = identity.root
    return [programs.program(BRICK), "-N", "-f", f"{root}/brick.vol", "-l", f"{root}/log/{BRICK}.log"]


def client_command(identity: PracticeIdentity, name: str) -> list[str]:
    """Return a client's command line; a node's client runs in a mount namespace of its own."""
    root = identity.root
    mount = [
        programs.program("glusterfs"),
        "--no-daemon",
        f"--volfile={root}/client.vol",
        f"--log-file={root}/log/{name}.log",
        *(f"--{what}-timeout={CACHE_SECONDS}" for what in ("entry", "attribute", "negative")),
        str(mount_point(identity)),
    ]
    if name == OUTSIDE:
        return mount
    return [programs.program("unshare"), "--mount", "--propagation=private", *mount]


def mount_point(identity: PracticeIdentity) -> Path:
    """Return the path of the mount as the kernel writes it: without links."""
    return (identity.root / SHARED).resolve()


def is_mounted(identity: PracticeIdentity, pid: int) -> bool:
    """Whether the filesystem is mounted for a process, and answers."""
    mounted = f" {_escaped(mount_point(identity))} "
    try:
        lines = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
        found = any(mounted in line and "fuse.glusterfs" in line for line in lines)
        return found and Path(f"/proc/{pid}/root{mount_point(identity)}").is_dir()
    except OSError:
        return False


def inside(pid: int, command: list[str]) -> list[str]:
    """Wrap a command so that it runs in the mount namespace of a process."""
    return [programs.program("nsenter"), f"--mount=/proc/{pid}/ns/mnt", *command]


def unmount(folder: Path) -> None:
    """Unmount the filesystem from the user's view, whether or not its client still lives."""
    place = (folder / SHARED).resolve()
    mounted = f" {_escaped(place)} "
    library = ctypes.CDLL(None, use_errno=True)
    while any(mounted in line for line in Path("/proc/self/mountinfo").read_text().splitlines()):
        if library.umount2(os.fsencode(place), _DETACH):
            reason = os.strerror(ctypes.get_errno())
            raise DevclusterError(f"{place} cannot be unmounted ({reason}); umount -l {place}")


def _escaped(path: Path) -> str:
    return "".join(f"\\{ord(sign):03o}" if sign in " \t\n\\" else sign for sign in str(path))
