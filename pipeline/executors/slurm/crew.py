"""The workers of a run at one moment: what Slurm shows of their jobs, and what their beats say."""

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.config.scheduler import ResourcesConfig, SlurmConfig, resources_of
from pipeline.executors.slurm.exit_reasons import Gone
from pipeline.executors.slurm.job_table import ArrayElement, JobTable, Live
from pipeline.executors.slurm.queue import as_heard_of, is_live, is_pending, newest_starts, worker_of
from pipeline.orchestrate.crew import Crew, Pending, Worker, wanted_workers
from pipeline.orchestrate.places import Held, Need
from pipeline.orchestrate.situation import Foreign
from pipeline.run.commits import CorruptData, read_record
from pipeline.run.paths import RunPaths
from pipeline.run.plan import Plan
from pipeline.run.submissions import Submission, is_driver_job
from pipeline.run.tasks import Task, parse_task
from pipeline.workers.beats import Beat, Doing, Reason
from pipeline.workers.claims import Claim, said
from pipeline.workers.reading import read_beats
from slurm.limits import parse_gres, parse_memory
from slurm.nodes import node_names
from slurm.query import Element
from slurm.reasons import is_at_limit, lacks_room
from slurm.ringing import parse_worker
from slurm.states import SlurmState

SILENT_SECONDS = 300.0
"""Age of its newest beat at which a worker that Slurm shows as running is taken to be stuck."""
BLAMELESS = frozenset(
    {Reason.DONE, Reason.ONE, Reason.FAR, Reason.LONG, Reason.NEEDED, Reason.TIME, Reason.WARNED}
    | {Reason.CHANGED, Reason.TURNED}
)
"""Reasons to leave without having done a task that are no failure of it."""

Beats = Mapping[str, Beat]
"""Newest beats by the workers' names."""


def wanted_by(config: SlurmConfig, plan: Plan) -> dict[str, int]:
    """Return the number of workers that a run is to have by its settings, by job kind. Pure."""
    return wanted_workers(plan, lambda job_kind: resources_of(config, job_kind).array_parallelism)


def kinds_of_one_task(config: SlurmConfig, job_kinds: Iterable[str]) -> frozenset[str]:
    """Return the job kinds of which each task has a job of its own. Pure."""
    return frozenset(kind for kind in job_kinds if resources_of(config, kind).does_one_task)


def beats_of(paths: RunPaths, elements: Collection[str]) -> dict[str, Beat]:
    """Read the beats of the workers of some elements like ``4711_3``, of any restart."""

    def is_wanted(worker: str) -> bool:
        name = parse_worker(worker)
        return name is not None and name.element in elements

    return read_beats(paths, is_wanted) if elements else {}


def needs_of(config: SlurmConfig, job_kinds: Iterable[str]) -> dict[str, Need]:
    """Return what jobs of each kind ask Slurm for. Pure."""
    return {kind: need_of(resources_of(config, kind)) for kind in job_kinds}


def need_of(given: ResourcesConfig) -> Need:
    """Return what a job with these resources asks for; of the default partition the name is empty."""
    gres = given.gres or f"gpu:{given.gpus_per_node or 0}"
    return Need(
        frozenset(given.partition or ("",)),
        cpus=given.ntasks_per_node * given.cpus_per_task,
        gpus=parse_gres(gres).get("gpu", 0),
        memory=parse_memory(given.mem) if given.mem else 0,
        num_nodes=given.nodes,
    )


def held_by(elements: Iterable[Element]) -> list[Held]:
    """Return what jobs that run hold of their nodes. Pure."""
    running = (e for e in elements if not is_pending(e))
    return [Held(node, _asked_by(e)) for e in running for node in node_names(e.node)]


def lacking_room(elements: Iterable[Element]) -> list[Foreign]:
    """Return the jobs that wait for room, in the order in which they were submitted; without driver jobs,
    which ask for so little that nobody leaves for them. Pure."""
    waiting = [e for e in elements if is_pending(e) and lacks_room(e.reason) and not is_driver_job(e.name)]
    waiting.sort(key=lambda e: (e.submitted or 0.0, e.array_id, e.index))
    return [Foreign(worker_of(e).element, _asked_by(e), is_at_limit(e.reason)) for e in waiting]


