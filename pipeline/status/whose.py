"""What is known of a run on Slurm by who is not its owner, or not on its cluster; and what comes next."""

import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.text import duration
from pipeline.workers.beats import SILENT_SECONDS

if TYPE_CHECKING:  # a run of this machine needs nothing of Slurm's
    from pipeline.run.commits import Record
    from pipeline.run.standpoint import Elsewhere
    from pipeline.workers.beats import Beat

_IS_OVER = ("failed", "cancelled", "paused", "stopped")


@dataclass(frozen=True)
class Whose:
    """Owner of a run, for who looks from elsewhere, and the last signs of life. Times are unix seconds."""

    owner: str
    """User whose jobs do the run's tasks."""
    cluster: str
    """Cluster that has them; empty where it is not known."""
    seen_by: str
    """User who looks."""
    seen_from: str
    """Cluster that is asked from here; empty where it is not known."""
    is_hidden: bool
    """Whether Slurm does not show the run's jobs here."""
    last_commit: float | None
    """End of the newest task at hand that is committed."""
    last_word: float | None
    """Newest beat of a worker."""

    @property
    def is_other_user(self) -> bool:
        return self.owner != self.seen_by

    @property
    def is_on_another_cluster(self) -> bool:
        return bool(self.cluster and self.seen_from) and self.cluster != self.seen_from

    def lives(self, now: float) -> bool:
        """Whether a worker was heard of just now, or something was committed."""
        newest = max(self.last_word or 0.0, self.last_commit or 0.0)
        return now - newest <= SILENT_SECONDS


def whose(
    elsewhere: "Elsewhere", is_hidden: bool, records: Iterable["Record"], beats: Iterable["Beat"], now: float
) -> Whose:
    """Return what is known of a run from elsewhere. Signs of a node whose clock is far ahead count for none:
    they would be new for as long. Pure."""
    return Whose(
        owner=elsewhere.owner.user,
        cluster=elsewhere.owner.cluster,
        seen_by=elsewhere.me.user,
        seen_from=elsewhere.me.cluster,
        is_hidden=is_hidden,
        last_commit=_newest((record.ended for record in records), now),
        last_word=_newest((beat.beat for beat in beats), now),
    )


def _newest(moments: Iterable[float], now: float) -> float | None:
    return max((moment for moment in moments if moment <= now + SILENT_SECONDS), default=None)


def in_words(of: Whose, state: str, now: float) -> str:
    """Say whose a run is, and what is known of it from here. Pure."""
    on = f" on cluster {of.cluster}" if of.cluster else ""
    to = f" to cluster {of.cluster}" if of.cluster else ""
    if state == "running":
        said = f"runs as {of.owner}{on}"
    elif state == "stopped":
        said = f"submitted by {of.owner}{to}, which shows no job of the run"
    else:
        said = f"submitted by {of.owner}{to}"
    hidden = f"; {_not_seen(of)}" if of.is_hidden and state in ("running", "unknown") else ""
    return f"{said}; {_signs(of, now)}{hidden}"


def _signs(of: Whose, now: float) -> str:
    commit = "nothing is committed yet"
    if of.last_commit is not None:
        commit = _ago("last commit", of.last_commit, now)
    return commit if of.last_word is None else f"{commit}, {_ago('last heartbeat', of.last_word, now)}"


def _ago(what: str, moment: float, now: float) -> str:
    return f"{what} {duration(max(0.0, now - moment))} ago"


def _not_seen(of: Whose) -> str:
    if of.is_on_another_cluster:
        return f"its jobs are not seen from here, where {of.seen_from} is asked"
    return f"Slurm shows its jobs to {of.owner} alone"


def next_step(of: Whose, state: str, root: str) -> str | None:
    """Return what comes next for who is not the owner; None: the same as for the owner."""
    from pipeline.run.standpoint import asked_of, way_on

    place = shlex.quote(root)
    if state == "unknown":
        as_owner = f" as {of.owner}" if of.is_other_user else ""
        there = f" on a machine of {of.cluster}" if of.is_on_another_cluster else ""
        return f"slurm-ppo status {place}, run{as_owner}{there}"
    if state in _IS_OVER:
        resume = asked_of(of.owner, of.cluster, of.is_other_user, f"slurm-ppo resume {place}")
        return f"{resume}, or {way_on(Path(root))}"
    if state == "complete" and not os.access(root, os.W_OK):
        return f"slurm-ppo report {place} --out FILE"
    return None
