"""A run directory, opened to look at it: rows, records, samples, policies, status. Read only."""

import operator
import os
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config.home import full_path
from pipeline.config.schema import Config
from pipeline.metrics.samples import Damage, Samples
from pipeline.run.commits import CorruptData, Record, check_sizes, read_record
from pipeline.run.directory import Run, load_run
from pipeline.run.identity import RunError
from pipeline.run.plan import policy_maker, state_of
from pipeline.run.records import Records, find_frontier
from pipeline.run.retention import kept_versions, read_best
from pipeline.sweep.grid import SweepError
from pipeline.sweep.manifest import is_sweep
from slurm.errors import UserError

if TYPE_CHECKING:
    import pandas
    import pyarrow as pa

    from pipeline.status.state import Status

_INDEX = "iteration"


class MissingPackage(UserError, ImportError):
    """A package that is not among the requirements of slurm-ppo is needed, and is not installed."""


@dataclass(frozen=True)
class TaskRecords:
    """Commit records of an iteration's tasks."""

    iteration: int
    rows: tuple[Record, ...]
    """Records, inputs before what reads them."""
    damage: tuple[Damage, ...]
    """Tasks whose record, or a file that it names, is gone or not as it was committed, by size."""
    missing: tuple[str, ...]
    """Tasks that are not committed."""


@dataclass(frozen=True)
class Policy:
    """A committed policy that was kept."""

    version: int
    """0 is the model that the run began with."""
    path: Path
    """Model directory, as transformers loads it; with ``is_adapter`` one whose ``adapter`` peft loads."""
    is_adapter: bool
    """Whether it holds an adapter instead of a model; ``slurm-ppo export`` makes a whole model of one."""
    reward: float | None
    """Mean reward on held-out prompts; None where it was not evaluated."""
    is_best: bool
    """Whether it is the best of the run so far, by ``evaluate.best`` and ``evaluate.best_is``."""
    damage: Damage | None = None
    """What is wrong with its files, by their sizes."""


def open_run(path: str | os.PathLike[str]) -> "OpenedRun":
    """Open a run directory, whether the run has begun, goes on or has ended, to look at it.

    Of a sweep's folder the best run is opened, by the rule of the sweep's report; :attr:`OpenedRun.chosen`
    says which one, and why.

    Raises:
        RunError: there is no run, it cannot be read, or ``path`` is none; one line says what, and the way
            out. Also where no run of a sweep has a row yet, or its manifest cannot be read.
        NoHome: a ValueError like all of them: ``path`` begins with ``~NAME``, and there is no such user.
    """
    root = _given_path("path", path)
    if not is_sweep(root):
        return OpenedRun(load_run(root))
    from pipeline.status.sweep import choose_run

    try:
        best = choose_run(root)
    except SweepError as error:
        raise RunError(str(error)) from None
    return OpenedRun(load_run(Path(best.run)), best.in_words)


