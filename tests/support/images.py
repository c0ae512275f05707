"""An image of a root filesystem of its own, and the words that enter it, by a rootless container program.

The image is a folder: links and empty mount points, made without a network. The machine's /usr and this
environment's Python are bound into it at places where the machine itself has nothing, so what runs there
runs in the image. Nothing else of the machine is seen, but for what a test binds.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support import ROOT

PROGRAM = "ch-run"
CODE = "/opt/slurm-ppo"
"""Place of the checkout in an image."""
_LINKS = ("bin", "lib", "lib64", "sbin")
_FOLDERS = ("dev", "etc", "home", "opt", "proc", "run", "sys", "tmp", "usr", "var")
_FILES = ("group", "hosts", "passwd", "resolv.conf")


@dataclass(frozen=True)
class Image:
    """A root filesystem, and where it has its Python."""

    root: Path
    home: str
    """Place of the virtual environment in the image; outside of it there is none."""

    @property
    def python(self) -> str:
        return f"{self.home}/bin/python"

    def words(self, *shown: Path | str) -> str:
        """The words before a command, for ``scheduler.container``.

        Args:
            shown: folders of the machine that are seen in the image, at the same place.
        """
        binds = {"/usr": "/usr", sys.base_prefix: sys.base_prefix, sys.prefix: self.home, str(ROOT): CODE}
        binds |= {str(path): str(path) for path in shown}
        for target in binds.values():
            (self.root / target.lstrip("/")).mkdir(parents=True, exist_ok=True)
        pairs = [f"--bind={source}:{target}" for source, target in binds.items()]
        return shlex.join([PROGRAM, "--private-tmp", *pairs, str(self.root), "--"])


def compose_image(root: Path, home: str) -> Image:
    """Make an image in a new folder."""
    for name in _FOLDERS:
        (root / name).mkdir(parents=True)
    for name in _LINKS:
        if Path("/", name).exists():
            (root / name).symlink_to(f"usr/{name}")
    for name in _FILES:
        (root / "etc" / name).touch()
    if Path("/etc/ld.so.cache").exists():
        shutil.copy("/etc/ld.so.cache", root / "etc")
    return Image(root, home)


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that the program itself wants."""
    return {"USER": environment.get("USER") or "root", "HOME": environment.get("HOME") or "/root"}


def why_none(image: Image, environment: Mapping[str, str]) -> str:
    """Why nothing can be run in an image here; empty if something can."""
    if shutil.which(PROGRAM) is None:
        return f"{PROGRAM} is not installed; on Debian or Ubuntu: sudo apt install charliecloud-runtime"
    command = [*shlex.split(image.words()), image.python, "-c", "import os"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**environment, **variables(environment)}
    )
    return "" if done.returncode == 0 else f"{PROGRAM} cannot be used here: {done.stderr.strip()}"


def settings(stages: Mapping[str, tuple[Image, str]]) -> list[str]:
    """Words of a run whose stages are in images, and its driver jobs outside.

    Args:
        stages: for each stage its image, and the words that enter it.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    found = [
        f"scheduler.environment={{PYTHONPATH: '{CODE}'}}",
        f"scheduler.driver.environment={{PYTHONPATH: '{path}'}}",
        f"scheduler.driver.python={sys.executable}",
    ]
    for stage, (image, words) in stages.items():
        found.append(f"scheduler.{stage}.container='{words}'")
        found.append(f"scheduler.{stage}.python={image.python}")
    return found
