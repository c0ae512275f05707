"""``slurm-ppo sync``: bring every row to a destination once, or into an offline run of W&B, and report it."""

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
from pipeline.tracking.destination import Destination, package_problem
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
    sync_command,
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
class NewRun:
    """Another run at the destination gets all rows: on W&B where this shell's variables say, else where the
    run was."""

    project: str | None = None
    """Goes before all else, as does ``entity``."""
    entity: str | None = None

    @staticmethod
    def asked(is_new: bool, project: str | None, entity: str | None) -> "NewRun | None":
        """Return what the command's options ask for. Raises UserError where they name a place without it."""
        if not is_new and (project or entity):
            raise UserError(
                "--project and --entity go with --new-run: W&B cannot move a run, so a new one gets all rows"
            )
        return NewRun(project, entity) if is_new else None


@dataclass(frozen=True)
class SyncOptions:
    """Options of the command."""

    to: Destination = Destination.WANDB
    new: NewRun | None = None
    offline: Path | None = None
    """Folder for an offline run of W&B with the rows, instead of sending them."""

    def check(self) -> None:
        """Raise UserError for options of W&B with another destination, a missing key or package."""
        is_wandb = self.to is Destination.WANDB
        if not is_wandb and (self.offline or (self.new and (self.new.project or self.new.entity))):
            raise UserError(
                f"--offline, --project and --entity are W&B's: leave them out with --to {self.to}"
            )
        if is_wandb and self.offline is None and not has_key(os.environ):
            raise UserError(NO_KEY)
        if why := package_problem(self.to):
            raise UserError(why)

    @property
    def of_mirror(self) -> list[str]:
        """The same for the mirror process."""
        return ["--offline", str(self.offline)] if self.offline else ["--once"]


def sync(run: Run, asked: SyncOptions, seconds: float, say: Callable[[str], None]) -> str:
    """Send the rows that a destination lacks, or all to another run there. Returns a summary for a person.

    Args:
        seconds: limit after which it gives up.
        say: takes messages about the progress.

    Raises:
        UserError: there is no key or package, or W&B takes the run or the key never; says what has to be
            another way.
        ServiceError: it could not be reached, or has not confirmed every row; another call goes on there.
        LeaseHeld: another process has been sending rows for minutes.
    """
    check_is_no_copy(run, "sync")
    asked.check()
    if holder := holder_of(mirror_lease(run.paths, asked.to)):
        say(f"waiting for another process that sends rows: {holder}")
    if asked.new:
        _begin_generation(run, asked.to, asked.new)
    elif asked.to is Destination.WANDB and (told := not_followed(run, os.environ)):
        say(told)
    done = _carried_out(run, asked, seconds, say)
    if done.missing and asked.offline is None:
        again = sync_command(run, asked.to)
        raise ServiceError(
            f"{asked.to.label} has not confirmed {done.missing} of {done.rows} rows; later: {again}"
        )
    if asked.offline is None:
        note_recovery(run.paths, Trouble(asked.to))
    return described(done, asked)


def _begin_generation(run: Run, to: Destination, new: NewRun) -> None:
    is_wandb = to is Destination.WANDB
    place = moved_here(run, os.environ, new.project, new.entity) if is_wandb else None
    with hold(mirror_lease(run.paths, to), _PATIENCE):
        write_state(run.paths, read_state(run.paths, to).next_generation(place), to)


def _carried_out(run: Run, asked: SyncOptions, seconds: float, say: Callable[[str], None]) -> Mirrored:
    mirror = MirrorProcess.start(run, asked.to, *asked.of_mirror)
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
                f"{asked.to.label} did not take the rows within {seconds:g} s; "
                "another call goes on from there"
            )
        time.sleep(0 if has_ended else _LOOK_SECONDS)
    if done is None:
        raise ServiceError(f"{asked.to.label} could not be brought up to date: {mirror.last_line()}")
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
        f"and run: {sync_command(run, Destination.WANDB)} --new-run"
    )


def described(done: Mirrored, asked: SyncOptions) -> str:
    """Summarise for a person."""
    offline = asked.offline
    if offline is None:
        where = done.url or asked.to.label
        return f"{where}: {done.rows} rows, each once; {done.had} were there, {done.sent} sent"
    if not done.sent:
        return f"{done.rows} rows, all at W&B or written before: there is nothing to carry"
    where = shlex.quote(str(offline / "wandb"))
    count = f"{done.sent} rows written, {done.had} before"
    return f"{offline}: {count}; where there is a network, once: wandb sync {where}"
