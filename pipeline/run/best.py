"""The best policy of a run, by its evaluations."""

import json
import os
from collections.abc import Sequence

from pipeline.config.evaluate import HELDOUT_REWARD, Best
from pipeline.run.benchmarks import read_measured
from pipeline.run.commits import CorruptData, NotCommitted, Record, require_record, thinned_folders
from pipeline.run.directory import Run
from pipeline.run.durable import replace_durably
from pipeline.run.journal import Row
from pipeline.run.plan import policy_maker
from slurm.sharedfiles import is_there, read_newest


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
    private.replace(link)
