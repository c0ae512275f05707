"""Remaining work of a run, in words: summed up on a screen, or task by task."""

import itertools
import shlex
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.decide.reconcile import Actions, Launch, Observation, reconcile
from pipeline.run import journal
from pipeline.run.directory import Run, is_run
from pipeline.run.lease import holder_of
from pipeline.run.plan import Plan
from pipeline.run.records import Frontier, Records, find_frontier, stale_because
from pipeline.run.retention import in_words
from pipeline.run.tasks import PREPARE, Stage, Task
from pipeline.status.lanes import at_work
from pipeline.text import duration, seconds_in_words
from pipeline.workers.beats import BeatReader, read_living

if TYPE_CHECKING:  # a run of this machine needs nothing of Slurm's
    from pipeline.executors.slurm.queue import RunQueue

_MOST_LINES = 10
"""Most lines of one kind; the rest is counted."""
_RECENT = 5
"""Iterations whose seconds tell how long the rest takes."""


@dataclass(frozen=True)
class Outlook:
    """Preview of the next driver pass: what it would observe and decide."""

    plan: Plan
    frontier: Frontier
    seen: Observation
    """State of the tasks of the iterations at hand."""
    actions: Actions
    unanswered: str | None
    """Reason why it is not known what is in the queue, in words."""
    where: str = "in the queue"
    """Phrase on tasks that are not due, as they have a worker."""
    is_hidden: bool = False
    """Whether the jobs are another user's and not seen here: what is due only the owner can see."""


def look_ahead(run: Run) -> Outlook:
    """Read the iterations at hand, on Slurm also its queue; all others follow from the frontier."""
    plan, slurm, is_there = run.plan, run.config.slurm, is_run(run.paths.root)
    frontier = find_frontier(plan, run.paths) if is_there else Frontier(-1, 0)
    tasks = frontier.window(plan)
    records = Records(run.paths)
    if is_there:
        records.refresh([*tasks, *(source for task in tasks for source in plan.inputs(task))])
    live, queue = set[Task](), None
    if is_there and slurm:
        live, queue = _live_tasks(run, {task.iteration for task in tasks})
    elif is_there and holder_of(run.paths.locks):
        live = set(at_work(read_living(BeatReader(run.paths)).values()))
    passed = frontier.passed(plan, tasks)
    seen = Observation(tasks, records.known, records.corrupt, live, {}, passed=passed)
    actions = reconcile(plan, seen, run.config.scheduler.max_attempts)
    where, is_hidden = "in the queue" if slurm else "being done", queue is not None and queue.is_hidden
    return Outlook(plan, frontier, seen, actions, _why_unknown(queue), where, is_hidden)


def _why_unknown(queue: "RunQueue | None") -> str | None:
    if queue is not None and queue.elsewhere is not None and queue.is_hidden:
        return queue.elsewhere.why_hidden
    return f"Slurm does not answer: {queue.unanswered}" if queue is not None and queue.unanswered else None


def _live_tasks(run: Run, iterations: set[int]) -> "tuple[set[Task], RunQueue]":
    """Return the tasks of some iterations that have or will have a worker, and the queue."""
    from pipeline.executors.slurm.queue import look_at_queue
    from pipeline.run.submissions import Ledger
    from pipeline.status.slurm import JobsShown
    from pipeline.workers.beats import read_beats

    queue, submissions = look_at_queue(run), Ledger(run.paths).load(iterations)
    beats = read_beats(run.paths)
    return JobsShown(submissions, queue.with_heard(beats), tuple(beats.values())).live, queue


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
        yield from () if found.is_hidden else _due(found.actions)
        yield from _pace(run)
        command = f"slurm-ppo plan {shlex.quote(str(run.paths.root))} " if is_run(run.paths.root) else ""
        yield f"\nevery task: {command}--all"


