"""Checks of Slurm for this user: commands, limits, partitions, and files as compute nodes see them."""

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from pipeline.config.issue import ConfigIssue
from pipeline.config.scheduler import ResourcesConfig, key_of, resources_of
from pipeline.config.schema import Config
from pipeline.doctor.findings import (
    Check,
    Finding,
    Group,
    Look,
    findings_of,
    milliseconds,
    ok,
    problem,
    skipped,
    warning,
)
from pipeline.doctor.semantics import SYNCHRONISE
from pipeline.preflight.cluster import (
    PROGRAMS,
    job_kind_problems,
    job_kinds_used,
    limit_problems,
    read_cluster,
)
from pipeline.preflight.probe import Aim, ask_nodes, judge, note
from pipeline.run.lease import EXPIRY_SECONDS
from slurm.associations import read_associations
from slurm.clusters import on_cluster
from slurm.commands import SlurmError, SlurmMissing, run_command
from slurm.limits import Partition, format_duration, parse_limits, read_limits, read_partitions
from slurm.probe import Answer, Exchange, Probe, ProbeTimeout, run_probes

_OPTIONAL = {"sinfo": "partitions are", "sacct": "costs are", "sacctmgr": "limits are"}
_SLOW_SECONDS = 5.0
_LATE_SECONDS = 5.0
_TOO_LATE_SECONDS = 60.0
_NODE_SECONDS = 120.0
_CALL_SECONDS = 20.0
_MOST_SHOWN = 6
_PLACE = "Slurm"
_CONTROLLER = "Slurm's controller"
_ASK = "wait, and ask the administrators if it lasts; nothing of a run is lost meanwhile"


def slurm_checks(
    config: Config | None, folder: Path, with_probe: bool, why_not: Callable[[], str] = str
) -> list[Check]:
    """Return the checks of Slurm; a skipped one where there is no Slurm here and none is needed.

    Args:
        config: of a run on Slurm, or None: then what the cluster is like.
        folder: where probe jobs meet this machine.
        why_not: says why it is not for this user to try the jobs of the run; empty where it is.
    """
    if config is None and not any(map(shutil.which, PROGRAMS)):
        return [Check(Group.SLURM, "commands", lambda: skipped("commands", "there is no Slurm here"))]
    name = config.slurm.cluster if config and config.slurm else ""
    asking = partial(_asking, name)
    checks = [
        Check(Group.SLURM, "commands", lambda: judge_commands(_paths_of_commands())),
        asking("controller", look_at_controller, gate=_CONTROLLER, is_needed=config is not None),
        asking("limits", lambda: look_at_limits(None if why_not() else config)),
        asking("accounting", look_at_accounting),
        asking("partitions", lambda: judge_partitions(read_partitions())),
    ]
    if config is not None:
        stages = _unless(why_not, "jobs of stages", lambda: look_at_stages(config))
        checks.append(asking("stages", stages, 90.0))
    if with_probe:
        nodes = _unless(why_not, "compute nodes", lambda: look_at_nodes(config, folder))
        return [*checks, asking("compute nodes", nodes, _NODE_SECONDS + 60)]
    none = skipped("compute nodes", "--no-probe: no job was sent to look")
    return [*checks, Check(Group.SLURM, none.title, lambda: none)]


def _unless(why_not: Callable[[], str], title: str, look: Callable[[], Iterator[Finding]]) -> Look:
    """Make a look that is skipped where there is a reason."""

    def careful() -> Iterator[Finding]:
        if why := why_not():
            yield skipped(title, why)
        else:
            yield from look()

    return careful


def _asking(
    cluster: str,
    title: str,
    look: Look,
    limit: float = 3 * _CALL_SECONDS,
    gate: str = "",
    is_needed: bool = True,
) -> Check:
    """Make a check that asks Slurm, which may be missing or silent.

    Args:
        cluster: name of the cluster to ask; empty: the one of this machine.
    """

    def carefully() -> Iterator[Finding]:
        try:
            with on_cluster(cluster):
                yield from findings_of(look)
        except SlurmMissing as error:
            yield skipped(title, str(error))
        except SlurmError as error:
            yield (problem if is_needed else warning)(title, f"Slurm does not answer: {error}", _ASK)

    needs = "" if gate else _CONTROLLER
    return Check(Group.SLURM, title, carefully, limit, place=_PLACE, gate=gate, needs=needs)


