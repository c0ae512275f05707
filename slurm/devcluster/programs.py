"""Programs that a cluster needs, wherever a distribution puts them."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from slurm.devcluster.errors import DevclusterError, PackagesMissing
from slurm.devcluster.layout import Layout

# Daemons lie in folders that are not in an ordinary user's PATH.
_MORE_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/libexec")
_SLURM = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client"}
_ACCOUNTING = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server", "mariadb-install-db": "mariadb-server"}

_NETWORK = {
    "glusterfs": "glusterfs-client",
    "glusterfsd": "glusterfs-client",  # of glusterfs-common, which that one brings along
    "nsenter": "util-linux",
    "unshare": "util-linux",
}
_MACHINES = {
    "hostname": "hostname",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "unshare": "util-linux",
}
_CLOCKS = {"cc": "gcc libc6-dev"}


def search_path() -> str:
    """Return PATH with the folders of daemons added."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), *_MORE_FOLDERS])


def find(name: str) -> Path | None:
    """Return a program's path; None if it is not installed."""
    found = shutil.which(name, path=search_path())
    return Path(found) if found else None


def program(name: str) -> str:
    """Return a program's path. Raises PackagesMissing."""
    found = find(name)
    if found is None:
        raise PackagesMissing(f"{name} is not installed")
    return str(found)


def check(layout: Layout, accounting: bool) -> None:
    """Raise PackagesMissing, with the command that installs them, unless every program is there."""
    asked = {
        **_SLURM,
        **(_ACCOUNTING if accounting else {}),
        **(_NETWORK if layout.network_filesystem else {}),
        **(_MACHINES if any(node.host for node in layout.nodes) else {}),
        **(_CLOCKS if layout.has_clocks else {}),
    }
    packages = dict.fromkeys(package for name, package in asked.items() if find(name) is None)
    if packages:
        raise PackagesMissing(
            "a development cluster needs packages that are not installed; on Debian or Ubuntu: "
            f"sudo apt install --no-install-recommends {' '.join(packages)}"
        )


def slurm_version() -> tuple[int, int]:
    """Return Slurm's version, e.g. (22, 5)."""
    said = subprocess.run([program("slurmctld"), "-V"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"(\d+)\.(\d+)", said)
    if found is None:
        raise DevclusterError(f"slurmctld -V does not say which version it is: {said.strip()!r}")
    return int(found[1]), int(found[2])
