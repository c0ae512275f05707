"""Contents of a report: rows, spans, samples, advice. Reads the run directory and nothing else."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.config.job_kinds import DRIVER
from pipeline.metrics.advice import advise
from pipeline.metrics.advice_input import Advice, AdviceInput, TaskTime
from pipeline.metrics.attempts import Facts, attempts_of
from pipeline.metrics.noticed import Noticed, read_noticed
from pipeline.metrics.responses import Selection, read_samples
from pipeline.metrics.row import evaluation_metrics
from pipeline.metrics.samples import Choice, Sample
from pipeline.metrics.spans import IterationSpans, Span, SpanEnd, iteration_spans, read_lines
from pipeline.metrics.terminal import Row
from pipeline.run import journal
from pipeline.run.benchmarks import read_measured, with_measured
from pipeline.run.commits import CorruptData, read_record
from pipeline.run.directory import Run
from pipeline.run.forecast import Forecast, read_forecast
from pipeline.run.identity import RunError
from pipeline.run.records import Records
from pipeline.run.retention import BestPolicy, read_best
from pipeline.run.submissions import Ledger
from pipeline.run.tasks import PREPARE, Stage, Task
from pipeline.workers.beats import Beat, read_beats
from pipeline.workers.summary import workers_of

_MOST_ITERATIONS = 20
_MOST_ATTEMPTS = 6000
"""Limits on the iterations, and attempts, that the timeline shows one by one."""
_WITHOUT_LINES = 10
"""Newest iterations whose spans are read from their records where spans.jsonl has none."""
_SAMPLED_ITERATIONS = 8
_SHOWN = Selection(best=8, worst=8, at_random=24)
_SAMPLE_BYTES = 4 << 20
"""Bytes of rollout data that are read for the samples of one iteration."""
_TEXT_BUDGET = 2_000_000
"""Letters of prompts and responses that a report holds."""


@dataclass(frozen=True)
class ReportData:
    """All that the report of one run is made from."""

    run: Run
    rows: Sequence[Row]
    """Rows, ascending; the first may be that of the evaluation of the policy that the run begins with."""
    best: BestPolicy | None
    spans: Mapping[int, IterationSpans]
    """Spans by iteration, ascending; the newest with their attempts."""
    samples: Sequence[tuple[Choice | None, Sample]]
    advice: Sequence[Advice]
    now: float
    """Unix time at which it was read."""
    beats: Sequence[Beat] = ()
    """What the newest workers said last; none of a run whose jobs do not stay."""
    noticed: Sequence[Noticed] = ()
    """What the run's drivers noticed, and when, oldest first."""
    forecast: Forecast | None = None
    """What was expected of the run when it began."""
    prepared: Mapping[str, float] = field(default_factory=dict)
    """Prepare's metrics; none where its record cannot be read."""

    @property
    def trained(self) -> Sequence[Row]:
        """Rows of iterations, without that of the first policy's evaluation."""
        return [row for row in self.rows if row["iteration"] > self.run.plan.start]

    @property
    def done(self) -> int:
        """The newest iteration that has a row."""
        return int(self.rows[-1]["iteration"]) if self.rows else self.run.plan.start


def read_report(run: Run) -> ReportData:
    """Read everything that a page about the run shows."""
    rows, now = read_rows(run), time.time()
    spans = read_spans(run, int(rows[-1]["iteration"]) if rows else run.plan.start)
    beats = list(read_beats(run.paths).values()) if run.config.slurm else []
    found = AdviceInput(rows, run.config, task_times(spans), workers_of(beats, now))
    samples = read_some_samples(run, [int(row["iteration"]) for row in rows])
    return ReportData(
        run=run,
        rows=rows,
        best=read_best(run.paths),
        spans=spans,
        samples=samples,
        advice=advise(found),
        now=now,
        beats=beats,
        noticed=read_noticed(run.paths),
        forecast=read_forecast(run.paths),
        prepared=read_prepared(run),
    )


def read_prepared(run: Run) -> Mapping[str, float]:
    """Return prepare's metrics; none where its record is not there, or cannot be read."""
    try:
        record = read_record(run.paths, PREPARE)
    except CorruptData:
        return {}
    return record.metrics if record is not None else {}


def read_rows(run: Run) -> list[Row]:
    """Read ``metrics.jsonl``, ascending, the last line of an iteration being the one that counts.

    If the policy that the run begins with was evaluated, a row with that evaluation alone comes first. The
    numbers of evaluate.command are added to the rows of the policies that they are of.

    Raises:
        RunError: a row is not made of numbers.
    """
    rows: dict[int, Row] = {}
    first = run.plan.start
    try:
        start = read_record(run.paths, Task(first, Stage.EVALUATE))
    except CorruptData:
        start = None
    if start is not None:
        rows[first] = {"iteration": first, **evaluation_metrics(start)}
    found = journal.read(run.paths.metrics)
    check_rows(run, found)
    rows |= {row["iteration"]: row for row in found}
    return with_measured(rows.values(), read_measured(run.paths))


