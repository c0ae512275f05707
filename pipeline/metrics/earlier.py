"""Earlier runs beside a new one, whose measured seconds a forecast scales."""

import contextlib
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.config.issue import UserError
from pipeline.config.model_files import architectures_of, read_json
from pipeline.config.scheduler import SlurmConfig, resources_of
from pipeline.config.schema import Config
from pipeline.data.summary import MEAN_LENGTH
from pipeline.forecast.seconds import EarlierRun, work_of
from pipeline.forecast.shapes import read_shape
from pipeline.run import journal
from pipeline.run.commits import CorruptData, read_record
from pipeline.run.directory import Run, is_run, load_run
from pipeline.run.journal import Row
from pipeline.run.paths import RunPaths
from pipeline.run.tasks import PREPARE, Stage, Task

_MOST_RUNS = 20
"""Newest runs of the folder that are looked at."""
_RECENT = 5
"""Iterations that medians are of."""
_STAGES = ("rollout", "reward", "update")


def earlier_run(config: Config) -> EarlierRun | None:
    """Return the newest run in the folder of a new one that had a model of the same class and size, the same
    engines and number formats, on this machine or on the same partitions; None where there is none."""
    wanted = _likeness(config)
    for run in _runs_beside(Path(config.run_dir)):
        with contextlib.suppress(UserError, OSError):  # its model may be gone
            if _likeness(run.config) == wanted and (found := measured_in(run)) is not None:
                return found
    return None


def _runs_beside(root: Path) -> Iterator[Run]:
    """Yield runs with rows in the folder above a run's directory, those with the newest rows first."""
    found: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError):
        for path in root.absolute().parent.iterdir():
            with contextlib.suppress(OSError):
                found.append((RunPaths(path).metrics.stat().st_mtime, path))
    for _, path in sorted(found, reverse=True)[:_MOST_RUNS]:
        with contextlib.suppress(UserError, OSError):
            if path != root.absolute() and is_run(path):
                yield load_run(path)


def measured_in(run: Run) -> EarlierRun | None:
    """Return the medians of a run's newest iterations; None where it has no row, or ran elsewhere."""
    rows = [row for row in journal.read_tail(run.paths.metrics) if "seconds/iteration" in row][-_RECENT:]
    if not rows or not _ran_here(run, rows):
        return None
    named = [name for row in rows for name in row if _is_stage(name)]
    seconds = {name.removeprefix("seconds/"): _median(rows, name) for name in dict.fromkeys(named)}
    prompt, response = _mean_prompt(run), _median(rows, "response_length/mean")
    if not prompt or not response:
        return None
    work = work_of(run.config, prompt, response)
    return EarlierRun(run.paths.root.name, len(rows), work, seconds, _median(rows, "seconds/iteration"))


def _is_stage(name: str) -> bool:
    stage = name.removeprefix("seconds/")
    return stage != name and (stage in _STAGES or stage.startswith("score-")) and "/" not in stage


def _median(rows: Sequence[Row], name: str) -> float:
    return statistics.median([float(row[name]) for row in rows if name in row] or [0.0])


def _mean_prompt(run: Run) -> float:
    with contextlib.suppress(CorruptData):
        record = read_record(run.paths, PREPARE)
        return record.metrics.get(MEAN_LENGTH, 0.0) if record else 0.0
    return 0.0


def _ran_here(run: Run, rows: Sequence[Row]) -> bool:
    """Whether the newest update was made on this machine; of a run on Slurm its partitions say enough."""
    if run.config.slurm:
        return True
    with contextlib.suppress(CorruptData):
        record = read_record(run.paths, Task(int(rows[-1]["iteration"]), Stage.UPDATE))
        return record is not None and record.host == os.uname().nodename
    return False


def _likeness(config: Config) -> Mapping[str, Any]:
    """Return all that seconds are alike by, but for the number of tokens."""
    update, rollout, reward = config.update, config.rollout, config.reward
    return {
        "model": model_class(Path(config.model.policy)),
        "rollout": (rollout.engine, config.rollout_precision, rollout.num_threads, rollout.staleness),
        "reward": (reward.engine, config.reward_precision, sorted([*reward.components, *reward.teachers])),
        "update": (update.engine, update.precision, update.zero_stage, update.num_threads, update.lora),
        "place": _place(config),
    }


def model_class(directory: Path) -> tuple[str, int]:
    """Return the architecture and the number of weights of a model. Raises ConfigError."""
    named = architectures_of(read_json(directory / "config.json") or {})
    return next(iter(named), ""), read_shape(directory).parameters


def _place(config: Config) -> object:
    given = config.scheduler
    if not isinstance(given, SlurmConfig):
        return given.kind, given.num_update_ranks
    jobs = {stage: resources_of(given, stage) for stage in _STAGES}
    return {
        stage: (job.partition, job.num_gpus, job.nodes, job.ntasks_per_node) for stage, job in jobs.items()
    }
