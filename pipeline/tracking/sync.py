"""``slurm-ppo sync``: bring W&B's server to exactly one row per iteration, and say what was done."""

import os
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.config.schema import WandbMode
from pipeline.run.directory import Run
from pipeline.run.lease import holder_of
from pipeline.run.place import check_is_no_copy
from pipeline.tracking.mirror import Mirrored
from pipeline.tracking.mode import NO_KEY, NoKey, has_key
from pipeline.tracking.place import moved_here, not_followed, place_of
from pipeline.tracking.refusal import Fault
from pipeline.tracking.state import forget_rows, online_lease
from pipeline.tracking.tracker import MirrorProcess
from slurm.errors import ServiceError, UserError

_LOOK_SECONDS = 0.2
_LONGEST = 100
"""Characters of a refusal of W&B that are shown."""


class SyncRefused(UserError, ValueError):
    """W&B will not take the run, or the key, however often it is asked."""


class SyncFailed(ServiceError, RuntimeError):
    """W&B could not be reached, refused, or has not confirmed every row."""


@dataclass(frozen=True)
class Anew:
    """Another W&B run gets all rows: where this shell's W&B variables say, else where the run was."""

    project: str | None = None
    """Goes before all else, as does ``entity``."""
    entity: str | None = None

    @staticmethod
    def asked(anew: bool, project: str | None, entity: str | None) -> "Anew | None":
        """Return what the command's options ask for. Raises UserError where they name a place without it."""
        if not anew and (project or entity):
            raise UserError(
                "--project and --entity go with --anew: W&B moves no run, a new one gets all rows"
            )
        return Anew(project, entity) if anew else None


def sync(run: Run, seconds: float, anew: Anew | None, say: Callable[[str], None]) -> str:
    """Send the rows that W&B lacks, or all to another W&B run. Returns a summary for a person.

    Args:
        seconds: limit after which it gives up.
        say: takes messages about the progress.

    Raises:
        NoKey: naming the ways to give one.
        SyncRefused: saying what has to be another way, and how.
        SyncFailed: saying why, and that another call goes on from there.
        LeaseHeld: another process has been sending rows for minutes.
    """
    check_is_no_copy(run, "sync")
    if not has_key(os.environ):
        raise NoKey(NO_KEY)
    if holder := holder_of(online_lease(run.paths)):
        say(f"waiting for another process that sends rows: {holder}")
    if anew:
        forget_rows(run.paths, moved_here(run, os.environ, anew.project, anew.entity))
    elif told := not_followed(run, os.environ):
        say(told)
    done = _carried_out(run, seconds, say)
    again = f"slurm-ppo sync {shlex.quote(str(run.paths.root))}"
    if done.missing:
        raise SyncFailed(f"W&B has not confirmed {len(done.missing)} of {done.rows} rows; later: {again}")
    if done.twice:
        raise SyncFailed(
            f"W&B has iteration {done.twice[0]} more than once, which another program did, and cannot take "
            f"rows back; to send all rows to a new W&B run: {again} --anew"
        )
    return described(done)


def _carried_out(run: Run, seconds: float, say: Callable[[str], None]) -> Mirrored:
    mirror = MirrorProcess.start(run, WandbMode.ONLINE, "--once")
    until = time.monotonic() + seconds
    done, has_ended = None, False
    while not has_ended:
        has_ended = mirror.process.poll() is not None
        for said in mirror.said():
            if "note" in said:
                say(said["note"])
            elif "refused" in said:
                raise SyncRefused(_way_out(run, Fault(said["fault"]), said["refused"]))
            else:
                done = Mirrored(**said["done"])
        if not has_ended and time.monotonic() > until:
            mirror.kill()
            raise SyncFailed(
                f"W&B did not take the rows within {seconds:g} s; another call goes on from there"
            )
        time.sleep(0 if has_ended else _LOOK_SECONDS)
    if done is None:
        raise SyncFailed(f"W&B could not be brought up to date: {mirror.last_line()}")
    return done


def _way_out(run: Run, fault: Fault, why: str) -> str:
    """Say of a refusal that stays what a person can do."""
    if fault is Fault.KEY:
        return f"W&B refuses the API key ({why}): type `wandb login`, or set WANDB_API_KEY to another"
    place = place_of(run, os.environ)
    where = f"{place.entity}/{place.project}" if place.entity else place.project
    return (
        f"W&B refuses the run as it was made, for {where} at {place.base_url}, and will again "
        f"({why[:_LONGEST]}); set what is wrong (--project, --entity, a variable such as WANDB_TAGS) "
        f"and type: slurm-ppo sync {shlex.quote(str(run.paths.root))} --anew"
    )


def described(done: Mirrored) -> str:
    """Summarise for a person."""
    counts = f"{done.rows} rows, one per iteration; {done.had} were there, {done.sent} sent"
    lines = [f"{done.url or 'W&B'}: {counts}"]
    if done.removed:
        lines.append(f"{done.removed} offline segments were cut and are removed; their rows are among these")
    if done.marked:
        lines.append(f"{done.marked} offline segments hold nothing new, and `wandb sync` will skip them")
    return "\n".join(lines)
