"""Where a run's rows go on W&B: as it was settled when the run was made, whatever a later shell says."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pipeline.run.directory import Run
from pipeline.run.wandb_place import VARIABLES, WandbPlace, read_value, settled
from pipeline.tracking.state import read_online, write_state

_LONGEST = 60


def place_of(run: Run, environment: Mapping[str, str]) -> WandbPlace:
    """Return the place that the run went to or ``sync --anew`` chose, else that of the making; where neither
    was noted, as the run was made without W&B, what the environment says now."""
    kept = read_online(run.paths).place or run.identity.wandb
    return kept or _settled_here(run, environment)


def moved_here(
    run: Run, environment: Mapping[str, str], project: str | None = None, entity: str | None = None
) -> WandbPlace:
    """Return the run's place with what the variables say that are set now, also to nothing.

    Args:
        project: goes before all else, as does ``entity``.
    """
    here = _settled_here(run, environment)
    said = {field: getattr(here, field) for field, name in VARIABLES.items() if name in environment}
    said |= {name: value for name, value in (("project", project), ("entity", entity)) if value}
    return replace(place_of(run, environment), **said)


def keep_entity(run: Run, entity: str) -> None:
    """Keep whose project the run went to, where only the key said so: the next key may be another person's.
    For the holder of the lease of :func:`pipeline.tracking.state.online_lease`."""
    place = place_of(run, os.environ)
    if place.entity is None:
        write_state(run.paths, replace(read_online(run.paths), place=replace(place, entity=entity)))


def not_followed(run: Run, environment: Mapping[str, str]) -> str:
    """Name, for a person, the variables that ask for another place than the run's. Empty: none does."""
    place, given = place_of(run, environment), run.config.tracking.wandb
    told = []
    for field, variable in VARIABLES.items():
        text, kept = environment.get(variable), getattr(place, field)
        if text and not getattr(given, field, None) and (said := read_value(field, text)) != kept:
            told.append(f"{variable}={_short(said)} (the run has {_short(kept) or 'none'})")
    if not told:
        return ""
    sync = f"slurm-ppo sync {shlex.quote(str(run.paths.root))} --anew"
    return (
        f"W&B goes on as when the run was made, without this shell's {', '.join(told)}; "
        f"to send all rows to a new W&B run, as this shell has it: {sync}"
    )


def _settled_here(run: Run, environment: Mapping[str, str]) -> WandbPlace:
    return settled(run.config.tracking.wandb, run.identity.name, environment, Path.cwd())


def _short(value: str | tuple[str, ...] | None) -> str:
    text = ",".join(value) if isinstance(value, tuple) else value or ""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
