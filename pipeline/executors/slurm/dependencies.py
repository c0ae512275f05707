"""Slurm dependency expressions between jobs, from what is committed and live. Pure.

Dependencies only order jobs; every task checks its inputs itself. So a job waits for the jobs that compute
its missing inputs now. Where such a job failed and another took its place, the waiting job's dependency is
updated, so that it keeps its place in the queue.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.config.job_kinds import DRIVER, EVALUATION_DRIVER
from pipeline.config.scheduler import StreamingDependency
from pipeline.orchestrate.reconcile import Observation
from pipeline.run.plan import Plan
from pipeline.run.tasks import WORK_STAGES, Stage, Task

NEVER, DEPENDENCY = "DependencyNeverSatisfied", "Dependency"
"""Pending reasons of Slurm's."""
_OF_POLICIES = (Stage.EVALUATE, Stage.BENCHMARK)
"""Stages that read a policy and that no stage reads."""
CHAIN = tuple(stage for stage in WORK_STAGES if stage not in _OF_POLICIES)
"""The other stages in order, each reading what the one before made."""

IsCommitted = Callable[[Task], bool]


@dataclass(frozen=True)
class ArrayElement:
    """Array element that carries a live task."""

    array: str
    """Job id of the array."""
    index: int


@dataclass(frozen=True)
class Waiting:
    """A live task that has not started."""

    task: Task
    carrier: ArrayElement
    reason: str
    """Reason why it is pending, as Slurm shows it."""
    waits_for: Collection[str]
    """Ids of the arrays that its job's dependency names."""


@dataclass(frozen=True)
class DependencyUpdate:
    """New dependency for pending elements of one array."""

    elements: tuple[ArrayElement, ...]
    waits_for: tuple[str, ...]
    dependency: str
    """Dependency expression; empty where all inputs are committed."""


def missing_inputs(plan: Plan, task: Task, is_committed: IsCommitted) -> list[Task]:
    """Find the direct dependencies: uncommitted inputs, minus those implied by another uncommitted input."""
    missing = [source for source in plan.inputs(task) if not is_committed(source)]
    if len(missing) < 2:
        return missing
    implied = {source for waiting in missing for source in plan.inputs(waiting)}
    return [source for source in missing if source not in implied]


def elements_of(
    plan: Plan, task: Task, is_committed: IsCommitted, carriers: Mapping[Task, ArrayElement]
) -> tuple[ArrayElement, ...] | None:
    """Return the elements that ``task`` has to wait for; None if an input is neither committed nor live."""
    missing = missing_inputs(plan, task, is_committed)
    if any(source not in carriers for source in missing):
        return None
    return tuple(carriers[source] for source in missing)


def ended_before(plan: Plan, task: Task, carriers: Mapping[Task, ArrayElement]) -> tuple[str, ...]:
    """Return the arrays that must have ended, in whatever way, before ``task`` starts."""
    before = plan.must_have_ended(task)
    return (carriers[before].array,) if before is not None and before in carriers else ()


Waits = tuple[Task, int, tuple[ArrayElement, ...]]
"""Task and array index of an element of an array, and the elements that it has to wait for."""


def dependency_of(
    elements: Sequence[Waits], streaming: StreamingDependency, ended: Sequence[str] = ()
) -> tuple[str, tuple[str, ...]]:
    """Return the dependency expression of one array, and the array ids in it.

    Args:
        ended: arrays that must have ended, in whatever way; see :func:`ended_before`.
    """
    arrays = _arrays_of(carrier for *_, waits_for in elements for carrier in waits_for)
    parts = []
    if arrays:
        corresponds = streaming is StreamingDependency.AFTERCORR and _correspond(elements, arrays)
        parts.append(f"{'aftercorr' if corresponds else 'afterok'}:{':'.join(arrays)}")
    if ended:
        parts.append(f"afterany:{':'.join(ended)}")
    return ",".join(parts), (*arrays, *ended)


def _arrays_of(carriers: Iterable[ArrayElement]) -> tuple[str, ...]:
    """Return the ids of their arrays, oldest first."""
    return tuple(sorted({c.array for c in carriers}, key=lambda id: (int(id) if id.isdigit() else 0, id)))


