"""Checks of room and inodes where a run writes, against what it still needs."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from pipeline.doctor.estimate import Estimate, estimate
from pipeline.doctor.findings import Check, Finding, Group, ok, problem, skipped, warning
from pipeline.doctor.place import scratch
from pipeline.preflight.disk_need import Footprint, room
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


def space_checks(folder: Path, run: Run | None, exists: bool) -> list[Check]:
    """Return the checks of the run directory's folder, and of those that libraries write to."""
    writing = Check(
        Group.SPACE, "writing", lambda: look_at_writing(folder), limit=30, place=str(folder), gate=WRITING
    )
    checks = [_space_check("run directory", folder), writing]
    if run is not None:
        checks.append(
            Check(Group.SPACE, "need", lambda: look_at_need(folder, run, exists), place=str(folder))
        )
    return [
        *checks,
        _space_check("TMPDIR", Path(os.environ.get("TMPDIR") or "/tmp")),
        _space_check("HOME", Path.home()),
    ]


def _space_check(title: str, folder: Path) -> Check:
    return Check(Group.SPACE, title, lambda: look_at_space(title, folder), place=str(folder))


def look_at_space(title: str, folder: Path) -> Iterator[Finding]:
    free, inodes = room(folder)
    yield judge_space(title, str(folder), free, inodes)


def judge_space(title: str, folder: str, free: int, inodes: int | None) -> Finding:
    """Judge whether anything can be written at all. Pure."""
    files = "inodes not counted" if inodes is None else f"{inodes} inodes free"
    told = f"{folder}: {size(free)} free, {files}"
    numbers = {"free_bytes": float(free)} | ({} if inodes is None else {"free_inodes": float(inodes)})
    advice = "make room there, or choose another folder"
    if free < _NOTHING_BYTES or (inodes is not None and inodes < _NOTHING_FILES):
        return problem(title, told, advice, **numbers)
    if free < _LITTLE_BYTES or (inodes is not None and inodes < _LITTLE_FILES):
        return warning(title, told, advice, **numbers)
    return ok(title, told, **numbers)


def look_at_writing(folder: Path) -> Iterator[Finding]:
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
        yield problem("writing", f"{size(_WRITTEN_BYTES)} in {folder}: {error.strerror}", advice)
        return
    rate = _WRITTEN_BYTES / seconds
    yield ok("writing", f"{size(_WRITTEN_BYTES)} in {seconds:.2f} s ({size(rate)}/s)", bytes_per_second=rate)


def look_at_need(folder: Path, run: Run, exists: bool) -> Iterator[Finding]:
    free, inodes = room(folder)
    yield judge_need(estimate(run, exists), free, inodes)


def judge_need(given: Estimate, free: int, inodes: int | None) -> Finding:
    """Judge the need against what is free. Pure."""
    if not given.iterations_left:
        return skipped("need", "no iteration is left")
    need: Footprint = given.needed
    how = "as the last iteration was" if given.is_measured else "estimated from the models"
    told = (
        f"{size(need.num_bytes)} and {need.files} files for {given.iterations_left} iterations "
        f"({size(given.state.num_bytes)} of policy, critic and trainer state, {given.states_more} more at "
        f"once; {size(given.shards.num_bytes)} of shards each; {how})"
    )
    numbers = {"need_bytes": float(need.num_bytes), "need_files": float(need.files)}
    is_over = need.num_bytes > free or (inodes is not None and need.files > inodes)
    is_tight = need.num_bytes > _TIGHT_SHARE * free
    is_tight |= inodes is not None and need.files > _TIGHT_SHARE * inodes
    keep = "keep fewer states (update.keep_last=N), or choose another filesystem"
    if is_over:
        return problem("need", f"{told}; only {size(free)} are free", keep, **numbers)
    if is_tight:
        return warning("need", f"{told}; {size(free)} are free", keep, **numbers)
    return ok("need", told, **numbers)
