"""State of our jobs that wait or run, or have ended just now: one squeue call for all."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from slurm.commands import SlurmError, run_command
from slurm.limits import parse_duration, parse_memory
from slurm.states import Phase, SlurmState, UnknownState, parse_state, phase_of


@dataclass(frozen=True)
class Element:
    """One run of an element of a job array, or of a job without an array. Times are unix seconds.

    Which of the optional fields are known depends on the command that was asked, and for what.
    """

    array_id: str
    index: int
    """Array index; 0 for a job without an array."""
    name: str
    state: SlurmState
    reason: str = ""
    """Reason why it waits, as Slurm shows it; see :func:`slurm.reasons.reason_in_words`."""
    node: str = ""
    """Node where it runs or last ran; empty before."""
    partition: str = ""
    submitted: float | None = None
    """Time when it was submitted, or last requeued."""
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None
    """Exit code once ended. From 128 on, accounting shows the excess over 128 and squeue the whole code."""
    signal: int | None = None
    """Signal that killed it, or 0, once ended."""
    restarts: int | None = None
    """Number of times that it was requeued."""
    time_limit: float | None = None
    """Time limit in seconds; None where there is none."""
    eligible: float | None = None
    """Time from which only resources and priority kept it from starting."""
    elapsed: float | None = None
    """Seconds that it has run since it last started, without those in which it was suspended."""
    cpus: int | None = None
    """Number of CPUs that it holds, or asks for while it waits; None where that is not known."""
    gpus: int | None = None
    """Number of GPUs, on all of its nodes together; 0 also where the cluster does not account for them
    (AccountingStorageTRES)."""
    memory_mb: int | None = None
    """Memory in MiB, on all of its nodes together."""
    num_nodes: int | None = None
    """Number of nodes."""

    @property
    def job_id(self) -> str:
        """Slurm's id of it, like ``4711_3``."""
        return f"{self.array_id}_{self.index}"

    @property
    def run_id(self) -> str:
        """Id of this run of it, like ``4711_3r0``: the name of the worker that it is, if it is one."""
        return f"{self.job_id}r{self.restarts or 0}"


# The name last, as it may hold the separator. Free text that Slurm itself writes is before it.
_QUEUE_FIELDS = (
    *("ArrayJobID", "ArrayTaskID", "State", "exit_code", "RestartCnt", "SubmitTime", "StartTime", "EndTime"),
    *("TimeLimit", "EligibleTime", "TimeUsed", "tres-alloc", "tres-per-node"),
    *("Partition", "NodeList", "Reason", "Name"),
)
"""Fields of squeue. ``tres-alloc`` is what a job that waits asks for, and else what it was given."""
_QUEUE_START = re.compile(r"^(?=\d+\|[^|\n]*\|[A-Z_,+]+\|)", re.MULTILINE)
_RETRIES = 2
PATIENCE = 60.0


def read_queue(
    is_ours: Callable[[str], bool], timeout: float = PATIENCE, user: int | None = None
) -> list[Element]:
    """Read every job of a user whose name ``is_ours``: waiting, running, or ended less than MinJobAge ago.

    One call of squeue. ``user``: number of the user; None: this one. Of another, Slurm may show none
    (:func:`slurm.limits.hides_jobs`).

    Raises :class:`SlurmError`, :class:`SlurmMissing` and, for a state of a job of ours,
    :class:`slurm.states.UnknownState`.
    """
    return parse_queue(ask_queue(timeout, user), is_ours)


def ask_queue(timeout: float, user: int | None = None) -> str:
    """Run squeue for all jobs of a user (None: this one), once. Returns its output, for :func:`parse_queue`.

    Raises :class:`SlurmError`, also where the output is not understood, and :class:`SlurmMissing`.
    """
    text = squeue(timeout=timeout, retries=0, user=user)
    parse_known(text)
    return text


QUEUE_FORMAT = ",".join(f"{field}:|" for field in _QUEUE_FIELDS)
"""squeue's option that :func:`parse_queue` understands the output of."""


def squeue(
    *filters: str, timeout: float = PATIENCE, retries: int | None = None, user: int | None = None
) -> str:
    whose = os.getuid() if user is None else user
    options = ["-a", "-h", "--states=all", f"--user={whose}", f"--Format={QUEUE_FORMAT}"]
    options.append("--array-unique")  # else a requeued element shows restarts and reasons of another
    retries = retries_within(timeout) if retries is None else retries
    return run_command(["squeue", *options, *filters], timeout=timeout, retries=retries)


def retries_within(timeout: float) -> int:
    """Return how often to retry: not at all for a caller whose timeout is shorter than usual."""
    return _RETRIES if timeout >= PATIENCE else 0


def parse_queue(text: str, is_ours: Callable[[str], bool] = lambda name: True) -> list[Element]:
    """Parse the elements in squeue's output. A line of several pending elements, which have
    never been anything else, yields each of them."""
    return [element for row in _queue_rows(text) if is_ours(row[-1]) for element in _queued(row)]


def parse_known(text: str) -> list[Element]:
    """Parse the elements in squeue's output whose states are known: of jobs that need not be ours."""
    found: list[Element] = []
    for row in _queue_rows(text):
        with contextlib.suppress(UnknownState):
            found += _queued(row)
    return found


