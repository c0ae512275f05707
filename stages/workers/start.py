"""A worker's process on a shared filesystem: ``python -m stages.workers``, with the arguments of ``python -m
stages``, from its start to its end.
"""

import atexit
import importlib
import os
import time
from collections.abc import Sequence
from typing import NoReturn

from pipeline.config.scheduler import ResourcesConfig, SlurmConfig, resources_of
from pipeline.run.directory import load_run
from pipeline.run.environment import TASK_ENVIRONMENT
from pipeline.run.failures import DISK_EXIT, is_of_disk
from pipeline.run.tasks import Task, task_key
from pipeline.workers.beats import Beat, process_space
from pipeline.workers.outside import of_environment, started_at
from stages.attempts.arguments import Arguments, parse
from stages.logs import log, set_up_log
from stages.workers.loop import Source, work
from stages.workers.pulling import Pulling
from stages.workers.pulse import Pulse
from stages.workers.surroundings import flush_output


def pulling(first: Arguments, started: float) -> Pulling:
    """Make the source of the worker that begins with an attempt. Its pulse has begun."""
    run = load_run(first.run_dir)
    job_kind, scheduler = first.task.job_kind, run.config.scheduler
    outside = of_environment(run, job_kind, os.environ, started)
    beat = Beat(
        *(outside.name, job_kind, os.uname().nodename, os.getpid(), started),
        since=started,
        queued_seconds=outside.queued_seconds,
        process_space=process_space(),
        nodes=outside.nodes,
        task=task_key(first.task),
    )
    pulse = Pulse(run.paths, beat)
    pulse.start()
    if isinstance(scheduler, SlurmConfig):
        settings, most = resources_of(scheduler, job_kind), float(scheduler.linger_max)
    else:
        settings, most = ResourcesConfig(linger="auto"), 600.0
    return Pulling(run, first, outside, settings, pulse, most, run.config.attempts_of(job_kind))


def import_stage(task: Task) -> None:
    """Import what a task of this kind needs: who starts early is ready when the input is."""
    importlib.import_module("stages.attempts.execution")
    importlib.import_module(f"stages.tasks.{task.stage}")


def main(argv: Sequence[str]) -> int:
    """Work; return the exit code: the last attempt's, or that of a disk which takes nothing."""
    started = started_at(os.environ, time.time())
    os.environ.update(TASK_ENVIRONMENT)  # before torch is imported, which the first rank needs to lead
    set_up_log()
    first = parse(argv)
    try:
        source = source_of_rank(first, started)
        import_stage(first.task)
        return work(source)
    except OSError as error:
        if not is_of_disk(error):
            raise
        log.error(f"the disk takes nothing: {error}")
        return DISK_EXIT


def source_of_rank(first: Arguments, started: float) -> Source:
    """Return the source of this process: one that finds tasks, or one that is told by the first rank."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return pulling(first, started)
    from stages.workers.following import Following, Leading, meet

    if os.environ["RANK"] == "0":
        source = pulling(first, started)
        return Leading(source, meet(os.environ))
    return Following(meet(os.environ))


def end_process(exit_code: int) -> NoReturn:
    """End this process as sys.exit does, but without taking apart what is in memory: with torch and a model
    that takes a core for more than a second, and many workers end at once, beside others that compute."""
    atexit._run_exitfuncs()
    flush_output()
    os._exit(exit_code)
