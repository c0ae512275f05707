"""When the next inputs of workers are expected, and how long coming back takes: from what was measured."""

from collections.abc import Mapping, Sequence

from pipeline.config.scheduler import SlurmConfig, resources_of
from pipeline.orchestrate.expectations import estimates_of
from pipeline.orchestrate.staffing import Estimate
from pipeline.run import journal
from pipeline.run.commits import Record
from pipeline.run.directory import Run
from pipeline.run.records import Committed
from pipeline.run.tasks import PREPARE, Stage, Task
from pipeline.workers.estimates import passages
from pipeline.workers.reading import read_beats

_SPANS_BYTES = 1 << 18


def read_estimates(
    run: Run, config: SlurmConfig, tasks: Sequence[Task], committed: Mapping[Task, Committed], now: float
) -> dict[str, Estimate]:
    """Return an estimate for each job kind whose workers start early.

    Args:
        tasks: of the iteration at hand and of the next, by iteration.
        committed: records of these and of what they read.
    """
    kinds = map(str, (PREPARE.job_kind, *run.plan.job_kinds, Stage.EVALUATE, Stage.BENCHMARK))
    early = [kind for kind in kinds if resources_of(config, kind).start_early]
    if not early:
        return {}
    seen = passages(journal.read_tail(run.paths.spans, _SPANS_BYTES)) if run.paths.spans.exists() else []

    def committed_at(task: Task) -> float | None:
        record = committed.get(task)
        return record.ended if isinstance(record, Record) else None

    return estimates_of(
        run.plan, early, list(read_beats(run.paths).values()), tasks, committed, committed_at, seen, now
    )
