"""Which checks each command makes: validate, doctor, and those that start a run; and their printing.

| suite | checks |
|---|---|
| start (before run, submit, fork) | settings, memory, cluster |
| validate | settings, models, memory, seconds, cluster, nodes |
| plan | memory, prompt lengths, seconds |
| doctor | machine, disk, files, cluster, nodes, W&B, health |
| rehearse | what tasks compute here, or on the partitions of the stages |
"""

import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from pipeline.checks.cluster import QUIET, check_cluster, slurm_checks
from pipeline.checks.disk import existing_folder, space_checks
from pipeline.checks.files import file_checks
from pipeline.checks.finding import (
    Check,
    CheckGroup,
    Finding,
    Grouped,
    Verdict,
    conclusion,
    count,
    describe,
    line,
    of_line,
    ok,
    problem,
    refuse,
    to_json,
)
from pipeline.checks.health import health_checks
from pipeline.checks.machine import machine_checks, wandb_checks
from pipeline.checks.memory import check_memory, memory_lines, needs_in
from pipeline.checks.nodes import check_nodes, folder_of
from pipeline.checks.rehearsal_places import RehearsalOptions, described, rehearse
from pipeline.checks.running import remove_leftovers, run_check, run_checks
from pipeline.checks.seconds import check_seconds, prompt_lengths_of
from pipeline.checks.settings import validate_inputs
from pipeline.config.findings import Findings
from pipeline.config.issue import UserError
from pipeline.config.schema import Config
from pipeline.process import interruptible, uninterrupted
from pipeline.run.directory import Run, is_run, load_run
from pipeline.run.forecast import Forecast
from pipeline.run.identity import RunError
from pipeline.run.standpoint import standpoint


@dataclass(frozen=True)
class Subject:
    """Subject of the checks: a run, settings, or a folder."""

    folder: Path
    """Folder where files are tried out: the run directory, or where it would be made."""
    run: Run | None = None
    """Run on disk, or of the settings at hand; None: this machine and folder."""
    exists: bool = False
    """Whether the run is on disk."""
    trouble: str = ""
    """Reason why the run on disk cannot be opened."""

    @property
    def subject(self) -> str:
        return str(self.run.paths.root if self.run else self.folder)


def patient_of(root: Path | None, imagined: Run | None) -> Subject:
    """Return the subject for a run directory, settings, or nothing: this folder. RunError: it is no run."""
    if imagined is not None:
        return Subject(existing_folder(imagined.paths.root.absolute()), imagined)
    if root is None:
        return Subject(Path.cwd())
    # In a process of its own, because a dead file server never answers.
    if run_check(Check(CheckGroup.RUN, "run", lambda: ok("run", f"{root} exists: {root.exists()}"))) is None:
        return Subject(root.absolute(), trouble=f"{root} does not answer")
    if not is_run(root):
        load_run(root)  # says what is missing
    try:
        return Subject(root.absolute(), load_run(root), exists=True)
    except RunError as error:
        return Subject(root.absolute(), trouble=str(error))


def checks_of(patient: Subject, with_probe: bool) -> list[Check]:
    """Return the checks in the order in which they are made and shown."""
    run = patient.run
    config = run.config if run else None
    on_slurm = config if config and config.slurm else None
    is_local = config is not None and on_slurm is None
    checks = machine_checks(config if is_local else None)
    is_reader = patient.exists and not os.access(patient.folder, os.W_OK)
    checks += space_checks(patient.folder, run, patient.exists, is_reader)
    checks += [] if is_reader else file_checks(patient.folder, is_shared=on_slurm is not None)
    if not is_local:
        checks += slurm_checks(on_slurm, patient.folder, with_probe, lambda: why_not_tried(patient))
    checks += wandb_checks(run)
    if patient.trouble:
        advice = "restore the file from a backup, or start a new run"
        checks.append(Check(CheckGroup.RUN, "run", lambda: problem("run", patient.trouble, advice)))
    elif run and patient.exists:
        checks += health_checks(run)
    return checks


