"""What a pass decides for a simulated run: by the program's own functions, from what such a pass sees."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.decide.crew import Crew, Pending, Worker, failed_claims, held_tasks, wanted_workers
from pipeline.decide.expectations import estimates_of
from pipeline.decide.places import Held, Need
from pipeline.decide.reconcile import Observation, reconcile
from pipeline.decide.situation import Estimate, Foreign, Situation, tasks_only_by_pass
from pipeline.decide.staffing import Staffing, staff
from pipeline.run.failures import Failure, FailureKind
from pipeline.run.tasks import PREPARE, Stage, Task
from pipeline.simulate.cluster import SimulatedJob
from pipeline.simulate.plant import Plant, PlantKind
from pipeline.simulate.run import SimulatedRun
from pipeline.workers.beats import Doing
from pipeline.workers.claims import Claim, newest_numbers
from slurm.nodes import Node


@dataclass(frozen=True)
class PassDecision:
    """What a pass does for a run."""

    staffing: Staffing
    known: Mapping[Task, int]
    """Numbers of the newest claims that it knew of."""
    failed: Sequence[Claim] = ()
    """Attempts that came to nothing, and that no earlier pass has seen."""
    left_out: tuple[Task, ...] = ()
    """Expendable tasks that the run goes on without."""
    given_up: tuple[Failure, ...] = ()


@dataclass(frozen=True)
class Around:
    """What a pass sees of the cluster beside its own workers."""

    nodes: Sequence[Node] = ()
    others: Sequence[Held] = ()
    """What jobs of the user's other runs hold."""
    foreign: Sequence[Foreign] = ()
    """Jobs of the user's other runs that wait for room."""
    lacking: Mapping[SimulatedJob, bool] = field(default_factory=dict)
    """The user's jobs that wait for room, and whether at a limit of the user."""
    slots: int | None = None
    """Elements that the run may have in the queue at once; None: any number."""


@dataclass(frozen=True)
class PassTerms:
    """What passes of a run go by that never changes."""

    wanted: Mapping[str, int]
    """Most workers by job kind."""
    early: Sequence[str]
    """Job kinds whose workers start early."""
    of_one_task: Collection[str]
    """Job kinds whose workers leave after one task."""
    needs: Mapping[str, Need]

    @staticmethod
    def of(plant: Plant) -> "PassTerms":
        wanted = wanted_workers(plant.plan, lambda job_kind: _parallelism(plant, job_kind))
        wanted = {kind: number for kind, number in wanted.items() if kind in plant.kinds}
        early = [kind for kind in wanted if plant.kinds[kind].start_early]
        of_one_task = frozenset(kind for kind in wanted if plant.kinds[kind].does_one_task)
        return PassTerms(wanted, early, of_one_task, {kind: need_of(plant.kinds[kind]) for kind in wanted})


def decide(
    run: SimulatedRun, terms: PassTerms, submitted_for: Collection[Task], around: Around
) -> PassDecision:
    """Observe, count what failed, and decide which workers there are to be."""
    progress, plan = run.progress, run.plant.plan
    window, tasks = progress.window, progress.tasks
    committed, crew = progress.seen(), crew_of(run, around.lacking)
    newest = Task(progress.frontier.updated, Stage.UPDATE)
    claims = progress.claims_on(dict.fromkeys((*tasks, newest)))
    failed = failed_claims(claims, crew, progress.committed, progress.judged)
    count_failures(run, failed)
    held = held_tasks(claims, crew, progress.committed)
    observed = Observation(window, committed, {}, held.keys(), progress.failures)
    actions = reconcile(plan, observed, run.plant.max_attempts)
    if actions.give_up:
        return PassDecision(Staffing(), {}, failed, given_up=actions.give_up)
    situation = Situation(
        plan=plan,
        tasks=tasks,
        crew=crew,
        held=held,
        committed=committed.keys(),
        ready=[launch.task for launch in actions.launch],
        wanted=terms.wanted,
        early=terms.early,
        of_one_task=terms.of_one_task,
        needs=terms.needs,
        nodes=around.nodes,
        others=around.others,
        foreign=around.foreign,
        promised=run.handovers,
        slots=around.slots,
        most_running=run.plant.limits.jobs,
        measures=run.plant.measures,
        tried={claim.task for claim in claims},
        now=run.now,
        estimates=_estimates(run, terms, committed),
        submitted_for=submitted_for,
        only_by_pass=tasks_only_by_pass(progress.failures, lambda job_kind: run.plant.max_attempts),
    )
    left_out = tuple(failure.task for failure in actions.leave_out)
    staffing = staff(situation)
    if not run.plant.evicts:
        staffing = replace(staffing, end_idle=())
    return PassDecision(staffing, newest_numbers(claims), failed, left_out)


def crew_of(run: SimulatedRun, lacking: Mapping[SimulatedJob, bool]) -> Crew:
    """Return a run's workers as Slurm and their beats show them.

    Args:
        lacking: jobs that Slurm showed to wait for room, and whether at a limit of the user.
    """
    nodes = run.cluster.nodes
    workers = [
        Worker(
            name=w.name,
            first=w.first,
            doing=w.doing or Doing.STARTING,
            task=w.claim.task if w.claim else w.awaited,
            since=w.since,
            nodes=tuple(nodes[number].name for number in w.job.nodes),
            has_worked=w.beat.tasks > 0,
        )
        for w in run.running()
    ]
    waiting = (w for w in run.workers.values() if w.doing is None)
    pending = [
        Pending(w.element, w.first, w.begin, w.wanted, w.job in lacking, lacking.get(w.job, False))
        for w in waiting
    ]
    return Crew(workers, pending)


def need_of(kind: PlantKind) -> Need:
    """Return what jobs of a kind ask for, as passes have it."""
    asked = kind.request
    return Need(frozenset(kind.partitions), asked.cpus, asked.gpus, asked.memory, asked.nodes)


def nodes_of(plant: Plant) -> list[Node]:
    """Return a plant's nodes, as sinfo shows them."""
    partitions: dict[str, set[str]] = {}
    for partition in plant.partitions:
        for name in partition.nodes:
            partitions.setdefault(name, set()).add(partition.name)
    return [
        Node(node.name, frozenset(partitions.get(node.name, ())), node.cpus, node.gpus, node.memory)
        for node in plant.nodes
    ]


def count_failures(run: SimulatedRun, failed: Sequence[Claim]) -> None:
    for claim in failed:
        progress = run.progress
        kind = progress.ended.get(claim.attempt, FailureKind.KILLED)
        progress.judged.add(claim.attempt)
        found = progress.failures.setdefault(claim.task, [])
        found.append(Failure(claim.task, claim.number, kind, "simulated"))


def _parallelism(plant: Plant, job_kind: str) -> int | None:
    return plant.kinds[job_kind].parallelism if job_kind in plant.kinds else None


def _estimates(run: SimulatedRun, terms: PassTerms, committed: Collection[Task]) -> dict[str, Estimate]:
    kinds, early = (
        [kind for kind in found if kind != PREPARE.job_kind] for found in (terms.wanted, terms.early)
    )
    progress, plan = run.progress, run.plant.plan
    return estimates_of(
        plan,
        kinds=kinds,
        early=early,
        beats=run.known.all_beats(),
        tasks=progress.tasks,
        committed=committed,
        committed_at=progress.at,
        seen=progress.passages,
        now=run.now,
    )
