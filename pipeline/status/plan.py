"""Remaining work of a run, in words: summed up on a screen, or task by task."""

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.config.scheduler import SlurmConfig
from pipeline.orchestrate.reconcile import Actions, Launch, Observation, reconcile
from pipeline.run.directory import Run, is_run
from pipeline.run.plan import Plan
from pipeline.run.records import Frontier, Records, find_frontier, stale_because
from pipeline.run.retention import in_words
from pipeline.run.tasks import PREPARE, Stage, Task

_MOST_LINES = 10
"""Most lines of one kind; the rest is counted."""


@dataclass(frozen=True)
class Outlook:
    """Preview of the next driver pass: what it would observe and decide."""

    plan: Plan
    frontier: Frontier
    seen: Observation
    """State of the tasks of the iterations at hand."""
    actions: Actions
    unanswered: str | None
    """Slurm's error where it did not say what is in the queue."""


def look_ahead(run: Run) -> Outlook:
    """Read the iterations at hand, on Slurm also its queue; all others follow from the frontier."""
    plan, config = run.plan, run.config.scheduler
    is_there, is_on_slurm = is_run(run.paths.root), isinstance(config, SlurmConfig)
    frontier = find_frontier(plan, run.paths) if is_there else Frontier(-1, 0)
    tasks = plan.window(frontier.updated, frontier.evaluated, getattr(config, "horizon", 0))
    records = Records(run.paths)
    if is_there:
        records.refresh([*tasks, *(source for task in tasks for source in plan.inputs(task))])
    live, unanswered = _live(run, tasks) if is_there and is_on_slurm else (set(), None)
    seen = Observation(tasks, records.known, records.corrupt, live, {})
    actions = reconcile(plan, seen, config.max_attempts, in_advance=is_on_slurm)
    return Outlook(plan, frontier, seen, actions, unanswered)


def _live(run: Run, tasks: Sequence[Task]) -> tuple[set[Task], str | None]:
    """Return the tasks that wait or run, and Slurm's error where that is not known."""
    from pipeline.executors.slurm.queue import is_live, look_at_queue
    from pipeline.run.submissions import Ledger
    from pipeline.status.slurm import match

    queue = look_at_queue(run)
    submissions = Ledger(run.paths).load({task.iteration for task in tasks})
    elements = match(submissions, queue)
    return {task for task, element in elements.items() if is_live(element)}, queue.unanswered


def describe_plan(run: Run) -> Iterator[str]:
    """Describe the whole run by stage, the iterations at hand, and what is due.

    Costs the same however long the run is.
    """
    found = look_ahead(run)
    yield from _whole_run(found)
    if not found.seen.tasks:
        yield "nothing to do: every task is committed"
    else:
        yield from _at_hand(found)
        yield from _due(found.actions)
        root = shlex.quote(str(run.paths.root))
        yield (
            f"\nevery task: slurm-ppo plan {root} --all" if is_run(run.paths.root) else "\nevery task: --all"
        )
    yield "This was a plan: nothing was run."


def _whole_run(found: Outlook) -> Iterator[str]:
    total, done = count_all(found.plan), count_done(found)
    yield f"{'stage':<10}{'to run':>10}{'done':>10}"
    for job_kind, count in total.items():
        yield f"{job_kind:<10} {count - done[job_kind]:>9}{done[job_kind]:>10}"
    yield ""


def count_all(plan: Plan) -> Counter[str]:
    """Count the tasks of the whole run by job kind, in the order of the plan."""
    width = plan.iterations - plan.start
    counts = Counter({str(Stage.PREPARE): 1})
    for job_kind in plan.job_kinds:
        counts[job_kind] = width if job_kind == Stage.UPDATE else width * plan.num_shards
    if evaluations := len(plan.evaluations()):
        counts[str(Stage.EVALUATE)] = evaluations
    return counts


