"""Checks of Slurm for this user: commands, limits, partitions, and files as compute nodes see them."""

import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from pipeline.checks.finding import (
    Check,
    CheckGroup,
    Finding,
    Look,
    findings_of,
    milliseconds,
    ok,
    problem,
    skipped,
    warning,
)
from pipeline.checks.nodes import PROBE_SECONDS, check_nodes, job_kinds_used
from pipeline.checks.requests import (
    MEMORY,
    ClusterFacts,
    asks_for_memory,
    judge_memory,
    limit_problems,
    names_in_words,
    shortened,
    stage_problems,
)
from pipeline.checks.side_by_side import TITLE, judge_side_by_side
from pipeline.config.issue import ConfigIssue
from pipeline.config.job_kinds import DRIVER
from pipeline.config.scheduler import ResourcesConfig, SlurmConfig, key_of, resources_of
from pipeline.config.schema import Config
from pipeline.decide.escalating import Escalation
from pipeline.executors.slurm.arrays import array_of, driver_submission, stage_submissions
from pipeline.executors.slurm.crew import needs_of
from pipeline.run.directory import imagined_run
from pipeline.run.tasks import Stage, task_of
from slurm.associations import read_associations, read_ceilings
from slurm.commands import SlurmError, SlurmMissing, SlurmTimeout, on_cluster, run_command
from slurm.limits import (
    Partition,
    format_duration,
    parse_limits,
    read_cluster_memory,
    read_limits,
    read_partitions,
    unavailable_nodes,
)
from slurm.nodes import read_nodes
from slurm.submission import render

PROGRAMS = ("sbatch", "squeue", "scontrol", "scancel", "srun")
QUIET = ("your limits", "jobs of ")
"""Beginnings of the titles of findings that are shown to who starts a run only where something is wrong."""
_TEST_SECONDS = 30.0
_NO_SUCH_NODES = "Requested node configuration is not available"
_LATER = "--begin=now+1hour"
OPTIONAL = {"sinfo": "partitions are", "sacct": "costs are", "sacctmgr": "limits are"}
_SLOW_SECONDS = 5.0
_CALL_SECONDS = 20.0
_MOST_SHOWN = 6
_PLACE = "Slurm"
_CONTROLLER = "Slurm's controller"
_ASK = "wait, and ask the administrators if it lasts; nothing of a run is lost meanwhile"


# --- what start, validate and doctor judge alike ---


def read_cluster() -> ClusterFacts:
    mine = read_associations()
    return ClusterFacts(
        limits=read_limits(),
        partitions=read_partitions(),
        associations=mine,
        ceilings=read_ceilings() if mine and mine.is_limited else None,
    )


def check_cluster(config: Config) -> list[Finding]:
    """Look whether a cluster can give what a configuration asks for, in a second and without a job."""
    assert config.slurm
    with on_cluster(config.slurm.cluster):
        cluster = cluster_at_hand(config.slurm)
        if isinstance(cluster, ConfigIssue):
            return [problem("commands", str(cluster), "")]
        return list(judge_requests(config, config.slurm, cluster))


def cluster_at_hand(given: SlurmConfig) -> ClusterFacts | ConfigIssue:
    """Ask the cluster what it offers. Returns why that cannot be asked where it cannot."""
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        why = f"{', '.join(missing)} not found; run this on a login node"
        return ConfigIssue("scheduler", given.kind, why)
    try:
        return read_cluster()
    except SlurmError as error:
        return ConfigIssue("scheduler", given.kind, f"Slurm does not answer: {error}")


def judge_requests(config: Config, given: SlurmConfig, cluster: ClusterFacts) -> Iterator[Finding]:
    """Judge what the jobs of a run ask for: by what the cluster has, then by what sbatch says."""
    asked = {job_kind: resources_of(given, job_kind) for job_kind in job_kinds_used(config)}
    yield judge_limit(given, cluster)
    for job_kind, resources in asked.items():
        issues = list(stage_problems(job_kind, resources, cluster))
        yield from judge_stage(job_kind, resources, issues or list(refusals(config, given, job_kind)))
    if config.rollout.staleness:
        yield from _side_by_side(config, given, cluster)
    yield from not_asked(asked.values(), cluster)
    if not all(map(asks_for_memory, asked.values())):
        try:
            yield from judge_memory(asked, cluster.partitions, read_cluster_memory())
        except SlurmError as error:
            yield skipped(MEMORY, f"memory of jobs that ask for none ({error})")


