"""Workers as processes of this machine, which find their light tasks in a run directory, without Slurm."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.config.scheduler import ResourcesConfig
from pipeline.run import pass_requests
from pipeline.run.attempts import new_attempt
from pipeline.run.directory import Run, load_run
from pipeline.run.paths import RunPaths
from pipeline.run.tasks import Task, task_key
from pipeline.workers.beats import Beat, Doing, process_space, read_beats
from pipeline.workers.outside import CommitHooks, Queue, WorkerHost
from stages.attempts.arguments import Arguments
from stages.logs import set_up_log
from stages.workers import loop, surroundings
from stages.workers.pulling import Pulling
from stages.workers.pulse import Pulse
from tests.support import ROOT
from tests.support.passes import take_turn
from tests.support.processes import fork_server
from tests.support.waiting import wait_for


def start_worker(run: Run, first: Task, **environment: str) -> Any:
    """Begin a worker in a fork; returns the process. Its output between tasks goes to ``worker-PID.log``.

    With GROWING in its environment it finds after each task that it holds twice as much memory; with TENDS it
    looks after passes. LINGER and START_EARLY are its stage's, as JSON; TASK_TIME is what a task may take,
    ENDS the unix time at which Slurm will end the
    worker, and WATCHFUL has it look at its package and configuration at every chance.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    given = (str(run.paths.root), first, {**os.environ, **environment})
    process = fork_server().Process(target=_work, args=given)
    process.start()
    return process


@contextmanager
def crew(run: Run, *tasks: Task, **environment: str) -> Iterator[list[Any]]:
    """Workers with these first tasks, none of which outlives the block."""
    workers = [start_worker(run, task, **environment) for task in tasks]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def _work(root: str, first: Task, environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    os.chdir(ROOT)
    log = os.open(f"{root}/worker-{os.getpid()}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    set_up_log()
    if "GROWING" in environment:
        loop.settled_size = lambda earlier: 2 ** (30 + len(earlier))
    if "WATCHFUL" in environment:
        surroundings.ASK_SECONDS = 0.0
    run, outside = load_run(Path(root)), {}
    if "TENDS" in environment:
        outside["waits"] = _tends(run)
    if "ENDS" in environment:
        outside["ask_queue"] = lambda: Queue(ends=float(environment["ENDS"]))
    outside["committed"] = lambda task: _note(run, task)
    settings = ResourcesConfig(
        linger=json.loads(environment.get("LINGER", "60")),
        start_early=json.loads(environment.get("START_EARLY", "true")),
        task_time=environment.get("TASK_TIME"),
    )
    sys.exit(loop.work(source_of(run, first, settings, **outside)))


def _note(run: Run, task: Task) -> None:
    """Note, where a pass would be asked for after a commit, what the worker's beat says by then."""
    beat = next(beat for beat in read_beats(run.paths).values() if beat.pid == os.getpid())
    with (run.paths.root / "committed.txt").open("a") as lines:
        lines.write(f"{task_key(task)} {beat.doing}\n")


def _tends(run: Run) -> Callable[[], None]:
    """What a worker does for others while it waits; a pass leaves a line in ``passes.txt``."""

    def make_pass() -> None:
        with (run.paths.root / "passes.txt").open("a") as lines:
            lines.write(f"{os.getpid()}\n")

    pass_requests.start_pass = lambda paths: take_turn(paths, make_pass) and None
    return CommitHooks(run, "4711_0r0", began=0.0).waits


def source_of(run: Run, first: Task, settings: ResourcesConfig, **outside: Any) -> Pulling:
    name, now = f"{os.uname().nodename}-{os.getpid()}", time.time()
    beat = Beat(name, first.job_kind, os.uname().nodename, os.getpid(), now, since=now)
    pulse = Pulse(run.paths, Beat(**{**vars(beat), "process_space": process_space()}))
    pulse.start()
    arguments = Arguments(first, run.paths.root, "1", None)
    return Pulling(run, arguments, WorkerHost(name, new_attempt, **outside), settings, pulse)


def beat_of(paths: RunPaths, process: Any) -> Beat | None:
    return next((beat for beat in read_beats(paths).values() if beat.pid == process.pid), None)


def wait_until(run: Run, process: Any, doing: Doing, task: Task) -> None:
    """Wait for a worker to do something."""

    def does() -> bool:
        beat = beat_of(run.paths, process)
        return beat is not None and (beat.doing, beat.task) == (doing, task_key(task))

    wait_for(does, f"{doing} {task}")


def join(*processes: Any) -> list[int | None]:
    """Wait for the ends of workers; returns their exit codes."""
    for process in processes:
        process.join(timeout=120)
    return [process.exitcode for process in processes]
