"""The configuration of notifications: who is notified when a run fails, completes or stalls."""

import shlex
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import BeforeValidator, Field

from pipeline.config.types import PositiveInt, Text


class Occasion(StrEnum):
    """Occasions for a notification."""

    FAILED = "failed"
    """The run cannot go on: a task was given up, or the driver itself broke down."""
    COMPLETE = "complete"
    """Every iteration is committed."""
    STALLED = "stalled"
    """Nothing was committed for notify.stall_after seconds."""
    TROUBLE = "trouble"
    """A driver meets an error that it did not expect, and tries again; or rows cannot be written; or the run
    pauses, as its jobs were cancelled by hand."""


def _split_into_words(value: object) -> object:
    """Split text into words as a shell does with quotes and backslashes; nothing else is special."""
    return shlex.split(value) if isinstance(value, str) else value


Words = Annotated[tuple[Text, ...], Field(min_length=1), BeforeValidator(_split_into_words)]
"""A command: a YAML list of words, or text that is split as a shell would, without one."""


@dataclass(frozen=True, kw_only=True)
class NotifyConfig:
    """A command that is notified of events of the run."""

    command: Words | None = None
    """Program and arguments, a list or one text, without a shell. It gets the event as JSON on standard
    input and as SLURM_PPO_* variables."""
    on: tuple[Occasion, ...] = tuple(Occasion)
    """Occasions to notify of: failed, complete, stalled, trouble."""
    stall_after: PositiveInt = 21600
    """Seconds without a commit after which a run that is not at its end counts as stalled."""
    time_limit: PositiveInt = 30
    """Seconds that the command may take before it is stopped."""
