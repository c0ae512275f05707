"""Shell lines of a user's that prepare a job: run one after another, and named where one fails."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from string import Template

SETUP_EXIT = 78
"""Exit code of a job that ends as a line of its setup failed (EX_CONFIG of sysexits.h)."""
_TEMPLATE = Path(__file__).parent / "templates" / "setup.sh"
_MARK = "slurm-ppo: line"
_FAILED = re.compile(
    rf"^{_MARK} (?P<line>-?\d+ of setup failed on node .*? \(exit code \d+\): .*)$".encode(), re.MULTILINE
)


def checked(lines: Sequence[str], ends_job: bool = True) -> list[str]:
    """Return shell lines that run some of a user's, as they are: they may make up one command together.

    One that fails is named in the output. What is not a line's own end does not count: a command inside a
    file that it reads, the left side of ``||``.

    Args:
        ends_job: whether the job ends there with SETUP_EXIT; else it goes on.
    """
    if not lines:
        return []
    texts = [text for line in lines for text in line.split("\n")]
    then = f"; exit {SETUP_EXIT}" if ends_job else ""
    head = Template(_TEMPLATE.read_text()).substitute(lines=shlex.join(texts), mark=_MARK, then=then)
    return [*head.splitlines(), *lines, "trap - ERR"]


def failed_line(log: bytes) -> str:
    """Return a phrase on the last line of setup that failed, by a job's output; empty where none says so."""
    found = [match["line"] for match in _FAILED.finditer(log)]
    return f"line {found[-1].decode(errors='replace')}" if found else ""
