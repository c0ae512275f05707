"""Fork servers of runs on this machine, as forks of a process that has imported their modules.

The local scheduler starts a server for each run, which imports what tasks need: 0.6 s of CPU for light tasks,
6 s with DeepSpeed and transformers. ``python -m tests.support.warm_servers DESCRIPTOR MODULE ...`` does that
once, and each message at the socket of that number makes a fork of it the fork server of a command.
"""

import ast
import contextlib
import gc
import importlib.util
import json
import multiprocessing.util
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from pathlib import Path

from pipeline.run.environment import TASK_ENVIRONMENT
from tests.support import ROOT, warm_plugins

SIZE = 2**20
_SERVER = re.compile(
    r"from multiprocessing\.forkserver import main; main\((\d+), (\d+), (\[.*\]), \*\*(\{.*\})\)"
)
"""The program of a fork server: its socket, what tells that no client is left, modules, and settings."""
_READ_AT_IMPORT = re.compile("(OMP|GOMP|MKL|OPENBLAS|TORCH|PYTORCH|DS|CUDA|VLLM|HF|TRANSFORMERS|LD)_")
"""Variables that modules read when they are imported: a fork would not heed them."""
_LATER = ("pandas", "pyarrow.pandas_compat", "pydantic.dataclasses", "safetensors.numpy", "tokenizers")
"""What tasks of any kind import when they need it: a fifth of a second, mostly pandas for pyarrow."""


def read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if _READ_AT_IMPORT.match(name)}


def load_hooks() -> None:
    """In a fork: what an interpreter loads that starts with tests/support/hooks in its PYTHONPATH."""
    if "KILL_AT" in os.environ:
        spec = importlib.util.spec_from_file_location("hooks", ROOT / "tests/support/hooks/sitecustomize.py")
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


# --- in a command ---


def ask_for_fork_servers(
    address: str, environment: Mapping[str, str], end_with: Callable[[Callable[[], None]], None]
) -> None:
    """Let this process get its fork servers from the warm process at an address, which has an environment.
    Processes of plug-ins it forks itself, and ``end_with`` ends them."""
    spawn = multiprocessing.util.spawnv_passfds
    here, heeded = map(read_at_import, (environment, {**environment, **TASK_ENVIRONMENT}))

    def spawn_or_ask(path: bytes, arguments: list[str], descriptors: list[int]) -> int:
        asked = _SERVER.fullmatch(arguments[-1])
        now = read_at_import(os.environ)
        if warm_plugins.is_of_plugin(arguments) and now in (here, heeded):
            return warm_plugins.fork_plugin(arguments, descriptors, end_with)
        if asked is None or now != heeded:
            return spawn(path, arguments, descriptors)
        request = {
            "modules": ast.literal_eval(asked[3]),
            "settings": ast.literal_eval(asked[4]),
            "environment": dict(os.environ),
            "folder": str(Path.cwd()),
            "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        }
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(address)
            files = [0, 1, 2, int(asked[1]), int(asked[2])]
            socket.send_fds(connection, [json.dumps(request).encode()], files)
            # A fork server is its command's child. This child ends when the server does.
            script = f"exec cat <&{connection.fileno()} >/dev/null"
            return spawn(b"/bin/bash", ["bash", "-c", script], [connection.fileno()])  # sh knows one digit

    multiprocessing.util.spawnv_passfds = spawn_or_ask


# --- in the process that commands are forked from ---


class WarmServers:
    """A warm process for each list of modules, which ends with this process."""

    def __init__(self) -> None:
        self._controls: dict[tuple[str, ...], socket.socket] = {}

    def start(self, request: bytes, files: list[int], connection: socket.socket) -> None:
        """Hand a command's request to the process that has imported its modules."""
        modules = tuple(json.loads(request)["modules"])
        if modules not in self._controls:
            self._controls[modules] = start_process(modules)
        socket.send_fds(self._controls[modules], [request], [*files, connection.fileno()])

    @property
    def sockets(self) -> list[socket.socket]:
        """What a fork has to close."""
        return list(self._controls.values())


def start_process(modules: tuple[str, ...]) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-m", "tests.support.warm_servers", str(theirs.fileno()), *modules]
        subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    return ours


# --- the process that fork servers are forked from ---


def serve(control: socket.socket, modules: list[str]) -> None:
    """Fork a server for each message, until nobody is left who could send one."""
    before = dict(os.environ)
    for module in (*modules, *_LATER):
        with contextlib.suppress(ImportError):  # as a fork server does
            __import__(module)
    added = {name: value for name, value in os.environ.items() if before.get(name) != value}
    gc.freeze()  # as stages.preload does
    while True:
        message, files, _, _ = socket.recv_fds(control, SIZE, 6)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            os.close(files.pop())
            become_server(json.loads(message), added, files)
        for descriptor in files[:-1]:
            os.close(descriptor)
        threading.Thread(target=end_with, args=(pid, files[-1]), daemon=True).start()


def end_with(pid: int, connection: int) -> None:
    """Close the connection when the process ends."""
    os.waitpid(pid, 0)
    os.close(connection)


def become_server(request: dict, added: dict[str, str], files: list[int]) -> None:
    """The body of a fork: what the interpreter does that the command would have started.

    Args:
        added: variables that the modules have set.
    """
    *standard, listener, alive = files
    for target, source in enumerate(standard):
        os.dup2(source, target)
        os.close(source)
    os.environ.clear()
    os.environ.update(added | request["environment"])
    load_hooks()
    os.chdir(request["folder"])
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    sys.argv = ["-c"]
    with contextlib.suppress(SystemExit):
        forkserver.main(listener, alive, [], **request["settings"])
    os._exit(0)  # tearing down its objects would write to every page that forks share


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
