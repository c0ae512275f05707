"""Filesystems of run directories, by type: whether other machines share them, and what clients keep."""

from pathlib import Path

_LOCAL = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay", "bcachefs"}
)
_ASKED = frozenset(
    {
        "lustre",
        "gpfs",
        "ceph",
        "fuse.ceph",
        "ceph-fuse",
        "beegfs",
        "wekafs",
        "fuse.glusterfs",
        "gfs2",
        "ocfs2",
    }
)
"""Filesystems whose clients list folders as their servers have them."""
_MOUNTS = Path("/proc/mounts")
"""The mounted filesystems, later ones over earlier ones: device, path, type and more, with blanks between."""


def is_network(folder: Path) -> bool:
    """Whether a folder is on a filesystem that other machines share, by its type; a type that is not known
    as a local one counts as shared."""
    return filesystem_of(folder) not in _LOCAL


def keeps_listings(folder: Path) -> bool:
    """Whether the client of a folder's filesystem may list it as it was seconds ago, by its type; one that is
    not known counts as such."""
    return filesystem_of(folder) not in _LOCAL | _ASKED


def filesystem_of(folder: Path) -> str:
    """Return the type of a folder's filesystem as /proc/mounts has it; empty if it is not known."""
    return mount_of(folder)[1]


def mount_of(folder: Path) -> tuple[str, str]:
    """Return where a folder's filesystem is mounted, and its type; empty if they are not known."""
    try:
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return "", ""
    mounts = [(words[1].replace("\\040", " "), words[2]) for line in lines if len(words := line.split()) > 2]
    above = [mount for mount in mounts if folder.resolve().is_relative_to(mount[0])]
    return max(reversed(above), key=lambda mount: len(mount[0]), default=("", ""))