def _whole_run(found: Outlook) -> Iterator[str]:
    """Yield a table of the tasks of the whole run, in the order of the plan.

    Done are all behind the frontier, and those that were read and whose commit stands.
    """
    plan, seen, frontier = found.plan, found.seen, found.frontier
    width, behind = plan.iterations - plan.start, max(0, frontier.updated - plan.start)
    each = {job_kind: 1 if job_kind == Stage.UPDATE else plan.num_shards for job_kind in plan.job_kinds}
    total = Counter({"prepare": 1, **{job_kind: width * count for job_kind, count in each.items()}})
    total.update(task.job_kind for task in (*plan.evaluation_tasks(), *plan.benchmark_tasks()))
    done = Counter({"prepare": int(frontier.updated >= 0), Stage.EVALUATE.value: frontier.evaluated})
    done[Stage.BENCHMARK] = frontier.benchmarked
    done.update({job_kind: behind * count for job_kind, count in each.items()})
    retracted = {item.task for item in found.actions.retract}
    done.update(t.job_kind for t in seen.tasks if t in seen.committed and t not in retracted)
    done.subtract(task.job_kind for task in retracted if task not in seen.tasks)
    yield f"{'stage':<10}{'to run':>10}{'done':>10}"
    for job_kind, count in total.items():
        yield f"{job_kind:<10} {count - done[job_kind]:>9}{done[job_kind]:>10}"
    yield ""


def _at_hand(found: Outlook) -> Iterator[str]:
    plan, frontier, seen = found.plan, found.frontier, found.seen
    trained = f"iterations {plan.start + 1} to {frontier.updated} are trained; "
    yield f"{trained if frontier.updated > plan.start else ''}at hand:"
    for name, group in itertools.groupby(seen.tasks, _group):
        tasks = list(group)
        committed = sum(task in seen.committed for task in tasks)
        queued = sum(task in seen.live and task not in seen.committed for task in tasks)
        in_queue = f", {queued} {found.where}" if queued else ""
        yield f"  {name}: {committed} of {len(tasks)} committed{in_queue}"
    if found.unanswered:
        yield f"  what is in the queue is not known, {found.unanswered}"


def _pace(run: Run) -> Iterator[str]:
    """Yield what an iteration took of late, and what that says of the rest of the run."""
    rows = [row for row in journal.read_tail(run.paths.metrics) if "seconds/remaining" in row]
    if rows:
        recent = [row["seconds/iteration"] for row in rows[-_RECENT:]]
        pace, rest = seconds_in_words(statistics.median(recent)), duration(rows[-1]["seconds/remaining"])
        yield f"\nmeasured: {pace} an iteration, median of the newest {len(recent)}; about {rest} remain"


def _group(task: Task) -> str:
    """Describe a task in words, without its shard."""
    return str(task._replace(shard=0)).removesuffix(" shard 0")


def _due(actions: Actions) -> Iterator[str]:
    told = {
        "cannot be done": [f"{item.task}: {item.message}" for item in actions.give_up],
        "to be retracted and made again": [f"{item.task}: {item.reason}" for item in actions.retract],
        "due now": list(_launches(actions.launch)),
    }
    for heading, lines in told.items():
        if lines:
            yield f"\n{heading}:"
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
        tasks = (*plan.tasks(iteration), *plan.benchmark_of(iteration))
        for task, reason in _outstanding(run, tasks) if is_there else ((t, "not committed") for t in tasks):
            has_any = True
            yield f"{task}: {reason}"
    if not has_any:
        yield "nothing to do: every task is committed"


def _outstanding(run: Run, tasks: Sequence[Task]) -> Iterator[tuple[Task, str]]:
    """Yield the tasks of one iteration without a commit that stands, with the reason."""
    inputs = {task: run.plan.inputs(task) for task in tasks}
    records = Records(run.paths)
    records.refresh([PREPARE, *tasks, *(source for sources in inputs.values() for source in sources)])
    committed = records.known
    for task in tasks:
        missing = None if task in committed else "not committed"
        why = records.corrupt.get(task) or missing or stale_because(task, inputs[task], committed)
        if why:
            yield task, why
