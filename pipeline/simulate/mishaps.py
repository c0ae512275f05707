"""What befalls workers of a simulated run: time limits, preemptions, and what others see of them."""

from collections.abc import Iterable

from pipeline.run.failures import FailureKind
from pipeline.simulate.run import SimulatedRun
from pipeline.simulate.worker import SimulatedWorker
from pipeline.workers.beats import Doing, Reason
from pipeline.workers.claims import Claim


def watch_limit(run: SimulatedRun, worker: SimulatedWorker) -> None:
    """Have a worker that has just started warned, and ended, when its time is up."""
    kind, start = run.kind(worker.job_kind), worker.restart
    ends = run.now + kind.request.limit
    run.clock.at(max(run.now, ends - kind.signal), _warn, run, worker, start)
    run.clock.at(ends, _end_in_time, run, worker, start)


def _warn(run: SimulatedRun, worker: SimulatedWorker, restart: int) -> None:
    """Slurm warns a worker of its time limit."""
    if worker.doing is None or worker.restart != restart or worker.doing is Doing.LEAVING:
        return
    worker.is_warned = True
    if worker.doing is Doing.WAITING:
        run.leave(worker, Reason.WARNED)
    elif worker.claim is not None and worker.claim.task.stage.generates:
        claim = worker.claim
        _save(run, worker)
        run.progress.end(claim, FailureKind.PAUSED)
        worker.claim = None
        worker.change(Doing.WAITING, run.now)
        run.leave(worker, Reason.WARNED)
        run.wake([claim.task.job_kind])


def _save(run: SimulatedRun, worker: SimulatedWorker) -> None:
    """Keep what an attempt that is warned has computed."""
    assert worker.claim is not None
    task, computed = worker.claim.task, max(0.0, run.now - worker.computes)
    run.saved[task] = run.saved.get(task, 0.0) + computed


def _end_in_time(run: SimulatedRun, worker: SimulatedWorker, restart: int) -> None:
    """Slurm ends a job at its time limit."""
    if worker.doing is not None and worker.restart == restart:
        kill(run, worker, FailureKind.TIMEOUT)
        del run.workers[worker.element]
        run.around.has_ended(worker)


def preempt(run: SimulatedRun, worker: SimulatedWorker) -> None:
    """Slurm takes a worker's place, and puts its job back into the queue."""
    kill(run, worker, FailureKind.PREEMPTED)
    slurm = run.plant.slurm
    worker.start_again(run.now + slurm.requeue + run.plant.queue_of(worker.name))
    run.cluster.submit(worker.job)
    run.clock.at(worker.job.eligible, run.around.try_jobs)


def kill(run: SimulatedRun, worker: SimulatedWorker, why: FailureKind) -> None:
    """End a worker's job at once. Others learn of it by a pass."""
    claim = worker.claim
    if claim is not None and claim.task.stage.generates:
        _save(run, worker)
        why = FailureKind.PAUSED
    if claim is not None:
        run.progress.end(claim, why, is_known=False)
        run.unseen[claim.attempt] = claim
    is_lost = claim is not None and why is not FailureKind.PAUSED
    worker.claim, worker.reason = None, None
    run.free(worker, "lost" if is_lost else "")


def see_killed(run: SimulatedRun, failed: Iterable[Claim]) -> None:
    """A pass has seen which attempts came to nothing: others may take their tasks."""
    names = {claim.attempt for claim in failed}
    gone = [c for c in run.unseen.values() if c.attempt in names or c.task in run.progress.committed]
    run.unseen = {name: c for name, c in run.unseen.items() if c not in gone}
    for claim in gone:
        run.progress.close(claim)
    run.wake(dict.fromkeys(claim.task.job_kind for claim in gone))
