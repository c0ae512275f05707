"""Light tasks that fail when a signal comes, and what sends it: the failures that a simulation draws.

An attempt at a task fails by the very draw of :meth:`pipeline.simulate.plant.Plant.fails_at`, after that
share of what it takes: which depends on the task and on the number of the attempt, never on the clock.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

from pipeline.run.attempts import AttemptId
from pipeline.run.paths import RunPaths
from pipeline.run.plan import Plan
from pipeline.run.tasks import parse_task
from pipeline.simulate.plant import Plant
from pipeline.workers.beats import Beat, Doing, read_beats
from stages.engines.base import without_torch
from tests.support import light

WORDS = tuple(
    f"{stage}.engine=benchmarks.slurm_faults:make_{what}"
    for stage, what in (("rollout", "generator"), ("reward", "scorer"), ("update", "trainer"))
)
"""What makes a run's light tasks fail when they are signalled."""
_POLL_SECONDS = 0.05


# --- in a task ---------------------------------------------------------------------------------------------


@without_torch
def make_generator(config, directory):
    signal.signal(signal.SIGALRM, _fail)
    return light.make_generator(config, directory)


@without_torch
def make_scorer(config, directory):
    signal.signal(signal.SIGALRM, _fail)
    return light.make_scorer(config, directory)


@without_torch
def make_trainer(config):
    signal.signal(signal.SIGALRM, _fail)
    return light.make_trainer(config)


def _fail(number: int, frame: FrameType | None) -> None:
    raise RuntimeError("a failure that was asked for")


# --- outside -----------------------------------------------------------------------------------------------


def draw(share: float) -> Plant:
    """Return a plant of which only the draw of failures is used."""
    return Plant(Plan(1, 1, 0), (), (), {}, failures=share)


@contextlib.contextmanager
def failing(root: Path, share: float, seconds: Mapping[str, float]) -> Iterator[None]:
    """While it lasts have a share of the attempts of a run fail.

    Args:
        root: the run's directory, which may not be there yet.
        seconds: what a task takes, by job kind.
    """
    ended, drawn, done = threading.Event(), draw(share), set[str]()

    def is_due(beat: Beat) -> bool:
        if beat.doing is not Doing.BUSY or beat.attempt in done or beat.job_kind not in seconds:
            return False
        when = drawn.fails_at(parse_task(beat.task), AttemptId.parse(beat.attempt).number)
        return when is not None and time.time() >= beat.since + when * seconds[beat.job_kind]

    def look() -> None:
        while not ended.wait(_POLL_SECONDS):
            for beat in filter(is_due, read_beats(RunPaths(root)).values()):
                if _heeds(beat.pid):
                    os.kill(beat.pid, signal.SIGALRM)
                    done.add(beat.attempt)

    thread = threading.Thread(target=look)
    if share:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if share:
            thread.join()


def _heeds(pid: int) -> bool:
    """Whether a process handles the signal by now: else that would be its end."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
        return bool(caught >> (signal.SIGALRM - 1) & 1)
    return False
