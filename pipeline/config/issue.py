"""Problems with keys of the configuration, and the error that reports them."""

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from slurm.errors import UserError as UserError  # stages, which know nothing of Slurm, have it from here


@dataclass(frozen=True)
class ConfigIssue:
    """One key that cannot be used as given."""

    key: str
    value: Any
    why: str
    is_passing: bool = False
    """Whether it may pass by itself: it can be used, and jobs wait."""

    @classmethod
    def at(cls, owner: object, name: str, why: str, prefix: str = "") -> "ConfigIssue":
        """Refuse the value that ``owner`` has under a dotted name; ``prefix`` is put before the name."""
        return cls(prefix + name, attrgetter(name)(owner), why)

    def __str__(self) -> str:
        return f"{self.key}={self.value}: {self.why}"


@dataclass(frozen=True)
class Mistake:
    """A key that is unknown or missing, or has a value that no such key can have."""

    key: str
    text: str
    """What is wrong and the way out, in one line."""
    meant: tuple[str, ...] = ()
    """Keys that were probably meant by an unknown one, and by what is below it."""


class ConfigError(UserError, ValueError):
    """The configuration cannot be used. One line per problem."""
