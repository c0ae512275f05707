"""Going back to an earlier point of a run: everything from there on is moved aside, never deleted."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.config.job_kinds import parts_of
from pipeline.decide.reconcile import Retract
from pipeline.orchestrate.jobs import Jobs
from pipeline.run import journal
from pipeline.run.benchmarks import trim_measured
from pipeline.run.commits import BadCommit, CorruptData, read_record, require_record
from pipeline.run.directory import Run, resume_command
from pipeline.run.endings import Ending, move_endings, note_endings, read_endings
from pipeline.run.failures import Failure, FailureKind
from pipeline.run.identity import RunError
from pipeline.run.inside import check_holds_no_links
from pipeline.run.journal import Row
from pipeline.run.lease import hold
from pipeline.run.packing import restore_submissions, unpack
from pipeline.run.paths import RunPaths
from pipeline.run.plan import Plan, policy_maker
from pipeline.run.records import Records, find_frontier, is_committed, recorded
from pipeline.run.retention import (
    Thinned,
    check_is_kept,
    in_words,
    keep_best,
    kept_versions,
    read_best,
    way_back,
)
from pipeline.run.states import can_go_on, can_roll_out, has_references, versions_with_state
from pipeline.run.submissions import Ledger
from pipeline.run.superseded import fresh_folder, move_aside, move_folder, move_history, with_states
from pipeline.run.tasks import WORK_STAGES, Stage, Task, parse_task, task_key
from slurm.sharedfiles import is_there

_STAGES = WORK_STAGES[1:]
"""Stages of an iteration, in order."""
_OF_POLICIES = frozenset({Stage.EVALUATE, Stage.BENCHMARK})
"""Stages that nothing reads: going back to one takes back it alone. They count from policy 0."""


@dataclass(frozen=True)
class Point:
    """A stage of an iteration to start again from."""

    stage: Stage
    iteration: int | None
    """Iteration to start in; None: the one in progress, or the last one of a complete run."""
    pool: str = ""
    """Pool to score again, where the stage is score. Empty: all pools."""

    def __str__(self) -> str:
        return f"{self.stage}-{self.pool}" if self.pool else str(self.stage)


def parse_point(text: str) -> Point:
    """Read ``STAGE`` or ``STAGE@ITERATION``; STAGE may be ``score-POOL``. Raises RunError."""
    name, _, iteration = text.partition("@")
    stage, pool = parts_of(name)
    names = ", ".join(stage for stage in _STAGES if stage is not Stage.SCORE)
    if stage not in _STAGES or (pool and stage != Stage.SCORE) or name.endswith("-"):
        raise RunError(
            f"--from {text}: no stage {name!r}; write STAGE or STAGE@ITERATION, stages: {names}; "
            "of a run with pools also score and score-POOL"
        )
    if iteration and not (iteration.isdecimal() and int(iteration) >= (stage not in _OF_POLICIES)):
        raise RunError(f"--from {text}: {iteration!r} is not an iteration; they count from 1")
    return Point(Stage(stage), int(iteration) if iteration else None, pool)


def go_back(run: Run, point: Point, patience: float = 0.0) -> Path | None:
    """Move everything from ``point`` on aside. Returns the folder it is now in; None if there was nothing.

    Args:
        patience: seconds to wait for a driver whose pass is short.

    Raises:
        RunError: the run has not reached that point, begins after it, has no such pool, or what it would go
            on from was pruned.
        LeaseHeld: a driver is running.
    """
    with hold(run.paths.locks, patience):
        return take_back(run, point)


def checked_point(run: Run, point: Point) -> tuple[Point, int]:
    """Return the point with its iteration, and the iteration that the run is in. Changes nothing.

    Raises:
        RunError: as :func:`go_back`.
        UserError: something of the run would be moved to where a link leads.
    """
    check_has_pool(run.plan, point)
    frontier = find_frontier(run.plan, run.paths)
    if frontier.updated < 0 and is_committed(run.paths, policy_maker(run.plan.start + 1)):
        raise RunError(
            f"the prompts are to be prepared again before the run can go back: {resume_command(run)}, "
            f"and once that is done: --from {point}"
        )
    updated = frontier.updated
    at_hand = min(max(updated, run.plan.start) + 1, run.plan.iterations)
    iteration = at_hand if point.iteration is None else point.iteration
    if iteration > at_hand:
        raise RunError(f"the run has come to iteration {at_hand}, so it cannot go back to {iteration}")
    check_can_start_from(run, point.stage, iteration, updated)
    check_holds_no_links(run.paths, iteration)
    return replace(point, iteration=iteration), at_hand


def take_back(run: Run, point: Point) -> Path | None:
    """Do what :func:`go_back` does, for a caller that holds the lease."""
    point, at_hand = checked_point(run, point)
    iteration = point.iteration
    assert iteration is not None
    tasks = superseded(run.plan, point, max(at_hand, newest_begun(run)))
    done = list(recorded(run.paths, tasks))
    if not done:
        return None
    taken = {(task.iteration, task.job_kind) for task in tasks}
    for packed in sorted({task.iteration for task in tasks if task.stage is Stage.UPDATE}):
        if any((t.iteration, t.job_kind) not in taken for t in run.plan.tasks(packed)):  # some shards stay
            unpack(run.paths, packed)
    restore_submissions(run.paths, [task.iteration for task in tasks if task.stage is Stage.UPDATE])
    folder = fresh_folder(run.paths.superseded, f"from-{point}-{iteration}")
    budgets = budgets_of(run.paths, done)
    if point.stage is not Stage.EVALUATE:
        trim_measured(run.paths, iteration, folder)
    if point.stage is not Stage.BENCHMARK:
        trim_rows(run, iteration, folder)  # first: interrupted here, the driver writes the rows again
    elif run.config.evaluate.best_is_measured:  # no row holds what is taken back
        trim_best(run, iteration, (), folder)
    move_history(folder, run.paths, tasks)
    withdraw_submissions(run, tasks)
    move_endings(run.paths, tasks, folder)
    note_endings(run.paths, budgets)
    names = [task_key(task) for task in done]
    journal.event(run.paths.events, "went_back", tasks=names, moved_to=str(folder))
    return folder


def budgets_of(paths: RunPaths, done: Sequence[Task]) -> list[Ending]:
    """Return what a repetition of committed tasks must know to write the same bytes: which of them were done
    with a smaller batch budget. Only of tasks with a failed attempt the record is read."""
    endings = read_endings(paths, {task.iteration for task in done}).values()
    failed = {parse_task(ending.task) for ending in endings}
    found = []
    for task in failed.intersection(done):
        with contextlib.suppress(CorruptData):
            if (record := read_record(paths, task)) and record.halvings:
                found.append(Ending(record.attempt, task_key(task), halvings=record.halvings))
    return found


def withdraw_submissions(run: Run, tasks: Sequence[Task]) -> None:
    """Mark the submissions of these tasks as withdrawn: that they end without a commit is no failure."""
    ledger, job_kinds = Ledger(run.paths), {(task.iteration, task.job_kind) for task in tasks}
    for submission in ledger.load({task.iteration for task in tasks}):
        if (submission.iteration, submission.job_kind) in job_kinds:
            ledger.note(submission, replace(submission.state, is_withdrawn=True))


def newest_begun(run: Run) -> int:
    """Return the newest iteration that has a folder: a lost driver may have begun some ahead of the run."""
    begun = (int(path.name) for path in run.paths.iterations.glob("[0-9]*"))
    return min(max(begun, default=0), run.plan.iterations)


def check_has_pool(plan: Plan, point: Point) -> None:
    """Raise RunError where the point names scores that the run does not have."""
    if point.stage is Stage.SCORE and (not plan.pools or (point.pool and point.pool not in plan.pools)):
        pools = ", ".join(plan.pools) or "none: no reward component names one"
        raise RunError(f"the run has no {point} to start from; pools: {pools}")


def check_can_start_from(run: Run, stage: Stage, iteration: int, updated: int) -> None:
    """Raise RunError unless everything that will be read again still exists."""
    plan = run.plan
    if iteration + (stage in _OF_POLICIES) <= plan.start:
        raise RunError(
            f"the run was forked after iteration {plan.start}, so it cannot go back to iteration {iteration}"
        )
    if stage in _OF_POLICIES:
        due = plan.evaluations() if stage is Stage.EVALUATE else plan.benchmarks()
        kept = {0, *kept_versions(run.paths, ["policy"])}
        gone = [v for v in due if iteration <= v <= updated and v not in kept]
        if gone:
            raise Thinned(
                f"policy {in_words(gone)} was pruned on purpose (update.keep_last), so it cannot be "
                f"evaluated again; evaluations of later ones than {gone[-1]} can be retracted"
            )
    elif iteration > 1:
        check_can_go_on(run, iteration - 1)
        if not has_references(plan, run.paths, iteration):
            raise Thinned(
                f"iteration {iteration} reads policy {in_words(plan.references_of(iteration))} as reference "
                f"(algorithm.kl.sync_every), which was pruned or is gone; {way_back(run)}"
            )
        if stage is Stage.ROLLOUT and not can_roll_out(plan, run.paths, iteration):
            raise Thinned(
                f"responses of iteration {iteration} and those after it are of policies "
                f"{in_words(range(plan.policy_of(iteration), iteration))} (rollout.staleness), of which one "
                f"was pruned or is gone; {way_back(run)}; or keep the responses: "
                f"--from {Stage.REWARD}@{iteration}"
            )


def check_can_go_on(run: Run, version: int) -> None:
    """Raise RunError where the iteration after a committed version cannot be learnt again: its policy was
    pruned or its record is corrupt, or there is no trainer's state from which learning can get to it."""
    try:
        record = require_record(run.paths, policy_maker(version))
    except BadCommit as error:
        itself = f"go back to it: --from {Stage.UPDATE}@{version}"
        raise RunError(f"{error}; {itself if version > run.plan.start else way_back(run)}") from None
    check_is_kept(run.paths, record, "policy", "critic", "trainer")
    if not can_go_on(run.plan, run.paths, version):
        there = sorted(versions_with_state(run.paths))
        named = f"iteration {in_words(there)} {'has' if len(there) == 1 else 'have'} one" if there else ""
        raise Thinned(
            f"iteration {version} has no trainer's state, nor has any from which it could be learned again; "
            f"{named or 'no iteration has one'}; {way_back(run)}"
        )


