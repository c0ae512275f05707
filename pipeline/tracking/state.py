"""Rows of a run as mirrors get them, where W&B's go, and what may have reached each: one small file,
``wandb/online.json``, and ``online.json`` in the folders of other destinations.

The rows are numbered in the order in which they were written; the number is W&B's step, so that the server
says by its last step which rows it has.
"""

import hashlib
import json
import math
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pipeline.config.conversion import converted
from pipeline.config.evaluate import COMMAND_PREFIX
from pipeline.config.schema import WandbMode
from pipeline.run import journal
from pipeline.run.benchmarks import read_measured
from pipeline.run.directory import Run
from pipeline.run.durable import replace_durably
from pipeline.run.journal import Row
from pipeline.run.paths import RunPaths
from pipeline.run.wandb_place import VARIABLES, WandbPlace, read_value, settled
from pipeline.tracking.destination import Destination
from slurm.sharedfiles import from_json, read_newest

MEASURED_STEP = f"{COMMAND_PREFIX}iteration"
"""x-axis of the numbers of evaluate.command: the version of the policy that they are of."""


def published(run: Run) -> list[Row]:
    """Return the rows in the order in which they were written; the index is the step. More are only appended,
    unless the run goes back.

    Numbers of evaluate.command are rows of their own, each after the row that was the newest when they came.
    """
    rows = {int(row["iteration"]): row for row in journal.read(run.paths.metrics) if "iteration" in row}
    newest = max(rows, default=run.plan.start)
    measured = read_measured(run.paths) if run.plan.benchmark_every else ()  # read after the rows before it
    keyed = [((iteration, -1), row) for iteration, row in rows.items()]
    keyed += [
        ((one.after, one.policy_version), {MEASURED_STEP: one.policy_version, **one.numbers})
        for one in measured
        if one.numbers and one.after <= newest
    ]
    return [row for _, row in sorted(keyed, key=lambda pair: pair[0])]


def finite(row: Row) -> Row:
    """Return the numbers of a row that are finite: trackers make words or gaps of the others."""
    return {name: value for name, value in row.items() if math.isfinite(value)}


def iteration_of(row: Row) -> int:
    """Return the place of a row on the x-axis: its iteration, or that of a measured policy."""
    return int(row["iteration"] if "iteration" in row else row[MEASURED_STEP])


def written_at(run: Run, row: Row) -> float:
    """Return the Unix time of a row: of the end of its iteration. Now, where it does not say."""
    return run.identity.created + row["seconds/elapsed"] if "seconds/elapsed" in row else time.time()


@dataclass(frozen=True)
class Sent:
    """Rows that may have reached a destination."""

    generation: int = 1
    """Number of the run there: rows stay, so once some were taken back, or on request, another gets all."""
    sent: int = 0
    """Number of rows that may be there; written before they are sent."""
    digest: str = ""
    """SHA-256 of these rows."""
    confirmed: int = 0
    """Number of rows that the destination has confirmed."""
    carried: int = 0
    """Number of rows that ``sync --offline`` has written."""
    place: WandbPlace | None = None
    """Place that counts instead of that of ``run.json``: with the entity of the first key, or as
    ``sync --new-run`` chose it."""

    def holds(self, rows: Sequence[Row]) -> bool:
        """Whether the run still has every row that was sent, unchanged."""
        return not self.sent or digest(rows[: self.sent]) == self.digest

    def with_sent(self, rows: Sequence[Row]) -> "Sent":
        """Return the state in which all ``rows`` may be there, and maybe more: a killed mirror's."""
        return self if len(rows) <= self.sent else replace(self, sent=len(rows), digest=digest(rows))

    def next_generation(self, place: WandbPlace | None = None) -> "Sent":
        """Return the state of a new run without rows. ``place`` on W&B: None is the same as before."""
        return Sent(self.generation + 1, place=place or self.place)


