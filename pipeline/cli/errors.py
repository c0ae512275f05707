"""System errors in one line that a person can read, with the way out."""

import errno
import os
import sys
from pathlib import Path

LONGEST_LINE = 300
_LONGEST_NAME = 120
_PASSING = frozenset(
    {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENOTCONN, errno.EAGAIN}
)
"""Errors of a file server that is away, and of a machine that is short of something."""
_REMEDIES = {
    errno.EROFS: "the filesystem is mounted read-only here: run the command where it can be written",
    errno.EACCES: "change its permissions, or run the command as its owner",
    errno.EPERM: "change its permissions or attributes, or run the command as its owner",
    errno.ENOSPC: "free some space there, and run the command again",
    errno.EDQUOT: "free some space there, and run the command again",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EMFILE: "allow this shell more open files: ulimit -n",
}


_CHANGING = frozenset({"run", "submit", "resume", "cancel", "clean", "fork"})
"""Commands that change a run; before they do, they check what they would do."""
_acts: list[str] = []
"""What this process has begun to change."""


def will_change(what: str) -> None:
    """Note that from here on something may be changed: until then a refusal says that nothing was."""
    _acts.append(what)


def refusal(error: Exception, command: str) -> str:
    """Return what a command says that refuses: also, where that is so, that nothing was changed. Pure, but
    for what the process has done."""
    message = str(error)
    if command not in _CHANGING or _acts:
        return message
    return f"{message if message.endswith('...') else message.removesuffix('.')}; nothing was changed"


def clipped(line: str) -> str:
    """Clip a line in its middle, to a length that a person can read: the way out is at its end."""
    plain = "".join(letter if letter.isprintable() else "?" for letter in line)
    over = len(plain) - LONGEST_LINE
    return plain if over <= 0 else f"{plain[: LONGEST_LINE // 2]} ... {plain[LONGEST_LINE // 2 + over + 5 :]}"


def system_error(error: OSError) -> str:
    """Say what the system refused, of which file, and the way out, in one line."""
    if error.errno == errno.EACCES and (closed := _closed(error)):
        return closed
    what = error.strerror or " ".join(str(error).split()) or type(error).__name__
    names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
    short = [name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..." for name in names]
    way_out = _REMEDIES.get(error.errno or 0, "fix that and run the command again")
    if is_passing(error):
        way_out = "nothing that was committed is lost; run the command again later"
    return f"{' -> '.join(short)}{': ' if short else ''}{what}; {way_out}"


def _closed(error: OSError) -> str | None:
    """Say which folder above what a command needs is closed to this user; None where none is."""
    if not isinstance(error.filename, str | bytes):
        return None
    from pipeline.run.owner import why_closed

    return why_closed(Path(os.fsdecode(error.filename)).absolute())


def is_passing(error: OSError) -> bool:
    """Whether the same may work later, without a repair."""
    return error.errno in _PASSING


def say_error(text: str) -> None:
    """Print what is wrong, a line for each thing."""
    for line in text.splitlines():
        print(clipped(f"error: {line}"), file=sys.stderr)
