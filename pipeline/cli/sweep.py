"""``slurm-ppo sweep``: makes and extends sweeps, and carries out their runs."""

import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.cli.errors import say_error, system_error
from pipeline.cli.listing import entries_of
from pipeline.cli.sweep_runs import LEFT_ALONE, NOT_COMPLETE, STOP_SECONDS, PointRun, Runner, end_with_sweep
from pipeline.config.allocation import AllocationConfig
from pipeline.config.choices import known_groups
from pipeline.config.compose import compose
from pipeline.config.findings import Findings
from pipeline.config.scheduler import LocalConfig
from pipeline.config.schema import Config
from pipeline.run.directory import is_run, near_runs, no_setting, shown
from pipeline.run.identity import RunError
from pipeline.run.lease import Lease, LeaseHeld, hold, holder_of
from pipeline.run.paths import RunPaths
from pipeline.run.standpoint import NotOurs
from pipeline.status.listing import Entry
from pipeline.status.listing_text import describe
from pipeline.sweep.grid import SweepError, parse_grid, read_words
from pipeline.sweep.manifest import Sweep, SweepPoint, is_sweep, locks_of, read_sweep, without, write_sweep
from pipeline.sweep.points import (
    Draft,
    as_begun,
    check_folder,
    config_of,
    drafts_of,
    extended,
    has_begun,
    run_folder,
)
from pipeline.text import table
from slurm.errors import ServiceError, UnfinishedError, UserError

_PATIENCE = 300.0
"""Seconds to wait for another command that submits the same sweep."""
_END_SECONDS, _LOOK_SECONDS = 60.0, 0.2
"""Seconds to wait for a run whose command was killed, and between two looks at it."""
_SUBMITTING = 2
"""Runs that are submitted to Slurm at once: each asks the controller some questions."""


@dataclass(frozen=True)
class Asked:
    """Words of a command."""

    words: Sequence[str]
    """Overrides, or the folder of a sweep alone."""
    config_dir: Path | None = None
    num_seeds: int | None = None
    at_once: int | None = None

    def existing(self) -> Path | None:
        """Return the sweep's folder where that is the only word. Raises UserError for a word that is no
        setting."""
        named = [word for word in self.words if "=" not in word]
        if not named:
            return None
        if len(self.words) == 1 and is_sweep(root := Path(named[0])):
            if self.num_seeds is not None:
                raise SweepError(
                    "--seeds goes with settings: give the sweep's settings again, with more seeds"
                )
            return root.absolute()
        if is_sweep(Path(named[0])):
            raise SweepError(f"{named[0]} is a sweep; to extend it give its settings again, with more values")
        raise _no_sweep(named[0])


def _no_sweep(word: str) -> UserError:
    """Return the error for a word that sets nothing and is no sweep's folder."""
    root = Path(word)
    if is_run(root):
        return no_setting(word)
    what = "holds no sweep" if root.exists() else "is not a sweep: nothing is there"
    near = near_runs(root, is_sweep)
    return SweepError(f"{shown(root)} {what}{near}; give the folder of a sweep, or settings as KEY=A,B")


def list_points(asked: Asked) -> str:
    """Return what a command would start, without starting or writing anything."""
    root = asked.existing()
    if root is not None:
        sweep = read_sweep(root)
    else:
        root, sweep, drafts = _read_words(asked)
        _say_decided(drafts)
    lines = [["run", *sweep.keys]]
    lines += [[p.name, *(p.settings.get(key, "-") for key in sweep.keys)] for p in sweep.points]
    runs = "1 run" if len(sweep.points) == 1 else f"{len(sweep.points)} runs"
    return "\n".join([*table(lines), "", f"{runs} in {root}; nothing was started"])


def drop_point(asked: Asked, name: str) -> str:
    """Take a point out of a sweep; what its run has on disk, and in Slurm's queue, stays. Returns what to
    say."""
    root = _folder(asked, "--drop")
    with hold(locks_of(root), _PATIENCE):
        sweep = read_sweep(root)
        write_sweep(root, without(sweep, name))
    return f"{name} is no longer part of the sweep; {_what_stays(root, sweep.point(name))}"


def _what_stays(root: Path, dropped: SweepPoint) -> str:
    folder = run_folder(root, dropped)
    if not is_run(folder):
        return "it had not begun"
    stays = f"its run stays in {folder}"
    if dropped.config["scheduler"]["kind"] != "slurm":  # read so, as a point that no longer loads can go too
        return stays
    return f"{stays}, and its jobs in the queue; to cancel them: slurm-ppo cancel {shlex.quote(str(folder))}"


def carry_out(asked: Asked, point: str | None = None) -> int:
    """Make, extend or continue a sweep, and carry out its runs. Returns the exit code.

    Args:
        point: carry out this run of a sweep that is there, in this process.
    """
    if point is not None:
        of_sweep = _folder(asked, "--point")
        end_with_sweep()
        return _carry_out_point(of_sweep, read_sweep(of_sweep).point(point))
    existing = asked.existing()
    return _begin(asked) if existing is None else _go_on(existing, asked)


