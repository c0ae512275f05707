"""A worker's process, from its start to its end: ``python -m stages.workers``, with the arguments of ``python
-m stages``; on this machine it is forked from a server that has imported most (:func:`serve`).

Of several ranks the first finds the tasks, and tells the others through a store. These wait in a call of it,
a socket: never in a collective, which would spin on their GPUs.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, Protocol

from pipeline.config.scheduler import ResourcesConfig, SlurmConfig, resources_of
from pipeline.run.attempts import AttemptId
from pipeline.run.directory import load_run
from pipeline.run.environment import TASK_ENVIRONMENT
from pipeline.run.failures import DISK_EXIT, is_of_disk
from pipeline.run.paths import RunPaths, rank_log
from pipeline.run.tasks import Task, parse_task, task_key
from pipeline.workers.beats import Beat, Reason, process_space
from pipeline.workers.outside import of_environment, started_at
from stages.attempts.arguments import Arguments, parse
from stages.logs import log, set_up_log
from stages.process.arrow import spare_pandas
from stages.process.imported import note_inherited
from stages.workers.loop import Source, work
from stages.workers.pulling import Pulling
from stages.workers.pulse import Pulse
from stages.workers.surroundings import Output, flush_output

_LONGEST = timedelta(days=30)
"""Time for which a rank waits for the first: as long as it lives. If it dies the store's connection ends."""

_PARTING_SECONDS = 60.0
"""Seconds for which the first rank stays until all others have heard that nothing more is to be done: its
store ends with it, and a rank that asks it later fails, and by that the job."""

_OF_ALL = (Reason.WARNED, Reason.GREW)
"""Reasons for which a rank asks the first that all of them leave, once the task at hand is done."""


class Store(Protocol):
    """What is used of torch's stores."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def add(self, key: str, amount: int, /) -> int: ...

    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...


class Leading:
    """Source of the first rank: tells the others what it got, leaves when one of them has to, and is the last
    to go."""

    def __init__(self, source: Source, store: Store, size: int) -> None:
        self._source, self._store, self._told = source, store, 0
        self._others, self._has_failed = range(1, size), False

    def next(self) -> Arguments | None:
        for reason in _OF_ALL:
            if self._store.add(_wish(reason), 0):
                self._source.leave(reason)
        given = self._source.next()
        self._store.set(f"task/{self._told}", to_json(given))
        self._told += 1
        return given

    def ended(self, arguments: Arguments, exit_code: int) -> None:
        self._has_failed = exit_code != 0
        self._source.ended(arguments, exit_code)

    def leave(self, reason: Reason) -> None:
        self._source.leave(reason)

    def left(self) -> None:
        self._source.left()
        if not self._has_failed:  # else others may hang in what failed, and the end of this rank ends them
            with contextlib.suppress(RuntimeError):  # one that is gone has ended the others, or will
                self._store.wait([_parting(r) for r in self._others], timedelta(seconds=_PARTING_SECONDS))


class Following:
    """Source of every other rank."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank, self._heard = store, rank, 0
        self._output = Output()
        self._has_failed = False

    def next(self) -> Arguments | None:
        if self._has_failed:
            return None
        key = f"task/{self._heard}"
        for number in (signal.SIGTERM, signal.SIGUSR2):  # the first rank is warned too, and says what follows
            signal.signal(number, signal.SIG_IGN)
        self._store.wait([key], _LONGEST)
        self._heard += 1
        given = from_json(self._store.get(key).decode())
        if given is None:
            self._store.set(_parting(self._rank), "")
        elif not given.loads:
            files = RunPaths(given.run_dir).task(given.task)
            log = files.log(AttemptId.parse(given.attempt).number)
            self._output.turn_to(own_log(log, os.environ), given.run_dir)
        return given

    def ended(self, arguments: Arguments, exit_code: int) -> None:
        self._output.turn_back()

    def leave(self, reason: Reason) -> None:
        """Ask the first rank that all leave: the others would wait for a rank that is gone. After a failure
        leave at once, with an exit code that ends them."""
        if reason in _OF_ALL:
            self._store.add(_wish(reason), 1)
        else:
            self._has_failed = True

    def left(self) -> None:
        """The first rank says it for all."""