def _paths_of_commands() -> dict[str, str | None]:
    return {name: shutil.which(name) for name in (*PROGRAMS, *_OPTIONAL)}


def judge_commands(paths: Mapping[str, str | None]) -> Finding:
    """Judge which of Slurm's commands are on PATH. Pure."""
    missing = [name for name in PROGRAMS if paths[name] is None]
    without = [name for name in _OPTIONAL if paths[name] is None]
    if missing:
        advice = "type this on a login node, or put Slurm's bin folder on PATH (module load slurm)"
        return problem("commands", f"not found: {', '.join([*missing, *without])}", advice)
    if without:
        lost = "; ".join(f"without {name} {_OPTIONAL[name]} not known" for name in without)
        return warning("commands", lost, "install the rest of Slurm's client commands")
    folders = sorted({str(Path(path).parent) for path in paths.values() if path})
    return ok("commands", f"{len(paths)} found in {', '.join(folders)}")


def look_at_controller() -> Finding:
    """Measure how long it takes to answer what is asked in every pass."""
    started = time.perf_counter()
    version = run_command(["sbatch", "--version"], timeout=_CALL_SECONDS).strip()
    run_command(["squeue", "--me", "-h", "-o", "%i"], timeout=_CALL_SECONDS)
    seconds = time.perf_counter() - started
    told = f"{version}, squeue answers in {milliseconds(seconds)}"
    busy = " (that is long: it is busy, raise scheduler.check_minutes)" if seconds > _SLOW_SECONDS else ""
    return ok("controller", told + busy, seconds=seconds)


def look_at_limits(config: Config | None) -> Iterator[Finding]:
    text = run_command(["scontrol", "show", "config"], timeout=_CALL_SECONDS)
    yield judge_settings(text)
    limits = read_limits()
    needed = list(limit_problems(config.slurm, limits)) if config and config.slurm else []
    if needed:
        yield problem("your limits", str(needed[0]), "ask for a higher MaxSubmitJobs, or use another QOS")
    else:
        mine = "without a limit" if limits.max_submit is None else f"{limits.max_submit} at most"
        yield ok("your limits", f"you may have jobs in the queue {mine}")


def judge_settings(text: str) -> Finding:
    """Judge the settings that matter in ``scontrol show config``. Pure."""
    limits = parse_limits(text)
    told = (
        f"MaxArraySize {limits.max_array_size}, MaxJobCount {limits.max_jobs}, MinJobAge "
        f"{limits.min_job_age:g} s"
    )
    numbers = {"max_array_size": limits.max_array_size, "max_jobs": limits.max_jobs}
    if limits.min_job_age < 60:
        advice = "ended jobs are forgotten at once: how they ended is known from accounting alone"
        return warning("limits", told, advice, **numbers)
    return ok("limits", told, **numbers)


def look_at_accounting() -> Finding:
    started = time.perf_counter()
    try:
        run_command(["sacct", "-X", "-n", "-P", "--format=JobID"], timeout=_CALL_SECONDS)
    except SlurmError as error:
        told = f"sacct does not answer: {' '.join(error.stderr.split())[:120] or error}"
        advice = "runs work without; how ended jobs ended is known for MinJobAge only, and costs are not"
        return warning("accounting", told, advice)
    seconds = time.perf_counter() - started
    known = read_associations()
    mine = f"accounts: {', '.join(sorted(known.accounts)) or 'none'}" if known else "accounts are not known"
    rules = ", enforced" if known and known.enforced else ""
    return ok("accounting", f"sacct answers in {milliseconds(seconds)}; {mine}{rules}", seconds=seconds)


def judge_partitions(partitions: Mapping[str, Partition]) -> Finding:
    """Judge whether some partition takes jobs. Pure."""
    up = [partition for partition in partitions.values() if partition.state == "UP" and partition.nodes]
    if not up:
        return problem("partitions", f"none of {len(partitions)} takes jobs", "wait until one is UP: sinfo")
    shown = "; ".join(map(_in_words, up[:_MOST_SHOWN]))
    more = f"; and {len(up) - _MOST_SHOWN} more" if len(up) > _MOST_SHOWN else ""
    return ok("partitions", f"{shown}{more}", partitions=len(up))


def _in_words(partition: Partition) -> str:
    limit = "no limit" if partition.max_time is None else format_duration(partition.max_time)
    gpus = partition.most("gpu")
    star = "*" if partition.default else ""
    nodes = f"{partition.nodes} node{'' if partition.nodes == 1 else 's'}"
    return f"{partition.name}{star} {nodes}{f' of {gpus} GPUs' if gpus else ''}, {limit}"


