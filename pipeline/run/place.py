"""Where a run lies, and whether a directory is the run, was moved, or is a copy of one that is there still.

``run.json`` names the directory in which the run was made or last went on. Who finds it elsewhere looks
there:

* the same directory, by another path or mount: it is the run;
* nothing, or another run: it was moved, or put back from an archive, and is the run;
* a run of the same id: it is a copy. The jobs, the lease and W&B's run belong to the original.

What lies in the named directory is the run, whatever it is made of: jobs in the queue name it, and a run
that is put back there from an archive goes on.
"""

import shlex
from dataclasses import replace
from pathlib import Path

from pipeline.run.directory import Run, shown
from pipeline.run.identity import RunError, write_identity
from pipeline.run.originals import find_original, is_one


def original_of(run: Run) -> Path | None:
    """Return the directory of the run that this one is a copy of; None where it is the run itself, or was
    moved. Raises OSError where that cannot be seen now."""
    return find_original(run.identity.root, run.paths.root, run.identity.id)


def is_elsewhere(run: Run) -> bool:
    """Whether the run's identity names another directory than that in which it lies."""
    known, here = run.identity.root, run.paths.root
    return known not in ("", str(here)) and not (Path(known).is_dir() and is_one(Path(known), here))


def settle(run: Run) -> Run:
    """Note where the run lies now, for the holder of its lease. Returns the run as it is then."""
    if run.identity.root and not is_elsewhere(run):
        return run
    identity = replace(run.identity, root=str(run.paths.root))
    write_identity(run.paths, identity)
    return replace(run, identity=identity)


def check_is_no_copy(run: Run, word: str) -> None:
    """Refuse to do with a copy what only its original has jobs or a run on W&B for. Raises RunError.

    Args:
        word: the command, which can be typed of the original.
    """
    if original := original_of(run):
        raise no_own_jobs(run.paths.root, original, word)


def no_own_jobs(copy: Path, original: Path, word: str) -> RunError:
    """Return the refusal of :func:`check_is_no_copy`."""
    return RunError(
        f"{shown(copy)} is a copy, and has no jobs nor a run on W&B of its own; those of {shown(original)} "
        f"are left alone; for that: slurm-ppo {word} {shlex.quote(shown(original))}"
    )
