"""Retention: policies and trainers' states of old iterations are pruned, and readers can tell.

A commit record stays, so its iteration stays done. A marker beside it, written before anything is removed,
names the folders that went: what it names is gone on purpose, anything else that is missing is lost. A driver
that is killed between the two leaves folders that the next one finds, because it goes by what is on disk.
"""

import json
import os
import shlex
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from pipeline.config.evaluate import HELDOUT_REWARD, Best
from pipeline.config.schema import Config
from pipeline.run import inside, journal
from pipeline.run.benchmarks import read_measured
from pipeline.run.commits import CorruptData, NotCommitted, Record, require_record, thinned_folders
from pipeline.run.directory import Run, load_run
from pipeline.run.durable import replace_durably
from pipeline.run.identity import RunError
from pipeline.run.journal import Row
from pipeline.run.paths import RunPaths
from pipeline.run.plan import Plan, policy_maker, state_of
from pipeline.run.states import FOLDER, can_go_on, can_roll_out, has_references, oldest_needed
from pipeline.run.tasks import Task
from slurm.sharedfiles import from_json, is_there, make_folder, names_in, read_newest

_PARENTS = ("state", "trainer", "critic", "reference", "policy")
"""Folders that are pruned, in the order in which they go."""
_OF_REFERENCES = ("reference/", "policy/")
"""Folders of which one holds a reference that iterations still read (algorithm.kl.sync_every)."""


class Thinned(RunError):
    """A policy, critic or trainer state that is needed was removed on purpose."""


def is_kept(
    version: int,
    newest: int,
    keep_last: int,
    keep_every: int | None,
    awaited: Collection[int] = (),
    needed: int | None = None,
) -> bool:
    """Whether everything of an iteration stays. Pure.

    The newest can be made again from the one before it, so ``keep_last`` is at least 2
    (:func:`kept_last`).

    Args:
        needed: version from which on all stay, from :func:`oldest_needed`.
    """
    is_due = keep_every is not None and version % keep_every == 0
    is_needed = version in awaited or (needed is not None and version >= needed)
    return is_due or version > newest - keep_last or is_needed


def kept_last(config: Config) -> int | None:
    """Return how many of the newest versions stay whole: at least those that rollouts still read, and the one
    before them. None: all."""
    keep_last = config.update.keep_last
    return None if keep_last is None else max(keep_last, Plan.of(config).least_kept)


def thin(run: Run, newest: int, awaited: Collection[int] = ()) -> Iterator[str]:
    """Remove what the configuration does not keep, seen from iteration ``newest``. Idempotent.

    Later iterations are left alone, and so are ``awaited``, whose policies are still to be evaluated, and the
    newest two states with all policies after the older one. The best policy stays, without its state, and so
    do references of iterations that may still be computed. Costs a few listings of what is kept, however long
    the run is. Yields a line for each iteration of which something could not be removed.
    """
    keep_last, keep_every = kept_last(run.config), run.config.update.keep_every
    if keep_last is None:
        return
    best = found.policy if (found := read_best(run.paths)) else None
    needed = oldest_needed(run.plan, run.paths, newest)
    references = references_read(run.plan, min(needed, newest - keep_last + 1), newest)
    for version, folders in list_folders(run.paths).items():
        staying = _OF_REFERENCES if version in references else ()
        going = [folder for folder in folders if folder != best and not folder.startswith(staying)]
        if going and not is_kept(version, newest, keep_last, keep_every, awaited, needed):
            try:
                remove_folders(run.paths, version, going)
            except (OSError, CorruptData) as error:  # a reader on NFS may still hold a file open
                yield f"{', '.join(going)} could not be pruned yet: {error}"


def references_read(plan: Plan, oldest: int, newest: int) -> frozenset[int]:
    """Return the versions that are references of the iteration after ``newest``, or of one that may be
    computed again: those after version ``oldest``. Pure."""
    iterations = range(max(oldest, plan.start) + 1, newest + 2)
    return frozenset(version for iteration in iterations for version in plan.references_of(iteration))


