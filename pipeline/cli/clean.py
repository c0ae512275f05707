"""``slurm-ppo clean``: shows what can go, asks, and removes it."""

import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.cli.errors import system_error, will_change
from pipeline.config.issue import ConfigError
from pipeline.orchestrate.independence import make_independent
from pipeline.run.cleaning import LeftoverKind, Removable, find_removable, remove
from pipeline.run.directory import Run, load_run
from pipeline.run.identity import RunError
from pipeline.run.lease import LeaseHeld, hold, holder_of
from pipeline.run.paths import holds_identity
from pipeline.run.place import original_of
from pipeline.run.sizes import bytes_below
from pipeline.run.standpoint import check_is_ours
from pipeline.run.submissions import cluster_of
from pipeline.status.listing import find_places
from pipeline.text import size, table
from pipeline.workers.beats import SILENT_SECONDS, LiveWorkers
from slurm.commands import SlurmError, SlurmMissing, on_cluster
from slurm.limits import read_cluster_name

_WORDS = {
    LeftoverKind.SUPERSEDED: "moved aside when the run went back",
    LeftoverKind.STATES: "older than those that a resume may begin with",
    LeftoverKind.LEFTOVERS: "left by attempts and drivers that were killed",
    LeftoverKind.CACHES: "made again where they are needed",
    LeftoverKind.LOGS: "of iterations that are done",
}


@dataclass(frozen=True)
class RunLeftovers:
    """What can go of a run."""

    run: Run
    items: tuple[Removable, ...]

    @property
    def num_bytes(self) -> int:
        return sum(item.num_bytes for item in self.items)


def clean_runs(folder: Path, yes: bool, only: Collection[str]) -> int:
    """Show what can go of the runs below a folder, ask, and remove it. Returns the exit code.

    Raises:
        RunError: the only run is active, or cannot be read; or there is no terminal to ask at.
    """
    kinds = _kinds(only)
    found, left = _look(folder, kinds)
    print("\n".join([*_listed(found), *left]))
    total = sum(one.num_bytes for one in found)
    if not any(one.items for one in found):
        print("nothing to remove")
        return 0
    if not yes and not _is_agreed(f"remove {size(total)}? [y/N] "):
        print("nothing was removed")
        return 0
    failed = [line for one in found for line in _remove(one)]
    there = sum(_bytes_left(item) for one in found for item in one.items)
    print(f"removed {size(max(0, total - there))}" + (f"; {size(there)} are left:" if failed else ""))
    for line in failed:
        print(line, file=sys.stderr)
    return 1 if failed else 0


def _kinds(only: Collection[str]) -> frozenset[LeftoverKind]:
    wrong = [word for word in only if word not in tuple(LeftoverKind)]
    if wrong:
        raise ConfigError(f"--only {wrong[0]}: no such kind; legal: {', '.join(LeftoverKind)}")
    return frozenset(map(LeftoverKind, only or LeftoverKind))


def _look(folder: Path, kinds: frozenset[LeftoverKind]) -> tuple[list[RunLeftovers], list[str]]:
    """Return what can go of each run, and a line for each run that is left alone."""
    places = [place.root for place in find_places(folder) if _holds_run(place.root)]
    if not places:
        raise RunError(f"{folder} holds no runs; give a run directory, or a folder of them")
    found, left = [], []
    for root in places:
        try:
            run = load_run(root)
            check_is_idle(run)
            items = tuple(item for item in find_removable(run) if item.kind in kinds)
            found.append(RunLeftovers(run, items))
        except (RunError, LeaseHeld, OSError) as error:
            if len(places) == 1:
                raise
            left.append(f"{root} is left alone: {_why(error)}")
    return found, left


def _holds_run(root: Path) -> bool:
    """Whether a run is there; true too where that cannot be seen: reading it says why."""
    try:
        return holds_identity(root)
    except OSError:
        return True


def check_is_idle(run: Run) -> None:
    """Refuse a run that a driver or a job works at. Raises RunError."""
    if original_of(run):  # a copy's lease is the original's
        return
    if holder := holder_of(run.paths.locks):
        raise RunError(f"{holder}; clean it afterwards")
    _check_no_jobs(run)


