"""Commands of ``slurm-ppo`` in forks of a process that has imported them: a test need not wait for imports.

``python -m tests.support.warm SOCKET`` is that process. Each request names arguments, environment and folder,
and brings the files of standard output and error. What an interpreter reads when it starts (PYTHON...) cannot
differ from the server's; such commands are started as they are typed, as are those that get signals.
"""

import atexit
import contextlib
import gc
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
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.support import ROOT, warm_client, warm_plugins
from tests.support.warm_servers import SIZE, WarmServers, ask_for_fork_servers, load_hooks

_NEVER = ("pipeline.tracking.mirror", "pipeline.tracking.client", "pipeline.tracking.push")
"""Not imported ahead: they import W&B's client, which starts threads."""
_LATER = ("pandas", "plotext", "plotly.offline")
"""What commands import when they need it: pyarrow the first where it is installed, charts the others."""


class WarmCommands:
    """Runs commands as :func:`subprocess.run` does, in forks."""

    def __init__(self, environment: Mapping[str, str], folder: Path) -> None:
        self._environment = dict(environment)
        self.address = str(folder / "commands")
        """For :mod:`tests.support.warm_client`."""
        command = [sys.executable, "-m", "tests.support.warm", self.address]
        seeded = warm_plugins.SEED | self._environment
        self._server = subprocess.Popen(command, env=seeded, cwd=ROOT, stdout=subprocess.PIPE)
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
            connection = files.enter_context(warm_client.connected(self.address))
            outputs = [out.fileno(), error.fileno()]
            pid = warm_client.begin(connection, arguments, environment, str(folder), outputs)
            connection.settimeout(timeout)
            try:
                code = warm_client.end(connection)
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(arguments, timeout, said(out), said(error)) from None
            return subprocess.CompletedProcess(arguments, code, said(out), said(error))


def said(file) -> str:
    file.seek(0)
    return file.read()


def python_settings(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith("PYTHON")}


def import_commands() -> None:
    """Import the command line, and what it imports when it needs it."""
    for module in pkgutil.walk_packages([str(ROOT / "pipeline")], "pipeline."):
        if module.name not in _NEVER:
            importlib.import_module(module.name)
    for name in _LATER:
        importlib.import_module(name)


# --- the server ---


def serve(address: str) -> None:
    """Fork a process for each connection, until terminated."""
    os.environ.pop("PYTHONHASHSEED", None)  # only processes of plug-ins have a seed
    import_commands()
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
    gc.freeze()  # as stages.preload does
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(address)
    listening.listen(64)
    print("ready", flush=True)
    servers = WarmServers()
    while True:
        connection, _ = listening.accept()
        request, files, _, _ = socket.recv_fds(connection, SIZE, 5)
        if len(files) == 2:
            start(request, files, connection, address, [listening, *servers.sockets])
        else:
            with connection:
                servers.start(request, files, connection)
        for descriptor in files:
            os.close(descriptor)


def start(request: bytes, files: list[int], connection: socket.socket, address: str, ours: list) -> None:
    """Fork a process for a command."""
    pid = os.fork()
    if pid == 0:
        for one in (*ours, connection):
            one.close()
        ask_for_fork_servers(address, os.environ, end_with)
        carry_out(*json.loads(request), *files)
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
    load_hooks()
    os.chdir(folder)
    sys.path[0] = folder  # as python -m does
    program = importlib.import_module("pipeline.__main__")
    sys.modules["__main__"] = program
    sys.argv = [str(program.__file__), *arguments]
    end_with(program.main)


def end_with(main: Callable[[], None]) -> None:
    """Carry out, and end as an interpreter does, but for tearing down its objects: that writes to every page
    which forks share, half a second for each command. Does not return; passes on what is raised.
    """
    try:
        main()
        code: str | int | None = 0
    except SystemExit as ended:
        code = ended.code
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if isinstance(code, str) else code or 0)


if __name__ == "__main__":
    serve(sys.argv[1])
