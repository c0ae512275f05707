"""A check that the weights of a model are finite, read piece by piece from its files. No torch."""

import itertools
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from pipeline.config.model_files import Tensor
from stages.context import UserError
from stages.logs import log

_EXPONENTS: dict[str, tuple[str, int]] = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "BF16": ("<u2", 0x7F80),
    "F16": ("<u2", 0x7C00),
    "F8_E5M2": ("<u1", 0x7C),
    "F8_E4M3": ("<u1", 0x7F),
}
"""Integer type and bit mask by format; the bits of the mask are all set where a number is NaN or infinite."""
_PIECE = 1 << 24
"""Bytes read at a time."""
_PAGE = 1 << 12
"""Least bytes read of a tensor of which only a share is."""


def check_finite(
    key: str, directory: Path, tensors: Sequence[tuple[str, Tensor]], most: int | None = None
) -> None:
    """Check every weight, and log how many there were.

    Args:
        key: configuration key that names the model.
        tensors: name and place of each weight, in any order.
        most: bytes to read; of larger models the beginning of each weight is. Default: all.

    Raises:
        UserError: one is NaN or infinite.
    """
    started, ordered = time.monotonic(), sorted(tensors, key=lambda item: (item[1].path, item[1].start))
    total = sum(tensor.size for _, tensor in tensors)
    share = 1.0 if most is None or total <= most else most / total
    for path, group in itertools.groupby(ordered, key=lambda item: item[1].path):
        _check_file(key, directory, path, group, share)
    seconds, counted = time.monotonic() - started, f"{len(tensors)} weights of {total / 2**30:.2f} GiB"
    if share < 1:
        counted = f"the first {share:.0%} of each of {counted}"
    log.info(f"{key}={directory}: {counted}, all finite ({seconds:.1f} s)")


def _check_file(
    key: str, directory: Path, path: Path, tensors: Iterable[tuple[str, Tensor]], share: float
) -> None:
    with path.open("rb", buffering=0) as file:
        for name, tensor in tensors:
            if not is_finite(file, tensor, share):
                raise UserError(
                    f"{key}={directory}: its weight {name} in {path.name} has NaN or infinite values; "
                    "copy the model again, or give another checkpoint"
                )


def is_finite(file: BinaryIO, tensor: Tensor, share: float = 1.0) -> bool:
    """Whether every number of a tensor, or of a share of it from its beginning, but at least a page, is
    finite; true of formats without NaN."""
    if tensor.dtype not in _EXPONENTS:
        return True
    kind, mask = _EXPONENTS[tensor.dtype]
    file.seek(tensor.start)
    left = tensor.size if share >= 1 else min(tensor.size, (int(tensor.size * share) // _PAGE + 1) * _PAGE)
    while left > 0:
        bits = np.frombuffer(file.read(min(left, _PIECE)), kind)
        if not bits.size or np.any((bits & mask) == mask):
            return False
        left -= bits.nbytes
    return True
