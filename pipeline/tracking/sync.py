"""``slurm-ppo sync``: bring every row to W&B once, or into an offline run, and say what was done."""

import os
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.run.directory import Run
from pipeline.run.lease import hold, holder_of
from pipeline.run.place import check_is_no_copy
from pipeline.run.troubles import Trouble, note_recovery
from pipeline.tracking.mirror import Mirrored
from pipeline.tracking.refusal import Fault
from pipeline.tracking.state import (
    NO_KEY,
    has_key,
    mirror_lease,
    moved_here,
    not_followed,
    place_of,
    read_state,
    write_state,
)
from pipeline.tracking.tracker import MirrorProcess
from slurm.errors import ServiceError, UserError

_LOOK_SECONDS = 0.2
_PATIENCE = 60.0
"""Seconds to wait for a writer that is about to close."""
_LONGEST = 100
"""Characters of a refusal of W&B that are shown."""


@dataclass(frozen=True)
class NewWandbRun:
    """Another W&B run gets all rows: where this shell's W&B variables say, else where the run was."""

    project: str | None = None
    """Goes before all else, as does ``entity``."""
    entity: str | None = None

    @staticmethod
    def asked(is_new: bool, project: str | None, entity: str | None) -> "NewWandbRun | None":
        """Return what the command's options ask for. Raises UserError where they name a place without it."""
        if not is_new and (project or entity):
            raise UserError(
                "--project and --entity go with --new-run: W&B cannot move a run, so a new one gets all rows"
            )
        return NewWandbRun(project, entity) if is_new else None


def sync(
    run: Run, seconds: float, new: NewWandbRun | None, say: Callable[[str], None], offline: Path | None = None
) -> str:
    """Send the rows that W&B lacks, or all to another W&B run. Returns a summary for a person.

    Args:
        seconds: limit after which it gives up.
        say: takes messages about the progress.
        offline: folder for an offline run of W&B with the rows, instead of sending them.

    Raises:
        UserError: there is no key, or W&B takes the run or the key never; says what has to be another way.
        ServiceError: W&B could not be reached, or has not confirmed every row; another call goes on there.
        LeaseHeld: another process has been sending rows for minutes.
    """
    check_is_no_copy(run, "sync")
    if offline is None and not has_key(os.environ):
        raise UserError(NO_KEY)
    if holder := holder_of(mirror_lease(run.paths)):
        say(f"waiting for another process that sends rows: {holder}")
    if new:
        place = moved_here(run, os.environ, new.project, new.entity)
        with hold(mirror_lease(run.paths), _PATIENCE):
            write_state(run.paths, read_state(run.paths).next_generation(place))
    elif told := not_followed(run, os.environ):
        say(told)
    done = _carried_out(run, seconds, say, ["--offline", str(offline)] if offline else ["--once"])
    if done.missing and offline is None:
        again = f"slurm-ppo sync {shlex.quote(str(run.paths.root))}"
        raise ServiceError(f"W&B has not confirmed {done.missing} of {done.rows} rows; later: {again}")
    if offline is None:
        note_recovery(run.paths, Trouble.WANDB)
    return described(done, offline)


def _carried_out(run: Run, seconds: float, say: Callable[[str], None], options: list[str]) -> Mirrored:
    mirror = MirrorProcess.start(run, *options)
    until = time.monotonic() + seconds
    done, has_ended = None, False
    while not has_ended:
        has_ended = mirror.process.poll() is not None
        for said in mirror.said():
            if "note" in said:
                say(said["note"])
            elif "refused" in said:
                raise UserError(_way_out(run, Fault(said["fault"]), said["refused"]))
            else:
                done = Mirrored(**said["done"])
        if not has_ended and time.monotonic() > until:
            mirror.kill()
            raise ServiceError(
                f"W&B did not take the rows within {seconds:g} s; another call goes on from there"
            )
        time.sleep(0 if has_ended else _LOOK_SECONDS)
    if done is None:
        raise ServiceError(f"W&B could not be brought up to date: {mirror.last_line()}")
    return done


def _way_out(run: Run, fault: Fault, why: str) -> str:
    """Say of a refusal that stays what a person can do."""
    if fault is Fault.KEY:
        return f"W&B refuses the API key ({why}): run `wandb login`, or set WANDB_API_KEY to another"
    place = place_of(run, os.environ)
    where = f"{place.entity}/{place.project}" if place.entity else place.project
    return (
        f"W&B refuses the run as it was made, for {where} at {place.base_url}, and will again "
        f"({why[:_LONGEST]}); set what is wrong (--project, --entity, a variable such as WANDB_TAGS) "
        f"and run: slurm-ppo sync {shlex.quote(str(run.paths.root))} --new-run"
    )


def described(done: Mirrored, offline: Path | None) -> str:
    """Summarise for a person."""
    if offline is None:
        return f"{done.url or 'W&B'}: {done.rows} rows, each once; {done.had} were there, {done.sent} sent"
    if not done.sent:
        return f"{done.rows} rows, all at W&B or written before: there is nothing to carry"
    where = shlex.quote(str(offline / "wandb"))
    count = f"{done.sent} rows written, {done.had} before"
    return f"{offline}: {count}; where there is a network, once: wandb sync {where}"
