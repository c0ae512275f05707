"""Refusals of W&B that stay: asking again later changes nothing, a person has to.

What may pass, the client tries again by itself until its time is up. Facts are of wandb 0.31.
"""

import contextlib
import re
from collections.abc import Iterator
from enum import StrEnum

from pydantic import ValidationError

from pipeline.config.conversion import in_words

_TIMED_OUT = re.compile(r"timed out|timeout", re.IGNORECASE)
_STAYS = re.compile(r"HTTP 4(?!08|29)\d\d")
"""Answers that the client asks again for, and that stay: 409 where a run of that id was deleted."""
_OF_THE_KEY = re.compile(r"\b401\b|Unauthorized|not logged in|API[ _]KEY", re.IGNORECASE)


class Fault(StrEnum):
    """What a person has to change."""

    KEY = "key"
    PLACE = "place"
    """Where the run goes, or what it is called there."""


class RunRefused(Exception):
    """W&B refuses the run as it is set."""

    def __init__(self, fault: Fault, why: str) -> None:
        super().__init__(why)
        self.fault = fault


@contextlib.contextmanager
def told_apart() -> Iterator[None]:
    """Raise refusals of W&B that stay as RunRefused; other errors of its client pass."""
    import wandb

    try:
        yield
    except ValidationError as error:
        raise RunRefused(Fault.PLACE, f"ValidationError: {in_words(error)}") from error
    except (wandb.errors.UsageError, wandb.errors.CommError) as error:
        said = " ".join(str(error).split())
        if stays(said):
            fault = Fault.KEY if _OF_THE_KEY.search(said) else Fault.PLACE
            raise RunRefused(fault, f"{type(error).__name__}: {said}") from error
        raise


def stays(said: str) -> bool:
    """Whether asking again gets the same answer, by what the client says. Pure."""
    return not _TIMED_OUT.search(said) or bool(_STAYS.search(said))
