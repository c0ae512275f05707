"""The workers of a run at one moment: what Slurm shows of their jobs, and what their beats say."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from pipeline.config.changeable import asked_for
from pipeline.config.job_kinds import DRIVER
from pipeline.config.scheduler import ResourcesConfig, SlurmConfig, resources_of
from pipeline.decide.crew import Crew, Pending, Worker, wanted_workers
from pipeline.decide.ended import Beats
from pipeline.decide.expectations import estimates_of
from pipeline.decide.judging import Gone
from pipeline.decide.passages import passages
from pipeline.decide.places import Held, Need
from pipeline.decide.situation import Estimate, Foreign
from pipeline.executors.slurm.job_table import JobTable
from pipeline.executors.slurm.queue import as_heard_of, is_live, is_pending, newest_starts
from pipeline.executors.slurm.silence import SILENT_SECONDS
from pipeline.run import journal
from pipeline.run.commits import CorruptData, Record, read_record
from pipeline.run.directory import Run
from pipeline.run.paths import RunPaths
from pipeline.run.plan import Plan
from pipeline.run.records import Committed
from pipeline.run.submissions import Submission, is_driver_job
from pipeline.run.tasks import Stage, Task, parse_task
from pipeline.workers.beats import Beat, read_beats
from pipeline.workers.claims import Claim
from slurm.limits import parse_memory
from slurm.nodes import node_names
from slurm.query import Element
from slurm.reasons import is_at_limit, lacks_room
from slurm.ringing import parse_worker
from slurm.states import SlurmState


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
    return Need(
        frozenset(given.partition or ("",)),
        cpus=given.ntasks_per_node * given.cpus_per_task,
        gpus=given.num_gpus or 0,
        memory=parse_memory(given.mem) if given.mem else 0,
        num_nodes=given.nodes,
    )


def held_by(elements: Iterable[Element]) -> list[Held]:
    """Return what jobs that run hold of their nodes. Pure."""
    running = (e for e in elements if not is_pending(e))
    return [Held(node, _asked_by(e)) for e in running for node in node_names(e.node)]


def lacking_room(elements: Iterable[Element]) -> list[Foreign]:
    """Return the jobs that wait for room, in the order in which they were submitted; without driver jobs,
    which ask for so little that no worker leaves for them. Pure."""
    waiting = [e for e in elements if is_pending(e) and lacks_room(e.reason) and not is_driver_job(e.name)]
    waiting.sort(key=lambda e: (e.submitted or 0.0, e.array_id, e.index))
    return [Foreign(e.job_id, _asked_by(e), is_at_limit(e.reason)) for e in waiting]


def _asked_by(element: Element) -> Need:
    """Return what a job asks for on each of its nodes, as squeue shows it."""
    nodes = max(1, element.num_nodes or 1)
    cpus, gpus, memory = (
        -(-(part or 0) // nodes) for part in (element.cpus, element.gpus, element.memory_mb)
    )
    return Need(frozenset(element.partition.split(",")), cpus, gpus, memory, nodes)


def read_crew(table: JobTable, beats: Beats, claims: Iterable[Claim] = ()) -> Crew:
    """Match live elements with their beats.

    An element that the queue showed as pending, and that has beaten or claimed something since, has started.
    """
    workers, pending = [], []
    heard_of = newest_starts([*beats, *(claim.worker for claim in claims)])
    for submission, index, element in _live_elements(table):
        first = submission.task(index)
        element = element and as_heard_of(element, heard_of)
        started = element is not None and not is_pending(element)
        name = _name(submission, index, element, started)
        if started:
            assert element is not None
            workers.append(_worker(name, first, beats.get(name), element.node))
        else:
            begin, reason = submission.begin_of(index), element.reason if element else ""
            since, waits = max(submission.created, begin or 0.0), lacks_room(reason)
            pending.append(Pending(name, first, begin, since, waits, is_at_limit(reason)))
    return Crew(workers, pending)


def outdated(run: Run, pending: Sequence[Pending], submissions: Iterable[Submission]) -> tuple[str, ...]:
    """Return the names of the elements that wait and would be submitted with other resources now, as the
    run's settings were changed since."""
    old = {
        f"{submission.state.job}_{index}"
        for submission in submissions
        if submission.settings < len(run.changes) and _asks_otherwise(run, submission)
        for index in submission.indices
    }
    return tuple(element.name for element in pending if element.name in old)