def _queue_rows(text: str) -> Iterator[list[str]]:
    # squeue puts a separator after the name as well: were a field missing, the name would be cut too early.
    return split_records(text, _QUEUE_START, len(_QUEUE_FIELDS), "squeue", end="|\n")


def split_records(
    text: str, start: re.Pattern[str], width: int, program: str, end: str = "\n"
) -> Iterator[list[str]]:
    """Split output into rows of fields. A name may hold separators and line breaks, so a row ends where the
    next starts.
    """
    before, *records = start.split(text) if start.search(text) else [text]
    if before.strip():
        raise SlurmError([program], 0, f"its output is not understood: {before.strip()[:100]!r}")
    for record in records:
        row = record.removesuffix(end).split("|", width - 1)
        if len(row) != width or not record.endswith(end):
            raise SlurmError([program], 0, f"its output is not understood: {record[:100]!r}")
        yield row


def _queued(row: Sequence[str]) -> Iterator[Element]:
    array_id, indices, state_text, status, restarts, submitted, started, ended = row[:8]
    time_limit, eligible, used, resources, per_node, partition, node, reason, name = row[8:]
    state = parse_state(state_text)
    phase = phase_of(state)
    over = phase == Phase.ENDED
    exit_code, signal = parse_exit(status) if over else (None, None)
    first = Element(
        array_id=array_id,
        index=0,
        name=name,
        state=state,
        reason=reason,
        node=parse_text(node),
        partition=partition,
        submitted=unix_time(submitted),
        # For pending jobs the start is Slurm's estimate.
        started=None if phase == Phase.PENDING else unix_time(started),
        ended=unix_time(ended) if over else None,
        exit_code=exit_code,
        signal=signal,
        restarts=int(restarts) if restarts.isdigit() else None,
        time_limit=_limit(time_limit),
        eligible=unix_time(eligible),
        elapsed=_limit(used),
    )
    first = _with_resources(first, resources, per_node)
    return (replace(first, index=index) for index in expand(indices))


def _with_resources(element: Element, resources: str, per_node: str) -> Element:
    """Add what it holds or asks for. Where the cluster does not track GPUs (AccountingStorageTRES) they are
    in its request for each node alone."""
    if "=" not in resources:
        return element
    nodes = count_resource(resources, "node")
    return replace(
        element,
        cpus=count_resource(resources, "cpu"),
        gpus=count_gpus(resources) or nodes * sum(_gpus_of_node(per_node)),
        memory_mb=_memory(resources),
        num_nodes=nodes,
    )


def _gpus_of_node(request: str) -> Iterator[int]:
    """Yield the GPUs in a list like ``gres:gpu:2,gres:gpu:a100:1``; newer versions write ``gres/gpu:2``,
    older ones ``gpu:2``."""
    for words in (re.split("[:/=]", part.removeprefix("gres")) for part in request.split(",")):
        if "gpu" in words[:2]:
            yield int(words[-1]) if words[-1].isdigit() else 1


def _memory(resources: str) -> int | None:
    """Return the memory in such a list in MiB; None where there is none, or in a unit that is not known."""
    found = re.search(r"(?:^|,)mem=([^,]+)", resources)
    with contextlib.suppress(ValueError):
        return parse_memory(found[1]) if found else None
    return None


def count_gpus(resources: str) -> int:
    """Count the GPUs in a list like ``cpu=4,gres/gpu=2,gres/gpu:a100=2``."""
    return count_resource(resources, "gres/gpu") or count_resource(resources, r"gres/gpu:[^=,]+")


def count_resource(resources: str, name: str) -> int:
    """Count a resource, by a pattern of its name, in a list like ``cpu=4,gres/gpu=2,gres/gpu:a100=2``."""
    return sum(int(number) for number in re.findall(rf"(?:^|,){name}=(\d+)", resources))


def expand(indices: str) -> list[int]:
    """List the indices in an array expression like ``[3-7,9,20-40:5%2]``. ``N/A``, for no array, is index 0.

    Raises :class:`ValueError`, also where Slurm cut the expression short.
    """
    bare = indices.strip().strip("[]").split("%")[0]
    if bare in ("", "N/A"):
        return [0]
    expanded: list[int] = []
    for part in bare.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+)(?::([1-9]\d*))?)?", part)
        if found is None:
            raise ValueError(f"not a whole array expression: {indices!r}")
        first, last, step = found.groups()
        expanded += range(int(first), int(last or first) + 1, int(step or 1))
    return expanded


def parse_exit(status: str) -> tuple[int | None, int | None]:
    """Parse exit code and signal from "code:signal" or from the status that wait(2) gives."""
    code, colon, signal = status.partition(":")
    if not code.isdigit() or (colon and not signal.isdigit()):
        return None, None
    return (int(code), int(signal)) if colon else (int(code) >> 8, int(code) & 0x7F)


def unix_time(text: str) -> float | None:
    """Parse unix seconds; None where Slurm shows no time (Unknown, None, N/A)."""
    return float(text) if text.isdigit() and text != "0" else None


def _limit(text: str) -> float | None:
    """Parse a time limit, or a time that was used, into seconds; None where a job has none, or none yet."""
    return parse_duration(text) if re.fullmatch(r"[\d:-]+", text) else None


def parse_text(text: str) -> str:
    return "" if text in ("None assigned", "(null)", "N/A", "None") else text
