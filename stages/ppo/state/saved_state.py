"""A trainer's state on disk: each rank's slices in files of its own, readable by any number of ranks."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pipeline.config.model_files import Tensor as Stored
from pipeline.config.model_files import read_header
from pipeline.run.commits import FileEntry
from pipeline.run.durable import from_json, read_shared
from stages import ranks
from stages.ppo.state.slices import Slice
from stages.ppo.state.tensor_files import Described, TensorFile, WholeRead, read_metadata, read_part

LARGEST_FILE = 2 * 2**30
"""Bytes of a file of the state, give or take its header."""
_STARTS = "starts"
_COUNTERS = "counters.json"
_WRITER = re.compile(r"-rank-(\d{5})-\d+\.safetensors$")
_AT_ONCE = 1 << 24
"""Elements that are read at once."""
_WIDTH = 4
"""Bytes of an element of the state: fp32."""
_NOTHING = torch.empty(0)

File = tuple[Path, int, str]
"""A file that was written, its size in bytes and its hash."""


@dataclass(frozen=True)
class SavedPiece:
    """A part of one tensor of the state, as a file holds it."""

    key: str
    """Kind and name, e.g. ``exp_avg/lm_head.weight``."""
    start: int
    """Index of its first element in the flat tensor."""
    tensor: Tensor
    """[n]"""


def pieces_of(slices: Iterable[Slice], kinds: Sequence[str], limit: int) -> Iterator[SavedPiece]:
    """Yield what of the slices is to be written, in pieces of at most ``limit`` bytes."""
    for one in slices:
        for kind in kinds:
            part = one.parts[kind]
            step = max(1, limit // part.element_size())
            for start in range(0, len(part), step):
                yield SavedPiece(f"{kind}/{one.name}", one.start + start, part[start : start + step])


def in_files(pieces: Iterable[SavedPiece], limit: int) -> Iterator[list[SavedPiece]]:
    """Divide pieces into files of at most ``limit`` bytes; no file has two pieces of one tensor."""
    together: list[SavedPiece] = []
    size = 0
    for piece in pieces:
        if together and (size + piece.tensor.nbytes > limit or together[-1].key == piece.key):
            yield together
            together, size = [], 0
        together.append(piece)
        size += piece.tensor.nbytes
    if together:
        yield together


def write_slices(
    folder: Path, name: str, rank: int, slices: Iterable[Slice], kinds: Sequence[str]
) -> Iterator[File]:
    """Write a rank's slices of one trainer, durably.

    Args:
        name: the trainer's.
        kinds: what of each slice to write.
    """
    pieces = pieces_of(slices, kinds, LARGEST_FILE)
    for number, together in enumerate(in_files(pieces, LARGEST_FILE)):
        path = folder / f"{name}-rank-{rank:05d}-{number:03d}.safetensors"
        tensors = [Described(p.key, p.tensor.dtype, tuple(p.tensor.shape)) for p in together]
        # As one entry, as a file is to be the same each time.
        starts = {_STARTS: json.dumps({p.key: p.start for p in together})}
        with TensorFile(path, tensors, starts) as file:
            for piece in together:
                file.add(piece.tensor)
            yield (path, *file.end())


@dataclass(frozen=True)
class Part:
    """A part of one tensor of the state, where a file has it."""

    start: int
    """Index of its first element in the flat tensor."""
    stored: Stored

    @property
    def stop(self) -> int:
        return self.start + self.stored.size // _WIDTH


class SavedState:
    """What files hold of one trainer's state. Only headers are read until a part of it is wanted."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files: dict[Path, dict[str, Part]] = {}
        for path in files:
            starts = from_json(read_metadata(path).get(_STARTS, "{}"))  # older states have whole tensors
            found = read_header(path).items()
            self._files[path] = {key: Part(starts.get(key, 0), stored) for key, stored in found}

    @property
    def keys(self) -> set[str]:
        return {key for parts in self._files.values() for key in parts}

    def read(self, key: str, start: int, target: Tensor) -> None:
        """Copy the elements of a tensor from index ``start`` into ``target`` [n], wherever that is.

        Raises:
            KeyError: the state does not have all of them.
        """
        wanted = {key: (start, target)}
        for parts in self._files.values():
            _read_parts(parts, wanted)
        self._check_has(wanted)

    def read_into(self, slices: Iterable[Slice], kinds: Sequence[str]) -> list[File]:
        """Fill slices with what was saved. Files that are this rank's to verify are read whole, and once.

        Returns:
            These files, with the hashes that they have.

        Raises:
            KeyError: the state does not have all of them.
        """
        wanted = {f"{kind}/{one.name}": (one.start, one.parts[kind]) for one in slices for kind in kinds}
        self._check_has(wanted)
        verified: list[File] = []
        for path, parts in self._files.items():
            if (writer := writer_of(path.name)) is not None and writer % ranks.size() == ranks.rank():
                verified.append((path, *_read_whole(path, parts, wanted)))
            else:
                _read_parts(parts, wanted)
        return verified

    def _check_has(self, wanted: "Wanted") -> None:
        for key, (start, target) in wanted.items():
            parts = [parts[key] for parts in self._files.values() if key in parts]
            bounds = (overlap(part, start, len(target)) for part in parts)
            found = sum(max(0, high - low) for low, high in bounds)
            if found != len(target):
                raise KeyError(f"{key}: {found} of {len(target)} elements from {start} are there")


