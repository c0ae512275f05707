"""Tasks that compute less at once than the configuration says, as tries ran out of GPU memory. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from pipeline.config.schema import Config
from pipeline.decide.budgets import budget_in_words, next_halvings
from pipeline.run.commits import Record
from pipeline.run.endings import Endings
from pipeline.run.tasks import Task, task_key
from pipeline.workers.claims import Budget


@dataclass(frozen=True)
class SmallerBudget:
    """Tasks of a stage of an iteration, or of one pool's scores, whose batch budget is smaller."""

    iteration: int
    stage: str
    tasks: int
    total: int
    """Tasks of the stage."""
    halvings: int
    """Number of times that the budget was halved, of the task with the smallest."""
    words: str


def smaller_budgets(
    config: Config, tasks: Iterable[Task], records: Mapping[Task, Record], endings: Endings
) -> Iterator[SmallerBudget]:
    """Yield a finding for each stage and iteration with such tasks.

    Args:
        tasks: in the order of the plan.
        records: of those that are done.
        endings: how attempts at these tasks ended.
    """
    tried: dict[str, list[Budget]] = {}
    for ending in endings.values():
        tried.setdefault(ending.task, []).append(Budget(ending.halvings, ending.kind))
    for (iteration, stage), group in groupby(tasks, lambda task: (task.iteration, task.job_kind)):
        together = list(group)
        counts = [_halvings(task, records.get(task), tried) for task in together]
        if most := max(counts):
            less = sum(count > 0 for count in counts)
            where = f"{stage} of iteration {iteration}" if iteration else stage
            which = "" if len(together) == 1 else f"{less} of {len(together)} tasks compute with "
            budget = budget_in_words(config, together[0].stage, most)
            words = f"{where}: {which}{budget}, as a try ran out of GPU memory"
            yield SmallerBudget(iteration, stage, less, len(together), most, words)


def _halvings(task: Task, record: Record | None, tried: Mapping[str, list[Budget]]) -> int:
    return record.halvings if record else next_halvings(tried.get(task_key(task), ()))
