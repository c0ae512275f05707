"""Memory that each stage needs, beside what its GPUs have: before anything is queued."""

import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from pipeline.checks.finding import Finding, Verdict, line, refuse, skipped
from pipeline.checks.host_memory import HostRooms, host_need, judge_host
from pipeline.checks.rehearsal_record import corrections
from pipeline.checks.requests import needs_of
from pipeline.config.issue import ConfigError
from pipeline.config.scheduler import LocalConfig, ResourcesConfig, SlurmConfig, resources_of
from pipeline.config.schema import Config
from pipeline.executors.devices import devices_of
from pipeline.executors.local_limits import gpus_of_tasks
from pipeline.forecast.cards import Card, any_of, card_named, kind_of
from pipeline.forecast.changes import smallest_change
from pipeline.forecast.corrections import CPU, Correction, corrected
from pipeline.forecast.corrections import in_words as correction_in_words
from pipeline.forecast.parts import GIB, MemoryPart, StageNeed
from pipeline.forecast.stages import GpusOf, stage_needs
from pipeline.text import duration
from slurm.commands import SlurmError, SlurmMissing, on_cluster
from slurm.limits import Partition, parse_gres, partitions_of, read_partitions

TITLE = "memory of "
_TIGHT = 0.9
"""Share of a GPU's memory from which on there is a warning: allocators lose some between blocks."""
_LEAST_SHOWN = 0.005 * GIB
_ASK_SECONDS = 20.0


def check_memory(config: Config, gpu_memory: float | None = None) -> Iterator[Finding]:
    """Compare what each stage needs with its GPUs.

    Args:
        gpu_memory: GiB of each GPU. Default: what the scheduler's GRES or this machine's driver says.
    """
    try:
        partitions, known = partitions_of_cluster(config), corrections()
        gpus_of, rooms = partial(gpus_of_task, config, 1 if gpu_memory else 0), HostRooms(config, partitions)
        for need in stage_needs(config, gpus_of):
            job_kind = need.stage.partition(" ")[0]
            card = Card(gpu_memory * GIB, gpu_memory * GIB, "--gpu-memory") if gpu_memory else None
            card = card or card_of_task(config, job_kind, partitions)
            kind = card.kind if card else "" if gpus_of(job_kind) else CPU
            yield judge_need(config, need, card, gpus_of, known.get(kind))
            if found := judge_host(config, need, rooms.of(job_kind), gpus_of):
                yield found
    except (ConfigError, OSError) as error:
        yield skipped("memory", f"memory that the stages need ({error})")


def needs_in(found: Sequence[Finding]) -> dict[str, float]:
    """Return the peak bytes of each stage that findings on memory have."""
    needs = {one.title.removeprefix(TITLE): one.numbers.get("need_bytes") for one in found}
    return {stage: size for stage, size in needs.items() if size is not None}


# --- judging ---


def memory_lines(config: Config, gpu_memory: float | None) -> Iterator[str]:
    """Yield a line for each stage on the memory that it needs. Raises ConfigError for what cannot fit."""
    needs = list(check_memory(config, gpu_memory))
    yield from (line(one) for one in needs if one.verdict is not Verdict.PROBLEM)
    refuse(needs)


def judge_need(
    config: Config, need: StageNeed, card: Card | None, gpus_of: GpusOf, measured: Correction | None = None
) -> Finding:
    """Judge a stage's need, by the formulas: a problem where what it needs for certain is more than any GPU
    has. Pure, but for models' headers and the clock.

    Args:
        measured: what a rehearsal has measured on such a card.
    """
    need = corrected(need, measured)
    facts = in_words(need, card, gpus_of(need.stage.partition(" ")[0])) + _measured_in_words(need, measured)
    numbers = {"need_bytes": need.peak, "certain_bytes": need.certain}
    verdict, limit = Verdict.OK, 0.0
    if card is not None and need.certain > card.most * need.share:
        verdict, limit = Verdict.PROBLEM, card.most
    elif card is not None and need.peak > _TIGHT * card.least * need.share:
        verdict, limit = Verdict.WARNING, card.least
    if verdict is Verdict.OK:
        return Finding(TITLE + need.stage, verdict, facts, numbers=numbers)

    def fits(changed: Config) -> bool:
        found = next(one for one in stage_needs(changed, gpus_of) if one.stage == need.stage)
        found = corrected(found, measured)
        return found.peak <= _TIGHT * limit * found.share

    words = smallest_change(config, need.stage, fits)
    advice = f"it would fit with {' '.join(words)}" if words else "take GPUs with more memory"
    begin = f"scheduler: {need.stage} cannot fit: " if verdict is Verdict.PROBLEM else ""
    return Finding(TITLE + need.stage, verdict, f"{begin}{facts}; {advice}", advice, numbers)


