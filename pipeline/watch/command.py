"""The command ``slurm-ppo watch``."""

import os
import sys

from pipeline.process import interruptible
from pipeline.run.directory import Run
from pipeline.status.snapshot import Status, read_status
from pipeline.status.text import describe, standing
from pipeline.watch.plain import changes
from pipeline.watch.reading import SILENT_SECONDS, Reading


def watch(run: Run, interval: float) -> str:
    """Show the run until it has ended, or the person quits. Changes nothing in the run directory.

    Args:
        interval: seconds between two questions to Slurm.

    Returns:
        The run's state, as :attr:`pipeline.status.snapshot.Status.state`.
    """
    reading = Reading(run, interval)
    reading.start()
    has_ended = False
    try:
        with interruptible():
            if has_terminal():
                from pipeline.watch.terminal import RunWindow, show

                has_ended = show(RunWindow(reading))
            else:
                has_ended = _tell(reading)
    except KeyboardInterrupt:
        pass  # one way to quit
    finally:
        reading.stop()
    status = read_status(run) if has_ended else reading.seen.look
    if status is None:
        return "unknown"
    goes_on = "; it goes on without this view" if status.state == "running" else ""
    print(describe(status) if has_ended else f"{standing(status)}{goes_on}")
    return status.state


def has_terminal() -> bool:
    """Whether a screen can be drawn where this process prints."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _tell(reading: Reading) -> bool:
    """Print lines, until the run has ended."""
    last: Status | None = None
    trouble: str | None = None
    while True:
        reading.arrived.wait(SILENT_SECONDS)
        reading.arrived.clear()
        reading.check()
        seen = reading.seen
        if seen.trouble != trouble:
            trouble = seen.trouble
            print(trouble or "the run can be read again", flush=True)
        if seen.look and seen.look is not last:
            for line in changes(last, seen.look):
                print(line, flush=True)
            last = seen.look
        if seen.is_settled:
            return True
