"""Cancelling a run that cannot be opened any more: a purge has taken what identifies it, or all of it. Its
jobs have its id in their names."""

import contextlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pipeline.cli.errors import will_change
from pipeline.cli.queue import cancel_run
from pipeline.executors.slurm.queue import cancel_of_id
from pipeline.run.control import SpoiltControl, read_control, write_control
from pipeline.run.directory import is_run, load_run, shown
from pipeline.run.identity import RunError, read_identity
from pipeline.run.originals import find_original
from pipeline.run.owner import who_acts
from pipeline.run.paths import RunPaths
from pipeline.run.place import no_own_jobs
from pipeline.run.standpoint import check_is_ours, owner_of
from pipeline.run.submissions import run_id_of
from slurm.commands import SlurmError
from slurm.limits import read_cluster_names
from slurm.sharedfiles import names_in, read_shared, unsealed

_ID = re.compile(r"[0-9a-f]{12}")


class Left(NamedTuple):
    """What is left of a run's identity."""

    run_id: str
    root: str
    """Directory that it names; empty where it names none."""


def cancel_whatever_is_left(root: Path) -> str:
    """Cancel every job of a run, or of an id. Returns what to say.

    Raises:
        RunError: there is no run, nor anything that names the id of one; or it is a copy.
    """
    try:
        run = load_run(root)
    except RunError:
        # Another trouble than that its files are gone is the user's to fix.
        configs = {RunPaths(root).config_yaml.name, RunPaths(root).config_copy.name}
        if (is_run(root) and configs & names_in(root)) or not (left := _left_of(root)):
            raise
    else:
        return cancel_run(run)
    paths = RunPaths(root.absolute())
    if original := find_original(left.root, paths.root, left.run_id):
        raise no_own_jobs(paths.root, original, "cancel")
    cluster = _cluster_of(paths)
    with contextlib.suppress(SpoiltControl):
        check_is_ours(paths, lambda: who_acts(cluster))
    will_change("the queue")
    done = _cancel_everywhere(left.run_id, cluster)
    if paths.control.is_file():
        with contextlib.suppress(OSError, ValueError):  # drivers could not open the run either
            control = read_control(paths)
            write_control(paths, replace(control, cancelled=True, emptied=control.invocation))
    what_is_left = f"what is left of it: ls {shlex.quote(str(root))}"
    return f"{shown(root)} cannot be opened; {done}; {what_is_left}"


def _cluster_of(paths: RunPaths) -> str:
    """Return the name of the cluster that has a run's jobs; empty where that is not known."""
    with contextlib.suppress(SpoiltControl, OSError):
        owner = owner_of(paths)
        return owner.cluster if owner else ""
    return ""


def _cancel_everywhere(run_id: str, cluster: str) -> str:
    """Cancel the jobs that have a run's id. Returns what to say.

    Args:
        cluster: the one that has them; empty: this machine's is asked, and every other that accounting knows.

    Raises:
        SlurmError: this machine's cluster does not answer.
        RunError: nor does that which has them, from here.
    """
    here = who_acts().cluster
    count, message = 0, []
    if cluster in ("", here):
        count += cancel_of_id(run_id, "")
    for name in [cluster] if cluster else read_cluster_names():
        if name == here:
            continue
        try:
            count += cancel_of_id(run_id, name)
            message.append(f"cluster {name} was asked")
        except SlurmError as error:
            message.append(
                f"cluster {name} cannot be asked from here ({error}): run this on one of its machines"
            )
            if cluster:
                raise RunError(message[-1]) from None
    return "; ".join([f"cancelled {count} jobs that have its id, {run_id}, in their names", *message])


def _left_of(root: Path) -> Left | None:
    """Return what is left of the identity of a run in a directory, or the word itself as an id."""
    if not root.is_dir():
        is_id = root.name == str(root) and _ID.fullmatch(root.name)
        return Left(root.name, "") if is_id else None
    paths = RunPaths(root)
    with contextlib.suppress(OSError, ValueError):
        identity = read_identity(paths)
        return Left(identity.id, identity.root)
    return next(filter(None, map(_of_submission, _submissions(paths))), None)


def _submissions(paths: RunPaths) -> Iterator[Path]:
    """Yield the files of submissions, newest iterations first."""
    for folder in sorted(filter(str.isdecimal, names_in(paths.slurm)), key=int, reverse=True):
        yield from (paths.slurm / folder / name for name in sorted(names_in(paths.slurm / folder)))


def _of_submission(path: Path) -> Left | None:
    """Return what a submission's file says of the run: its jobs' name has the id, their command the place."""
    if path.suffix != ".json":
        return None
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError, LookupError):
        content = unsealed(read_shared(path))
        words = list(content["arguments"])
        root = words[words.index("--run-dir") + 1] if "--run-dir" in words else words[1]
        if run_id := run_id_of(content["name"]):
            return Left(run_id, root)
    return None