def check_rows(run: Run, rows: Sequence[Mapping[str, object]]) -> None:
    """Raise RunError where a row holds something else than numbers, or no iteration."""
    for count, row in enumerate(rows, 1):
        wrong = next((name for name, value in row.items() if not isinstance(value, int | float)), None)
        wrong = wrong or ("iteration" if not isinstance(row.get("iteration"), int) else None)
        if wrong is not None:
            raise RunError(
                f"{run.paths.metrics}: row {count} cannot be read: {wrong} is not a number, but "
                f"{row.get(wrong)!r}; take the line out, and slurm-ppo resume writes it again"
            )


# --- spans -----------------------------------------------------------------------------------------------


def read_spans(run: Run, newest: int) -> dict[int, IterationSpans]:
    """Read spans from spans.jsonl, and from records where it lacks a line.

    The latter only for the start, the iteration at hand, and the newest that have a row.

    Args:
        newest: the newest iteration that has a row.
    """
    found = read_lines(journal.read(run.paths.spans), newest, _MOST_ITERATIONS)
    at_hand = min(newest + 1, run.plan.iterations)
    lacking = {run.plan.start, at_hand, *range(max(newest - _WITHOUT_LINES, run.plan.start) + 1, newest + 1)}
    for iteration in lacking - found.keys():
        if spans := read_live(run, iteration):
            found[iteration] = iteration_spans(iteration, spans)
    return _with_few_attempts({iteration: found[iteration] for iteration in sorted(found)})


def read_live(run: Run, iteration: int) -> list[Span]:
    """Read the attempts at one iteration's tasks from its records, submissions and failures."""
    records = Records(run.paths)
    records.refresh(run.plan.tasks(iteration))
    facts = Facts()
    if run.config.slurm:
        facts = Facts(Ledger(run.paths).load([iteration]), beats=list(read_beats(run.paths).values()))
    return attempts_of(run, iteration, records.readable, facts, time.time())


def _with_few_attempts(found: Mapping[int, IterationSpans]) -> dict[int, IterationSpans]:
    """Keep the attempts of the newest iterations, as many as a page can draw; always those of the newest."""
    kept: dict[int, IterationSpans] = {}
    room = _MOST_ATTEMPTS
    for count, iteration in enumerate(sorted(found, reverse=True)):
        spans = found[iteration]
        is_kept = count == 0 or (count < _MOST_ITERATIONS and len(spans.attempts) <= room)
        room -= len(spans.attempts) if is_kept else room
        kept[iteration] = spans if is_kept else replace(spans, attempts=())
    return dict(sorted(kept.items()))


def task_times(spans: Mapping[int, IterationSpans]) -> list[TaskTime]:
    """Return the times of attempts, evidence for advice on nodes and shards."""
    return [
        TaskTime(i, span.job_kind, span.shard, span.node, seconds, span.end is SpanEnd.COMMITTED)
        for i, of_iteration in spans.items()
        for span in of_iteration.attempts
        if span.job_kind != DRIVER and (seconds := span.seconds) is not None
    ]


# --- samples ---------------------------------------------------------------------------------------------


def sampled_iterations(iterations: Sequence[int], count: int = _SAMPLED_ITERATIONS) -> list[int]:
    """Choose ``count`` iterations at most, ascending: newest three, first, others evenly between. Pure."""
    if len(iterations) <= count:
        return sorted(iterations)
    newest, before = list(iterations[-3:]), list(iterations[:-3])
    others = count - len(newest)
    evenly = {before[i * (len(before) - 1) // max(1, others - 1)] for i in range(others)}
    return sorted({*newest, *evenly})


def read_some_samples(run: Run, iterations: Sequence[int]) -> list[tuple[Choice | None, Sample]]:
    """Read best, worst and random responses of some iterations, newest first, cut to fit the page."""
    of_training = [iteration for iteration in iterations if iteration > run.plan.start]
    chosen: list[tuple[Choice | None, Sample]] = []
    for iteration in reversed(sampled_iterations(of_training)):
        found = read_samples(run, iteration, _SHOWN, _SAMPLE_BYTES)
        chosen += zip(found.choices, found.rows, strict=True)
    longest = _TEXT_BUDGET // (2 * max(1, len(chosen)))
    return [(choice, shortened(sample, longest)) for choice, sample in chosen]


def shortened(sample: Sample, letters: int) -> Sample:
    """Cut prompt and response to so many letters: of a prompt keep its end, of a response both ends."""
    prompt, response = sample.prompt, sample.response
    if len(prompt) > letters:
        prompt = f"[{len(prompt) - letters} letters left out] … {prompt[-letters:]}"
    if len(response) > letters:
        cut = len(response) - letters
        middle = f" … [{cut} letters left out] … "
        response = response[: letters // 2] + middle + response[-(letters // 2) :]
    return replace(sample, prompt=prompt, response=response)