@dataclass(frozen=True, repr=False)
class OpenedRun:
    """A run to look at. Nothing is written; each call reads what is on disk."""

    _run: Run = field()
    chosen: str = ""
    """Name of the run within the sweep whose folder was opened, and why it is this one; empty for a run that
    was named itself."""

    def __repr__(self) -> str:
        return f"<run {self.name} in {self.path}{f': {self.chosen}' if self.chosen else ''}>"

    @property
    def path(self) -> Path:
        """The run directory, absolute."""
        return self._run.paths.root

    @property
    def name(self) -> str:
        """The run's name (``name=`` of its configuration)."""
        return self._run.identity.name

    @property
    def id(self) -> str:
        """The run's id, also on W&B."""
        return self._run.identity.id

    @property
    def config(self) -> Config:
        """The resolved configuration: a tree of dataclasses, with the keys of the reference as attributes."""
        return self._run.config

    def status(self) -> "Status":
        """Return where the run stands. Of a run on Slurm, its queue is asked, for 15 seconds at most.

        The keys that ``slurm-ppo status --json`` prints are its attributes, such as ``state``,
        ``iterations_done``, ``iterations``, ``evaluations_done`` and ``evaluations``.
        """
        from pipeline.status.snapshot import read_status

        return read_status(self._run)

    def metrics(self) -> "pa.Table":
        """Return the rows of metrics.jsonl: a row per iteration, ascending, and a column per number.

        ``iteration`` is the first column; the reference of metrics has the others, with their units. A column
        is int64 where all its numbers are integers, else float64; what an iteration does not have is null.
        If the policy that the run begins with was evaluated, the first row holds that evaluation. A run that
        has not begun has no rows.

        Raises:
            RunError: a row is not made of numbers.
        """
        import pyarrow as pa

        from pipeline.report.data import read_rows

        columns, rows = {}, read_rows(self._run)
        for name in dict.fromkeys([_INDEX, *(name for row in rows for name in row)]):
            values = [row.get(name) for row in rows]
            is_whole = all(value is None or isinstance(value, int) for value in values)
            columns[name] = pa.array(values, pa.int64() if is_whole else pa.float64())
        return pa.table(columns)

    def metrics_frame(self) -> "pandas.DataFrame":
        """Return :meth:`metrics` as a pandas frame whose index is the iteration. Null is NaN.

        Raises:
            MissingPackage: pandas is not installed; it is not among the requirements of slurm-ppo.
            RunError: a row is not made of numbers.
        """
        try:
            import pandas  # noqa: F401
        except ImportError:
            raise MissingPackage(
                "pandas is not installed here: pip install pandas; or take metrics(), which is an Arrow table"
            ) from None
        return self.metrics().to_pandas().set_index(_INDEX)

    def samples(
        self,
        iteration: int | None = None,
        *,
        best: int = 0,
        worst: int = 0,
        at_random: int = 0,
        prompt: str | None = None,
        seed: int | None = None,
    ) -> Samples:
        """Return responses of an iteration with their scores: all of them, or those that are asked for.

        No response comes twice: the best first, descending, then the worst, ascending, then random ones.
        Shards that cannot be read are left out and named in :attr:`Samples.damage`. While an iteration is
        running, the shards that are scored already are read.

        Args:
            iteration: default: the newest of which anything has a reward.
            best: so many of the highest total rewards.
            worst: so many of the lowest.
            at_random: so many others.
            prompt: only responses to this prompt: its id, or a part of its text that no other prompt has.
            seed: of the random ones. Default: by the run's seed and the iteration, so the same each time.

        Raises:
            RunError: there is no such iteration, none has rewards yet, a number is negative or none, or not
                exactly one prompt is named.
        """
        from pipeline.metrics.responses import Selection, check_iteration, newest_scored, read_samples

        counts = {"best": best, "worst": worst, "at_random": at_random}
        best, worst, at_random = (_given_number(name, value) for name, value in counts.items())
        wanted = None if prompt is None else _given_text("prompt", prompt)
        chance = None if seed is None else _given_number("seed", seed)
        found = newest_scored(self._run) if iteration is None else _given_number("iteration", iteration)
        if found is None:
            raise RunError(f"{self.path} has no responses with rewards yet")
        check_iteration(self._run, found)
        return read_samples(self._run, found, Selection(best, worst, at_random, wanted, chance))

    def records(self, iteration: int) -> TaskRecords:
        """Return the commit records of an iteration's tasks; 0 has what came before the first: prepare.

        Of every file that a record names the size is compared; contents are hashed by who reads them.

        Raises:
            RunError: the run has no such iteration, or it is no number.
        """
        plan, iteration = self._run.plan, _given_number("iteration", iteration)
        if iteration not in (0, *range(plan.start, plan.iterations + 1)):
            raise RunError(f"{self.path} has iterations {plan.start} to {plan.iterations}, not {iteration}")
        found, planned = Records(self._run.paths), plan.tasks(iteration)
        tasks = [*planned, *([state_of(iteration)] if iteration > 0 else [])]  # which is in no plan
        found.refresh(tasks)
        rows = [record for task in tasks if (record := found.readable(task))]
        damage = tuple(Damage(str(task), why) for task, why in found.corrupt.items())
        there = {record.task for record in rows} | found.corrupt.keys()
        missing = tuple(str(task) for task in planned if task not in there)
        return TaskRecords(iteration, tuple(rows), damage, missing)

    def policies(self) -> list[Policy]:
        """Return the committed policies that were kept, ascending by version; of a run that is no fork, first
        the model that it began with. ``update.keep_last`` and ``keep_every`` say which are kept.

        Raises:
            RunError: a row of metrics.jsonl, which has the rewards, is not made of numbers, or best.json
                cannot be read.
        """
        return list(_policies(self._run))


def _policies(run: Run) -> Iterator[Policy]:
    from pipeline.report.data import read_rows

    rewards = {int(row["iteration"]): row.get("evaluate/reward") for row in read_rows(run)}
    found = read_best(run.paths)
    best = found.iteration if found else None
    if run.plan.start == 0:
        model = Path(run.identity.folder, run.config.model.policy)
        yield Policy(0, model, False, rewards.get(0), best == 0)
    updated = find_frontier(run.plan, run.paths).updated
    for version in kept_versions(run.paths, ["policy"]):
        if 0 < version <= updated:
            path, is_adapter, damage = _folder_of(run, version)
            yield Policy(version, path, is_adapter, rewards.get(version), best == version, damage)


def _folder_of(run: Run, version: int) -> tuple[Path, bool, Damage | None]:
    """Return a policy's directory, whether it is an adapter, and what is wrong with it."""
    task = policy_maker(version)
    path = run.paths.policies / f"{version:05d}"
    try:
        record = read_record(run.paths, task)
        if record is None:
            return path, False, Damage(str(task), "its record is gone")
    except CorruptData as error:
        return path, False, Damage(str(task), error.why)
    folder = run.paths.task(task).policy(record.attempt)
    try:
        check_sizes(run.paths, record)
    except CorruptData as error:
        return folder, record.is_adapter, Damage(str(task), error.why)
    return folder, record.is_adapter, None


# --- what callers give -----------------------------------------------------------------------------------


def _given_path(name: str, value: object) -> Path:
    """Return a path as an absolute one. Raises RunError for something else, NoHome for an unknown user's."""
    if isinstance(value, str | os.PathLike) and isinstance(path := os.fspath(value), str):
        return full_path(path)
    raise _wrong(name, value, "a path, as text or pathlib.Path")


def _given_number(name: str, value: object) -> int:
    """Return a whole number, also of numpy. Raises RunError for anything else."""
    if not isinstance(value, bool) and hasattr(value, "__index__"):
        return operator.index(value)
    raise _wrong(name, value, "a whole number")


def _given_text(name: str, value: object) -> str:
    """Return a text. Raises RunError for anything else."""
    if isinstance(value, str):
        return value
    raise _wrong(name, value, "a text")


def _wrong(name: str, value: object, wanted: str) -> RunError:
    return RunError(f"{name}={reprlib.repr(value)} is of type {type(value).__name__}; give {wanted}")