def why_not_tried(patient: Subject) -> str:
    """Say why it is not for this user, or this machine, to try the jobs of a run; empty where it is."""
    run = patient.run
    if run is None or not patient.exists or not run.config.slurm:
        return ""
    if (found := standpoint(run.paths, run.who_acts)) is not None:
        return f"the run {found.reason}"
    return "" if os.access(patient.folder, os.W_OK) else f"you may not write to {patient.folder}"


# --- start and validate ---

_ALL_TRIED = "ok so far; no run was started"
_NOT_TRIED = "ok so far; the numbers in the models are checked by the run's first task"


def start(
    config: Config,
    found: Findings,
    folder: Path | None = None,
    number: int = 0,
    with_weights: bool = False,
    gpu_memory: float | None = None,
    forecast: Forecast | None = None,
) -> Iterator[Grouped]:
    """Check all that a run is made of. Problems are added to ``found``; yields what else is found.

    Args:
        found: what is wrong with ``config`` so far.
        folder: folder that rules are imported from. Default: the current one.
        number: number of iterations that a fork has from its parent.
        with_weights: try the models too, which takes seconds; else the run's first task does.
        gpu_memory: GiB of each GPU, where that is given.
        forecast: gets what the run is expected to take.
    """
    forecast = Forecast() if forecast is None else forecast
    with found.collecting("memory"):
        needs = list(check_memory(config, gpu_memory))
        shown = (Verdict.OK, Verdict.WARNING, Verdict.SKIPPED) if with_weights else (Verdict.WARNING,)
        yield from ((CheckGroup.SETTINGS, one) for one in needs if one.verdict in shown)
        forecast.memory |= needs_in(needs)
        refuse(needs)
    for text in validate_inputs(config, found, folder, number, with_weights, forecast.lengths):
        yield CheckGroup.SETTINGS, of_line(text)
    if not found:
        forecast.seconds, told = check_seconds(config, forecast.of_training)
        yield from [(CheckGroup.SETTINGS, told)] if with_weights else []
    is_tried = with_weights and not found
    yield CheckGroup.SETTINGS, of_line(_ALL_TRIED if is_tried else _NOT_TRIED)
    if config.slurm:
        with found.collecting("the cluster"):
            seen = check_cluster(config)
            yield from ((CheckGroup.SLURM, one) for one in seen if one.verdict is not Verdict.PROBLEM)
            refuse(seen)


def validated(
    config: Config, found: Findings, with_probe: bool, gpu_memory: float | None = None
) -> Iterator[Grouped]:
    """Check as before a start, and try models and, where nothing is wrong so far, compute nodes."""
    yield from start(config, found, with_weights=True, gpu_memory=gpu_memory)
    if config.slurm and not found:
        yield CheckGroup.SLURM, ok("cluster", "partitions, limits and sizes allow what is asked for")
        if with_probe:
            seen = list(check_nodes(config, folder_of(config)))
            yield from ((CheckGroup.SLURM, one) for one in seen if one.verdict is not Verdict.PROBLEM)
            found.add(one.measured for one in seen if one.verdict is Verdict.PROBLEM)


def lines_of(checked: Iterable[Grouped], found: Findings) -> Iterator[str]:
    """Yield lines for people, until a problem is found; then raise ConfigError with every problem."""
    for _, one in checked:
        if not found and not (one.verdict is Verdict.OK and one.title.startswith(QUIET)):
            yield line(one)
    found.refuse()


def validate(
    make: Callable[[], tuple[Config, Findings]], with_probe: bool, gpu_memory: float | None = None
) -> Iterator[str]:
    """Yield lines for people. Raises UserError with every problem."""
    config, found = make()
    yield from lines_of(validated(config, found, with_probe, gpu_memory), found)


