"""safetensors files, written tensor by tensor and read in parts: no file is ever whole in memory."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
import xxhash
from torch import Tensor

from pipeline.config.model_files import Tensor as Stored
from pipeline.run.durable import flush, naming

_CHUNK = 1 << 26
"""Bytes that are copied, hashed and written at once."""
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_FORMATS = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class Described:
    """A tensor that is to be written, without its numbers."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def header_of(tensors: Sequence[Described], metadata: Mapping[str, str]) -> bytes:
    """Return what a file of these tensors, in this order, begins with."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for tensor in tensors:
        end = start + tensor.nbytes
        offsets = {"data_offsets": [start, end]}
        header[tensor.name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), **offsets}
        start = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class TensorFile:
    """A new file: its header is written first, then each tensor. All of it is hashed on the way.

    Larger elements must come first, or tensors would not lie where their elements may.
    """

    def __init__(self, path: Path, tensors: Sequence[Described], metadata: Mapping[str, str]) -> None:
        self.path = path
        self._due = iter(tensors)
        self._hash = xxhash.xxh3_128()
        self._file = path.open("xb")
        self._write(memoryview(header_of(tensors, metadata)))

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, tensor: Tensor) -> None:
        """Write the next tensor, wherever it is, in its own number format."""
        described = next(self._due)
        found = (tensor.dtype, tuple(tensor.shape))
        assert found == (described.dtype, described.shape), (described, found)
        for chunk in _chunks(tensor):
            self._write(chunk)

    def end(self) -> tuple[int, str]:
        """Flush the file to the disk. Returns its size in bytes, and its hash."""
        assert next(self._due, None) is None, f"{self.path} lacks tensors"
        with naming(self.path):
            flush(self._file)
        return self._file.tell(), self._hash.hexdigest()

    def _write(self, data: memoryview) -> None:
        self._hash.update(data)
        with naming(self.path):
            self._file.write(data)


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor, copied to the host where they are not there."""
    flat = tensor.detach().reshape(-1)
    length = max(1, _CHUNK // flat.element_size())
    for start in range(0, len(flat), length):
        piece = flat[start : start + length].cpu().contiguous()
        yield piece.view(torch.uint8).numpy().data


def read_metadata(path: Path) -> dict[str, str]:
    """Return what a file says of itself."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        metadata: dict[str, str] = json.loads(file.read(length)).get("__metadata__", {})
    return metadata


def read_part(stored: Stored, start: int = 0, stop: int | None = None) -> Tensor:
    """Read elements of a tensor as it lies in the file, flat: [stop - start], by default to its end."""
    count = (math.prod(stored.shape) if stop is None else stop) - start
    found = torch.empty(count, dtype=_FORMATS[stored.dtype])
    fill_part(stored, start, found)
    return found


def fill_part(stored: Stored, start: int, target: Tensor) -> None:
    """Read elements from ``start`` on into ``target`` [n], which lies contiguous in the host's memory and has
    the file's format."""
    assert target.dtype is _FORMATS[stored.dtype], (target.dtype, stored.dtype)
    if len(target):
        with stored.path.open("rb", buffering=0) as file:
            file.seek(stored.start + start * target.element_size())
            _fill(file, target.detach().view(torch.uint8).numpy().data)


def _fill(file: object, target: memoryview) -> None:
    """Read until ``target`` is full. Raises OSError where the file ends before."""
    position = 0
    while position < len(target):
        number = file.readinto(target[position:])  # type: ignore[attr-defined]
        if not number:
            raise OSError(f"{getattr(file, 'name', 'a file')} is cut short")
        position += number
