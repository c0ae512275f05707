"""Program of a probe's job on a compute node: it checks what was requested and writes an answer file.

The job's own interpreter reads a copy of this file from its standard input, so that it runs in an image that
shows no folder of the cluster, and needs nothing but Python's standard library. Where the answer cannot be
written, it is printed: the job's log is written outside of the image.
"""

import ctypes
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ANSWER = "slurm-ppo-probe-answer "
"""Beginning of the printed line that holds an answer."""
_ASK_SECONDS = 20
_REPLY_SECONDS = 60
_TRIAL_SECONDS = 90
_NVIDIA = "/proc/driver/nvidia"
_CAPABILITY = (75, 76)
"""Numbers of the driver's attributes with a device's compute capability: major, minor."""


def main(request: str, answer_path: str) -> None:
    """Answer a request, which is JSON. The file appears in one step, never half written."""
    wanted, private = json.loads(request), Path(answer_path + ".tmp")
    answer = findings(wanted)
    try:
        private.write_text("")
    except OSError as error:
        answer["place_error"] = error.strerror
        print(ANSWER + json.dumps(answer), flush=True)
        return
    if wanted.get("run"):
        answer["exit_code"] = subprocess.run([sys.executable, "-P", "-m", *wanted["run"]]).returncode
    if "exchange" in wanted:
        answer["delay"] = exchange(Path(wanted["exchange"]))
    private.write_text(json.dumps(answer))
    private.replace(answer_path)


def findings(request: "dict[str, Any]") -> "dict[str, object]":
    """Look for everything that was requested. A driver with which GPUs do not compute is asked for nothing
    more: it may hang."""
    trial = trial_error(request.get("trial", ""))
    return {
        "node": os.environ.get("SLURMD_NODENAME") or os.uname().nodename,
        "python": ".".join(map(str, sys.version_info[:3])),
        "missing_modules": {name: why for name in request["modules"] if (why := import_error(name))},
        "missing_paths": [path for path in request["paths"] if not os.access(path, os.R_OK)],
        "unreachable": {name: why for name in request["programs"] if (why := program_error(name))},
        "gpus": visible_gpus(),
        "version": installed_version(),
        "driver_error": driver_error(),
        "trial_error": trial,
        "capabilities": [] if trial else capabilities(),
    }


def import_error(name: str) -> str:
    """Return why a module cannot be imported; those marked with ?, slow to import, are only looked for."""
    try:
        if name.startswith("?"):
            return "" if importlib.util.find_spec(name[1:]) else "not installed"
        importlib.import_module(name)
    except Exception as error:  # whatever it is, the task would meet it too
        return f"{type(error).__name__}: {error}"
    return ""


def program_error(command: str) -> str:
    """Return why a command of Slurm's cannot be used here; empty if it can."""
    words = command.split()
    if shutil.which(words[0]) is None:
        return "not on PATH"
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_ASK_SECONDS)
    except subprocess.TimeoutExpired:
        return "no answer"
    return "" if done.returncode == 0 else " ".join(done.stderr.split()) or f"exit code {done.returncode}"


def exchange(stem: Path) -> "dict[str, float | None]":
    """Write a greeting, and time its reply, looking for it as tasks look for files: by listing the folder."""
    private, hello = stem.with_suffix(".hello.tmp"), stem.with_suffix(".hello")
    private.write_text("")
    before = time.time()
    os.utime(private)
    touched = private.stat().st_mtime
    skew = touched - min(max(touched, before), time.time())
    written, started = time.time(), time.monotonic()
    private.replace(hello)
    while time.monotonic() - started < _REPLY_SECONDS:
        if stem.name + ".reply" in os.listdir(stem.parent):  # noqa: PTH208 - names are all that is asked for
            return {"written": written, "round_trip": time.monotonic() - started, "skew": skew}
        time.sleep(0.05)
    return {"written": written, "round_trip": None, "skew": skew}


def visible_gpus() -> "int | None":
    """Count the devices that this job was given; None where that cannot be seen."""
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "SLURM_JOB_GPUS"):
        if name in os.environ:
            listed = [word for word in os.environ[name].split(",") if word and word != "NoDevFiles"]
            return len(listed)
    return None


def installed_version() -> str:
    """Return the version of slurm-ppo that is installed for this interpreter; empty if none is."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("slurm-ppo")
    except PackageNotFoundError:
        return ""


def driver_error() -> str:
    """Return why the library of NVIDIA's driver cannot be loaded, on a node that has the driver."""
    if not Path(_NVIDIA).exists():
        return ""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return str(error)
    return ""


def trial_error(program: str) -> str:
    """Return what a program says is wrong with the GPUs of a node that has NVIDIA's driver. Its first line of
    output says that it has begun: until then only its libraries are slow."""
    if not program or not Path(_NVIDIA).exists():
        return ""
    with tempfile.TemporaryFile() as output:
        command, unheard = [sys.executable, "-c", program], subprocess.DEVNULL
        process = subprocess.Popen(command, stdin=unheard, stdout=output, stderr=unheard)
        try:
            code = process.wait(_TRIAL_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()  # and is not waited for: a driver that hangs may keep it in the kernel
            code = None
        output.seek(0)
        said = output.read().decode(errors="replace").splitlines()
    if not said or code is None:
        return f"no answer in {_TRIAL_SECONDS} s" if said else ""
    if code:
        return f"a process that tried them ended with exit code {code}"
    return said[1] if len(said) > 1 else ""


def capabilities() -> "list[str]":
    """Return the compute capability of each NVIDIA GPU that this job sees, as the driver says it: ``8.6``."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    number, device = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(number)):
        return []
    found = []
    for index in range(number.value):
        driver.cuDeviceGet(ctypes.byref(device), index)
        parts = [ctypes.c_int() for _ in _CAPABILITY]
        for part, attribute in zip(parts, _CAPABILITY):  # noqa: B905 - images may have an older Python
            driver.cuDeviceGetAttribute(ctypes.byref(part), attribute, device)
        found.append(".".join(str(part.value) for part in parts))
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
