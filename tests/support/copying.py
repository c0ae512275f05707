"""Copies of run directories, as people make them."""

import shutil
import subprocess
from pathlib import Path

import pytest

TOOLS = {
    "cp -r": "cp -r {source} {target}",
    "cp -a": "cp -a {source} {target}",
    "rsync": "rsync -a {source}/ {target}/",
    "tar": "mkdir {target} && tar -C {source} -cf - . | tar -C {target} -xf -",
}
MAY_CHANGE = 1
"""Exit code of tar where a file has changed as it was read: a run at work."""


def copied(source: Path, target: Path, tool: str) -> Path:
    if not shutil.which(tool.split()[0]):
        pytest.skip(f"there is no {tool}")
    command = TOOLS[tool].format(source=source, target=target)
    assert subprocess.run(command, shell=True, check=False).returncode in (0, MAY_CHANGE)
    return target
