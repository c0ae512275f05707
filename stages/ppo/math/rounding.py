"""Which numbers round to a number of half precision."""

import torch
from torch import Tensor


def nearest_that_rounds_to(values: Tensor, rounded: Tensor) -> Tensor:
    """Return the fp32 numbers nearest to ``values`` that become ``rounded`` in its number format.

    Args:
        values: any shape, fp32. Those that round to it already stay as they are.
        rounded: of the same shape, finite, fp32, bf16 or fp16. fp32 numbers round to themselves alone.
    """
    if rounded.dtype == torch.float32:
        return rounded
    exact = rounded.float()
    low, high = ((exact + _neighbour(rounded, step).float()) / 2 for step in (-1, 1))
    found = torch.minimum(torch.maximum(values, low), high)
    # Halfway numbers round to even: to this one or to its neighbour.
    found = torch.where(found.to(rounded.dtype) == rounded, found, torch.nextafter(found, exact))
    found = torch.where(found.to(rounded.dtype) == rounded, found, exact)
    return torch.where(values.to(rounded.dtype) == rounded, values, found)


def _neighbour(numbers: Tensor, step: int) -> Tensor:
    """Return the next larger (1) or smaller (-1) numbers of the same format."""
    bits = numbers.view(torch.int16).int()
    order = torch.where(bits < 0, -(bits & 0x7FFF), bits) + step
    back = torch.where(order < 0, (-order) | 0x8000, order)
    return torch.where(back >= 0x8000, back - 0x10000, back).to(torch.int16).view(numbers.dtype)