def count_done(found: Outlook) -> Counter[str]:
    """Count the tasks whose commit stands: all behind the frontier, and those that were read."""
    plan, seen, frontier = found.plan, found.seen, found.frontier
    behind = max(0, frontier.updated - plan.start)
    counts = Counter({p: behind if p == Stage.UPDATE else behind * plan.num_shards for p in plan.job_kinds})
    counts[str(Stage.PREPARE)] = int(frontier.updated >= 0)
    counts[str(Stage.EVALUATE)] = frontier.evaluated
    retracted = {item.task for item in found.actions.retract}
    counts.update(t.job_kind for t in seen.tasks if t in seen.committed and t not in retracted)
    counts.subtract(task.job_kind for task in retracted if task not in seen.tasks)
    return counts


def _at_hand(found: Outlook) -> Iterator[str]:
    plan, frontier, seen = found.plan, found.frontier, found.seen
    if frontier.updated > plan.start:
        yield f"iterations {plan.start + 1} to {frontier.updated} are trained; at hand:"
    else:
        yield "at hand:"
    groups: dict[str, list[Task]] = {}
    for task in seen.tasks:
        groups.setdefault(_group(task), []).append(task)
    for name, tasks in groups.items():
        committed = sum(task in seen.committed for task in tasks)
        queued = sum(task in seen.live and task not in seen.committed for task in tasks)
        yield f"  {name}: {committed} of {len(tasks)} committed" + (
            f", {queued} in the queue" if queued else ""
        )
    if found.unanswered:
        yield f"  what is in the queue is not known, Slurm does not answer: {found.unanswered}"


def _group(task: Task) -> str:
    """Describe a task in words, without its shard."""
    return str(task._replace(shard=0)).removesuffix(" shard 0")


def _due(actions: Actions) -> Iterator[str]:
    yield from _some("\ncannot be done:", [f"{g.task}: {g.message}" for g in actions.give_up])
    yield from _some("\nto be taken back and made again:", [f"{r.task}: {r.reason}" for r in actions.retract])
    yield from _some("\ndue now:", list(_launches(actions.launch)))


def _some(heading: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield heading
        yield from (f"  {line}" for line in lines[:_MOST_LINES])
    if len(lines) > _MOST_LINES:
        yield f"  and {len(lines) - _MOST_LINES} more"


def _launches(launches: Iterable[Launch]) -> Iterator[str]:
    """Yield a line for each stage of an iteration, in the order of the plan."""
    groups: dict[tuple[str, str], list[Task]] = {}
    for item in launches:
        groups.setdefault((_group(item.task), item.reason), []).append(item.task)
    for (name, reason), tasks in sorted(groups.items(), key=lambda group: group[1][0].iteration):
        shards = in_words(sorted(task.shard for task in tasks))
        yield f"{name} shard {shards}: {reason}" if tasks[0].stage.is_sharded else f"{name}: {reason}"


def every_task(run: Run) -> Iterator[str]:
    """Yield each task that would run and why, an iteration at a time, however many there are."""
    plan, is_there = run.plan, is_run(run.paths.root)
    has_any = False
    for iteration in dict.fromkeys((0, *range(plan.start, plan.iterations + 1))):
        tasks = plan.tasks(iteration)
        reasons = _outstanding(run, tasks) if is_there else dict.fromkeys(tasks, "not committed")
        for task, reason in reasons.items():
            has_any = True
            yield f"{task}: {reason}"
    if not has_any:
        yield "nothing to do: every task is committed"
    yield "This was a plan: nothing was run."


def _outstanding(run: Run, tasks: Sequence[Task]) -> Mapping[Task, str]:
    """Return the tasks of one iteration without a commit that stands, with the reason."""
    inputs = {task: run.plan.inputs(task) for task in tasks}
    records = Records(run.paths)
    records.refresh([PREPARE, *tasks, *(source for sources in inputs.values() for source in sources)])
    committed = records.known
    reasons: dict[Task, str] = {}
    for task in tasks:
        if task in records.corrupt:
            reasons[task] = records.corrupt[task]
        elif task not in committed:
            reasons[task] = "not committed"
        elif why := stale_because(task, inputs[task], committed):
            reasons[task] = why
    return reasons
