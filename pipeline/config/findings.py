"""Problems of one pass over all that a user gave: each is named once, and none hides another."""

import contextlib
import errno
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from pipeline.config.issue import ConfigError, Mistake
from pipeline.config.keys import fields_of
from pipeline.config.schema import Config
from slurm.errors import UserError

_Made = TypeVar("_Made")
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
EXPERIMENT = "experiment"
"""Group whose options set keys of any section."""


class Findings:
    """Problems in the order in which they are to be fixed.

    Checks go on after a problem, with what is left of the configuration. What they say of a key that was
    named before, or in view of its value, is a consequence, and is left out.
    """

    def __init__(self) -> None:
        self.decided = ""
        """Line on what was decided of settings that are auto; empty where none is."""
        self.auto: tuple[str, ...] = ()
        """Keys of these settings."""
        self._lines: list[str] = []
        self._last: list[str] = []
        self._skipped: list[str] = []
        self._named: set[str] = set()
        self._errors: list[UserError] = []

    def __bool__(self) -> bool:
        return bool(self._lines or self._last)

    @property
    def lines(self) -> list[str]:
        """All problems, and what was not checked, in the order in which they are said."""
        return [*self._lines, *self._last, *self._skipped]

    def names(self, key: str) -> bool:
        """Whether something is wrong with a key itself."""
        return key in self._named

    def names_below(self, section: str) -> bool:
        """Whether something is wrong with a key of a section."""
        return any(name.startswith(f"{section}.") for name in self._named)

    def add(self, lines: Iterable[object], is_last: bool = False) -> None:
        """Add what one check found, a line for each problem that is no consequence of an earlier check's.

        Args:
            is_last: say it behind what other checks find.
        """
        new = [text for line in lines if not self._follows(text := str(line))]
        (self._last if is_last else self._lines).extend(new)
        self._named.update(name for line in new for name in _names_in(line))

    def add_mistakes(self, mistakes: Iterable[Mistake]) -> None:
        """Add mistakes of one check; the keys that were probably meant count as named too."""
        new = [mistake for mistake in mistakes if not self._follows(mistake.key)]
        self._lines += [mistake.text for mistake in new]
        self._named.update(key for one in new for key in (one.key, *one.meant) if key)

    @contextlib.contextmanager
    def collecting(self, what: str, is_last: bool = False) -> Iterator[None]:
        """Add the problem that a check raises, instead of passing it on.

        Args:
            what: what the check looks at, for people.
            is_last: say it behind what other checks find.
        """
        try:
            yield
        except UserError as error:
            before = len(self._lines) + len(self._last)
            self.add(str(error).splitlines(), is_last)
            self._errors += [error] if len(self._lines) + len(self._last) > before else []
        except Exception as error:
            # A configuration with holes, filled by defaults, is not the user's: what a check finds wrong
            # there may be gone when the holes are fixed.
            if not self:
                raise
            self._skip(what, error)

    def _skip(self, what: str, error: Exception) -> None:
        """Note that a check was not made; but not for what another has said, nor for a file that is missing:
        the checks of paths, which come first, have named that."""
        said = next(iter(str(error).splitlines()), "")
        is_said = bool(said) and any(said in line for line in (*self._lines, *self._last))
        is_named = isinstance(error, OSError) and error.errno in _NO_FILE
        if not (is_said or is_named or self._follows(said)):
            reason = f"{type(error).__name__}: {said}" if said else type(error).__name__
            self._skipped.append(f"not checked: {what}: {reason}")

    def refuse(self) -> None:
        """Raise a ConfigError with all problems, or the one error that has them all."""
        lines = self.lines
        if len(self._errors) == 1 and str(self._errors[0]).splitlines() == lines:
            raise self._errors[0]
        if lines:
            raise ConfigError("\n".join(lines))

    def _follows(self, line: str) -> bool:
        return EXPERIMENT in self._named or any(_is_about(line, key) for key in self._named)


def without_problems(make: Callable[[Findings], _Made | None], found: Findings | None = None) -> _Made:
    """Return what is made where nothing is wrong. Raises ConfigError with every problem that was found.

    Args:
        found: takes what is found, for the caller to look at.
    """
    found = Findings() if found is None else found
    made = make(found)
    found.refuse()
    assert made is not None
    return made


def _names_in(line: str) -> Iterator[str]:
    """Yield the key that a line begins with, and the path that is its value."""
    found = re.match(r"([A-Za-z_][\w.-]*)(?:=(/.*?): )?", line)
    key = found[1].rstrip(".") if found else ""
    if found and key.split(".")[0] in fields_of(Config):
        yield from filter(None, (key, found[2]))


def _is_about(line: str, name: str) -> bool:
    """Whether a line is about a key or what is below it, about a path, or follows from a key's value."""
    own, below = re.escape(name), r"(?![\w/-])" if "." in name or "/" in name else r"\.\w"
    return bool(re.match(rf"{own}(?![\w-])", line) or re.search(rf"(?<![\w.]){own}{below}", line))
