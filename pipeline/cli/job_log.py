"""Log of a driver job: time and level before each line, by the standard library's logging."""

import io
import logging
import sys
from collections.abc import Callable
from typing import TextIO


def log_output() -> TextIO:
    """Log whatever this process prints from now on, for the rest of its life: errors what it prints to
    standard error, information the rest.

    Returns:
        The stream of information.
    """
    logger, handler = logging.Logger("driver"), _Handler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    sys.stdout, sys.stderr = _LineStream(logger.info), _LineStream(logger.error)
    return sys.stdout


class _Handler(logging.StreamHandler[TextIO]):
    """Handler that raises what writing raises, for the caller to decide on: a full disk, for example."""

    def handleError(self, record: logging.LogRecord) -> None:
        raise  # logging calls this while it handles the error


class _LineStream(io.TextIOBase, TextIO):
    """Text stream that makes a record of each line."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log, self._begun = log, ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._log(line)
        return len(text)
