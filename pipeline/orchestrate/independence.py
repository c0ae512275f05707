"""A copy of a run becomes a run of its own: with its own id it has jobs, a lease and a run on W&B.

What was copied of the original's jobs and processes says nothing of the copy's, and is removed; what was
committed, rows and journals stay. The new id is written last: a call that is killed before leaves a copy, and
the next goes on.
"""

import contextlib
import os
import shutil
from dataclasses import replace
from pathlib import Path

from pipeline.run import inside, journal
from pipeline.run.control import Control, read_control, write_control
from pipeline.run.directory import Run, load_run
from pipeline.run.identity import RunError, write_identity
from pipeline.run.lease import LeaseHeld, hold
from pipeline.run.place import original_of
from pipeline.run.records import find_frontier
from pipeline.run.submissions import Ledger
from pipeline.run.superseded import fresh_folder
from pipeline.run.twofold import both_of
from slurm.sharedfiles import is_there, names_in

COPIED = "copied"
"""Name of the journal's event: from where, and whose copy the run was."""


def make_independent(copy: Run) -> Run:
    """Give a copy an id of its own, unless another call has just done so. Returns the run as it is then.

    Raises:
        RunError: another call is at it.
    """
    # Leases are copied too: this one is named by the folder's own number, which no copy has.
    claim = copy.paths.root / f".own-{copy.paths.root.stat().st_ino}"
    try:
        with hold(claim):
            run = load_run(copy.paths.root)
            if original := original_of(run):
                run = _separate(run, original)
    except LeaseHeld:
        raise RunError(f"another call gives {copy.paths.root} an id of its own just now; try again") from None
    shutil.rmtree(claim, ignore_errors=True)
    return run


def _separate(run: Run, original: Path) -> Run:
    paths = run.paths
    if is_there(paths.locks):
        inside.remove(paths.root, paths.locks)
    for name in sorted(names_in(paths.slurm)):
        if not name.isdecimal() and paths.slurm / name not in both_of(paths.control):
            inside.remove(paths.root, paths.slurm / name)
    for mirror in filter(is_there, (paths.wandb, paths.tensorboard, paths.mlflow)):
        aside = fresh_folder(paths.superseded, f"{mirror.name}-of-the-original")
        inside.move(paths.root, mirror, aside / mirror.name)
    if run.config.slurm:
        _forget_jobs(run)
    identity = replace(run.identity, id=os.urandom(6).hex(), root=str(paths.root))
    journal.event(paths.events, COPIED, original=str(original), id=run.identity.id, own_id=identity.id)
    write_identity(paths, identity)
    return replace(run, identity=identity)


def _forget_jobs(run: Run) -> None:
    """Mark what the original has submitted as none of the copy's; that it leaves no commit is no failure."""
    with contextlib.suppress(ValueError):  # one that cannot be read is written again by what comes
        before = read_control(run.paths).invocation
        write_control(run.paths, Control(before, emptied=before))
    ledger, done = Ledger(run.paths), find_frontier(run.plan, run.paths).updated
    iterations = {int(name) for name in names_in(run.paths.slurm) if name.isdecimal()}
    for submission in ledger.load({0, *(number for number in iterations if number >= done)}):
        ledger.note(submission, replace(submission.state, is_withdrawn=True))
