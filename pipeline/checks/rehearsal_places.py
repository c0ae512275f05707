"""Where a rehearsal is made: on this machine, or in a job on each partition that stages go to."""

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.checks.finding import CheckGroup, Finding, Grouped, Verdict, describe, problem, skipped
from pipeline.checks.nodes import Aim, aims_of, folder_of, note, options_of, probe_of
from pipeline.checks.rehearsal import RehearsalRequest, RehearsalRunner
from pipeline.checks.rehearsal_list import RANKS, chosen, without_gpus
from pipeline.checks.rehearsal_record import keep_record
from pipeline.config.job_kinds import DRIVER
from pipeline.config.scheduler import LocalConfig, ResourcesConfig
from pipeline.config.schema import Config
from pipeline.executors.devices import devices_of
from pipeline.executors.slurm.resources import rank_words
from pipeline.gpus import visible_names
from pipeline.run.durable import digest_file
from pipeline.run.engine_use import uses_vllm
from slurm.commands import SlurmError, SlurmMissing, on_cluster
from slurm.limits import Partition, format_duration, partitions_of, read_partitions
from slurm.probe import Answer, Probe, ProbeResult, run_probes

_PREFIX = ".slurm-ppo-rehearsal-"
_MOST_SECONDS = 3600.0
"""Seconds that a job may take, and the command waits."""
SENT = "from-the-command"
"""Name of the file that nodes read; as in :mod:`stages.rehearsal.storage`."""
_LEFT_OUT = ("time", "signal", "mail-type", "mail-user")


@dataclass(frozen=True)
class RehearsalOptions:
    """What was asked for on the command line."""

    config: Config | None
    """Configuration whose partitions are rehearsed; None for this machine alone."""
    only: tuple[str, ...] = ()
    is_short: bool = False

    @property
    def num_mib(self) -> int:
        """Size of the file that stands for a policy."""
        return 64 if self.is_short else 256

    @property
    def subject(self) -> str:
        if self.config and self.config.slurm:
            return f"jobs of {self.config.run_dir}"
        return f"this machine, {os.uname().nodename}"


def rehearse(wanted: RehearsalOptions, tell: Callable[[Grouped], None]) -> list[Grouped]:
    """Make the checks, reporting each finding as it comes; keep the record. Leaves no process or file behind.

    Raises:
        ConfigError: there is no check of a name.
        OSError: nothing can be made where runs are to lie.
    """
    chosen(wanted.only, wanted.is_short)  # refuses unknown names before anything is made
    config, found = wanted.config, []
    for finding in _in_jobs(wanted, config) if config and config.slurm else _here(wanted):
        found.append((CheckGroup.REHEARSAL, finding))
        tell(found[-1])
    keep_record(wanted.subject, found)
    return found


def _here(wanted: RehearsalOptions) -> Iterator[Finding]:
    given = wanted.config.scheduler if wanted.config else None
    devices = (
        devices_of(given if isinstance(given, LocalConfig) else LocalConfig()).names
        or visible_names(os.environ)
        or ()
    )
    parent = folder_of(wanted.config) if wanted.config else Path.cwd()
    request = RehearsalRequest(gpus=len(devices), devices=devices, **_common(wanted))
    made = tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent, ignore_cleanup_errors=True)
    with made as folder, RehearsalRunner(request, Path(folder)) as runner:
        found = []
        for finding in runner.findings():
            found.append(finding)
            yield finding
    if not devices:
        yield without_gpus(found)


def _common(wanted: RehearsalOptions, kinds: Sequence[str] | None = None) -> dict[str, Any]:
    """Return what a rehearsal has anywhere, for the job kinds of a place; None for all of them."""
    needs_vllm = wanted.config is not None and uses_vllm(wanted.config, kinds)
    names = chosen(wanted.only, wanted.is_short, kinds, needs_vllm)
    common = {"is_short": wanted.is_short, "needs_vllm": needs_vllm, "num_mib": wanted.num_mib}
    return {"names": names, **common}


# --- in jobs ---


