"""Commands of ``slurm-ppo`` in forks of a process that has imported them: a test need not wait for imports.

``python -m tests.support.warm SOCKET`` is that process. Each request names arguments, environment and folder,
and brings the files of standard output and error. What an interpreter reads when it starts (PYTHON...) cannot
differ from the server's; such commands are started as they are typed, as are those that get signals.
"""

import contextlib
import importlib
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

from tests.support import ROOT

_SIZE = 2**20
_NEVER = ("pipeline.tracking.mirror", "pipeline.tracking.client", "pipeline.tracking.push")
"""Not imported ahead: they import W&B's client, which starts threads."""


class WarmCommands:
    """Runs commands as :func:`subprocess.run` does, in forks."""

    def __init__(self, environment: Mapping[str, str], folder: Path) -> None:
        self._environment = dict(environment)
        self._address = str(folder / "commands")
        command = [sys.executable, "-m", "tests.support.warm", self._address]
        self._server = subprocess.Popen(command, env=self._environment, cwd=ROOT, stdout=subprocess.PIPE)
        assert self._server.stdout
        assert self._server.stdout.readline() == b"ready\n"

    def close(self) -> None:
        self._server.terminate()
        self._server.wait(timeout=30)

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether a fork is the same as a new interpreter."""
        return python_settings(environment) == python_settings(self._environment)

    def run(
        self, arguments: list[str], environment: Mapping[str, str], folder: Path, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Raises subprocess.TimeoutExpired after having killed the command."""
        with contextlib.ExitStack() as files:
            out, error = (files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2))
            connection = files.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            connection.connect(self._address)
            request = json.dumps([arguments, dict(environment), str(folder)]).encode()
            socket.send_fds(connection, [request], [out.fileno(), error.fileno()])
            pid = int(connection.recv(64))
            connection.settimeout(timeout)
            try:
                code = int(connection.recv(64))
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(arguments, timeout, said(out), said(error)) from None
            return subprocess.CompletedProcess(arguments, code, said(out), said(error))


def said(file) -> str:
    file.seek(0)
    return file.read()


def python_settings(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith("PYTHON")}


# --- the server ---


def serve(address: str) -> None:
    """Fork a process for each connection, until terminated."""
    for module in pkgutil.walk_packages([str(ROOT / "pipeline")], "pipeline."):
        if module.name not in _NEVER:
            importlib.import_module(module.name)
    # What parses overrides learns its grammar from the first: a third of a second for each fork else.
    importlib.import_module("pipeline.config.compose").compose(
        [
            "model.policy=p",
            "data.prompts=d",
            "reward=model",
            "reward.components.rm.path=r",
            "scheduler=slurm",
            "update.betas=[0.9,0.95]",
            "name='x'",
        ]
    )
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(address)
    listening.listen(64)
    print("ready", flush=True)
    while True:
        connection, _ = listening.accept()
        request, files, _, _ = socket.recv_fds(connection, _SIZE, 2)
        pid = os.fork()
        if pid == 0:
            listening.close()
            connection.close()
            carry_out(*json.loads(request), *files)
        for descriptor in files:
            os.close(descriptor)
        connection.send(str(pid).encode())
        threading.Thread(target=answer, args=(pid, connection), daemon=True).start()


def answer(pid: int, connection: socket.socket) -> None:
    """Tell how a command ended."""
    _, status = os.waitpid(pid, 0)
    with connection, contextlib.suppress(OSError):  # who asked may have given up
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())


def carry_out(arguments: list[str], environment: dict[str, str], folder: str, out: int, error: int) -> None:
    """The body of a fork. Does not return."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (out, 1), (error, 2)):
        os.dup2(source, target)
        os.close(source)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[0] = folder  # as python -m does
    program = importlib.import_module("pipeline.__main__")
    sys.modules["__main__"] = program
    sys.argv = [str(program.__file__), *arguments]
    sys.exit(program.main())


if __name__ == "__main__":
    serve(sys.argv[1])
