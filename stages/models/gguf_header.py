"""The header of a GGUF file, read within bounds: what a damaged or hostile file states is compared with what
it has before anything of that size is read or kept.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Needs the package gguf, for the sizes of
quantised blocks.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Codes of a value's type -> formats of the module struct."""
_STRING, _ARRAY = 8, 9
_ALIGNMENT = "general.alignment", 32
_MOST_ELEMENTS = 1 << 21
"""Elements of an array: no tokenizer has as many tokens or merges."""
_MOST_DIMENSIONS = 8


class BadHeader(ValueError):
    """A header that cannot be read: says what is wrong, and where."""


@dataclass(frozen=True)
class HeaderTensor:
    """One tensor of a file."""

    shape: tuple[int, ...]
    """Dimensions, the one that changes fastest first."""
    kind: int
    """Code of its number format."""
    offset: int
    """First byte behind the header's end."""

    @property
    def num_weights(self) -> int:
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes in the file. Raises BadHeader for a format that the package gguf does not know."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            weights, size = GGML_QUANT_SIZES[GGMLQuantizationType(self.kind)]
        except (ValueError, KeyError):
            raise BadHeader(f"number format {self.kind} is not known") from None
        return self.num_weights // weights * size


@dataclass(frozen=True)
class Header:
    """Contents of a header."""

    keys: Mapping[str, Any]
    tensors: Mapping[str, HeaderTensor]


def read_header(file: Path) -> Header:
    """Read the header of a file that begins as GGUF files do, and see that all its tensors are in the file.

    Raises:
        BadHeader: it is damaged, cut, or of a version that is not known.
        OSError: it cannot be read.
    """
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data)
        cursor.take(len(MAGIC))
        if (version := cursor.number("I")) not in _VERSIONS:
            raise BadHeader(f"version {version} of GGUF is not known: 2 and 3 are, little-endian")
        num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
        keys: dict[str, Any] = {}
        for _ in range(num_keys):
            _add(keys, cursor.text(), cursor.value(cursor.number("I")))
        tensors: dict[str, HeaderTensor] = {}
        for _ in range(num_tensors):
            _add(tensors, cursor.text(), cursor.tensor())
        _check_extent(tensors, _start(keys, cursor.offset), len(data))
    return Header(keys, tensors)


def _add(found: dict[str, Any], name: str, value: Any) -> None:
    if name in found:
        raise BadHeader(f"{name!r} is there twice")
    found[name] = value


def _start(keys: Mapping[str, Any], end: int) -> int:
    """Return the first byte of tensors: the header's end, aligned as it says."""
    alignment = keys.get(*_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise BadHeader(f"{_ALIGNMENT[0]}={alignment!r} is not a power of two")
    return -(-end // alignment) * alignment


def _check_extent(tensors: Mapping[str, HeaderTensor], start: int, size: int) -> None:
    for name, tensor in tensors.items():
        if (end := start + tensor.offset + tensor.size) > size:
            raise BadHeader(f"tensor {name} ends at byte {end:,}, and the file has {size:,}")


class _Cursor:
    """A place in a file, and what is read from there on. Numbers are little-endian."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.offset = 0

    def take(self, size: int) -> bytes:
        """Return the next bytes. Raises BadHeader where the file has fewer."""
        if size > len(self._data) - self.offset:
            raise BadHeader(f"at byte {self.offset:,} it states {size:,} bytes more, which it does not have")
        self.offset += size
        return self._data[self.offset - size : self.offset]

    def numbers(self, form: str, count: int) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{form}", self.take(count * struct.calcsize(f"<{form}")))

    def number(self, form: str) -> Any:
        return self.numbers(form, 1)[0]

    def text(self) -> str:
        at, found = self.offset, self.take(self.number("Q"))
        try:
            return found.decode()
        except UnicodeDecodeError:
            raise BadHeader(f"at byte {at:,} is text that is no UTF-8") from None

    def value(self, kind: int) -> Any:
        """Return a value of a type: a number, a text, or a list of either."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise BadHeader(f"at byte {self.offset:,} is a value of type {kind}, which GGUF does not have")
        kind, count = self.number("I"), self.number("Q")
        if count > _MOST_ELEMENTS:
            raise BadHeader(f"at byte {self.offset:,} it states a list of {count:,} elements")
        if kind in _SCALARS:
            return list(self.numbers(_SCALARS[kind], count))
        if kind != _STRING:
            raise BadHeader(f"at byte {self.offset:,} is a list of type {kind}, which no model has")
        return [self.text() for _ in range(count)]

    def tensor(self) -> HeaderTensor:
        if (dimensions := self.number("I")) > _MOST_DIMENSIONS:
            raise BadHeader(f"at byte {self.offset:,} it states a tensor of {dimensions:,} dimensions")
        shape = self.numbers("Q", dimensions)
        if 0 in shape:
            raise BadHeader(f"at byte {self.offset:,} it states a tensor without numbers")
        return HeaderTensor(shape, self.number("I"), self.number("Q"))