def _asked_by(element: Element) -> Need:
    """Return what a job asks for on each of its nodes, as squeue shows it."""
    nodes = max(1, element.num_nodes or 1)
    cpus, gpus, memory = (
        -(-(part or 0) // nodes) for part in (element.cpus, element.gpus, element.memory_mb)
    )
    return Need(frozenset(element.partition.split(",")), cpus, gpus, memory, nodes)


@dataclass
class Roster:
    """Live elements of a table of jobs, as a crew and as what the table says of each."""

    crew: Crew
    lives: dict[str, Live] = field(default_factory=dict)
    """Elements by their names in the crew."""


def read_roster(table: JobTable, beats: Beats, claims: Iterable[Claim] = ()) -> Roster:
    """Match live elements with their beats.

    An element that the queue showed as pending, and that has beaten or claimed something since, has started.
    """
    workers, pending, lives = [], [], {}
    heard_of = newest_starts([*beats, *(claim.worker for claim in claims)])
    for submission, index, element in _live_elements(table):
        first = submission.task(index)
        element = element and as_heard_of(element, heard_of)
        started = element is not None and not is_pending(element)
        name = _name(submission, index, element, started)
        lives[name] = Live(submission, ArrayElement(element.array_id if element else "", index), element)
        if started:
            assert element is not None
            workers.append(_worker(name, first, beats.get(name), element.node))
        else:
            begin, reason = submission.begin_of(index), element.reason if element else ""
            since, waits = max(submission.created, begin or 0.0), lacks_room(reason)
            pending.append(Pending(name, first, begin, since, waits, is_at_limit(reason)))
    return Roster(Crew(workers, pending), lives)


def _live_elements(table: JobTable) -> Iterator[tuple[Submission, int, Element | None]]:
    for submission in table.submissions:
        elements = table.seen.live_elements(submission)
        for index, _ in submission.tasks():
            if index in elements:
                yield submission, index, elements[index]
            elif table.seen.is_expected(submission):
                yield submission, index, None


def _name(submission: Submission, index: int, element: Element | None, has_started: bool) -> str:
    if element is None:
        return f"{submission.name}_{index}"
    return str(worker_of(element)) if has_started else worker_of(element).element


def _worker(name: str, first: Task, beat: Beat | None, shown: str) -> Worker:
    """Return a worker as its beat describes it.

    Args:
        shown: its nodes as the queue has them: none where it has started since, or those of an earlier start.
    """
    if beat is None:
        return Worker(name, first, nodes=node_names(shown))
    nodes = node_names(beat.nodes or shown)
    return Worker(name, first, beat.doing, _task_of(beat), beat.since, nodes, beat.tasks > 0)


def _task_of(beat: Beat) -> Task | None:
    try:
        return parse_task(beat.task)
    except ValueError:
        return None


def silent_workers(queue: Iterable[Element], beats: Beats, now: float) -> dict[str, float]:
    """Return the elements that run but whose workers have not beaten for SILENT_SECONDS, and when those last
    beat. Pure.

    One that has never beaten still starts: its time limit bounds that.
    """
    found = {}
    for element in queue:
        beat = beats.get(str(worker_of(element)))
        if element.state is SlurmState.RUNNING and beat and now - beat.beat > SILENT_SECONDS:
            found[worker_of(element).element] = beat.beat
    return found


def find_broken(
    paths: RunPaths,
    claims: Sequence[Claim],
    beats: Beats,
    committed: Collection[Task],
    judged: Collection[str],
) -> set[str]:
    """Find the attempts that failed at tasks which others have done since the last pass.

    Args:
        judged: ids of the attempts whose end is known already.
    """
    claimed = Counter(claim.task for claim in claims)
    winners = {}
    for task in (task for task, count in claimed.items() if count > 1 and task in committed):
        with contextlib.suppress(CorruptData):
            if record := read_record(paths, task):
                winners[task] = record.attempt
    unjudged = (claim for claim in claims if claim.attempt not in judged)
    return broken_attempts(unjudged, beats, winners, lambda claim: said(paths, claim) is not None)


def broken_attempts(
    claims: Iterable[Claim],
    beats: Beats,
    winners: Mapping[Task, str],
    has_said_why: Callable[[Claim], bool],
) -> set[str]:
    """Return the ids of attempts at committed tasks that failed all the same: they said why, or their worker
    said to its end that it is at them. Whoever was just too late goes on, and says something else. Pure.

    Args:
        winners: ids of the attempts that committed, by their tasks.
        has_said_why: whether an attempt left a failure file.
    """
    beaten = [c for c in claims if c.attempt and c.task in winners and c.attempt != winners[c.task]]
    return {c.attempt for c in beaten if _is_last_word(beats.get(c.worker), c) or has_said_why(c)}


def _is_last_word(beat: Beat | None, claim: Claim) -> bool:
    return beat is not None and beat.attempt == claim.attempt


def are_in_doubt(
    claims: Sequence[Claim], shown: Collection[str], beats: Beats, committed: Collection[Task]
) -> bool:
    """Whether a pass may have to judge the end of somebody whom its look shows as running. Pure.

    Who was last heard of at a task that another has done may have been killed since, and with the
    iteration's row its claim goes. Of who was warned, with its task undone or done by another, Slurm alone
    knows why.

    Args:
        claims: all claims on the tasks at hand.
        shown: names of the workers that the look shows as running.
    """
    at_work = {beat.attempt for beat in beats.values() if beat.doing is Doing.BUSY}
    warned = {beat.worker for beat in beats.values() if beat.reason is Reason.WARNED}
    tried = Counter(claim.task for claim in claims)

    def is_doubtful(claim: Claim) -> bool:
        is_done = claim.task in committed
        if is_done and tried[claim.task] == 1:
            return False
        return claim.worker in warned or (is_done and claim.attempt in at_work)

    return any(is_doubtful(claim) for claim in claims if claim.worker in shown)


def are_several_warned(shown: Collection[str], beats: Beats) -> bool:
    """Whether several workers were warned whom a look shows as running: somebody may have cancelled all jobs
    since, and nothing is to be submitted then. Pure.

    Args:
        shown: names of the workers that the look shows as running.
    """
    return sum(name in beats and beats[name].reason is Reason.WARNED for name in shown) > 1


def gone_claims(claims: Sequence[Claim], beats: Beats) -> list[Gone]:
    """Return failed claims as attempts of array elements. One by a worker of no array is left out."""
    return [gone for claim in claims if (gone := _gone(claim, beats.get(claim.worker))) is not None]


def _gone(claim: Claim, beat: Beat | None) -> Gone | None:
    name = parse_worker(claim.worker)
    if name is None:
        return None
    is_used = beat is not None and beat.tasks > 0
    return Gone(
        *(claim.task, claim.number, name.array, name.index, claim.attempt, name.restart),
        is_of_used=is_used,
        invocation=claim.invocation,
    )


def split_unclaimed(
    ended: Iterable[tuple[Submission, int]], claims: Iterable[Claim], beats: Beats
) -> tuple[list[tuple[Submission, int]], list[tuple[Submission, int]]]:
    """Divide ended elements whose own task is not committed into those that failed and those that just left.

    A worker that claimed something is judged by its claims.
    """
    claimed = {name.element for claim in claims if (name := parse_worker(claim.worker))}
    failed: list[tuple[Submission, int]] = []
    left: list[tuple[Submission, int]] = []
    for submission, index in ended:
        element = f"{submission.state.job}_{index}"
        is_blameless = element in claimed or any(_has_left(beats[b]) for b in beats if is_of(b, element))
        (left if is_blameless else failed).append((submission, index))
    return failed, left


def is_of(worker: str, element: str) -> bool:
    """Whether a worker is an element's, in whichever of its starts. Pure."""
    return worker.rpartition("r")[0] == element


def _has_left(beat: Beat) -> bool:
    return beat.tasks > 0 or (beat.doing is Doing.LEAVING and beat.reason in BLAMELESS)


def live_arrays(queue: Iterable[Element], submissions: Iterable[Submission]) -> tuple[str, ...]:
    """Return the ids of the arrays of workers that wait or run, oldest first."""
    names = {s.name for s in submissions if s.is_of_stage}
    ids = {element.array_id for element in queue if is_live(element) and element.name in names}
    return tuple(sorted(ids, key=int))
