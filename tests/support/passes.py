"""Passes over runs as workers' processes and driver jobs make them, in this process."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from pipeline.executors.slurm.exit_reasons import Accounts
from pipeline.executors.slurm.passes import leased_pass, until_settled
from pipeline.orchestrate.driver import Pass
from pipeline.run.directory import Run
from pipeline.run.pass_requests import read_last, serve_requests
from pipeline.run.paths import RunPaths
from pipeline.workers.looking import Look
from slurm.signals import Errands
from tests.support.toyslurm import Element


def take_turn(paths: RunPaths, make_pass: Callable[[], object]) -> bool:
    """Make the passes that are asked for now. Returns whether there were any."""
    before = read_last(paths).began
    with Path(os.devnull).open() as orders:  # its end, from the start
        serve_requests(paths, make_pass, orders.fileno())
    return read_last(paths).began != before


class Watcher:
    """Writes the story."""

    def __init__(self, story: list[str]) -> None:
        self.story = story

    def note(self, text: str) -> None:
        self.story.append(f"  {text}")

    def progress(self, *_: object) -> None: ...

    def row(self, row: object) -> None: ...


class Lease:
    def beat(self) -> None: ...


def pass_over(run: Run, story: list[str], seen: Look | None = None) -> Pass:
    """Make a pass, by a look at the queue, and others as they are due at once."""
    watcher, looks = Watcher(story), [seen]
    errands = Errands(watcher.note)

    def make(accounts: Accounts) -> Pass:
        look = looks.pop() if looks else None
        return leased_pass(run, watcher, Lease(), errands, accounts, look)

    return until_settled(make, watcher.note)


@contextlib.contextmanager
def in_job(element: Element) -> Iterator[None]:
    """Have the environment that Slurm gives an element."""
    given = {
        "SLURM_ARRAY_JOB_ID": element.job.id,
        "SLURM_ARRAY_TASK_ID": str(element.index),
        "SLURM_JOB_NAME": element.job.name,
    }
    before = {name: os.environ.pop(name, None) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
