"""What happens to files: a bit that flips, a write that was cut."""

import json
import os
from collections.abc import Mapping
from itertools import count
from pathlib import Path

from slurm.sealing import sealed


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
    except ValueError:
        return data


def edit(path: Path, changes: Mapping[str, object]) -> None:
    """Change values of a JSON object, as someone who puts its checksum right does."""
    content = json.loads(path.read_text()) | changes
    content.pop("checksum", None)
    path.write_text(sealed(content))


def cut(path: Path) -> None:
    """Keep the first half."""
    os.truncate(path, path.stat().st_size // 2)
