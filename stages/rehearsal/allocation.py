"""An allocation and a product on this process's device. Imports torch and nothing of transformers."""

import torch

from pipeline.config.update import Precision
from stages.rehearsal.answers import CheckFailed

_WIDTH = 1024
_BF16 = (8, 0)
"""Least compute capability with bf16 arithmetic."""


def device() -> str:
    """Return the kind of device that this process computes on."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def half_precision() -> Precision:
    """Return the half precision of this process's device: bf16, and fp16 on cards without bf16 arithmetic,
    whose users train and generate in that."""
    is_older = torch.cuda.is_available() and torch.cuda.get_device_capability() < _BF16
    return Precision.FP16 if is_older else Precision.BF16


def compute() -> None:
    """Allocate and compute in fp32 and bf16. Raises CheckFailed where the numbers are wrong."""
    for dtype in (torch.float32, torch.bfloat16):
        ones = torch.ones(_WIDTH, _WIDTH, dtype=dtype, device=device())
        product = (ones[:64] @ ones[:64].T).float()
        if not bool((product == _WIDTH).all()):
            measured = f"a product of ones in {dtype} is {float(product[0, 0])}, not {_WIDTH}"
            raise CheckFailed(measured, "exclude this node")