Wanted = Mapping[str, tuple[int, Tensor]]
"""By key, the index of the first element that is wanted of the flat tensor, and [n] where to put them."""


def overlap(part: Part, start: int, length: int) -> tuple[int, int]:
    """Return bounds in the flat tensor of what a file's part has of ``length`` elements from ``start``."""
    return max(start, part.start), min(start + length, part.stop)


def _read_parts(parts: Mapping[str, Part], wanted: Wanted) -> None:
    """Read what is wanted of a file."""
    for key in parts.keys() & wanted.keys():
        part, (start, target) = parts[key], wanted[key]
        low, high = overlap(part, start, len(target))
        for at in range(low, high, _AT_ONCE):
            end = min(high, at + _AT_ONCE)
            target[at - start : end - start].copy_(read_part(part.stored, at - part.start, end - part.start))


def _read_whole(path: Path, parts: Mapping[str, Part], wanted: Wanted) -> tuple[int, str]:
    """Read a file, and put what is wanted where it belongs. Returns its size and hash."""
    with WholeRead(path) as file:
        for key, part in sorted(parts.items(), key=lambda item: item[1].stored.start):
            start, target = wanted.get(key, (0, _NOTHING))
            low, high = overlap(part, start, len(target))
            if low < high:
                file.pass_to(part.stored.start + (low - part.start) * _WIDTH)
                file.fill(target[low - start : high - start])
        return file.end()


def writer_of(name: str) -> int | None:
    """Return the rank that wrote a file of slices; None for other files."""
    found = _WRITER.search(name)
    return int(found[1]) if found else None


def is_hashed_here(index: int, entry: FileEntry) -> bool:
    """Whether this rank hashes a file before it is used: its share, but for slices, which are verified while
    they are read (:meth:`SavedState.read_into`)."""
    return writer_of(entry.path) is None and index % ranks.size() == ranks.rank()


def files_of(folder: Path, name: str) -> list[Path]:
    """Return the files of a trainer's state."""
    return sorted(folder.glob(f"{name}-rank-*.safetensors"))


def write_counters(folder: Path, counters: Mapping[str, Mapping[str, float]]) -> None:
    """Write what counts of each trainer, by its name."""
    (folder / _COUNTERS).write_text(json.dumps(counters, indent=1) + "\n")


def read_counters(folder: Path, name: str) -> Mapping[str, float]:
    """Return what counts of one trainer. Raises OSError, KeyError."""
    counters: dict[str, float] = from_json(read_shared(folder / _COUNTERS))[name]
    return counters
