"""safetensors files, written tensor by tensor and read in parts: no file is ever whole in memory."""

import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
import xxhash
from torch import Tensor

from pipeline.config.model_files import Tensor as Stored
from pipeline.run.durable import flush, naming, opened_file

_CHUNK = 1 << 26
"""Bytes that are copied, hashed and written at once."""
_FLUSHED = 1 << 25
"""Bytes after which what was written so far is sent to the disk, so that little is left to do at the end."""
_PIECE = 1 << 18
"""Bytes that are read and hashed at once, so few that the processor's cache still has them."""
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


class _Aside:
    """Another thread, which does in order what a file needs done besides."""

    _DEPTH = 4

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._begun: deque[Future[object]] = deque()

    def do(self, work: Callable[..., object], *given: object) -> None:
        """Begin, once no more than a few are left of those before. Raises what these raised."""
        self._begun.append(self._thread.submit(work, *given))
        self.wait(self._DEPTH)

    def wait(self, depth: int = 0) -> None:
        """Wait until at most ``depth`` are left. Raises what others raised."""
        while len(self._begun) > depth:
            self._begun.popleft().result()

    def stop(self) -> None:
        """Drop what has not begun, and wait for what has."""
        self._thread.shutdown(cancel_futures=True)


class TensorFile:
    """A new file: its header is written first, then each tensor. On the way another thread hashes all of it,
    and sends it to the disk.

    Larger elements must come first, or tensors would not lie where their elements may.
    """

    def __init__(self, path: Path, tensors: Sequence[Described], metadata: Mapping[str, str]) -> None:
        self.path = path
        self._due = iter(tensors)
        self._hash = xxhash.xxh3_128()
        self._file = path.open("xb", buffering=0)
        self._aside = _Aside()
        self._unflushed = 0
        self._write(memoryview(header_of(tensors, metadata)))

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._aside.stop()
        self._file.close()

    def add(self, tensor: Tensor) -> None:
        """Write the next tensor, wherever it is, in its own number format. It must not change before
        :meth:`end`."""
        described = next(self._due)
        found = (tensor.dtype, tuple(tensor.shape))
        assert found == (described.dtype, described.shape), (described, found)
        for chunk in _chunks(tensor):
            self._write(chunk)

    def end(self) -> tuple[int, str]:
        """Flush the file to the disk. Returns its size in bytes, and its hash."""
        assert next(self._due, None) is None, f"{self.path} lacks tensors"
        with naming(self.path):
            self._aside.wait()
            flush(self._file)
        return self._file.tell(), self._hash.hexdigest()

    def _write(self, data: memoryview) -> None:
        with naming(self.path):
            self._aside.do(self._hash.update, data)
            _write_all(self._file, data)
            self._unflushed += len(data)
            if self._unflushed >= _FLUSHED:
                self._unflushed = 0
                self._aside.do(os.fdatasync, self._file.fileno())


def _write_all(file: FileIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor, copied to the host where they are not there."""
    flat = tensor.detach().reshape(-1)
    length = max(1, _CHUNK // flat.element_size())
    for start in range(0, len(flat), length):
        piece = flat[start : start + length].cpu().contiguous()
        yield _bytes_of(piece)


class WholeRead:
    """A file that is read once, from its beginning to its end, and hashed on the way."""

    def __init__(self, path: Path) -> None:
        self._file = opened_file(path)
        self._hash = xxhash.xxh3_128()
        self._scratch = bytearray(_PIECE)
        self.position = 0
        """Byte that comes next."""

    def __enter__(self) -> "WholeRead":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def fill(self, target: Tensor) -> None:
        """Read the next bytes into ``target`` [n], wherever it is."""
        if target.device.type == "cpu" and target.is_contiguous():
            self._fill(_bytes_of(target))
            return
        for part in target.split(_CHUNK // target.element_size()):
            found = torch.empty(len(part), dtype=target.dtype)
            self._fill(_bytes_of(found))
            part.copy_(found)

    def pass_to(self, position: int) -> None:
        """Read on to a byte, dropping what comes before it."""
        while (left := position - self.position) > 0:
            self._fill(memoryview(self._scratch)[: min(left, _PIECE)])

    def end(self) -> tuple[int, str]:
        """Read the rest. Returns the file's size in bytes, and its hash."""
        self.pass_to(os.fstat(self._file.fileno()).st_size)
        return self.position, self._hash.hexdigest()

    def _fill(self, target: memoryview) -> None:
        for start in range(0, len(target), _PIECE):
            piece = target[start : start + _PIECE]
            _fill(self._file, piece)
            self._hash.update(piece)
            self.position += len(piece)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host. Not by ``Tensor.numpy``, after which torch cannot
    resize its storage, and so a trainer that stays could not give its memory back."""
    found: memoryview = np.from_dlpack(tensor.detach().view(torch.uint8)).data
    return found


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
    if count:
        with stored.path.open("rb", buffering=0) as file:
            file.seek(stored.start + start * found.element_size())
            _fill(file, _bytes_of(found))
    return found


def _fill(file: object, target: memoryview) -> None:
    """Read until ``target`` is full. Raises OSError where the file ends before."""
    position = 0
    while position < len(target):
        number = file.readinto(target[position:])  # type: ignore[attr-defined]
        if not number:
            raise OSError(f"{getattr(file, 'name', 'a file')} is cut short")
        position += number