def digest(rows: Sequence[Row]) -> str:
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def state_file(paths: RunPaths, to: Destination) -> Path:
    """Return the file that says which rows a destination was sent."""
    return paths.root / to / paths.wandb_online.name


def read_state(paths: RunPaths, to: Destination = Destination.WANDB) -> Sent:
    """Read the state; a file that is missing or cannot be understood counts as one without rows."""
    try:
        return converted(Sent, from_json(read_newest(state_file(paths, to))))
    except (FileNotFoundError, ValueError):
        return Sent()


def write_state(paths: RunPaths, state: Sent, to: Destination = Destination.WANDB) -> None:
    """Write the state. Only for the holder of :func:`mirror_lease`."""
    file = state_file(paths, to)
    file.parent.mkdir(exist_ok=True)
    said = {key: value for key, value in asdict(state).items() if value is not None}
    replace_durably(file, json.dumps(said) + "\n")


def mirror_id(run: Run, to: Destination) -> str:
    """Return the run's id at a destination: its own, with the generation where that is not the first."""
    generation = read_state(run.paths, to).generation
    return run.identity.id if generation == 1 else f"{run.identity.id}-{generation}"


def sync_command(run: Run, to: Destination) -> str:
    """Return the command that sends what a destination lacks."""
    option = "" if to is Destination.WANDB else f" --to {to}"
    return f"slurm-ppo sync {shlex.quote(str(run.paths.root))}{option}"


def mirror_lease(paths: RunPaths, to: Destination = Destination.WANDB) -> Path:
    """Return where the one writer of a destination's rows holds its lease."""
    return paths.locks / f"{to}-online"


# --- where rows go ---------------------------------------------------------------------------------------

# As it was settled when the run was made, whatever a later shell says.


_LONGEST = 60


def place_of(run: Run, environment: Mapping[str, str]) -> WandbPlace:
    """Return the place that the run went to or ``sync --new-run`` chose, else that of the making;
    where neither was noted, as the run was made without W&B, what the environment says now."""
    kept = read_state(run.paths).place or run.identity.wandb
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
    For the holder of the lease of :func:`pipeline.tracking.state.mirror_lease`."""
    place = place_of(run, os.environ)
    if place.entity is None:
        write_state(run.paths, replace(read_state(run.paths), place=replace(place, entity=entity)))


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
    sync = f"{sync_command(run, Destination.WANDB)} --new-run"
    return (
        f"W&B goes on as when the run was made, without this shell's {', '.join(told)}; "
        f"to send all rows to a new W&B run, as this shell has it: {sync}"
    )


def _settled_here(run: Run, environment: Mapping[str, str]) -> WandbPlace:
    return settled(run.config.tracking.wandb, run.identity.name, environment, Path.cwd())


def _short(value: str | tuple[str, ...] | None) -> str:
    text = ",".join(value) if isinstance(value, tuple) else value or ""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


NO_KEY = "there is no API key for W&B: run `wandb login`, or set WANDB_API_KEY"


_OLD_WORDS = {"dryrun": WandbMode.OFFLINE, "run": WandbMode.ONLINE}
"""Values of WANDB_MODE that W&B goes on to take."""


def wandb_mode(asked: WandbMode, environment: Mapping[str, str]) -> WandbMode:
    """Decide by the configuration; if that is auto, by WANDB_MODE, else by whether there is a key."""
    if asked is not WandbMode.AUTO:
        return asked
    named = environment.get("WANDB_MODE", "")
    named = _OLD_WORDS.get(named, named)
    if named in tuple(WandbMode) and named != WandbMode.AUTO:
        return WandbMode(named)
    return WandbMode.ONLINE if has_key(environment) else WandbMode.OFFLINE


def has_key(environment: Mapping[str, str]) -> bool:
    """Whether an API key is in the environment or in ~/.netrc."""
    if environment.get("WANDB_API_KEY"):
        return True
    try:
        return "wandb" in (Path.home() / ".netrc").read_text(errors="replace")
    except OSError:
        return False
