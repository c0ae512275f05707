"""What a check of the rehearsal is given, and its answers."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class CheckInput:
    """What every check is given."""

    folder: Path
    """Folder that all checks of one rehearsal share, on the filesystem of runs."""
    gpus: int = 0
    """Number of GPUs that the jobs or tasks ask for; 0 where they need none."""
    is_short: bool = False
    needs_vllm: bool = False
    """Whether the configuration names vLLM, so that its absence is a failure."""
    num_mib: int = 256
    """Size of the file that stands for a policy, in MiB."""


@dataclass(frozen=True)
class Shown:
    """What a check has shown."""

    measured: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Measurements for scripts; units are in the names."""
    advice: str = ""
    """What a user may change for it, although nothing failed."""


class CheckFailed(Exception):
    """A check that failed."""

    def __init__(self, measured: str, advice: str) -> None:
        super().__init__(measured)
        self.advice = advice


class MissedRanks(CheckFailed):
    """A rank that did not come to meet the others. It may hang, so that those which came end it with them."""


class NotShown(Exception):
    """What cannot be shown on this machine; the message says why."""


def with_torch(check: Callable[[CheckInput], Shown]) -> Callable[[CheckInput], Shown]:
    """Return a check before which torch is set up as in tasks."""

    @functools.wraps(check)
    def made(given: CheckInput) -> Shown:
        from stages.models.numerics import set_up_torch

        set_up_torch(num_threads=1, seed=0)
        return check(given)

    return made