def remove_folders(paths: RunPaths, version: int, folders: Sequence[str]) -> None:
    """Remove folders of a version; a marker beside its record says so first. Raises OSError, CorruptData."""
    of_state = [folder for folder in folders if folder.startswith("state/")]
    others = [folder for folder in folders if folder not in of_state]
    marked = [_mark(paths, state_of(version), of_state), _mark(paths, policy_maker(version), others)]
    if any(marked):
        journal.event(paths.events, "thinned", folders=folders)
    for folder in folders:
        parent, name = folder.split("/")
        link = paths.root / parent / name.split(".")[0]
        if link.is_symlink() and str(link.readlink()) == name:
            inside.remove(paths.root, link)
        inside.remove(paths.root, paths.root / folder)


def _mark(paths: RunPaths, task: Task, folders: Sequence[str]) -> bool:
    """Name folders in the marker beside the record that they belong to, unless they are named there. Returns
    whether they were not."""
    known = thinned_folders(paths, task)
    if known.issuperset(folders):
        return False
    text = json.dumps({"folders": sorted(known.union(folders))}) + "\n"
    make_folder(paths.task(task).folder, paths.root)
    replace_durably(paths.task(task).thinned, text)
    return True


def list_folders(paths: RunPaths) -> dict[int, list[str]]:
    """Return the folders of every attempt on disk, by version, ascending; e.g. ``trainer/00003.1-ab``."""
    found: dict[int, list[str]] = {}
    for parent in _PARENTS:
        folder = paths.root / parent
        for name in sorted(names_in(folder)):
            if (match := FOLDER.fullmatch(name)) and (folder / name).is_dir():
                found.setdefault(int(match[1]), []).append(f"{parent}/{name}")
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class BestPolicy:
    """The policy with the best value of evaluate.best."""

    iteration: int
    reward: float
    policy: str
    """Its folder, like ``policy/00003.1-ab``."""
    metric: str = HELDOUT_REWARD
    """Metric that ``reward`` is a value of."""


def read_best(paths: RunPaths) -> BestPolicy | None:
    """Return what ``best.json`` says; None where no policy was evaluated.

    Raises:
        RunError: it cannot be read.
    """
    try:
        best = from_json(read_newest(paths.best))
        wanted = {"iteration": int, "reward": int | float, "policy": str}
        wrong = [name for name, kind in wanted.items() if not isinstance(best[name], kind)]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
    else:
        if not wrong:
            metric = str(best.get("metric", HELDOUT_REWARD))
            return BestPolicy(best["iteration"], float(best["reward"]), best["policy"], metric)
        why = f"{wrong[0]} is {best[wrong[0]]!r}"
    again = f"slurm-ppo resume {shlex.quote(str(paths.root))}"
    raise RunError(
        f"{paths.best} cannot be read ({' '.join(why.split())}); remove it, and {again} writes it again"
    )


def kept_versions(paths: RunPaths, parents: Iterable[str] = _PARENTS) -> list[int]:
    """Return the committed versions of which nothing below ``parents`` was removed, ascending."""
    return [version for version in list_folders(paths) if _is_whole(paths, version, set(parents))]


def _is_whole(paths: RunPaths, version: int, parents: set[str]) -> bool:
    makers = policy_maker(version), state_of(version)
    try:
        gone = {folder.split("/")[0] for task in makers for folder in thinned_folders(paths, task)}
    except CorruptData:
        return False
    return is_there(paths.task(makers[0]).record) and not gone & parents


def check_is_kept(paths: RunPaths, record: Record, *parents: str) -> None:
    """Check that what an update committed below ``parents`` was not removed.

    Raises:
        Thinned: it was removed; the message names the iterations that one can go back to.
    """
    gone = sorted({folder.split("/")[0] for folder in thinned_folders(paths, record.task)} & set(parents))
    if gone:
        raise Thinned(
            f"iteration {record.task.iteration} was pruned on purpose (update.keep_last), its "
            f"{', '.join(gone)} is gone; {way_back(load_run(paths.root))}"
        )


