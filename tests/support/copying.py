"""Copies of run directories, as people make them, and whether a command has changed one."""

import shutil
import subprocess
from pathlib import Path

import pytest

TOOLS = {
    "cp -r": "cp -r {source} {target}",
    "cp -a": "cp -a {source} {target}",
    "cp -rL": "cp -rL {source} {target}",  # like scp -r, which follows links
    "rsync": "rsync -a {source}/ {target}/",
    "tar": "mkdir {target} && tar -C {source} -cf - . | tar -C {target} -xf -",
}
MAY_CHANGE = 1
"""Exit code of tar where a file has changed as it was read: a run at work."""


def copied(source: Path, target: Path, tool: str) -> Path:
    if not shutil.which(tool.split()[0]):
        pytest.skip(f"there is no {tool}")
    command = TOOLS[tool].format(source=source, target=target)
    for _ in range(3):  # on a network filesystem a file that is replaced while it is read fails a tool: again
        if subprocess.run(command, shell=True, check=False).returncode in (0, MAY_CHANGE):
            return target
        shutil.rmtree(target, ignore_errors=True)
    raise AssertionError(f"{command} failed three times")


def snapshot(root: Path) -> dict[str, tuple[int, int]]:
    """Size and time of all that lies below a folder, by path."""
    states = {str(path): path.lstat() for path in sorted(root.rglob("*"))}
    return {path: (state.st_size, state.st_mtime_ns) for path, state in states.items()}
