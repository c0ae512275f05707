"""What the library of NVIDIA's driver for monitoring (NVML) says of the GPUs here, as one line of JSON.

A program of its own, of Python's standard library alone: a driver that hangs stops it, and not its caller.
It asks what PyTorch asks to count GPUs without initialising CUDA; where it gets no answer, neither does that.
"""

import ctypes
import json

LIBRARY = "libnvidia-ml.so.1"
_LENGTH = 96


def answer() -> "dict[str, object]":
    """Return the identifiers of all GPUs (``uuids``), or why they cannot be had (``problem``)."""
    try:
        library = ctypes.CDLL(LIBRARY)
        _check(library, library.nvmlInit())
        count = ctypes.c_uint(0)
        _check(library, library.nvmlDeviceGetCount_v2(ctypes.byref(count)))
        return {"uuids": [_uuid(library, index) for index in range(count.value)]}
    except (OSError, AttributeError) as error:  # no library, an error of it, or a function that it lacks
        return {"problem": str(error)}


def _uuid(library: ctypes.CDLL, index: int) -> str:
    handle, text = ctypes.c_void_p(), ctypes.create_string_buffer(_LENGTH)
    _check(library, library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)))
    _check(library, library.nvmlDeviceGetUUID(handle, text, _LENGTH))
    return text.value.decode()


def _check(library: ctypes.CDLL, code: int) -> None:
    if code:
        library.nvmlErrorString.restype = ctypes.c_char_p
        raise OSError(f"NVML: {library.nvmlErrorString(code).decode()} (error {code})")


if __name__ == "__main__":
    print(json.dumps(answer()))
