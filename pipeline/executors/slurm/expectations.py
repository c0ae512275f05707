"""When the next inputs of workers are expected, and how long coming back takes: from what was measured."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from pipeline.config.scheduler import SlurmConfig, resources_of
from pipeline.orchestrate.staffing import Estimate
from pipeline.run import journal
from pipeline.run.commits import Record
from pipeline.run.directory import Run
from pipeline.run.records import Committed
from pipeline.run.tasks import Stage, Task
from pipeline.workers.beats import Beat
from pipeline.workers.estimates import expected_ready, passages, queue_wait, startup, task_seconds
from pipeline.workers.reading import read_beats

_SPANS_BYTES = 1 << 18


def read_estimates(
    run: Run, config: SlurmConfig, tasks: Sequence[Task], committed: Mapping[Task, Committed], now: float
) -> dict[str, Estimate]:
    """Return an estimate for each job kind.

    Args:
        tasks: of the iteration at hand and of the next, by iteration.
        committed: records of these and of what they read.
    """
    kinds = [str(kind) for kind in (*run.plan.job_kinds, Stage.EVALUATE, Stage.BENCHMARK)]
    beats = list(read_beats(run.paths).values())
    expected = _expectations(run, tasks, committed, now, early_kinds(config, kinds))
    return {kind: _estimate(beats, kind, expected(kind)) for kind in kinds}


def early_kinds(config: SlurmConfig, kinds: Iterable[str]) -> list[str]:
    """Return the job kinds whose workers start early."""
    return [kind for kind in kinds if resources_of(config, kind).start_early]


def _estimate(beats: list[Beat], job_kind: str, next_input: float | None) -> Estimate:
    wait, start = queue_wait(beats, job_kind), startup(beats, job_kind)
    late, median = wait.late if wait else None, start.median if start else None
    return Estimate(next_input, late, median, task_seconds(beats, job_kind))


def _expectations(
    run: Run, tasks: Sequence[Task], committed: Mapping[Task, Committed], now: float, early: Sequence[str]
) -> Callable[[str], float | None]:
    """Return a function: when the inputs of the next task of a job kind are expected to be committed."""
    seen = passages(journal.read_tail(run.paths.spans, _SPANS_BYTES)) if run.paths.spans.exists() else []

    def committed_at(task: Task) -> float | None:
        record = committed.get(task)
        return record.ended if isinstance(record, Record) else None

    def expected(job_kind: str) -> float | None:
        missing = (
            t for t in tasks if t.job_kind == job_kind and not committed.keys() >= {t, *run.plan.inputs(t)}
        )
        task = next(missing, None)
        return None if task is None else expected_ready(run.plan, task, committed_at, seen, now, early=early)

    return expected
