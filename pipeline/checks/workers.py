"""Checks of a run's jobs and workers: whether they can advance it, and whether what runs says so."""

import shlex
import time
from collections.abc import Iterator, Sequence

from pipeline.checks.finding import Finding, ok, problem, skipped, warning
from pipeline.config.job_kinds import DRIVERS
from pipeline.executors.slurm.queue import RunQueue, ask_for_queue, look_at_queue
from pipeline.run.control import read_control
from pipeline.run.directory import Run
from pipeline.run.submissions import job_kind_of
from pipeline.run.tasks import WORK_STAGES, Stage
from pipeline.status.snapshot import is_complete, read_status
from pipeline.status.state import Status
from pipeline.status.text import workers_in_words
from pipeline.status.whose import in_words as whose_in_words
from pipeline.status.whose import next_step
from pipeline.text import duration
from pipeline.workers.beats import Beat, Doing, read_beats
from pipeline.workers.looking import PERSON_AGE
from pipeline.workers.summary import SILENT_SECONDS, workers_of
from slurm.commands import SlurmError, SlurmMissing
from slurm.query import Element
from slurm.states import Phase, UnknownState, phase_of

_MOST_NAMED = 3


def check_workers(run: Run) -> list[Finding]:
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
    running = {element.run_id: element for element in at_work}
    known = {beat.worker: beat for beat in beats}
    silent = [b for b in beats if b.worker in running and is_silent(b, now)]
    unsaid = [e for name, e in running.items() if name not in known and is_old(e, now)]
    for beat in silent[:_MOST_NAMED]:
        silence = duration(now - beat.beat)
        message = f"{beat.worker} ({beat.job_kind}) on {beat.host} has sent no heartbeat for {silence}"
        again = "and its task is tried again in another one"
        advice = f"see its log; if it hangs: scancel {running[beat.worker].job_id}, {again}"
        yield problem("workers", message, advice)
    for element in unsaid[:_MOST_NAMED]:
        since = duration(now - (element.started or now))
        message = (
            f"job {element.job_id} on {element.node} has run for {since} without a heartbeat of a worker"
        )
        advice = "see its log: setup lines, a container or imports may hang; or it cannot write to the run"
        yield warning("workers", message, advice)
    if not silent and not unsaid:
        live = [one for one in workers_of(beats, now, running.keys()) if one.live]
        yield ok("workers", "; ".join(map(workers_in_words, live)) or "none is running")


def is_of_stage(element: Element) -> bool:
    """Whether a job does tasks; the others are driver jobs."""
    return job_kind_of(element.name).partition("-")[0] in {str(stage) for stage in WORK_STAGES}


def is_silent(beat: Beat, now: float) -> bool:
    return beat.doing is not Doing.LEAVING and now - beat.beat > SILENT_SECONDS


def is_old(element: Element, now: float) -> bool:
    """Whether it has run for so long that it should have said something."""
    return element.started is not None and now - element.started > SILENT_SECONDS


def check_jobs(run: Run) -> Finding:
    try:
        queue = ask_for_queue(run, PERSON_AGE, patience=20.0)
    except SlurmMissing as error:
        return skipped("jobs", str(error))
    except (SlurmError, UnknownState) as error:
        return problem("jobs", f"Slurm does not answer: {error}", "ask again later; nothing is lost")
    elements, control = queue.elements, read_control(run.paths)
    # A driver job waits for the last update's end, which goes on to write the trainer's state.
    trains = any(
        phase_of(one.state) is not Phase.ENDED and job_kind_of(one.name) == Stage.UPDATE for one in elements
    )
    is_over = control.cancelled or control.has_failed or (is_complete(run) and not trains)
    if queue.elsewhere is not None:
        return judge_jobs_of_others(queue, read_status(run), is_over)
    return judge_jobs(elements, is_over, shlex.quote(str(run.paths.root)))


def judge_jobs_of_others(queue: RunQueue, status: Status, is_over: bool) -> Finding:
    """Say what is known of the jobs of a run's owner. Whether they can advance the run is the owner's to see.
    Pure."""
    assert status.slurm
    if status.slurm.whose is None or is_over:
        return ok("jobs", f"{queue.elsewhere.owner if queue.elsewhere else ''} has submitted the run")
    facts = whose_in_words(status.slurm.whose, status.state, status.time)
    step = next_step(status.slurm.whose, status.state, status.run)
    if status.state == "stopped":
        return warning("jobs", facts, step or "")
    return ok("jobs", facts)


def judge_jobs(elements: Sequence[Element], is_over: bool, root: str) -> Finding:
    """Judge whether the jobs in the queue can advance the run. Pure."""
    live = [element for element in elements if phase_of(element.state) is not Phase.ENDED]
    running = sum(phase_of(element.state) is Phase.RUNNING for element in live)
    drivers = sum(job_kind_of(element.name) in DRIVERS for element in live)
    facts = f"{running} running, {len(live) - running} waiting, {drivers} of them driver jobs"
    if is_over and running < len(live):
        return warning("jobs", f"{facts}, and the run is over", f"slurm-ppo cancel {root}")
    if not is_over and not drivers:
        return problem("jobs", f"{facts}: nothing will advance the run", f"slurm-ppo submit {root}")
    return ok("jobs", facts, running=running, waiting=len(live) - running)
