"""Memory that a program holds and does not need: the C library's heap keeps what was freed for what is
allocated next, and a buffer keeps what it was written with."""

import ctypes
import functools
import mmap
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


def give_back_pages(address: int, num_bytes: int) -> None:
    """Give the whole pages of a buffer of the heap back to the system. What is read from them afterwards are
    zeros, until they are written again."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (address + num_bytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
