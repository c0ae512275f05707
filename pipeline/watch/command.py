"""The command ``slurm-ppo watch``."""

from pipeline.run.directory import Run
from pipeline.status.snapshot import read_status
from pipeline.status.text import describe, standing
from pipeline.watch.loop import look_on, tell_changes
from pipeline.watch.plain import changes
from pipeline.watch.reading import Reading


def watch(run: Run, interval: float) -> str:
    """Show the run until it has ended, or the person quits. Changes nothing in the run directory.

    Args:
        interval: seconds between two questions to Slurm.

    Returns:
        The run's state, as :attr:`pipeline.status.state.Status.state`.
    """
    reading = Reading(run, interval)
    has_ended = look_on(reading, lambda: _draw(reading), lambda: tell_changes(reading, "the run", changes))
    status = read_status(run) if has_ended else reading.seen.look
    if status is None:
        return "unknown"
    goes_on = "; it goes on without this view" if status.state == "running" else ""
    print(describe(status) if has_ended else f"{standing(status)}{goes_on}")
    return status.state


def _draw(reading: Reading) -> bool:
    from pipeline.watch.terminal import RunWindow, show

    return show(RunWindow(reading))