def superseded(plan: Plan, point: Point, at_hand: int) -> list[Task]:
    """Return the tasks of the point's stage from its iteration on, and all that is made from them. With
    staleness responses of older policies stay, which an iteration that is learned from again does not change.

    Latest first, so that going back, if interrupted, leaves a run that is whole up to where it stopped.
    Nothing reads evaluations, so going back to one takes back evaluations only.
    """
    assert point.iteration is not None
    taken: dict[Task, None] = {}
    for iteration in range(point.iteration, at_hand + 1):
        for task in (*plan.tasks(iteration), *plan.benchmark_of(iteration)):
            is_first = task.stage is point.stage and point.pool in ("", task.pool)
            is_after = point.stage not in _OF_POLICIES and not taken.keys().isdisjoint(plan.inputs(task))
            if is_first or is_after:
                taken[task] = None
    return [*with_states(reversed(taken))]


def trim_rows(run: Run, iteration: int, folder: Path) -> None:
    """Remove rows and spans from ``iteration`` on, and the best policy if it was one of these; copies of the
    files go into ``folder``.

    The folder of published rows moves as a whole: a driver that lost its lease may still write there.
    """
    rows = journal.read(run.paths.metrics)
    kept = [row for row in rows if row["iteration"] < iteration]
    trim_best(run, iteration, kept, folder)  # first: by the rows is seen that nothing is left to do
    move_folder(run.paths.rows, folder, run.paths)
    if len(kept) == len(rows):
        return
    journal.rewrite(folder / run.paths.metrics.name, rows)
    journal.rewrite(run.paths.metrics, kept)
    if is_there(run.paths.spans):
        spans = journal.read(run.paths.spans)
        journal.rewrite(folder / run.paths.spans.name, spans)
        journal.rewrite(run.paths.spans, (line for line in spans if line.get("iteration", 0) < iteration))


