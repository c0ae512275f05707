"""When the next inputs of workers are expected, and how long coming back takes: from what was measured."""

from collections.abc import Iterable, Mapping, Sequence

from pipeline.config.scheduler import SlurmConfig, resources_of
from pipeline.orchestrate.expectations import estimates_of
from pipeline.orchestrate.situation import Estimate
from pipeline.run import journal
from pipeline.run.commits import Record
from pipeline.run.directory import Run
from pipeline.run.records import Committed
from pipeline.run.tasks import Stage, Task
from pipeline.workers.passages import passages
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
    seen = passages(journal.read_tail(run.paths.spans, _SPANS_BYTES)) if run.paths.spans.exists() else []

    def committed_at(task: Task) -> float | None:
        record = committed.get(task)
        return record.ended if isinstance(record, Record) else None

    early = early_kinds(config, kinds)
    return estimates_of(run.plan, kinds, early, beats, tasks, committed, committed_at, seen, now)


def early_kinds(config: SlurmConfig, kinds: Iterable[str]) -> list[str]:
    """Return the job kinds whose workers start early."""
    return [kind for kind in kinds if resources_of(config, kind).start_early]
