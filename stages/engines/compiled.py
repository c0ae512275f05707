"""A cache of what engines compile, kept from task to task under the run directory.

Compilers write to their caches at any time, and array elements share the run directory. So each process
works in a folder of its own on the node, which begins as a copy of what the run has; the first that has
something to keep publishes its folder as a whole, by one rename, and what was published is never changed.

Such caches hold code and pickles. One is used only where no user but its owner, who runs this task, can
have written it.
"""

import os
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_128_hexdigest

from pipeline.run.paths import RunPaths
from stages.files.node_folders import make_node_folder, remove_node_folder
from stages.logs import log

_PREFIX = "slurm-ppo-engine-"


@dataclass(frozen=True)
class KeptCache:
    """The cache folder of one process, and where it is published."""

    folder: Path
    published: Path | None
    """Path under the run directory; None if the cache is not to be kept."""

    @property
    def variables(self) -> Mapping[str, str]:
        """Environment variables for vLLM, torch's compiler and Triton."""
        return {
            "VLLM_CACHE_ROOT": str(self.folder / "vllm"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),
            "TRITON_CACHE_DIR": str(self.folder / "triton"),
        }

    def publish(self) -> None:
        """Keep a copy of what is in the folder, unless another process was first."""
        if self.published is not None and not self.published.exists() and any(self.folder.glob("*")):
            _publish(self.folder, self.published)

    def discard(self) -> None:
        """Remove the folder."""
        remove_node_folder(self.folder.parent)


def private_cache(run_dir: Path, key: str, is_kept: bool) -> KeptCache:
    """Make a folder for this process, with a copy of what the run has for ``key``. Those of processes that
    were killed are removed first.

    Args:
        key: everything that compiled code depends on.
        is_kept: whether to use what other tasks kept, and to keep what is new.
    """
    folder = make_node_folder(_PREFIX) / "cache"
    folder.mkdir()
    if not is_kept or not run_dir.is_dir():
        return KeptCache(folder, None)
    published = RunPaths(run_dir).compiled / xxh3_128_hexdigest(key.encode())
    try:
        problem = distrust(published) if published.is_dir() else None
        if published.is_dir() and not problem:
            shutil.copytree(published, folder, dirs_exist_ok=True)
    except OSError as error:  # nothing is lost but time
        problem = str(error)
    if problem:
        log.warning(f"{published} is not used: {problem}")
    return KeptCache(folder, None if problem else published)


def distrust(folder: Path) -> str | None:
    """Return why another user may have written to a folder; None if none can have."""
    for path in (folder, *folder.rglob("*")):
        found = path.lstat()
        if stat.S_ISLNK(found.st_mode):
            return f"{path} is a link"
        if found.st_uid != os.getuid():
            return f"{path} belongs to another user"
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"others may write to {path}"
    return None


def _publish(folder: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    own = target.with_name(f".{target.name}.{os.urandom(4).hex()}")
    try:
        shutil.copytree(folder, own, symlinks=False)
        for path in (own, *own.rglob("*")):
            path.chmod(path.stat().st_mode & ~(stat.S_IWGRP | stat.S_IWOTH))
        own.rename(target)
    except OSError as error:  # another was first, or the disk is full: the next task compiles again
        log.warning(f"what was compiled is not kept: {error}")
        shutil.rmtree(own, ignore_errors=True)
