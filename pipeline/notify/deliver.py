"""Delivery to a command or an address, within a time limit; any failure becomes a line of text."""

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import IO, TYPE_CHECKING, Any

from pipeline.process import signal_session, wait_or_kill, within

if TYPE_CHECKING:
    from urllib.request import BaseHandler, OpenerDirector

from pipeline.text import exit_in_words

_LAST_BYTES = 4096
"""Bytes kept of a command's standard error, to find its last line in."""
_LONGEST_LINE = 200
_AFTER_SECONDS = 1.0


@dataclass(frozen=True)
class Delivery:
    """Result of a delivery to one recipient."""

    to: str
    """Recipient: command or webhook."""
    trouble: str = ""
    """Reason of failure. Empty: delivered."""


def run_words(
    words: Sequence[str], body: bytes, environ: Mapping[str, str], folder: Path, limit: float
) -> str:
    """Run a command without a shell, ``body`` on its standard input. Returns what went wrong, in a line."""
    try:
        process = Popen(
            words, cwd=folder, env=environ, stdin=PIPE, stdout=DEVNULL, stderr=PIPE, start_new_session=True
        )
    except (OSError, ValueError) as error:
        return f"{words[0]} cannot be started: {error}"
    assert process.stdin is not None
    assert process.stderr is not None
    last = bytearray()
    listener = threading.Thread(target=_listen, args=(process.stderr, last), daemon=True)
    listener.start()
    try:
        with contextlib.suppress(BrokenPipeError):  # it need not read
            process.stdin.write(body)  # far less than a pipe holds
            process.stdin.close()
    except BaseException:
        signal_session(process.pid)
        raise
    code = wait_or_kill(process, limit)
    if code is None:
        return f"{words[0]} was stopped, it took more than {limit:g} s"
    listener.join(_AFTER_SECONDS)  # a child that it left behind may hold the pipe open
    return "" if code == 0 else _in_words(words[0], code, bytes(last))


def _listen(stream: IO[bytes], last: bytearray) -> None:
    """Keep the end of a stream, however long it is."""
    with stream:
        while chunk := os.read(stream.fileno(), 1 << 16):
            last += chunk
            del last[:-_LAST_BYTES]


def _in_words(program: str, code: int, said: bytes) -> str:
    how = f"{'was ' if code < 0 else ''}{exit_in_words(code)}"
    lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
    return f"{program} {how}" + (f": {lines[-1].strip()[:_LONGEST_LINE]}" if lines else "")


def post(address: str, body: bytes, limit: float) -> str:
    """POST JSON. Returns what went wrong, in a line."""
    return within(limit, lambda: _post(address, body, limit), _unanswered(limit))


def _unanswered(limit: float) -> str:
    return f"no answer in {limit:g} s"


def opener_that_stays(*handlers: "BaseHandler") -> "OpenerDirector":
    """Make an opener that takes a redirect for an answer: an address may be a secret, for its server only."""
    from urllib.request import HTTPRedirectHandler, build_opener

    class Staying(HTTPRedirectHandler):
        def redirect_request(self, *arguments: Any) -> None:
            return None

    return build_opener(Staying, *handlers)


def _post(address: str, body: bytes, limit: float) -> str:
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import Request

    headers = {"Content-Type": "application/json", "User-Agent": "slurm-ppo"}
    try:
        with opener_that_stays().open(Request(address, body, headers), timeout=limit) as answer:
            answer.read(1)
        return ""
    except HTTPError as error:
        return f"the server answered {error.code} {error.reason}"
    except URLError as error:
        return f"the server cannot be reached: {error.reason}"
    except TimeoutError:  # the connection's own limit ran out before the thread's
        return _unanswered(limit)
    except (OSError, HTTPException, ValueError) as error:
        return f"{type(error).__name__}: {error}"
