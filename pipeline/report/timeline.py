"""The timeline: when and where every attempt waited and ran, as rows for the script that draws them.

Newest iterations attempt by attempt, all of them as one bar for each stage; the reader chooses the window.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.config.job_kinds import DRIVER, GUARD
from pipeline.metrics.spans import IterationSpans, Span, SpanEnd
from pipeline.report.data import ReportData
from pipeline.run.directory import Run
from pipeline.run.tasks import Stage, task_of

_WINDOW = 100
"""Iterations that a window of stages shows."""
_NEWEST = 3
_MOST_AT_ONCE = 1500
"""Most attempts in the first window, which holds as many of the newest iterations as fit."""


def windows_of(spans: Mapping[int, IterationSpans]) -> dict[str, list[tuple[str, str]]]:
    """Return groups of (value, words); none where nothing was ever tried.

    A value says what is drawn, and from which iteration to which.
    """
    if not spans:
        return {}
    groups: dict[str, list[tuple[str, str]]] = {}
    if detailed := [iteration for iteration, of_iteration in spans.items() if of_iteration.attempts]:
        newest = _newest(spans, detailed)
        several = [(f"attempts:{newest[0]}:{newest[-1]}", f"newest, {newest[0]} to {newest[-1]}")]
        single = [(f"attempts:{i}:{i}", f"iteration {i}") for i in reversed(detailed)]
        groups["Every attempt"] = [*(several if len(newest) > 1 else []), *single]
    first, last = min(spans), max(spans)
    parts = [(max(end - _WINDOW + 1, first), end) for end in range(last, first - 1, -_WINDOW)]
    groups["Stages"] = [(f"stages:{a}:{b}", f"iterations {a} to {b}") for a, b in parts]
    return groups


def _newest(spans: Mapping[int, IterationSpans], detailed: Sequence[int]) -> list[int]:
    """Find the newest iterations that can be drawn together."""
    kept: list[int] = []
    count = 0
    for iteration in reversed(detailed[-_NEWEST:]):
        count += len(spans[iteration].attempts)
        if kept and count > _MOST_AT_ONCE:
            break
        kept.append(iteration)
    return kept[::-1]


def timeline_data(data: ReportData) -> dict[str, Any]:
    """Return the script's data: times are seconds since ``base``, names are places in ``names``."""
    stages = [(i, job_kind, s) for i, found in data.spans.items() for job_kind, s in found.stages.items()]
    attempts = [(i, span) for i, found in data.spans.items() for span in found.attempts]
    times = [time for _, _, stage in stages for time in (stage.ready, stage.started) if time is not None]
    base = min(times, default=data.run.identity.created)
    job_kinds = job_kinds_of(data)
    lanes = (stage.lane for _, _, stage in stages)
    names = list(dict.fromkeys([*lanes, *(name for _, span in attempts for name in (span.lane, span.node))]))
    place = {name: index for index, name in enumerate(names)}
    return {
        "base": base,
        "now": round(data.now - base, 2),
        "names": names,
        "purposes": job_kinds,
        "colours": [colour_of(job_kind, job_kinds) for job_kind in job_kinds],
        "attempts": [_attempt(data.run, i, span, base, place, job_kinds) for i, span in attempts],
        "stages": [
            [i, job_kinds.index(job_kind), place[stage.lane]]
            + [_since(time, base) for time in (stage.ready, stage.started, stage.ended)]
            + [stage.attempts, stage.failed]
            for i, job_kind, stage in stages
        ],
    }


def job_kinds_of(data: ReportData) -> list[str]:
    """Return the job kinds that ran, in the order of the pipeline."""
    found = {job_kind for of_iteration in data.spans.values() for job_kind in of_iteration.stages}
    order = (Stage.PREPARE, *data.run.plan.job_kinds, Stage.EVALUATE, DRIVER)
    known = [str(job_kind) for job_kind in order if job_kind in found]
    return [*known, *sorted(found - set(known))]


def colour_of(job_kind: str, job_kinds: Sequence[str]) -> int:
    """Choose a colour of the style sheet: a stage has the same one in every chart, and pools follow."""
    usual: dict[str, int] = {Stage.ROLLOUT: 0, Stage.REWARD: 1, Stage.UPDATE: 2, Stage.EVALUATE: 3}
    if job_kind in usual:
        return usual[job_kind]
    pools = [other for other in job_kinds if other.startswith(f"{Stage.SCORE}-")]
    return 4 + pools.index(job_kind) % 2 if job_kind in pools else 5


def _attempt(
    run: Run, iteration: int, span: Span, base: float, place: Mapping[str, int], job_kinds: Sequence[str]
) -> list[Any]:
    times = (span.ready, span.started, span.ended)
    return [
        iteration,
        job_kinds.index(span.job_kind),
        place[span.lane],
        span.shard,
        span.attempt,
        *(_since(time, base) for time in times),
        place[span.node],
        span.job,
        list(SpanEnd).index(span.end),
        span.note[:300],
        log_of(run, iteration, span),
        _since(span.held, base),
    ]


def _since(time: float | None, base: float) -> float | None:
    return None if time is None else round(time - base, 2)


def log_of(run: Run, iteration: int, span: Span) -> str:
    """Return the path of an attempt's log, relative to the run directory."""
    if span.job_kind == DRIVER:
        kind, of_iteration, number = span.attempt.split("-")
        folder = run.paths.log_root / f"{int(of_iteration):05d}-{kind}" / f"attempt-{number}"
        path = (run.paths.log_root / GUARD if kind == GUARD else folder) / f"{kind}.log"
    else:
        task = task_of(iteration, span.job_kind, span.shard)
        path = run.paths.task(task).log(span.number)
    return run.paths.relative(path)