def _in_jobs(wanted: RehearsalOptions, config: Config) -> Iterator[Finding]:
    """Send a job to every place where stages do what is to be rehearsed, and wait for what it has found."""
    aims, parent = aims_for(wanted, config), folder_of(config)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent, ignore_cleanup_errors=True) as made:
        sent = Path(made) / SENT
        sent.write_bytes(os.urandom(wanted.num_mib << 20))
        sent.with_suffix(".digest").write_text(digest_file(sent)[1])
        with on_cluster(config.slurm.cluster if config.slurm else ""):
            known = _partitions()
            probes = [probe_for(wanted, config, aim, Path(made), known) for aim in aims]
            answers = run_probes(probes, parent, Path.cwd(), _MOST_SECONDS, note)
        for aim in aims:
            yield from in_place(aim, answers[aim.name], Path(made) / aim.name)


def aims_for(wanted: RehearsalOptions, config: Config) -> list[Aim]:
    """Return the places where stages do what is to be rehearsed. Pure."""
    aims = [aim for aim in aims_of(config, _LEFT_OUT) if DRIVER not in aim.stages]
    return [aim for aim in aims if chosen(wanted.only, wanted.is_short, aim.stages)]


def _partitions() -> Mapping[str, Partition]:
    """Return the partitions of the cluster; none where it does not say."""
    with contextlib.suppress(SlurmError, SlurmMissing):
        return read_partitions()
    return {}


def time_limit(given: ResourcesConfig, known: Mapping[str, Partition]) -> str:
    """Return the time limit of a job: an hour, or less where a partition allows less. Pure."""
    longest = [place.max_time for place in partitions_of(given.partition, known) if place.max_time]
    return format_duration(min([_MOST_SECONDS, *longest]))


def probe_for(
    wanted: RehearsalOptions, config: Config, aim: Aim, folder: Path, known: Mapping[str, Partition]
) -> Probe:
    """Return the job that rehearses in a place, with what its job kinds ask for, in a folder of its own."""
    place = folder / aim.name
    place.mkdir()
    for name in (SENT, f"{SENT}.digest"):
        (place / name).hardlink_to(folder / name)
    given, has_ranks = aim.given, aim.given.num_ranks > 1
    request = RehearsalRequest(
        gpus=given.num_gpus or 0,
        nodes=given.nodes,
        ranks=given.num_ranks if has_ranks else RANKS,
        launcher=tuple(rank_words(given, "slurm.step")) if has_ranks else (),
        **_common(wanted, aim.stages),
    )
    return replace(
        probe_of(config, aim),
        options=options_of(given, _LEFT_OUT),
        time=time_limit(given, known),
        run=("pipeline.checks.rehearsal", json.dumps(asdict(request)), str(place)),
    )


def in_place(aim: Aim, answer: Answer, folder: Path) -> Iterator[Finding]:
    """Yield the findings of a place's job, also of one that ended before its last check."""
    where = ", ".join(aim.stages)
    found = [Finding(**content) for content in _findings(folder / "findings.json")]
    for finding in found:
        yield replace(finding, title=f"{where}: {finding.title}", verdict=Verdict(finding.verdict))
    if isinstance(answer, ProbeResult):
        if answer.exit_code:
            said = (
                f"its program ended with code {answer.exit_code} on {answer.node} after {len(found)} checks"
            )
            yield problem(f"{where}: job", said, _advice(answer))
    elif answer.is_late:
        yield skipped(f"{where}: job", f"not shown here: its job did not end in time ({answer.why})")
    else:
        yield problem(
            f"{where}: job", answer.why, "see what the job said, and fix partition, setup or python"
        )


def _advice(answer: ProbeResult) -> str:
    missing = ", ".join(f"{name.removeprefix('?')}: {why}" for name, why in answer.missing_modules.items())
    return f"install there what is missing: {missing}" if missing else "slurm-ppo doctor with the same words"


def _findings(path: Path) -> list[Mapping[str, Any]]:
    with contextlib.suppress(OSError, json.JSONDecodeError):
        found: list[Mapping[str, Any]] = json.loads(path.read_text())
        return found
    return []


def described(finding: Finding, in_colour: bool) -> str:
    """Render a finding with the seconds that its check took."""
    seconds = finding.numbers.get("seconds")
    taken = "" if seconds is None else f" ({seconds:.1f} s)"
    return describe(None, replace(finding, measured=finding.measured + taken), in_colour)