def _asks_otherwise(run: Run, submission: Submission) -> bool:
    """Whether a job of its kind would be submitted with other resources now."""
    kind = submission.job_kind if submission.is_of_stage else DRIVER
    before, now = run.with_settings(submission.settings).config.slurm, run.config.slurm
    return before is not None and now is not None and asked_for(before, kind) != asked_for(now, kind)


def outdated_drivers(run: Run, table: JobTable) -> list[Submission]:
    """Return the driver jobs that wait and would be submitted with other resources now."""
    found = (s for s in table.submissions if not s.is_of_stage and s.settings < len(run.changes))
    waiting = (s for s in found if any(map(is_pending, table.seen.queue.get(s.name, ()))))
    return [one for one in waiting if not one.state.is_withdrawn and _asks_otherwise(run, one)]


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
    return element.run_id if has_started else element.job_id


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
        beat = beats.get(element.run_id)
        if element.state is SlurmState.RUNNING and beat and now - beat.beat > SILENT_SECONDS:
            found[element.job_id] = beat.beat
    return found


def gone_of(claim: Claim, beat: Beat | None) -> Gone:
    """Return a failed claim of an array element's worker as an attempt that is over."""
    name = parse_worker(claim.worker)
    assert name is not None
    return Gone(
        claim.task,
        number=claim.number,
        job=name.array,
        index=name.index,
        attempt=claim.attempt,
        restart=name.restart,
        is_of_used=beat is not None and beat.tasks > 0,
        invocation=claim.invocation,
        halvings=claim.halvings,
    )


def live_arrays(queue: Iterable[Element], submissions: Iterable[Submission]) -> tuple[str, ...]:
    """Return the ids of the arrays of workers that wait or run, oldest first."""
    names = {s.name for s in submissions if s.is_of_stage}
    ids = {element.array_id for element in queue if is_live(element) and element.name in names}
    return tuple(sorted(ids, key=int))


# --- when workers are wanted -----------------------------------------------------------------------------

# When their next inputs are expected, and how long coming back takes: from what was measured.


_SPANS_BYTES = 1 << 18


def read_estimates(
    run: Run, config: SlurmConfig, tasks: Sequence[Task], committed: Mapping[Task, Committed], now: float
) -> dict[str, Estimate]:
    """Return an estimate for each job kind.

    Args:
        tasks: of the iteration at hand and of the next, by iteration.
        committed: records of these and of what they read.
    """
    kinds = [str(kind) for kind in (*run.plan.job_kinds, Stage.EVALUATE, Stage.BENCHMARK)]
    beats = list(read_beats(run.paths).values())
    seen = passages(journal.read_tail(run.paths.spans, _SPANS_BYTES)) if run.paths.spans.exists() else []

    at_hand = set(tasks)

    def committed_at(task: Task) -> float | None:
        record = committed.get(task)
        if record is None and task not in at_hand:  # of an iteration whose row is not written yet
            record = _past_record(run.paths, task)
        return record.ended if isinstance(record, Record) else None

    early = early_kinds(config, kinds)
    return estimates_of(run.plan, kinds, early, beats, tasks, committed, committed_at, seen, now)


def _past_record(paths: RunPaths, task: Task) -> Record | None:
    """Return the record of a task that no pass looks at any more; None if it is gone or corrupt."""
    try:
        return read_record(paths, task)
    except CorruptData:
        return None


def early_kinds(config: SlurmConfig, kinds: Iterable[str]) -> list[str]:
    """Return the job kinds whose workers start early."""
    return [kind for kind in kinds if resources_of(config, kind).start_early]
