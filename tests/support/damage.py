"""What may become of a file that people, disks and other programs can reach."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _instead(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": _cut,
    "empty": lambda path: path.write_bytes(b""),
    "zero": _zero,
    "junk": lambda path: path.write_bytes(random.Random(0).randbytes(300)),
    "flipped": _flip,
    "deep": lambda path: path.write_text("[" * 100_000),
    "another kind": lambda path: path.write_text('["a list"]\n'),
    "pipe": lambda path: _instead(path, os.mkfifo),
    "folder": lambda path: _instead(path, Path.mkdir),
    "link to nothing": lambda path: _instead(path, lambda at: at.symlink_to("/nothing/is/there")),
    "gone": Path.unlink,
}
"""Ways to damage a file, by name."""


def restore(path: Path, content: bytes) -> None:
    """Put a file back, whatever lies in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.write_bytes(content)