def own_log(log: Path, environment: Mapping[str, str]) -> Path:
    """Return the log of this rank: the first one's where a job's ranks share their output, as under srun."""
    return log if "SLURM_STEP_ID" in environment else rank_log(log, int(environment["RANK"]))


def _parting(rank: int) -> str:
    return f"parting/{rank}"


def _wish(reason: Reason) -> str:
    return f"leave/{reason}"


def meet(environment: Mapping[str, str]) -> Store:
    """Return the store of this element's ranks: rank 0 listens, and says where in a file that is gone again
    when all have met.

    Raises:
        TimeoutError: the others did not come.
    """
    from stages.ranks import MEETING_SECONDS, RankPlace, find_store, open_store  # imports torch

    place, path = RankPlace.of(environment), Path(environment["RENDEZVOUS_FILE"] + ".tasks")
    if place.rank:
        store, _ = find_store(path, place, MEETING_SECONDS)
        store.set(f"here/{place.rank}", "")
        return store
    store = open_store(path, MEETING_SECONDS)
    store.wait([f"here/{rank}" for rank in range(1, place.size)], timedelta(seconds=MEETING_SECONDS))
    path.unlink(missing_ok=True)
    return store


def to_json(given: Arguments | None) -> str:
    if given is None:
        return "null"
    words = {"task": task_key(given.task), "run_dir": str(given.run_dir), "attempt": given.attempt}
    failure = str(given.failure_file) if given.failure_file else None
    ways = {"stays": given.stays, "loads": given.loads, "halvings": given.halvings}
    more = {"failure_file": failure, "patience": given.patience, "settings": given.settings}
    return json.dumps({**words, **more, **ways})


def from_json(text: str) -> Arguments | None:
    """Invert :func:`to_json`."""
    given = json.loads(text)
    if given is None:
        return None
    failure = Path(given["failure_file"]) if given["failure_file"] else None
    task, run_dir = parse_task(given["task"]), Path(given["run_dir"])
    ways = given["stays"], given["loads"], given["halvings"], given["settings"]
    return Arguments(task, run_dir, given["attempt"], failure, given["patience"], *ways)


def pulling(first: Arguments, started: float) -> Pulling:
    """Make the source of the worker that begins with an attempt. Its pulse has begun."""
    run = load_run(first.run_dir)
    job_kind, scheduler = first.task.job_kind, run.config.scheduler
    outside = of_environment(run, job_kind, os.environ, started)
    beat = Beat(
        worker=outside.name,
        job_kind=job_kind,
        host=os.uname().nodename,
        pid=os.getpid(),
        started=started,
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
        settings, most = outside.settings or ResourcesConfig(linger="auto"), 600.0
    return Pulling(run, first, outside, settings, pulse, most, run.config.attempts_of(job_kind))


def import_stage(task: Task) -> None:
    """Import what a task of this kind needs: who starts early is ready when the input is."""
    spare_pandas()
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
        gc.freeze()  # modules stay, and need not be looked at again
        gc.enable()
        return work(source)
    except OSError as error:
        if not is_of_disk(error):
            raise
        log.error(f"the disk takes nothing: {error}")
        return DISK_EXIT


def serve(words: Sequence[str]) -> NoReturn:
    """Work in a process that was forked for it."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until the worker handles it
    atexit._clear()  # what the server has to do at its end
    note_inherited()
    end_process(main(words))


def source_of_rank(first: Arguments, started: float) -> Source:
    """Return the source of this process: one that finds tasks, or one that follows the first rank."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return pulling(first, started)
    if os.environ["RANK"] == "0":
        source = pulling(first, started)
        return Leading(source, meet(os.environ), int(os.environ["WORLD_SIZE"]))
    return Following(meet(os.environ), int(os.environ["RANK"]))


def end_process(exit_code: int) -> NoReturn:
    """End this process as sys.exit does, but without taking apart what is in memory: with torch and a model
    that takes a core for more than a second, and many workers end at once, beside others that compute."""
    atexit._run_exitfuncs()
    flush_output()
    os._exit(exit_code)