def _measured_in_words(need: StageNeed, measured: Correction | None) -> str:
    words = correction_in_words(need, measured)
    if measured is None or not words:
        return ""
    ago = duration(time.time() - measured.made)
    return f"; corrected by the rehearsal on {measured.kind}, {ago} ago: {words}"


def in_words(need: StageNeed, card: Card | None, gpus: int) -> str:
    """Describe a need in GiB: parts of the largest phase, the GPU, what it serves, and the host's."""
    where = "on each GPU" if gpus else "of each process"
    text = f"{need.peak / GIB:.2f} GiB {where}{_of_card(need, card)} ({_parts_in_words(need.at_peak)})"
    if need.cache and card is not None:
        least, most = (need.sequences(memory) for memory in (card.least, card.most))
        count = f"{least}" if least == most else f"{least} to {most}"
        text = f"{text}; its cache is for {count} sequences of the longest"
    if need.host:
        host = host_need(need, gpus)
        parts = _parts_in_words(host.at_peak)
        text = f"{text}; {host.peak / GIB:.2f} GiB of the host for each process ({parts})"
    return text


def _of_card(need: StageNeed, card: Card | None) -> str:
    if card is None:
        return ""
    least, most = (f"{memory * need.share / GIB:.0f}" for memory in (card.least, card.most))
    return f" of {least if least == most else f'{least} to {most}'} ({card.why})"


def _parts_in_words(parts: Sequence[MemoryPart]) -> str:
    shown = [f"{part.name} {part.size / GIB:.2f}" for part in parts if part.size >= _LEAST_SHOWN]
    return ", ".join(shown) or "next to nothing"


# --- what there is ---


def gpus_of_task(config: Config, least: int, job_kind: str) -> int:
    """Return the GPUs that a process of a job kind has, ``least`` where there are none."""
    given = config.scheduler
    if isinstance(given, LocalConfig):
        wanted = gpus_of_tasks(config, len(devices_of(given).names)).get(job_kind, 0)
        return max(least, min(1, wanted) if job_kind == "update" else wanted)
    if isinstance(given, SlurmConfig):
        resources = resources_of(given, job_kind)
        return max(least, -(-(resources.num_gpus or 0) // resources.ntasks_per_node))
    step = given.resources.get(job_kind.replace("score-", "pools."))
    gpus = parse_gres(f"gpu:{step.gpus_per_node or 0}")["gpu"] if step else 0
    return max(least, -(-gpus // (step.ntasks_per_node if step else 1)))


def partitions_of_cluster(config: Config) -> Mapping[str, Partition]:
    """Return the partitions of the cluster that the stages run on, if they do; none where it is silent."""
    if config.slurm is None:
        return {}
    try:
        with on_cluster(config.slurm.cluster):
            return read_partitions()
    except (SlurmError, SlurmMissing):
        return {}


def card_of_task(config: Config, job_kind: str, partitions: Mapping[str, Partition]) -> Card | None:
    """Return what is known of the memory of a job kind's GPUs."""
    if isinstance(config.scheduler, LocalConfig):
        return _card_here() if devices_of(config.scheduler).names else None
    if isinstance(config.scheduler, SlurmConfig):
        return card_of_job(resources_of(config.scheduler, job_kind), partitions)
    return None


def card_of_job(given: ResourcesConfig, partitions: Mapping[str, Partition]) -> Card | None:
    """Return the memory of the GPUs that a job gets: by the type that it names, else by those of the nodes
    that it may run on. Pure."""
    types = [need.device.partition(":")[2] for need in needs_of(given) if need.device.startswith("gpu:")]
    if not given.has_gpus:
        return None
    if types:
        return card_named(types[-1])
    kinds = [kind for place in partitions_of(given.partition, partitions) for kind in place.kinds]
    there = [name.partition(":")[2] for kind in kinds for name in kind.gres if name.startswith("gpu:")]
    return any_of(card_named(name) for name in dict.fromkeys(there))


def _card_here() -> Card | None:
    """Ask the driver for the smallest GPU of this machine; None where it says nothing."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.total,name", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return any_of(card_in(line) for line in done.stdout.splitlines())


def card_in(line: str) -> Card | None:
    """Return the card of a line of nvidia-smi's table: MiB, and name; None of one without a size. Pure."""
    size, _, name = line.partition(",")
    if not size.strip().replace(".", "", 1).isdigit():
        return None
    memory = float(size) * 2**20
    return Card(memory, memory, "nvidia-smi", kind_of(name.strip()))