def _side_by_side(config: Config, given: SlurmConfig, cluster: ClusterFacts) -> Iterator[Finding]:
    """Look whether a rollout and the update have places at once."""
    needs = needs_of(given, (Stage.ROLLOUT, Stage.UPDATE))
    try:
        nodes = read_nodes({name for need in needs.values() for name in need.partitions})
    except (SlurmError, ValueError) as error:  # an answer that is not understood is none
        yield skipped(TITLE, f"whether a rollout and the update have places at once ({error})")
        return
    yield from judge_side_by_side(config, nodes, cluster.limits.max_running)


def judge_limit(given: SlurmConfig | None, cluster: ClusterFacts) -> Finding:
    """Judge how many jobs this user may have in the queue. Pure."""
    for issue in limit_problems(given, cluster.limits, cluster.ceilings) if given else ():
        return problem("your limits", str(issue), "ask for a higher MaxSubmitJobs, or use another QOS")
    most = cluster.limits.max_submit
    mine = "without a limit" if most is None else f"{most} at most"
    return ok("your limits", f"you may have jobs in the queue {mine}")


def judge_stage(job_kind: str, given: ResourcesConfig, issues: Sequence[ConfigIssue]) -> Iterator[Finding]:
    """Judge a stage's jobs by what was found. Pure."""
    title = f"jobs of {job_kind}"
    for issue in issues:
        if issue.is_passing:
            advice = "its jobs start when nodes are back; or choose another partition"
            yield warning(title, str(issue), advice)
        else:
            key = key_of(job_kind)
            advice = f"start with another {key}; of a run that goes on: slurm-ppo resume RUN {key}.KEY=VALUE"
            yield problem(title, str(issue), advice)
    if not issues:
        where = ", ".join(given.partition) or "the default partition"
        gpus = f", GPUs {given.gpus_per_node or given.gres}" if given.gpus_per_node or given.gres else ""
        yield ok(title, f"{where} takes them: {given.time}, {given.cpus_per_task} CPUs{gpus}")


def not_asked(asked: Iterable[ResourcesConfig], cluster: ClusterFacts) -> Iterator[Finding]:
    """Name accounts and QOS of which it is not known whether they are the user's. Pure."""
    given = [(name, getattr(one, name)) for one in asked for name in ("account", "qos")]
    words = dict.fromkeys(f"{name}={value}" for name, value in given if value is not None)
    if words and cluster.associations is None:
        why = "no accounting answers here (sacctmgr), so it is not known whether you may use them"
        yield skipped("accounts", f"{', '.join(words)}; {why}")


def refusals(config: Config, given: SlurmConfig, job_kind: str) -> Iterator[ConfigIssue]:
    """Ask sbatch (``--test-only``) for objections to the very script that would be submitted.

    While nodes are down, drained or silent, that refuses also what sbatch takes and what starts when they are
    back. Then a job that could not begin for an hour is submitted, and cancelled at once.
    """
    script, key = script_of(config, given, job_kind), key_of(job_kind)
    partitions = resources_of(given, job_kind).partition
    away: list[str] = []
    try:
        try:
            run_command(["sbatch", "--test-only"], input=script, timeout=_TEST_SECONDS)
        except SlurmError as error:
            if _NO_SUCH_NODES not in error.stderr or not (away := unavailable_nodes(partitions)):
                raise
            job = run_command(["sbatch", "--parsable", _LATER], input=script, timeout=_TEST_SECONDS)
            run_command(["scancel", job.strip().partition(";")[0]], timeout=_TEST_SECONDS)
    except SlurmTimeout:
        return  # a controller that is busy now says nothing about the settings
    except SlurmError as error:
        yield ConfigIssue(key, names_in_words(partitions), f"{error}")
        return
    if away:
        why = f"its jobs wait for nodes that are down, drained or silent: {shortened(away)} (sinfo -R)"
        yield ConfigIssue(f"{key}.partition", names_in_words(partitions), why, is_passing=True)


def script_of(config: Config, given: SlurmConfig, job_kind: str) -> str:
    """Render the batch script of a job kind's job, with one element."""
    run = imagined_run(config)
    if job_kind == DRIVER:
        submission = driver_submission(run, 1, DRIVER, 1)
    else:
        iteration = 0 if job_kind == Stage.PREPARE else 1
        (submission,) = stage_submissions(run, 1, 1, [task_of(iteration, job_kind)], 1000)
    return render(array_of(run, given, submission, Escalation(), None))


