"""Words around a run that a person starts or continues: what begins, how it ended, its summary."""

import shlex
import shutil
import sys
import time
from pathlib import Path

from pipeline.orchestrate.driver import Outcome, Pass
from pipeline.run import journal
from pipeline.run.benchmarks import in_words, read_measured
from pipeline.run.directory import Run, resume_command
from pipeline.run.failures import FOR_PEOPLE
from pipeline.run.identity import RunError
from pipeline.run.records import find_frontier
from pipeline.status.logs import failure_block
from pipeline.text import printable


def announce(run: Run) -> None:
    """Say what begins, and how to watch it: the first iteration may take long."""
    left = run.plan.iterations - max(find_frontier(run.plan, run.paths).updated, run.plan.start)
    print(f"run directory: {run.paths.root}", file=sys.stderr)
    size = f"{run.config.responses_per_iteration} responses"
    work = f"to do: {left} of {run.plan.iterations} iterations of {size}, a line for each"
    print(f"{work}; logs: {run.paths.log_root}", file=sys.stderr, flush=True)


def say_how_it_ended(run: Run, done: Pass, otherwise: str = "") -> int:
    """Print the summary, the failure block, or what to do next. Returns the exit code."""
    if done.outcome is Outcome.COMPLETE:
        print(summary(run))
        return 0
    if done.outcome is Outcome.FAILED:
        print(failure_block(run, done.given_up), file=sys.stderr)
        return 2 if any(item.kind in FOR_PEOPLE for item in done.given_up) else 1
    if done.outcome is Outcome.CANCELLED:
        otherwise = f"the run was cancelled; to continue: {resume_command(run)}"
    if done.outcome is Outcome.PAUSED:
        otherwise = pause_in_words(run)
    print(otherwise, file=sys.stderr)
    return 3


def pause_in_words(run: Run) -> str:
    """Say why a run pauses, and what to do."""
    from pipeline.run.control import read_control

    act, root = read_control(run.paths).paused, shlex.quote(str(run.paths.root))
    why = f"{act.in_words}, so it pauses" if act else "the run pauses"
    return f"{why}; resume with: {resume_command(run)}, or end it with: slurm-ppo cancel {root}"


def next_commands(run: Run) -> str:
    """Return the commands that a person will want after submitting."""
    root = shlex.quote(str(run.paths.root))
    return "\n".join(
        (
            "submitted; the run continues by itself, you may log out",
            f"  status:           slurm-ppo status {root}",
            f"  watch:            slurm-ppo watch {root}",
            f"  logs:             slurm-ppo logs {root} --follow",
            f"  cancel:           slurm-ppo cancel {root}",
            f"  continue:         {resume_command(run)}",
        )
    )


def summary(run: Run) -> str:
    """Write a complete run's report, and sum the run up: table, curve, where things are."""
    from pipeline.metrics.advice import advise, in_a_line
    from pipeline.metrics.advice_input import AdviceInput
    from pipeline.metrics.terminal import iteration_table, reward_curve
    from pipeline.workers.beats import read_beats
    from pipeline.workers.summary import workers_of

    width = min(shutil.get_terminal_size((80, 24)).columns, 120)
    rows = journal.read(run.paths.metrics)
    beats = read_beats(run.paths).values() if run.config.slurm else ()
    workers = workers_of(beats, time.time())
    what = "" if run.config.update.lora is None else " (an adapter: slurm-ppo export makes a whole model)"
    return "\n".join(
        (
            iteration_table(rows, width),
            "",
            reward_curve(rows, width, height=15),
            "",
            *(in_a_line(advice) for advice in advise(AdviceInput(rows, run.config, workers=workers))),
            *missing_numbers(run),
            f"run directory: {run.paths.root}",
            f"policy:        {run.paths.policies / f'{run.plan.iterations:05d}'}{what}",
            f"report:        {_write_report(run)}",
        )
    )


def _write_report(run: Run) -> Path | str:
    """Write the report. Returns its path, or why there is none: the run is complete all the same."""
    from pipeline.report import write_report

    try:
        return write_report(run)
    except RunError as error:
        return str(error)


def missing_numbers(run: Run) -> list[str]:
    """Return a line where evaluate.command gave no numbers of some policies: the run is complete without."""
    measured = read_measured(run.paths)
    if not any(one.missing for one in measured):
        return []
    message = in_words(measured, len(measured), len(run.plan.benchmarks()))
    return [printable(f"complete without some numbers: {message}")]
