"""Check of a run's workers: whether what Slurm says is running also says so itself."""

import time
from collections.abc import Iterator, Sequence

from pipeline.doctor.findings import Finding, ok, problem, skipped, warning
from pipeline.executors.slurm.queue import look_at_queue, worker_of
from pipeline.run.directory import Run
from pipeline.run.submissions import job_kind_of
from pipeline.run.tasks import WORK_STAGES
from pipeline.status.text import workers_in_words
from pipeline.text import duration
from pipeline.workers.beats import Beat, Doing
from pipeline.workers.reading import read_beats
from pipeline.workers.summary import SILENT_SECONDS, workers_of
from slurm.query import Element
from slurm.states import Phase, phase_of

_MOST_NAMED = 3


def look_at_workers(run: Run) -> list[Finding]:
    """Compare the beats of a run's workers with Slurm's queue."""
    beats = list(read_beats(run.paths).values())
    if not beats:
        return [skipped("workers", "none has begun: jobs do one task each, or none has run")]
    queue = look_at_queue(run, patience=20.0)
    if queue.unanswered is not None:
        return [skipped("workers", f"Slurm does not answer: {queue.unanswered}")]
    if queue.elsewhere is not None and queue.is_hidden:
        return [skipped("workers", queue.elsewhere.why_hidden)]
    heard = queue.with_heard(beat.worker for beat in beats)
    return list(judge_workers(beats, heard.elements, time.time()))


def judge_workers(beats: Sequence[Beat], elements: Sequence[Element], now: float) -> Iterator[Finding]:
    """Judge workers by their beats and the jobs in the queue. Pure."""
    at_work = (e for e in elements if phase_of(e.state) is Phase.RUNNING and is_of_stage(e))
    running = {str(worker_of(element)): element for element in at_work}
    known = {beat.worker: beat for beat in beats}
    silent = [b for b in beats if b.worker in running and is_silent(b, now)]
    unsaid = [e for name, e in running.items() if name not in known and is_old(e, now)]
    for beat in silent[:_MOST_NAMED]:
        told = (
            f"{beat.worker} ({beat.job_kind}) on {beat.host} has said nothing for {duration(now - beat.beat)}"
        )
        again = "and its task is tried again in another one"
        advice = f"see its log; if it hangs: scancel {id_of(running[beat.worker])}, {again}"
        yield problem("workers", told, advice)
    for element in unsaid[:_MOST_NAMED]:
        since = duration(now - (element.started or now))
        told = f"job {id_of(element)} on {element.node} has run for {since}, and no worker has said a word"
        advice = "see its log: setup lines, a container or imports may hang; or it cannot write to the run"
        yield warning("workers", told, advice)
    if not silent and not unsaid:
        live = [one for one in workers_of(beats, now, running.keys()) if one.live]
        yield ok("workers", "; ".join(map(workers_in_words, live)) or "none is at work")


def id_of(element: Element) -> str:
    return f"{element.array_id}_{element.index}"


def is_of_stage(element: Element) -> bool:
    """Whether a job does tasks; the others are driver jobs."""
    return job_kind_of(element.name).partition("-")[0] in {str(stage) for stage in WORK_STAGES}


def is_silent(beat: Beat, now: float) -> bool:
    return beat.doing is not Doing.LEAVING and now - beat.beat > SILENT_SECONDS


def is_old(element: Element, now: float) -> bool:
    """Whether it has run for so long that it should have said something."""
    return element.started is not None and now - element.started > SILENT_SECONDS
