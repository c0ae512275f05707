"""Numbers, sizes, times and names as text for people."""

import math
import re
import reprlib
import statistics
import time
import unicodedata
from collections.abc import Sequence


def size(num_bytes: float) -> str:
    """Write a number of bytes like 12.3 GiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} bytes" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def exit_in_words(exit_code: int) -> str:
    """Describe how a process ended, by its exit code or minus the signal that ended it."""
    return f"killed by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"


MISSING = "-"


_ESCAPES = re.compile(
    r"(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"  # commands to the terminal's system: OSC 52 ...
    r"|(?:\x1b[PX^_]|[\x90\x98\x9e\x9f])[^\x1b\x9c]*(?:\x1b\\|\x9c)?"  # other strings for it
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b."
)


def printable(text: str) -> str:
    """Return foreign text on one line, without what a terminal would obey: cursor, colours, clipboard."""
    plain = _ESCAPES.sub("", text).expandtabs()
    return "".join(c if c.isprintable() else " " for c in plain).rstrip()


_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
"""Unicode categories that show nothing, or change how what follows is shown."""
_KEPT = frozenset("\n\t\u200c\u200d")
"""Characters of those categories to keep: line ends, tabs, and the joiners that scripts and emoji need."""


def visible(text: str) -> str:
    """Spell out control and direction characters, so that a text cannot look like another, and no terminal
    obeys it."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_spelled(letter) for letter in text)


def _spelled(letter: str) -> str:
    if letter in _KEPT or unicodedata.category(letter) not in _INVISIBLE:
        return letter
    return f"⟨U+{ord(letter):04X}⟩"


def number(value: float | None, digits: int | None = None) -> str:
    """Write a number in few characters; "-" for None, integers in full, ``k`` and ``M`` for large others.

    Args:
        digits: decimal places, so that numbers line up. Default: as many as give four significant digits.
    """
    if value is None:
        return MISSING
    size = abs(value)
    if value == 0 or not math.isfinite(value) or (isinstance(value, int) and size < 1e6):
        return f"{value:g}" if size < 1e6 else str(value)
    if digits is not None and size < 10 ** -(digits + 2):
        return f"{0:.{digits}f}"  # rounding noise, e.g. of a KL that is zero
    if digits is None:
        digits = 3 if size < 10 else 2 if size < 100 else 1 if size < 1000 else 0
    if size < 0.5 * 10**-digits or size >= 1e9:
        return f"{value:.0e}"
    if size >= 9_999.5:
        return f"{value / 1e6:.2f}M" if size >= 999_950 else f"{value / 1e3:.1f}k"
    return f"{value:.{digits}f}"


def shortened(text: str, width: int) -> str:
    """Return the text, or its beginning and an ellipsis where it has more than ``width`` characters."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def duration(seconds: float) -> str:
    """Write a duration like 45 s, 3 min 20 s, 5 h 12 min, 2 d 3 h."""
    whole = round(seconds)
    for size, name, below, below_name in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // below} {below_name}"
    return f"{whole} s"


def seconds_in_words(seconds: float) -> str:
    """Write a duration with two digits below ten seconds, and as :func:`duration` above."""
    return f"{seconds:.2g} s" if seconds < 10 else duration(seconds)


def clock(seconds: float) -> str:
    """Write a unix time as time of day."""
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def moment(seconds: float) -> str:
    """Write a unix time as date and time of day."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def shown(value: object) -> str:
    """Describe a value for messages: its type, and its beginning."""
    return f"{type(value).__name__} {reprlib.repr(value)}"


_NAMES_SHOWN = 20


def listing(names: Sequence[str]) -> str:
    """List names for messages: quoted, and not too many."""
    first = ", ".join(repr(name) for name in names[:_NAMES_SHOWN])
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return first + more if first else "nothing"


def table(lines: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Align columns: the first ``left`` ones to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if i < left else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def spread_text(values: Sequence[float]) -> str:
    """Write mean and standard deviation over runs like ``0.412 ± 0.031``; of one run its value."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return MISSING
    mean = number(statistics.fmean(known))
    return mean if len(known) == 1 else f"{mean} ± {number(statistics.stdev(known))}"