def _go_on(root: Path, asked: Asked) -> int:
    """Continue a sweep as it is."""
    config = _config_of_all(root, read_sweep(root))
    gpus = _gpus_of_runs(config, asked.at_once)
    with hold(locks_of(root), _patience(config)) as lease:
        return _drive(root, read_sweep(root), asked, lease, gpus)


def _begin(asked: Asked) -> int:
    """Make a sweep, or extend the one that is there, and carry it out."""
    root, _, drafts = _read_words(asked)
    _say_decided(drafts)
    gpus = _gpus_of_runs(drafts[0].config, asked.at_once)
    _check_inputs(root, drafts)
    with hold(locks_of(root), _patience(drafts[0].config)) as lease:
        sweep = _read_words(asked, drafts)[1]  # another command may have extended it since
        if not is_sweep(root) or read_sweep(root) != sweep:
            write_sweep(root, sweep)
        return _drive(root, sweep, asked, lease, gpus)


def _folder(asked: Asked, option: str) -> Path:
    root = asked.existing()
    if root is None:
        raise SweepError(f"{option} goes with the folder of a sweep: slurm-ppo sweep DIR {option} NAME")
    return root


def _read_words(asked: Asked, drafts: list[Draft] | None = None) -> tuple[Path, Sweep, list[Draft]]:
    """Read settings: return the sweep's folder, the sweep as it is to be, and the points asked for."""
    groups = known_groups(asked.config_dir)
    unchecked = read_words(asked.words, groups, asked.num_seeds)
    first = [*unchecked.fixed, *next(unchecked.points())[1]]  # run_dir with the first value of every key
    root = Path(compose(first, asked.config_dir).run_dir).absolute()
    before = read_sweep(root) if is_sweep(root) else None
    grid = parse_grid(asked.words, groups, asked.num_seeds, before.keys if before else ())
    if before is None:
        check_folder(root)
    drafts = as_begun(root, before, drafts or drafts_of(grid, asked.config_dir))
    return root, extended(root, before, grid, drafts, str(Path.cwd())), drafts


def _say_decided(drafts: Sequence[Draft]) -> None:
    """Say what was decided of settings that are auto: a line, or one for each that points have."""
    for line in dict.fromkeys(draft.decided for draft in drafts if draft.decided):
        print(line, file=sys.stderr)


def _check_inputs(root: Path, drafts: Sequence[Draft]) -> None:
    """Refuse a new sweep whose first run cannot work, before anything is made."""
    if is_sweep(root):
        return
    from pipeline.checks.settings import validate_inputs

    found = Findings()
    for line in validate_inputs(drafts[0].config, found):
        if not found:
            print(line, file=sys.stderr)
    found.refuse()


def _config_of_all(root: Path, sweep: Sweep) -> Config:
    if not sweep.points:
        raise SweepError(f"the sweep in {root} has no runs left; give its settings again")
    return config_of(root, sweep.points[0])


def _patience(config: Config) -> float:
    """Return the seconds to wait for the sweep's lease: two commands would carry out the same runs. On Slurm
    they take turns; in an allocation the one before may have been killed with its node, and its lease runs
    out."""
    return 0.0 if isinstance(config.scheduler, LocalConfig) else _PATIENCE


def _drive(root: Path, sweep: Sweep, asked: Asked, lease: Lease, gpus: list[tuple[str, ...]]) -> int:
    config = config_of(root, sweep.points[0])
    on_slurm = config.slurm is not None
    folder = Path(sweep.folder) if Path(sweep.folder).is_dir() else Path.cwd()
    due = _due(root, sweep, on_slurm)
    print(f"sweep directory: {root}; {len(due)} of {len(sweep.points)} runs to do", file=sys.stderr)
    at_once = asked.at_once or (_SUBMITTING if on_slurm else 1)
    grace = config.scheduler.grace if isinstance(config.scheduler, AllocationConfig) else 0.0
    runner = Runner(root, folder, at_once, lease, gpus, sweep.keys, grace + STOP_SECONDS)
    ends = runner.carry_out(due)
    entries = entries_of(root)
    print(_summary(root, entries, ends, on_slurm))
    is_over = on_slurm or all(entry.state == "complete" for entry in entries)
    return _exit_code(ends, len(due)) or (0 if is_over else NOT_COMPLETE)


def _gpus_of_runs(config: Config, at_once: int | None) -> list[tuple[str, ...]]:
    """Divide the GPUs of this machine among the runs that go on at once; return nothing where runs are given
    none.

    Raises:
        ConfigError: there are fewer GPUs than runs.
        SweepError: --at-once is given, and runs are not processes that share this machine.
    """
    from pipeline.executors.devices import devices_of, parts

    if config.slurm is not None and at_once is not None:
        raise SweepError(
            "--at-once is for runs of this machine; on Slurm the queue decides what runs at once"
        )
    if isinstance(config.scheduler, AllocationConfig) and (at_once or 1) > 1:
        raise SweepError(
            f"--at-once={at_once}: in an allocation each run takes all of it, so one follows the other; "
            "leave --at-once out, or ask for several allocations, with a sweep in each"
        )
    given = config.scheduler
    if at_once is None or at_once == 1 or not isinstance(given, LocalConfig):
        return []
    return parts(devices_of(given), at_once)