def trim_best(run: Run, iteration: int, kept: Sequence[Row], folder: Path) -> None:
    """Move ``best.json`` into ``folder`` if it names a policy from ``iteration`` on, or cannot be read, and
    choose again among the rows that are kept. Interrupted here, the next driver chooses."""
    if _names_best_from(run, iteration):
        run.paths.best.rename(folder / run.paths.best.name)
        (run.paths.policies / "best").unlink(missing_ok=True)
        keep_best(run, kept)


def _names_best_from(run: Run, iteration: int) -> bool:
    try:
        best = read_best(run.paths)
    except RunError:  # which policy it named is not known
        return True
    return best is not None and best.iteration >= iteration


# --- single commits --------------------------------------------------------------------------------------

# What they name is moved aside, to be computed again.


def take_commits_back(
    run: Run, retracts: Sequence[Retract], records: Records, jobs: Jobs, note: Callable[[str], None]
) -> None:
    """Move the commits to retract aside, count them as failures of their tasks, and say so."""
    paths = run.paths
    label = task_key(retracts[0].task).replace("/", "-")
    more = f"-and-{len(retracts) - 1}-more" if len(retracts) > 1 else ""
    for iteration in {retract.task.iteration for retract in retracts if retract.task.stage.is_sharded}:
        unpack(paths, iteration)
    found = {one.task: record for one in retracts if (record := records.readable(one.task))}
    target = str(move_aside(paths, [retract.task for retract in retracts], label + more))
    for task, reason in ((retract.task, retract.reason) for retract in retracts):
        records.forget(task)
        # Counted like an attempt that failed for its inputs: a disk that spoils all commits ends the run.
        attempt, halvings = (found[task].attempt, found[task].halvings) if task in found else ("", 0)
        jobs.note_retracted(Failure(task, 0, FailureKind.INPUTS, reason), attempt, halvings)
        journal.event(paths.events, "retracted", task=task_key(task), reason=reason, moved_to=target)
    _tell(retracts, note)


def _tell(retracts: Sequence[Retract], note: Callable[[str], None]) -> None:
    """Say what is computed again, in a line for each reason."""
    by_reason: dict[str, list[Task]] = {}
    for one in retracts:
        by_reason.setdefault(one.reason, []).append(one.task)
    for reason, tasks in by_reason.items():
        named = f"{tasks[-1]} to {tasks[0]}" if len(tasks) > 1 else str(tasks[0])
        if tasks[0].stage is Stage.STATE:
            note(f"{named} is moved aside, and the next update learns it again: {reason}")
        else:
            note(f"{named} will be computed again: {reason}")