# --- Slurm for this user: doctor ---


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
        return [Check(CheckGroup.SLURM, "commands", lambda: skipped("commands", "there is no Slurm here"))]
    name = config.slurm.cluster if config and config.slurm else ""
    asking = partial(_asking, name)
    checks = [
        Check(CheckGroup.SLURM, "commands", lambda: judge_commands(_paths_of_commands())),
        asking("controller", check_controller, gate=_CONTROLLER, is_needed=config is not None),
        asking("limits", lambda: check_limits(config is not None and not why_not())),
        asking("accounting", check_accounting),
        asking("partitions", lambda: judge_partitions(read_partitions())),
    ]
    if config is not None:
        given = config.slurm
        assert given
        stages = _unless(why_not, "jobs of stages", lambda: judge_requests(config, given, read_cluster()))
        checks.append(asking("stages", stages, 90.0))
    if with_probe:
        nodes = _unless(why_not, "compute nodes", lambda: check_nodes(config, folder, measures_delay=True))
        return [*checks, asking("compute nodes", nodes, PROBE_SECONDS + 60)]
    none = skipped("compute nodes", "--no-probe: no job was sent to look")
    return [*checks, Check(CheckGroup.SLURM, none.title, lambda: none)]


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
    return Check(CheckGroup.SLURM, title, carefully, limit, place=_PLACE, gate=gate, needs=needs)


def _paths_of_commands() -> dict[str, str | None]:
    return {name: shutil.which(name) for name in (*PROGRAMS, *OPTIONAL)}


def judge_commands(paths: Mapping[str, str | None]) -> Finding:
    """Judge which of Slurm's commands are on PATH. Pure."""
    missing = [name for name in PROGRAMS if paths[name] is None]
    without = [name for name in OPTIONAL if paths[name] is None]
    if missing:
        advice = "run this on a login node, or put Slurm's bin folder on PATH (module load slurm)"
        return problem("commands", f"not found: {', '.join([*missing, *without])}", advice)
    if without:
        lost = "; ".join(f"without {name} {OPTIONAL[name]} not known" for name in without)
        return warning("commands", lost, "install the rest of Slurm's client commands")
    folders = sorted({str(Path(path).parent) for path in paths.values() if path})
    return ok("commands", f"{len(paths)} found in {', '.join(folders)}")


def check_controller() -> Finding:
    """Measure how long it takes to answer what is asked in every pass."""
    started = time.perf_counter()
    version = run_command(["sbatch", "--version"], timeout=_CALL_SECONDS).strip()
    run_command(["squeue", "--me", "-h", "-o", "%i"], timeout=_CALL_SECONDS)
    seconds = time.perf_counter() - started
    facts = f"{version}, squeue answers in {milliseconds(seconds)}"
    busy = " (that is long: it is busy, raise scheduler.check_minutes)" if seconds > _SLOW_SECONDS else ""
    return ok("controller", facts + busy, seconds=seconds)


def check_limits(is_of_stages: bool) -> Iterator[Finding]:
    """Look at the cluster's limits, and at the user's where the check of the stages does not."""
    yield judge_settings(run_command(["scontrol", "show", "config"], timeout=_CALL_SECONDS))
    if not is_of_stages:
        yield judge_limit(None, ClusterFacts(read_limits(), {}, None))


def judge_settings(text: str) -> Finding:
    """Judge the settings that matter in ``scontrol show config``. Pure."""
    limits = parse_limits(text)
    facts = (
        f"MaxArraySize {limits.max_array_size}, MaxJobCount {limits.max_jobs}, MinJobAge "
        f"{limits.min_job_age:g} s"
    )
    numbers = {"max_array_size": limits.max_array_size, "max_jobs": limits.max_jobs}
    if limits.min_job_age < 60:
        advice = "ended jobs are forgotten at once: how they ended is known from accounting alone"
        return warning("limits", facts, advice, **numbers)
    return ok("limits", facts, **numbers)


def check_accounting() -> Finding:
    started = time.perf_counter()
    try:
        run_command(["sacct", "-X", "-n", "-P", "--format=JobID"], timeout=_CALL_SECONDS)
    except SlurmError as error:
        facts = f"sacct does not answer: {' '.join(error.stderr.split())[:120] or error}"
        advice = "runs work without; how ended jobs ended is known for MinJobAge only, and costs are not"
        return warning("accounting", facts, advice)
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
