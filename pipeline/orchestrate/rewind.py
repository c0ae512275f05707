"""Going back to an earlier point of a run: everything from there on is moved aside, never deleted."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.config.job_kinds import parts_of
from pipeline.run import journal
from pipeline.run.benchmarks import trim_measured
from pipeline.run.best import keep_best
from pipeline.run.commits import BadCommit, require_record
from pipeline.run.directory import Run, resume_command
from pipeline.run.endings import move_endings
from pipeline.run.identity import RunError
from pipeline.run.inside import check_holds_no_links
from pipeline.run.journal import Row
from pipeline.run.lease import hold
from pipeline.run.packing import restore_submissions, unpack
from pipeline.run.plan import Plan, policy_maker
from pipeline.run.records import find_frontier, is_committed, recorded
from pipeline.run.retention import Thinned, check_is_kept, in_words, kept_versions, read_best, way_back
from pipeline.run.states import can_go_on, versions_with_state
from pipeline.run.submissions import Ledger
from pipeline.run.superseded import fresh_folder, move_folder, move_history, with_states
from pipeline.run.tasks import WORK_STAGES, Stage, Task, task_key
from pipeline.tracking.state import rewind, rewind_measured
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
            on from was thinned out.
        LeaseHeld: a driver is at work.
    """
    with hold(run.paths.locks, patience):
        return take_back(run, point)


def checked_point(run: Run, point: Point) -> tuple[Point, int]:
    """Return the point with its iteration, and the iteration that the run is in. Changes nothing.

    Raises:
        RunError: as :func:`go_back`.
        LinkedElsewhere: something of the run would be moved to where a link leads.
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
    if point.stage in (Stage.SCORE, Stage.REWARD, Stage.UPDATE):  # some of its shards stay
        unpack(run.paths, iteration)
    restore_submissions(run.paths, [task.iteration for task in tasks if task.stage is Stage.UPDATE])
    folder = fresh_folder(run.paths.superseded, f"from-{point}-{iteration}")
    if point.stage is not Stage.EVALUATE and trim_measured(run.paths, iteration, folder):
        rewind_measured(run.paths)
    if point.stage is not Stage.BENCHMARK:
        trim_rows(run, iteration, folder)  # first: interrupted here, the driver writes the rows again
    elif run.config.evaluate.best_is_measured:  # no row holds what is taken back
        trim_best(run, iteration, (), folder)
    move_history(folder, run.paths, tasks)
    withdraw_submissions(run, tasks)
    move_endings(run.paths, tasks, folder)
    names = [task_key(task) for task in done]
    journal.event(run.paths.events, "went_back", tasks=names, moved_to=str(folder))
    return folder


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
                f"policy {in_words(gone)} was thinned out on purpose (update.keep_last), so it cannot be "
                f"evaluated again; evaluations of later ones than {gone[-1]} can be taken back"
            )
    elif iteration > 1:
        check_can_go_on(run, iteration - 1)


def check_can_go_on(run: Run, version: int) -> None:
    """Raise RunError where the iteration after a committed version cannot be learnt again: its policy was
    thinned out or its record is spoilt, or there is no trainer's state from which learning can get to it."""
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
            f"iteration {version} has no trainer's state, nor has any from which it could be learnt again; "
            f"{named or 'no iteration has one'}; {way_back(run)}"
        )


def superseded(plan: Plan, point: Point, at_hand: int) -> list[Task]:
    """Return the tasks that depend on ``point``: of its iteration from its stage on, and of all later ones.

    Latest first, so that going back, if interrupted, leaves a run that is whole up to where it stopped.
    Nothing reads evaluations, so going back to one takes back evaluations only.
    """
    assert point.iteration is not None
    tasks: list[Task] = []
    for iteration in range(at_hand, point.iteration - 1, -1):
        stages = _STAGES if iteration > point.iteration else _STAGES[_STAGES.index(point.stage) :]
        if point.stage in _OF_POLICIES:
            stages = tuple(stage for stage in _STAGES if stage is point.stage)
        of_iteration = (*plan.tasks(iteration), *plan.benchmark_of(iteration))
        tasks += with_states(task for task in reversed(of_iteration) if task.stage in stages)
    others = {pool for pool in plan.pools if point.pool not in ("", pool)}
    return [task for task in tasks if task.iteration > point.iteration or task.pool not in others]


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
    rewind(run.paths, int(kept[-1]["iteration"]) if kept else run.plan.start)


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
    return best is not None and best["iteration"] >= iteration
