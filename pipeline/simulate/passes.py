"""What a pass decides for a simulated run: by the program's own functions, from what such a pass sees."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pipeline.orchestrate.expectations import estimates_of
from pipeline.orchestrate.reconcile import Observation, reconcile
from pipeline.orchestrate.staffing import (
    Crew,
    Estimate,
    Pending,
    Situation,
    Staffing,
    Worker,
    failed_claims,
    held_tasks,
    staff,
)
from pipeline.run.failures import Failure, FailureKind
from pipeline.run.tasks import PREPARE, Stage, Task
from pipeline.simulate.plant import Plant
from pipeline.simulate.run import SimulatedRun
from pipeline.workers.choosing import is_left_to_passes
from pipeline.workers.claims import Claim, newest_numbers


@dataclass(frozen=True)
class Decision:
    """What a pass does for a run."""

    staffing: Staffing
    known: Mapping[Task, int]
    """Numbers of the newest claims that it knew of."""
    left_out: tuple[Task, ...] = ()
    """Expendable tasks that the run goes on without."""
    given_up: tuple[Failure, ...] = ()


def decide(run: SimulatedRun, begun_with: Collection[Task]) -> Decision:
    """Observe, count what failed, and decide who is to work."""
    progress, plan = run.progress, run.plant.plan
    window = progress.tasks_at_hand()
    tasks = sorted((*window, *_tasks_after(run, window)), key=lambda task: task.iteration)
    committed, crew = progress.seen(tasks), crew_of(run)
    newest = Task(progress.frontier.updated, Stage.UPDATE)
    claims = progress.claims_on(dict.fromkeys((*tasks, newest)))
    count_failures(run, failed_claims(claims, crew, progress.committed, progress.judged))
    held = held_tasks(claims, crew, progress.committed)
    observed = Observation(window, committed, {}, held.keys(), progress.failures)
    actions = reconcile(plan, observed, run.plant.max_attempts)
    if actions.give_up:
        return Decision(Staffing(), {}, given_up=actions.give_up)
    situation = Situation(
        plan=plan,
        tasks=tasks,
        crew=crew,
        held=held,
        committed=committed.keys(),
        ready=[launch.task for launch in actions.launch],
        wanted=wanted_workers(run.plant),
        places={kind: settings.partitions for kind, settings in run.plant.kinds.items()},
        now=run.now,
        estimates=_estimates(run, tasks, committed),
        begun_with=begun_with,
        left={task for task, failures in progress.failures.items() if _is_left(run, failures)},
    )
    left_out = tuple(failure.task for failure in actions.leave_out)
    return Decision(staff(situation), newest_numbers(claims), left_out)


def _tasks_after(run: SimulatedRun, window: Sequence[Task]) -> tuple[Task, ...]:
    plan = run.plant.plan
    newest = max((plan.start, *(task.iteration for task in window)))
    return plan.tasks(newest + 1) if window and newest < plan.iterations else ()


def crew_of(run: SimulatedRun) -> Crew:
    """Return a run's workers as Slurm and their beats show them."""
    workers = [
        Worker(w.name, w.first, w.doing, w.claim.task if w.claim else w.awaited, w.since)
        for w in run.running()
    ]
    waiting = (w for w in run.workers.values() if w.doing is None)
    return Crew(workers, [Pending(w.element, w.first, w.begin) for w in waiting])


def count_failures(run: SimulatedRun, failed: Sequence[Claim]) -> None:
    for claim in failed:
        progress = run.progress
        kind = progress.ended.get(claim.attempt, FailureKind.KILLED)
        progress.judged.add(claim.attempt)
        found = progress.failures.setdefault(claim.task, [])
        found.append(Failure(claim.task, claim.number, kind, "simulated"))


def _is_left(run: SimulatedRun, failures: Sequence[Failure]) -> bool:
    return is_left_to_passes([failure.kind for failure in failures], run.plant.max_attempts)


def wanted_workers(plant: Plant) -> dict[str, int]:
    """Return the number of workers that a run is to have, by job kind."""
    plan = plant.plan
    sharded = {task.job_kind for task in plan.tasks(plan.iterations) if task.stage.is_sharded}
    others = (Stage.EVALUATE, *((Stage.BENCHMARK,) if plan.benchmark_every else ()))
    kinds = map(str, (PREPARE.job_kind, *plan.job_kinds, *others))
    return {kind: _most(plant, kind) if kind in sharded else 1 for kind in kinds if kind in plant.kinds}


def _most(plant: Plant, job_kind: str) -> int:
    return min(plant.plan.num_shards, plant.kinds[job_kind].parallelism or plant.plan.num_shards)


def _estimates(run: SimulatedRun, tasks: Sequence[Task], committed: Collection[Task]) -> dict[str, Estimate]:
    early = [kind for kind in wanted_workers(run.plant) if run.kind(kind).start_early]
    progress = run.progress
    return estimates_of(
        run.plant.plan, early, run.all_beats(), tasks, committed, progress.at, progress.passages, run.now
    )
