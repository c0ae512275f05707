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


class ConfigError(UserError, ValueError):
    """The configuration cannot be used. One line per problem."""
