"""One flat row per iteration, from the records of its tasks."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.run import replays
from pipeline.run.commits import Record
from pipeline.run.tasks import Stage

_PASSED = ("model_tokens", "model_positions")
"""Counts that stages/models/passes.py keeps."""
_OWN_OF_RECORD = (
    replays.METRICS
    | {*_PASSED}
    | {
        "compute_seconds",
        "startup_seconds",
        "peak_memory_gib",
        "peak_gpu_memory_gib",
        "response_tokens",
    }
)


@dataclass(frozen=True)
class Clock:
    """Reference points of a row's times: unix times, and counts."""

    created: float
    """Unix time at which the run was created."""
    previous_end: float
    """Unix time of the previous policy's commit; in the first iteration, of prepare's. 0: unknown."""
    iterations: int
    recent_seconds: Sequence[float]
    """``seconds/iteration`` of the last few rows, this one not included."""


def iteration_row(
    iteration: int, records: Mapping[str, Sequence[Record]], clock: Clock, has_lag: bool = False
) -> dict[str, float | int]:
    """Build the row of one iteration from its commit records by :attr:`Task.job_kind`. Pure.

    Records may be missing, and then so are the numbers that they held.

    Args:
        has_lag: whether responses may be of older policies than the one before (rollout.staleness).
    """
    row: dict[str, float | int] = {"iteration": iteration, "policy_version": iteration}
    if rollouts := records.get(Stage.ROLLOUT):
        row |= {name: int(value) for name, value in rollouts[0].metrics.items() if name.startswith("epoch")}
        if has_lag:
            row["staleness/lag"] = iteration - 1 - rollouts[0].policy_version
        row["rollout/refused"] = sum(r.metrics.get("refused", 0.0) for r in rollouts)
    for update in records.get(Stage.UPDATE, ()):
        row |= {name: value for name, value in update.metrics.items() if name not in _OWN_OF_RECORD}
    row |= _facts_of_engines([r for rs in records.values() for r in rs])
    row |= _counted([r for rs in records.values() for r in rs if r.task.stage.scores])
    row |= _by_environment(records.get(Stage.REWARD, ()))
    row |= _by_file(records.get(Stage.REWARD, ()))
    row |= _by_validity(records.get(Stage.REWARD, ()))
    for stage, stage_records in records.items():
        row |= stage_metrics(stage, stage_records)
    if evaluation := records.get(Stage.EVALUATE):
        row |= evaluation_metrics(evaluation[0])
    return row | pace_metrics(iteration, [r for rs in records.values() for r in rs], clock)


def pace_metrics(iteration: int, records: Sequence[Record], clock: Clock) -> dict[str, float]:
    """Return how long an iteration took, up to its update, and how long the rest of the run will."""
    training = [record for record in records if record.task.stage is not Stage.EVALUATE]
    if not training:
        return {}
    # Counts from the previous policy, or from the iteration's own first task where that started later (a run
    # that paused between iterations was not slow) or where the previous policy was committed again since.
    begin, end = min(record.started for record in training), max(record.ended for record in training)
    begin = max(begin, clock.previous_end) if clock.previous_end < end else begin
    pace = [*clock.recent_seconds, end - begin]
    return {
        "seconds/iteration": end - begin,
        "seconds/elapsed": end - clock.created,
        "seconds/remaining": statistics.median(pace) * (clock.iterations - iteration),
    }


def stage_metrics(stage: str, records: Sequence[Record]) -> dict[str, float]:
    """Return time, speed and memory of one stage, or of one pool's scores."""
    wall = max(r.ended for r in records) - min(r.started for r in records)
    metrics = {
        f"seconds/{stage}": wall,
        f"seconds/compute/{stage}": sum(r.metrics["compute_seconds"] for r in records),
        f"memory_gib/{stage}": max(r.metrics["peak_memory_gib"] for r in records),
    }
    last = max(records, key=lambda r: r.ended).job_id
    if last.isdecimal():
        metrics[f"slurm/job_id/{stage}"] = int(last)
    tokens = sum(r.metrics.get("response_tokens", 0.0) for r in records)
    if tokens:
        metrics[f"tokens_per_second/{stage}"] = tokens / wall
    passed, computed = (sum(r.metrics.get(name, 0.0) for r in records) for name in _PASSED)
    if computed:
        metrics[f"model_tokens_per_second/{stage}"] = passed / wall
        metrics[f"padding/{stage}"] = 1 - passed / computed
    gpu = [r.metrics["peak_gpu_memory_gib"] for r in records if "peak_gpu_memory_gib" in r.metrics]
    if gpu:
        metrics[f"gpu_memory_gib/{stage}"] = max(gpu)
    if halvings := max(r.halvings for r in records):
        metrics[f"halvings/{stage}"] = halvings
    return metrics


def evaluation_metrics(record: Record) -> dict[str, float]:
    found = {name: value for name, value in record.metrics.items() if name.startswith("evaluate/")}
    if refused := record.metrics.get("refused"):
        found["evaluate/refused"] = refused
    found["evaluate/response_length"] = record.metrics["response_tokens"] / record.metrics["responses"]
    if turns := record.metrics.get("turns"):
        found["evaluate/num_turns"] = turns / record.metrics["responses"]
    return found


def _facts_of_engines(records: Sequence[Record]) -> dict[str, float]:
    """Return how engines computed; the largest number where tasks differ."""
    found: dict[str, float] = {}
    for record in records:
        for name, value in record.metrics.items():
            if name.startswith("engine/"):
                found[name] = max(value, found.get(name, value))
    return found


_COUNTED = frozenset({"truncated", "unscored", "abstained", "late", "failed", "unreadable", "retries"})
"""Counters that scoring keeps for each reward component; ``unscored`` also for the sum of all."""


def _by_environment(records: Sequence[Record]) -> dict[str, float]:
    """Return the mean reward of each environment's responses; none where the run has not several."""
    means = _means(records, "environment")
    return {f"environment/{one}/reward": mean for one, mean in means.items()} if len(means) > 1 else {}


def _by_file(records: Sequence[Record]) -> dict[str, float]:
    """Return the mean reward of responses by the file of their prompt; none where files have no names."""
    return {f"reward/mean/{one}": mean for one, mean in _means(records, "source").items()}


def _means(records: Sequence[Record], what: str) -> dict[str, float]:
    """Return mean rewards by name, from the sums and numbers that reward tasks keep (``WHAT_rewards/NAME``,
    ``WHAT_responses/NAME``)."""
    sums, numbers = f"{what}_rewards/", f"{what}_responses/"
    totals: Counter[str] = Counter()
    for record in records:
        totals.update({k: v for k, v in record.metrics.items() if k.startswith((sums, numbers))})
    names = [name.removeprefix(numbers) for name in totals if name.startswith(numbers)]
    return {one: totals[sums + one] / totals[numbers + one] for one in names}


def _by_validity(records: Sequence[Record]) -> dict[str, float]:
    """Return the number of responses by whether they count, and why not, of those that occur."""
    totals: dict[str, float] = {}
    for record in records:
        for name, value in record.metrics.items():
            if name.startswith(_VALIDITY):
                totals[name] = totals.get(name, 0.0) + value
    return totals


_VALIDITY = "validity/"
"""Metrics of reward tasks: responses by :class:`pipeline.run.schemas.Validity`."""


def _counted(records: Sequence[Record]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for record in records:
        for name, value in record.metrics.items():
            what, _, component = name.partition("/")
            if what in _COUNTED:
                key = f"reward/{component}/{what}" if component else f"reward/{what}"
                totals[key] = totals.get(key, 0.0) + value
    return totals