def way_back(run: Run) -> str:
    """Return, in words, the iterations that the run can go back to, and how."""
    first = [1] if run.plan.start == 0 else []
    kept = kept_versions(run.paths, ["policy"])
    points = [*first, *(version + 1 for version in kept if can_go_on(run.plan, run.paths, version))]
    points = [p for p in points if p <= run.plan.iterations and can_roll_out(run.plan, run.paths, p)]
    points = [p for p in points if has_references(run.plan, run.paths, p)]
    command = f"slurm-ppo resume {shlex.quote(str(run.paths.root))} --from rollout@ITERATION"
    return f"one can go back to iteration {in_words(points)}: {command}" if points else "start a new run"


def in_words(numbers: Sequence[int]) -> str:
    """Format ascending numbers like ``1, 4 to 6, 9, 10``."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    words = {0: "{0}", 1: "{0}, {1}"}
    return ", ".join(words.get(last - first, "{0} to {1}").format(first, last) for first, last in spans)


# --- the best policy -------------------------------------------------------------------------------------


def keep_best(run: Run, rows: Sequence[Row]) -> None:
    """Point ``best.json`` and ``policy/best`` at the policy with the best value of evaluate.best so far.

    Thinned-out policies do not count: once the best was retracted, the second best may be gone. Nor do those
    whose commit records cannot be read: one that is being made again is considered when the driver ends.
    """
    for version, value in ranked(run, rows):
        task = policy_maker(version)
        try:
            record, thinned = require_record(run.paths, task), thinned_folders(run.paths, task)
        except (NotCommitted, CorruptData):
            continue
        folder = _folder(record, "policy")
        if folder not in thinned:
            best = {"iteration": version, "reward": value, "policy": folder}
            if (metric := run.config.evaluate.best) != HELDOUT_REWARD:
                best["metric"] = metric
            text = json.dumps(best) + "\n"
            if not is_there(run.paths.best) or read_newest(run.paths.best) != text.encode():
                replace_durably(run.paths.best, text)
                link_folder(run, record, "policy", "best")
            return


def ranked(run: Run, rows: Sequence[Row]) -> list[tuple[int, float]]:
    """Return versions and values of evaluate.best, the best first; of equal ones the earliest."""
    given, first = run.config.evaluate, run.plan.start
    if given.best_is_measured:
        found = [(one.policy_version, one.numbers) for one in read_measured(run.paths)]
    else:
        found = [(int(row["policy_version"]), row) for row in rows if given.best in row]
    values = [(at, numbers[given.best]) for at, numbers in found if given.best in numbers and at > first]
    sign = -1 if given.best_is is Best.HIGHEST else 1
    return sorted(values, key=lambda one: sign * one[1])


def _folder(record: Record, parent: str) -> str | None:
    """Return the attempt's folder below ``parent`` (policy, state, ...), relative to the run."""
    folders = (entry.folder for entry in record.outputs)
    return next((folder for folder in folders if folder.startswith(f"{parent}/")), None)


def link_folder(run: Run, record: Record, parent: str, name: str) -> None:
    """Link the folder of a commit under a name of its own. A folder in the place of the link, as copying
    programs make that follow links, is moved aside, as ``NAME.in-the-way.TIME``."""
    folder = _folder(record, parent)
    if folder is None:
        return
    link = run.paths.root / parent / name
    target = folder.removeprefix(f"{parent}/")
    if link.is_symlink() and str(link.readlink()) == target:
        return
    private = link.with_name(f".{name}.{os.getpid()}")
    private.unlink(missing_ok=True)
    private.symlink_to(target)
    if link.is_dir() and not link.is_symlink():
        link.rename(link.with_name(f"{name}.in-the-way.{time.time_ns()}"))
    private.replace(link)
