"""Checks of room and inodes where a run writes, against what it still needs."""

import math
import os
import time
from pathlib import Path

from pipeline.doctor.estimate import Estimate, estimate
from pipeline.doctor.findings import Check, Finding, Group, ok, problem, skipped, warning
from pipeline.doctor.place import scratch
from pipeline.preflight.disk_need import room
from pipeline.run.ages import ages_of, files_below, in_words
from pipeline.run.directory import Run
from pipeline.text import size

WRITING = "room to write"
"""Gate of the checks of files, which are tried out only where any can be made."""
_WRITTEN_BYTES = 8 << 20
_LITTLE_BYTES = 1 << 30
_LITTLE_FILES = 10_000
_NOTHING_BYTES = 64 << 20
_NOTHING_FILES = 100
_TIGHT_SHARE = 0.8


def space_checks(folder: Path, run: Run | None, exists: bool, is_reader: bool = False) -> list[Check]:
    """Return the checks of the run directory's folder, and of those that libraries write to.

    Args:
        is_reader: whether the run is somebody else's, and this user may only read it.
    """
    place = str(folder)

    def need() -> Finding:
        assert run is not None
        return judge_need(estimate(run, exists), *room(folder))

    return [
        _space_check("run directory", folder),
        _only_read(folder)
        if is_reader
        else Check(Group.SPACE, "writing", lambda: look_at_writing(folder), 30, place, gate=WRITING),
        *([Check(Group.SPACE, "need", need, place=place)] if run else []),
        *([Check(Group.SPACE, "ages", lambda: look_at_ages(run), 60, place)] if run and exists else []),
        _space_check("TMPDIR", Path(os.environ.get("TMPDIR") or "/tmp")),
        _space_check("HOME", Path.home()),
    ]


def _only_read(folder: Path) -> Check:
    """Return the check for who may read a run, and not write to it: nothing is tried out there."""
    told = f"you may read {folder}, and not write: what needs files there is for its owner to try"
    return Check(Group.SPACE, "writing", lambda: skipped("writing", told))


def _space_check(title: str, folder: Path) -> Check:
    place = str(folder)
    return Check(Group.SPACE, title, lambda: judge_space(title, place, *room(folder)), place=place)


def judge_space(title: str, folder: str, free: int, inodes: int | None) -> Finding:
    """Judge whether anything can be written at all. Pure."""
    files = "inodes not counted" if inodes is None else f"{inodes} inodes free"
    told = f"{folder}: {size(free)} free, {files}"
    numbers = {"free_bytes": float(free)} | ({} if inodes is None else {"free_inodes": float(inodes)})
    advice, left = "make room there, or choose another folder", math.inf if inodes is None else inodes
    if free < _NOTHING_BYTES or left < _NOTHING_FILES:
        return problem(title, told, advice, **numbers)
    if free < _LITTLE_BYTES or left < _LITTLE_FILES:
        return warning(title, told, advice, **numbers)
    return ok(title, told, **numbers)


def look_at_writing(folder: Path) -> Finding:
    """Write a file: a quota shows only here, what is free is of the whole filesystem."""
    try:
        with scratch(folder) as place:
            started = time.perf_counter()
            with (place / "file").open("wb") as file:
                file.write(os.urandom(_WRITTEN_BYTES))
                file.flush()
                os.fsync(file.fileno())
            seconds = time.perf_counter() - started
    except OSError as error:
        advice = "make room, ask for more quota, or choose a folder that you may write to"
        return problem("writing", f"{size(_WRITTEN_BYTES)} in {folder}: {error.strerror}", advice)
    rate = _WRITTEN_BYTES / seconds
    return ok("writing", f"{size(_WRITTEN_BYTES)} in {seconds:.2f} s ({size(rate)}/s)", bytes_per_second=rate)


def look_at_ages(run: Run) -> Finding:
    """Look at every file of a run for those that the site is about to remove."""
    days = run.config.storage.purge_days
    found = ages_of(files_below(run.paths.root), days or math.inf, time.time())
    told = f"the oldest file of the run was not used for {found.days:.0f} days"
    if days is None:
        return ok("ages", f"{told}; storage.purge_days is not set: nothing is taken to be removed")
    if not found.count:
        return ok("ages", f"{told}; files are removed after {days}")
    return warning(
        "ages", in_words(found, run, days), "copy the run, or let it go on: see docs/howto/scratch.md"
    )


def judge_need(given: Estimate, free: int, inodes: int | None) -> Finding:
    """Judge the need against what is free. Pure."""
    if not given.iterations_left:
        return skipped("need", "no iteration is left")
    need = given.needed
    how = "as the last iteration was" if given.is_measured else "estimated from the models"
    told = (
        f"{size(need.num_bytes)} and {need.files} files for {given.iterations_left} iterations "
        f"({size(given.state.num_bytes)} of policy, critic and trainer state, {given.states_more} more at "
        f"once; {size(given.shards.num_bytes)} of shards each; {how})"
    )
    numbers = {"need_bytes": float(need.num_bytes), "need_files": float(need.files)}
    share = max(need.num_bytes / max(free, 1), 0 if inodes is None else need.files / max(inodes, 1))
    keep = "keep fewer states (update.keep_last=N), or choose another filesystem"
    if share > 1:
        return problem("need", f"{told}; only {size(free)} are free", keep, **numbers)
    if share > _TIGHT_SHARE:
        return warning("need", f"{told}; {size(free)} are free", keep, **numbers)
    return ok("need", told, **numbers)