def validate_as_json(
    make: Callable[[], tuple[Config, Findings]], with_probe: bool, gpu_memory: float | None = None
) -> dict[str, Any]:
    """Return all that was found, as an object; see :func:`pipeline.checks.finding.to_json`."""
    seen: list[Grouped] = []
    subject = ""
    try:
        config, found = make()
        subject = str(config.run_dir)
        seen += validated(config, found, with_probe, gpu_memory)
        found.refuse()
    except UserError as error:
        lines = str(error).splitlines()
        seen += [(CheckGroup.SETTINGS, of_line(each, Verdict.PROBLEM)) for each in lines]
    return to_json(subject, seen)


def forecast_lines(config: Config, gpu_memory: float | None) -> Iterator[str]:
    """Yield lines for people on what a run that does not exist yet will take. Raises ConfigError for what
    cannot fit."""
    yield from memory_lines(config, gpu_memory)
    lengths, said = prompt_lengths_of(config)
    yield from said
    _, told = check_seconds(config, Forecast(lengths).of_training)
    yield line(told)


# --- doctor ---


def examine(patient: Subject, with_probe: bool, tell: Callable[[Grouped], None]) -> list[Grouped]:
    """Make every check, reporting each finding as it comes. Leaves nothing behind, also when interrupted."""
    found = []
    with interruptible(signal.SIGHUP):  # a closed terminal
        try:
            for grouped in run_checks(checks_of(patient, with_probe)):
                found.append(grouped)
                tell(grouped)
        finally:
            with uninterrupted():
                clean_up(patient.folder)
    return found


def clean_up(folder: Path) -> None:
    """Remove left-overs, in a process with a limit too: the folder may be what hangs."""
    own = os.getpid()

    def remove() -> Iterable[Finding]:
        remove_leftovers(folder, own)
        return ()

    run_check(Check(CheckGroup.FILES, "cleaning up", remove))


def next_command(patient: Subject, found: list[Grouped]) -> str:
    """Say which command to type next."""
    root = shlex.quote(patient.subject)
    if count(found, Verdict.PROBLEM):
        return f"fix the problems, then slurm-ppo doctor {root}" if patient.exists else "fix the problems"
    if patient.exists:
        return f"slurm-ppo status {root}"
    return "slurm-ppo validate ..., then submit or run" if patient.run else "slurm-ppo run experiment=..."


def show(patient: Subject, with_probe: bool, stream: TextIO) -> list[Grouped]:
    """Print findings as they come, under their groups."""
    in_colour = stream.isatty() and "NO_COLOR" not in os.environ
    last: list[CheckGroup] = []

    def tell(grouped: Grouped) -> None:
        group, finding = grouped
        print(describe(None if last[-1:] == [group] else group, finding, in_colour), file=stream, flush=True)
        last.append(group)

    print(f"slurm-ppo doctor: {patient.subject}", file=stream, flush=True)
    found = examine(patient, with_probe, tell)
    print(conclusion(found, next_command(patient, found)), file=stream)
    return found


# --- rehearse ---


def rehearsed(wanted: RehearsalOptions, as_json: bool) -> bool:
    """Make the checks of a rehearsal, and print each finding as it comes. Returns whether none failed."""
    in_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def tell(grouped: Grouped) -> None:
        if not as_json:
            print(described(grouped[1], in_colour), flush=True)

    if not as_json:
        print(f"slurm-ppo rehearse: {wanted.subject}", flush=True)
    with interruptible(signal.SIGHUP):
        found = rehearse(wanted, tell)
    failed = count(found, Verdict.PROBLEM)
    if as_json:
        print(json.dumps(to_json(wanted.subject, found), indent=1))
    else:
        good, missing = (count(found, verdict) for verdict in (Verdict.OK, Verdict.SKIPPED))
        print(f"\n{good} ok, {failed} failed, {missing} not shown here")
    return not failed


def doctor(patient: Subject, with_probe: bool, as_json: bool) -> bool:
    """Print what was found. Returns whether there was no problem."""
    if as_json:
        found = examine(patient, with_probe, lambda grouped: None)
        print(json.dumps(to_json(patient.subject, found), indent=1))
    else:
        found = show(patient, with_probe, sys.stdout)
    return not count(found, Verdict.PROBLEM)
