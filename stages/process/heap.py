"""The C library's heap, which keeps what a program frees for what it allocates next."""

import ctypes
import functools
from collections.abc import Callable


def give_back_freed() -> None:
    """Give freed memory back to the system; nothing where the C library is not glibc. It takes milliseconds
    for each GiB that is free."""
    _trim()(0)


@functools.cache
def _trim() -> Callable[[int], object]:
    try:
        found: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    except AttributeError:
        return bool
    return found
