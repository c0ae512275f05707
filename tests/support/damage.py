"""What happens to files: a bit that flips, a write that was cut, something else in their place."""

import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path

from slurm.sharedfiles import sealed


def flip_bit(path: Path) -> None:
    """Flip the lowest bit of the byte in the middle, or of the first after it that changes what is read.

    In JSON a flipped digit may change nothing: the last of a time's can be beyond a double's precision.
    """
    before = path.read_bytes()
    for position in count(len(before) // 2):
        after = bytearray(before)
        after[position] ^= 1
        if path.suffix != ".json" or _content(bytes(after)) != _content(before):
            _write_at(path, position, after[position])
            return


def _write_at(path: Path, position: int, byte: int) -> None:
    """In place, which needs no room on a full disk."""
    with path.open("r+b") as file:
        file.seek(position)
        file.write(bytes([byte]))


def _content(data: bytes) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return data


def edit(path: Path, changes: Mapping[str, object]) -> None:
    """Change values of a JSON object, as someone who puts its checksum right does."""
    content = json.loads(path.read_text()) | changes
    content.pop("checksum", None)
    path.write_text(sealed(content))


def cut(path: Path) -> None:
    """Keep the first half."""
    os.truncate(path, path.stat().st_size // 2)


def _instead(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": cut,
    "empty": lambda path: path.write_bytes(b""),
    "zero": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "junk": lambda path: path.write_bytes(random.Random(0).randbytes(300)),
    "flipped": flip_bit,
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
