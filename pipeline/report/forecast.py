"""What was expected of a run when it began, beside what came of it."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.metrics.terminal import Row
from pipeline.report.data import ReportData
from pipeline.report.html import Head
from pipeline.run.forecast import Forecast
from pipeline.text import MISSING, seconds_in_words

_GIB = 2.0**30
_TRAINING = ("rollout", "reward", "update")
HEADS = (
    Head(""),
    Head("expected", "when the run began"),
    Head("happened", "seconds: median over iterations; memory: largest of all"),
)


@dataclass(frozen=True)
class ForecastTable:
    """The section's table, and what its expectations were derived from."""

    rows: Sequence[tuple[str, str, str]]
    ground: str
    """Source of the seconds, in words; empty where there were none."""
    heads: Sequence[Head] = HEADS


def forecast_table(data: ReportData) -> ForecastTable | None:
    """Return the table; None for a run without a forecast."""
    found = data.forecast
    if found is None:
        return None
    rows = [
        *_lengths(found, data.prepared),
        *_responses(data),
        *_memory(found, data.trained),
        *_seconds(found, data.trained),
    ]
    return ForecastTable(rows, found.seconds.ground if found.seconds else "")


def _lengths(found: Forecast, prepared: Mapping[str, float]) -> Iterator[tuple[str, str, str]]:
    """Yield the lengths of the prompts that are trained on: prepare has measured all of them."""
    expected = found.of_training
    names = {"median": "median", "most": "95 % up to", "longest": "longest", "over": "over the limit"}
    for name, title in names.items():
        measured = prepared.get(f"prompt_length/{name}")
        field = "num_over" if name == "over" else name
        before = None if expected is None else float(getattr(expected, field))
        unit = "" if name == "over" else " tokens"
        yield f"prompts, {title}", _count(before, unit), _count(measured, unit)


def _responses(data: ReportData) -> Iterator[tuple[str, str, str]]:
    means = [row["response_length/mean"] for row in data.trained if "response_length/mean" in row]
    longest = [row["response_length/max"] for row in data.trained if "response_length/max" in row]
    if means and longest:
        happened = f"mean {statistics.fmean(means):.0f}, longest {max(longest):.0f} tokens"
        yield "responses", f"up to {data.run.config.rollout.max_new_tokens} tokens", happened


def _memory(found: Forecast, rows: Sequence[Row]) -> Iterator[tuple[str, str, str]]:
    """Yield each stage's peak: of a GPU where tasks had one, else of the host."""
    for stage in dict.fromkeys((*found.memory, *_stages(rows, "memory_gib/"))):
        kind = stage.partition(" ")[0]
        peaks = _values(rows, f"gpu_memory_gib/{kind}") or _values(rows, f"memory_gib/{kind}")
        need = found.memory.get(stage)
        yield f"memory, {stage}", _size(need / _GIB if need else None), _size(max(peaks, default=None))


def _seconds(found: Forecast, rows: Sequence[Row]) -> Iterator[tuple[str, str, str]]:
    expected = dict(found.seconds.stages) if found.seconds else {}
    stages = [stage for stage in _stages(rows, "seconds/") if stage in _TRAINING]
    for stage in dict.fromkeys((*expected, *stages)):
        yield f"time, {stage}", _time(expected.get(stage)), _time(_median(rows, f"seconds/{stage}"))
    whole = found.seconds.iteration if found.seconds else None
    yield "time, iteration", _time(whole), _time(_median(rows, "seconds/iteration"))
    elapsed = _values(rows, "seconds/elapsed")
    run = found.seconds.run if found.seconds else None
    yield "time, run", _time(run), f"{_time(elapsed[-1])} so far" if elapsed else MISSING


def _stages(rows: Sequence[Row], prefix: str) -> list[str]:
    """Return what follows a prefix in the names of the newest row, where that is one word."""
    names = rows[-1] if rows else ()
    found = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    return [stage for stage in found if "/" not in stage]


def _values(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


def _median(rows: Sequence[Row], name: str) -> float | None:
    found = _values(rows, name)
    return statistics.median(found) if found else None


def _count(value: float | None, unit: str) -> str:
    return MISSING if value is None else f"{value:,.0f}{unit}"


def _size(gib: float | None) -> str:
    return MISSING if gib is None else f"{gib:.2f} GiB"


def _time(seconds: float | None) -> str:
    return MISSING if seconds is None else seconds_in_words(seconds)
