"""All checks of a run, of settings, or of this folder; and their printing."""

import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from pipeline.doctor.cluster import slurm_checks
from pipeline.doctor.disk import space_checks
from pipeline.doctor.findings import (
    Check,
    Finding,
    Group,
    Grouped,
    Verdict,
    conclusion,
    count,
    describe,
    ok,
    problem,
    to_json,
)
from pipeline.doctor.health import health_checks
from pipeline.doctor.machine import machine_checks
from pipeline.doctor.place import remove_leftovers
from pipeline.doctor.running import run_check, run_checks
from pipeline.doctor.semantics import file_checks
from pipeline.doctor.wandbchecks import wandb_checks
from pipeline.preflight.disk_need import existing_folder
from pipeline.process import interruptible, uninterrupted
from pipeline.run.directory import Run, is_run, load_run
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
    if run_check(Check(Group.RUN, "run", lambda: ok("run", f"{root} exists: {root.exists()}"))) is None:
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
    checks = machine_checks(trains_here=is_local)
    is_reader = patient.exists and not os.access(patient.folder, os.W_OK)
    checks += space_checks(patient.folder, run, patient.exists, is_reader)
    checks += [] if is_reader else file_checks(patient.folder, is_shared=on_slurm is not None)
    if not is_local:
        checks += slurm_checks(on_slurm, patient.folder, with_probe, lambda: why_not_tried(patient))
    checks += wandb_checks(run)
    if patient.trouble:
        advice = "restore the file from a backup, or start a new run"
        checks.append(Check(Group.RUN, "run", lambda: problem("run", patient.trouble, advice)))
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

    run_check(Check(Group.FILES, "cleaning up", remove))


def next_command(patient: Subject, found: list[Grouped]) -> str:
    """Say which command to type next."""
    root = shlex.quote(patient.subject)
    if count(found, Verdict.PROBLEM):
        return f"mend the problems, then slurm-ppo doctor {root}" if patient.exists else "mend the problems"
    if patient.exists:
        return f"slurm-ppo status {root}"
    return "slurm-ppo validate ..., then submit or run" if patient.run else "slurm-ppo run experiment=..."


def show(patient: Subject, with_probe: bool, stream: TextIO) -> list[Grouped]:
    """Print findings as they come, under their groups."""
    in_colour = stream.isatty() and "NO_COLOR" not in os.environ
    last: list[Group] = []

    def tell(grouped: Grouped) -> None:
        group, finding = grouped
        print(describe(None if last[-1:] == [group] else group, finding, in_colour), file=stream, flush=True)
        last.append(group)

    print(f"slurm-ppo doctor: {patient.subject}", file=stream, flush=True)
    found = examine(patient, with_probe, tell)
    print(conclusion(found, next_command(patient, found)), file=stream)
    return found


def doctor(patient: Subject, with_probe: bool, as_json: bool) -> bool:
    """Print what was found. Returns whether there was no problem."""
    if as_json:
        found = examine(patient, with_probe, lambda grouped: None)
        print(json.dumps(to_json(patient.subject, found), indent=1))
    else:
        found = show(patient, with_probe, sys.stdout)
    return not count(found, Verdict.PROBLEM)