def look_at_stages(config: Config) -> Iterator[Finding]:
    """Compare what each stage asks for with what its partitions have, and let sbatch test the script."""
    assert config.slurm
    cluster = read_cluster()
    for job_kind in job_kinds_used(config):
        given = resources_of(config.slurm, job_kind)
        yield judge_stage(job_kind, given, job_kind_problems(config, job_kind, cluster))


def judge_stage(job_kind: str, given: ResourcesConfig, problems: Sequence[ConfigIssue]) -> Finding:
    """Judge a stage's jobs by the problems found. Pure."""
    title = f"jobs of {job_kind}"
    if problems:
        told = "; ".join(map(str, problems))
        if all(issue.is_passing for issue in problems):
            return warning(title, told, "its jobs start when nodes are back; or choose another partition")
        return problem(title, told, f"start with another {key_of(job_kind)}; a run's own settings are frozen")
    where = ", ".join(given.partition) or "the default partition"
    gpus = f", GPUs {given.gpus_per_node or given.gres}" if given.gpus_per_node or given.gres else ""
    return ok(title, f"{where} takes them: {given.time}, {given.cpus_per_task} CPUs{gpus}")


def look_at_nodes(config: Config | None, folder: Path) -> Iterator[Finding]:
    """Send tiny jobs, one to each place that stages go to; or one to the default partition."""

    if config is not None:
        for aim, answer in ask_nodes(config, _NODE_SECONDS, measures_delay=True):
            yield from judge_node(", ".join(aim.stages), list(judge(aim, answer)), answer)
        return
    probe = Probe("default", {}, (sys.executable,), ("slurm", "pipeline"), measures_delay=True)
    answer = run_probes([probe], folder, Path.cwd(), _NODE_SECONDS, note)["default"]
    aim = Aim(("driver",), ResourcesConfig(python=sys.executable))
    yield from judge_node("the default partition", list(judge(aim, answer)), answer)


def judge_node(name: str, problems: Sequence[ConfigIssue], answer: Answer) -> Iterator[Finding]:
    """Judge the answer of a probe job. Pure."""
    title = f"node for {name}"
    if isinstance(answer, ProbeTimeout):
        advice = "type slurm-ppo doctor again when the queue is shorter"
        if answer.is_late:
            yield warning(title, f"its job had to wait too long ({answer.why})", advice)
        else:
            why = "; ".join(each.why for each in problems) or answer.why
            yield problem(
                title, why, "see what the job said, and mend scheduler.setup, the image or the paths"
            )
        return
    told = f"{answer.node}, Python {answer.python}, {answer.gpus or 0} GPUs"
    if problems:
        advice = "install there what is missing, bind it into the image, or use a shared filesystem"
        yield problem(title, f"{told}: {'; '.join(each.why for each in problems)}", advice)
    else:
        yield ok(title, f"{told}; what the stage needs is there")
    if answer.exchange is not None:
        yield judge_exchange(f"files of {answer.node}", answer.exchange)


def judge_exchange(title: str, seen: Exchange) -> Finding:
    """Judge how long files take between a node and this machine. Pure."""
    clock = f"its clock is {abs(seen.node_skew):.2f} s {'behind' if seen.node_skew > 0 else 'ahead of'} the "
    clock = f"; {clock}file server's" if abs(seen.node_skew) >= 0.1 else ""
    numbers = {"node_skew_seconds": seen.node_skew}
    if seen.round_trip is None:
        told = f"what this machine wrote was not seen there in {_TOO_LATE_SECONDS:g} s{clock}"
        return problem(title, told, "mount it without long caches (acdirmax), or choose another run_dir")
    numbers["round_trip_seconds"] = seen.round_trip
    here = f"{max(0.0, seen.seen_here):.2f} s to be seen here"
    there = f"{max(0.0, seen.round_trip - max(0.0, seen.seen_here)):.2f} s to be seen there"
    told = f"{here}, {there}{clock}"
    if abs(seen.node_skew) > EXPIRY_SECONDS / 2:
        return problem(title, told, SYNCHRONISE, **numbers)
    if seen.round_trip > _LATE_SECONDS:
        advice = "a run works, each stage waits for as long; shorter caches (acdirmax) would help"
        return warning(title, told, advice, **numbers)
    return ok(title, told, **numbers)
