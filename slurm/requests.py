"""What a worker in a container asks of its batch script outside: rings and passes, by lines through a FIFO.

Images seldom have Slurm's commands. The batch script makes the FIFO in the job's temporary folder, names it
in a variable, and attends to it in the background while the task takes its own place
(templates/requests.sh).
"""

import contextlib
import os
import shlex
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurm.signals import in_calls

REQUESTS = "SLURM_PPO_REQUESTS"
"""Variable that names the FIFO."""
_TEMPLATE = Path(__file__).parent / "templates" / "requests.sh"


# --- outside: the batch script ---


def attending(
    log: Path, command: Sequence[str], setup: Sequence[str], variables: Mapping[str, str]
) -> list[str]:
    """Return shell lines that attend to requests in the background.

    Args:
        log: file for the output of passes; its folder is made.
        command: words of the command that makes a pass.
        setup: shell lines before that, taken as they are.
        variables: environment of it.
    """
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    folder = 'mktemp -d "${TMPDIR:-/tmp}/slurm-ppo.XXXXXX"'
    return [
        _TEMPLATE.read_text().rstrip("\n"),
        f'if requests=$({folder}) && mkfifo -m 600 "$requests/fifo"; then',
        f'export {REQUESTS}="$requests/fifo"',
        f"( unset {REQUESTS}",
        *setup,
        *exports,
        f"mkdir -p {shlex.quote(str(log.parent))} || :",
        f"attend {shlex.quote(str(log))} {shlex.join(command)}",
        'rm -rf "$requests"',
        # Opened for both, so that neither this nor a read waits for the other end.
        ') 9<>"$requests/fifo" </dev/null &',
        "fi",
    ]


# --- inside: the task ---


def find_requests(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the FIFO of this job; None where there is none, or the container does not show it."""
    path = Path(environment.get(REQUESTS) or os.devnull)
    with contextlib.suppress(OSError):
        return path if stat.S_ISFIFO(path.stat().st_mode) else None
    return None


def request_pass_outside(fifo: Path) -> str:
    """Ask for a pass. Returns what went wrong; empty if nothing did."""
    return _request(fifo, "pass")


def request_ring(fifo: Path, elements: Sequence[str]) -> str:
    """Ask for the workers of some elements to be woken, by a line for each call of scancel. Returns what went
    wrong; empty if nothing did."""
    lines = (" ".join(["ring", *some]) for some in in_calls(elements))
    return "; ".join(filter(None, (_request(fifo, line) for line in lines)))


def request_end(fifo: Path) -> None:
    """Say that nothing more will be asked: the batch script removes the FIFO."""
    _request(fifo, "end")


def _request(fifo: Path, line: str) -> str:
    """Write a line, without waiting for a reader or for room."""
    try:
        opened = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        return f"the batch script does not attend to requests: {error.strerror}"
    try:
        os.write(opened, f"{line}\n".encode())
    except OSError as error:
        return f"the batch script is behind with requests: {error.strerror}"
    finally:
        os.close(opened)
    return ""
