"""The files of a policy: a whole model, or an adapter and the model that it is for. No torch."""

from dataclasses import dataclass
from pathlib import Path


class CannotAdapt(Exception):
    """An engine cannot put this adapter on its base; it is given a merged model instead."""


@dataclass(frozen=True)
class PolicyFiles:
    """Directories of a policy, every file of them verified."""

    base: Path
    """Model directory of the policy itself; with an adapter, of the model that it is for."""
    adapter: Path | None = None
    """Directory of peft's files."""
    weights: tuple[str, str] = ("", "")
    """Fingerprints of both, equal only for equal bytes wherever they are; empty where there is no adapter."""