def _correspond(elements: Sequence[Waits], arrays: Sequence[str]) -> bool:
    """Whether each element waits for just the one of the same index in every array (``aftercorr``)."""
    return all(
        task.stage.scores and set(waits_for) == {ArrayElement(array, index) for array in arrays}
        for task, index, waits_for in elements
    )


def rewire(
    plan: Plan,
    waiting: Iterable[Waiting],
    is_committed: IsCommitted,
    carriers: Mapping[Task, ArrayElement],
    streaming: StreamingDependency,
) -> list[DependencyUpdate]:
    """Find dependencies that have to change, one update for elements of an array with the same new one."""
    groups: dict[tuple[str, tuple[str, ...], tuple[str, ...]], list[Waits]] = {}
    for item in waiting:
        now = elements_of(plan, item.task, is_committed, carriers)
        if now is None:
            continue
        arrays, ended = _arrays_of(now), ended_before(plan, item.task, carriers)
        is_wrong = item.reason == NEVER or not {*arrays, *ended} <= set(item.waits_for)
        if is_wrong or _is_held_back(item, is_committed, carriers):
            key = (item.carrier.array, arrays, ended)
            groups.setdefault(key, []).append((item.task, item.carrier.index, now))
    changes = []
    for (array, _, ended), elements in groups.items():
        dependency, arrays = dependency_of(elements, streaming, ended)
        told = tuple(ArrayElement(array, index) for _, index, _ in elements)
        changes.append(DependencyUpdate(told, arrays, dependency))
    return changes


def _is_held_back(item: Waiting, is_committed: IsCommitted, carriers: Mapping[Task, ArrayElement]) -> bool:
    """Whether a job waits for an update's job to end although the policy that it reads is committed: the
    update still writes the trainer's state, and has not released the job (:mod:`slurm.release`)."""
    reads = {Stage.ROLLOUT: item.task.iteration - 1}
    reads |= dict.fromkeys(_OF_POLICIES, item.task.iteration)
    if item.reason != DEPENDENCY or item.task.stage not in reads:
        return False
    update = Task(reads[item.task.stage], Stage.UPDATE)
    return update in carriers and is_committed(update) and carriers[update].array in item.waits_for


@dataclass(frozen=True)
class Watch:
    """Arrays that one driver job waits for."""

    iteration: int
    job_kind: str
    last: tuple[str, ...]
    """Ids of the arrays whose end, in success or failure, starts the job."""
    earlier: tuple[str, ...]
    """Ids of the arrays whose failure starts the job."""

    @property
    def arrays(self) -> tuple[str, ...]:
        return (*self.last, *self.earlier)


def watches(live: Iterable[tuple[Task, str]]) -> Iterator[Watch]:
    """Yield a watch for each iteration that has live arrays, and one for its evaluation and benchmark.

    Args:
        live: tasks and the ids of the arrays that carry them; empty where the id is not known yet.
    """
    arrays: dict[int, dict[Stage, dict[str, None]]] = {}
    for task, array in live:
        # Prepare is the first link of the first iteration's chain.
        iteration = 1 if task.stage is Stage.PREPARE else task.iteration
        of_stage = arrays.setdefault(iteration, {}).setdefault(task.stage, {})
        of_stage |= {array: None} if array else {}
    for iteration, stages in arrays.items():
        chain = [tuple(stages[stage]) for stage in CHAIN if stage in stages]
        if chain:
            yield Watch(iteration, DRIVER, chain[-1], tuple(array for ids in chain[:-1] for array in ids))
        of_policy = tuple(array for stage in _OF_POLICIES for array in stages.get(stage, {}))
        if any(stage in stages for stage in _OF_POLICIES):
            yield Watch(iteration, EVALUATION_DRIVER, of_policy, ())


def watch_expression(last: Sequence[str], earlier: Sequence[str]) -> str:
    """Return when to start a driver job: a last array of an iteration ended, or an earlier one failed.

    One job watches a whole iteration this way, and where nothing fails just one starts.
    """
    parts = [f"afterany:{array}" for array in last] + [f"afternotok:{array}" for array in earlier]
    return "?".join(parts)


def committed_in(seen: Observation) -> IsCommitted:
    """Return a predicate: whether one pass saw a task as committed, and not corrupt where it is read."""
    return seen.is_done
