"""A pretended library of NVIDIA's driver, a few lines of C that say what the environment tells them."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from pipeline.run.nvml import LIBRARY

SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>

static int told(const char *name) { return getenv(name) ? atoi(getenv(name)) : 0; }

int nvmlInit(void) { return told("NVML_ERROR"); }
int nvmlInit_v2(void) { return told("NVML_ERROR"); }
int nvmlInitWithFlags(unsigned flags) { return told("NVML_ERROR"); }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = told("NVML_COUNT"); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device)
{ *device = (void *)(index + 1L); return index < told("NVML_COUNT") ? 0 : 2; }
int nvmlDeviceGetMigMode(void *device, unsigned *now, unsigned *next)
{ *now = *next = told("NVML_MIG"); return 0; }
int nvmlDeviceGetUUID(void *device, char *text, unsigned size)
{
    snprintf(text, size, "GPU-%08ld-0000-0000-0000-000000000000", (long)device - 1);
    return told("NVML_UUID_ERROR");
}
const char *nvmlErrorString(int code)
{ return code == 18 ? "Driver/library version mismatch" : "Unknown Error"; }
"""


def built(folder: Path) -> Path:
    """Build it in a folder, for LD_LIBRARY_PATH. A C compiler is needed, as for the practice cluster."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "a C compiler is needed: install gcc"
    source = folder / "nvml.c"
    source.write_text(SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(folder / LIBRARY), str(source)], check=True)
    return folder


def environment(folder: Path | None, told: Mapping[str, object]) -> dict[str, str]:
    """Return this process's environment with the library of a folder, which says what it is told. None: with
    no library."""
    own = {n: v for n, v in os.environ.items() if not n.startswith(("NVML_", "CUDA_", "HIP_", "DS_"))}
    library = {"LD_LIBRARY_PATH": str(folder)} if folder else {}
    return {**own, **library, **{name: str(value) for name, value in told.items()}}
