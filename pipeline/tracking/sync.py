"""``slurm-ppo sync``: bring W&B's server to exactly one row per iteration, and say what was done."""

import os
import shlex
import time
from collections.abc import Callable

from pipeline.config.schema import WandbMode
from pipeline.run.directory import Run
from pipeline.run.lease import holder_of
from pipeline.tracking.mirror import Mirrored
from pipeline.tracking.mode import NO_KEY, NoKey, has_key
from pipeline.tracking.place import moved_here, not_followed
from pipeline.tracking.state import forget_rows, online_lease
from pipeline.tracking.tracker import MirrorProcess
from slurm.errors import ServiceError

_LOOK_SECONDS = 0.2


class SyncFailed(ServiceError, RuntimeError):
    """W&B could not be reached, refused, or has not confirmed every row."""


def sync(run: Run, seconds: float, anew: bool, say: Callable[[str], None]) -> str:
    """Send the rows that W&B lacks, or all to another W&B run. Returns a summary for a person.

    Args:
        seconds: limit after which it gives up.
        say: takes messages about the progress.

    Raises:
        NoKey: naming the ways to give one.
        SyncFailed: saying why, and that another call goes on from there.
        LeaseHeld: another process has been sending rows for minutes.
    """
    if not has_key(os.environ):
        raise NoKey(NO_KEY)
    if holder := holder_of(online_lease(run.paths)):
        say(f"waiting for another process that sends rows: {holder}")
    if anew:
        forget_rows(run.paths, moved_here(run, os.environ))
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


def described(done: Mirrored) -> str:
    """Summarise for a person."""
    counts = f"{done.rows} rows, one per iteration; {done.had} were there, {done.sent} sent"
    lines = [f"{done.url or 'W&B'}: {counts}"]
    if done.removed:
        lines.append(f"{done.removed} offline segments were cut and are removed; their rows are among these")
    if done.marked:
        lines.append(f"{done.marked} offline segments hold nothing new, and `wandb sync` will skip them")
    return "\n".join(lines)