def _check_no_jobs(run: Run) -> None:
    if not run.config.slurm:
        return
    from pipeline.executors.slurm.queue import look_at_queue

    check_is_ours(run.paths, run.who_acts)
    queue = look_at_queue(run, max_age=0.0)
    if queue.unanswered is not None:
        raise RunError(f"whether jobs of {run.paths.root} live is not known: {queue.unanswered}")
    if queue.live:
        raise RunError(
            f"{len(queue.live)} jobs of {run.paths.root} are in the queue; wait for them, or: "
            f"slurm-ppo cancel {run.paths.root}"
        )
    check_is_seen_here(run)


def _listed(found: Sequence[RunLeftovers]) -> Iterator[str]:
    """Yield lines: for each run what can go, by kind, with sizes."""
    for one in found:
        if not one.items:
            continue
        yield str(one.run.paths.root)
        lines = []
        for kind in LeftoverKind:
            of_kind = [item for item in one.items if item.kind is kind]
            if of_kind:
                count = f"{len(of_kind)} item{'' if len(of_kind) == 1 else 's'}"
                lines.append(["", kind, size(sum(item.num_bytes for item in of_kind)), count, _WORDS[kind]])
        for line, text in zip(lines, table([line[:4] for line in lines], left=2), strict=True):
            yield f"{text}  {line[4]}"


def _is_agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise RunError(
            "nothing was removed: standard input is not a terminal to ask on; to remove without asking: --yes"
        )
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:  # Ctrl-D
        print()
        return False


def _remove(found: RunLeftovers) -> list[str]:
    """Remove what was shown and can still go, while no driver may begin. Returns what could not be."""
    run = found.run
    if not found.items:
        return []
    try:
        run = make_independent(run) if original_of(run) else run
        with hold(run.paths.locks):
            _check_no_jobs(run)
            will_change("what can go")
            now = {item.path for item in find_removable(run)}
            return list(remove(run, [item for item in found.items if item.path in now]))
    except (RunError, LeaseHeld, OSError) as error:
        return [f"{run.paths.root}: {_why(error)}"]


def _why(error: Exception) -> str:
    return system_error(error) if isinstance(error, OSError) else str(error)


def _bytes_left(item: Removable) -> int:
    """Return the bytes of what could not be removed; all of it where that cannot be seen."""
    try:
        return bytes_below(item.path)
    except OSError:
        return item.num_bytes


# --- whether the queue that is asked here would show the jobs of a run ---


def check_is_seen_here(run: Run) -> None:
    """Refuse a run on Slurm whose jobs are not seen here, or may not be. Raises RunError.

    squeue is asked for the jobs of who types the command, on the cluster that this machine belongs to: of a
    run of another user, or on another cluster, it shows none even if jobs work at it.
    """
    _check_cluster_is_known(run)
    check_is_ours(run.paths, run.who_acts)
    _check_beats(run)


def _check_cluster_is_known(run: Run) -> None:
    """Check that Slurm says which cluster is asked here, where the run's has a name."""
    try:
        with on_cluster(run.cluster):
            if cluster_of(run.paths):
                read_cluster_name()
    except (SlurmError, SlurmMissing) as error:
        raise RunError(f"whether jobs of {run.paths.root} live is not known: {error}") from None


def _check_beats(run: Run) -> None:
    """Check that no worker has sent a heartbeat just now, of any user and on any cluster."""
    now = time.time()
    live = (
        LiveWorkers(run.paths).live(now).values()
    )  # at a first look also of workers that have long been silent
    if heard := [beat for beat in live if now - beat.beat <= SILENT_SECONDS]:
        beat = max(heard, key=lambda beat: beat.beat)
        raise RunError(
            f"worker {beat.worker} of {run.paths.root}, on {beat.host}, sent a heartbeat "
            f"{max(0.0, now - beat.beat):.0f} s ago; wait for the run; if its jobs were just ended, for "
            f"{SILENT_SECONDS:.0f} s"
        )