def _due(root: Path, sweep: Sweep, on_slurm: bool) -> list[SweepPoint]:
    """Return the points that are not complete. Active ones are left alone on Slurm; on this machine they
    come last, as they may be about to end since their command was killed (:func:`_carry_out_point`)."""
    states = [entry.state for entry in entries_of(root)]
    found = list(zip(sweep.points, states, strict=True))
    at_work = [point for point, state in found if state == "running"]
    due = [point for point, state in found if state not in ("complete", "running")]
    return due if on_slurm else [*due, *at_work]


def _carry_out_point(root: Path, point: SweepPoint) -> int:
    """Start the run of a point, or continue it; one that has a driver on this machine is left alone.
    Returns the exit code."""
    from pipeline.cli.run import resume_run, start
    from pipeline.run.directory import load_run

    config, folder = config_of(root, point), run_folder(root, point)
    try:
        if isinstance(config.scheduler, LocalConfig):  # others wait until a lease runs out
            _wait_for_holder(RunPaths(folder).locks)
        if has_begun(root, point):
            return resume_run(load_run(folder), watch=config.slurm is None)
        return start(config, Findings(), watch=config.slurm is None)
    except LeaseHeld as error:
        if config.slurm is not None:
            raise
        print(f"{LEFT_ALONE}{error}", file=sys.stderr)
        return NOT_COMPLETE


def _wait_for_holder(locks: Path) -> None:
    """Wait for a driver whose command was killed, and which ends in order. Raises LeaseHeld where it does not
    end, as it is another's."""
    until = time.monotonic() + _END_SECONDS
    while holder := holder_of(locks):
        if time.monotonic() >= until:
            raise LeaseHeld(holder)
        time.sleep(_LOOK_SECONDS)


def _exit_code(ends: Sequence[PointRun], due: int) -> int:
    """0 all done, 1 some failed, 3 interrupted, or another is active; 2 where nothing could be started, as
    settings are wrong."""
    if any(end.code not in (0, 2, NOT_COMPLETE) for end in ends):
        return 1
    if any(end.code == 2 for end in ends):
        return 2 if all(end.code == 2 for end in ends) and len(ends) == due else 1
    return NOT_COMPLETE if len(ends) < due or any(end.code == NOT_COMPLETE for end in ends) else 0


def _summary(root: Path, entries: Sequence[Entry], ends: Sequence[PointRun], on_slurm: bool) -> str:
    """Return the list of runs, what failed and why, and the next commands."""
    place = shlex.quote(os.path.relpath(root) if len(os.path.relpath(root)) < len(str(root)) else str(root))
    lines = [describe(entries, root), ""]
    for end in ends:
        if end.code not in (0, NOT_COMPLETE):
            lines.append(f"{end.point.name} failed: {end.said}; log: {end.log}")
    is_over = all(entry.state == "complete" for entry in entries)
    again = f"  continue:  slurm-ppo sweep {place}"
    more = f"  list:      slurm-ppo ls {place}"
    stop = f"  cancel:    slurm-ppo cancel {place}"
    report = f"  compare:   slurm-ppo report {place}"
    lines += [*([more, stop] if on_slurm else []), *([] if is_over else [again]), report]
    return "\n".join(lines)


def cancel_sweep(root: Path) -> int:
    """Cancel the jobs of all runs of a sweep on Slurm, and say so. One that cannot be cancelled does not stop
    the others. Returns the exit code."""
    sweep = read_sweep(root)
    if _config_of_all(root, sweep).slurm is None:
        raise RunError("the sweep's tasks are processes of the command that started it: end that with Ctrl-C")
    failed, refused = [], 0
    with hold(locks_of(root), _PATIENCE) as lease:
        for point in sweep.points:
            lease.beat()
            try:
                print(f"{point.name}: {_cancel(run_folder(root, point))}")
            except UnfinishedError as error:
                failed.append(f"{point.name}: {error}")
            except (UserError, ServiceError) as error:
                failed.append(f"not cancelled: {point.name}: {error}")
                refused += isinstance(error, NotOurs)
            except OSError as error:
                failed.append(f"not cancelled: {point.name}: {system_error(error)}")
    print(f"nothing that was committed is lost; to continue: slurm-ppo sweep {shlex.quote(str(root))}")
    for line in failed:
        say_error(line)
    return (2 if refused == len(sweep.points) else 1) if failed else 0


def _cancel(folder: Path) -> str:
    """Cancel the jobs of a run, if it has begun. Returns what to say."""
    from pipeline.cli.queue import cancel_run
    from pipeline.run.directory import load_run

    return cancel_run(load_run(folder)).partition(";")[0] if is_run(folder) else "it has not begun"
