"""A command of ``slurm-ppo`` asked for at a warm process (:mod:`tests.support.warm`). Imports little."""

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path

ADDRESS = "WARM_COMMANDS"
"""Variable that names the warm process to scripts which run commands."""


def connected(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    return connection


def begin(
    connection: socket.socket,
    arguments: list[str],
    environment: Mapping[str, str],
    folder: str,
    files: list[int],
) -> int:
    """Start a command with these files as standard output and error. Returns its process id."""
    request = json.dumps([arguments, dict(environment), folder]).encode()
    socket.send_fds(connection, [request], files)
    return int(connection.recv(64))


def end(connection: socket.socket) -> int:
    """Wait for a command that was begun. Returns its exit code, or the negative signal that killed it."""
    return int(connection.recv(64))


def run_here(arguments: list[str]) -> int:
    """A command as this process would run it. Returns the exit code that a shell sees."""
    with connected(os.environ[ADDRESS]) as connection:
        begin(connection, arguments, os.environ, str(Path.cwd()), [1, 2])
        code = end(connection)
    return code if code >= 0 else 128 - code
