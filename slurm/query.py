"""State of our jobs: one squeue call for all that wait or run, one sacct call for all that ended."""

import contextlib
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from slurm.commands import SlurmError, SlurmMissing, SlurmTimeout, run_command
from slurm.limits import parse_duration, parse_memory
from slurm.states import Phase, SlurmState, UnknownState, parse_state, phase_of


@dataclass(frozen=True)
class Element:
    """One element of a job array, or a job without an array. Times are unix seconds."""

    array_id: str
    index: int
    """Array index; 0 for a job without an array."""
    name: str
    state: SlurmState
    reason: str
    """Reason why it waits, as Slurm shows it; see :func:`slurm.states.reason_in_words`."""
    node: str
    """Node where it runs or last ran; empty before."""
    partition: str
    submitted: float | None
    """Time when it was submitted, or last requeued."""
    started: float | None
    ended: float | None
    exit_code: int | None
    """Exit code once ended. From 128 on, accounting shows the excess over 128 and squeue the whole code."""
    signal: int | None
    """Signal that killed it, or 0, once ended."""
    restarts: int | None
    """Number of times that it was requeued."""
    time_limit: float | None
    """Time limit in seconds; None where there is none."""
    eligible: float | None = None
    """Time from which only resources and priority kept it from starting. As all that follows, of the queue
    alone: accounting's elements have none of it."""
    elapsed: float | None = None
    """Seconds that it has run since it last started, without those in which it was suspended."""
    cpus: int | None = None
    """Number of CPUs that it holds, or asks for while it waits; None where that is not known."""
    gpus: int | None = None
    """Number of GPUs, on all of its nodes together."""
    memory_mb: int | None = None
    """Memory in MiB, on all of its nodes together."""
    num_nodes: int | None = None
    """Number of nodes."""


class NoAccounting(RuntimeError):
    """Failure to ask accounting: what it holds is unknown, not empty."""

    def __init__(self, why: str, is_absent: bool = False) -> None:
        super().__init__(why)
        self.is_absent = is_absent
        """Whether the cluster has none, rather than one that is away."""


class NoAnswer(NoAccounting):
    """Missing answer of accounting, which may come if it is asked again or waited for."""


# The name last, as it may hold the separator. Free text that Slurm itself writes is before it.
_QUEUE_FIELDS = (
    *("ArrayJobID", "ArrayTaskID", "State", "exit_code", "RestartCnt", "SubmitTime", "StartTime", "EndTime"),
    *("TimeLimit", "EligibleTime", "TimeUsed", "tres-alloc", "tres-per-node"),
    *("Partition", "NodeList", "Reason", "Name"),
)
"""Fields of squeue. ``tres-alloc`` is what a job that waits asks for, and else what it was given."""
_ACCOUNTING_FIELDS = (
    *("JobID", "State", "ExitCode", "Submit", "Start", "End"),
    *("TimelimitRaw", "Partition", "NodeList", "Reason", "JobName"),
)
_QUEUE_START = re.compile(r"^(?=\d+\|[^|\n]*\|[A-Z_,+]+\|)", re.MULTILINE)
_ACCOUNTING_START = re.compile(r"^(?=\d+[^|\n]*\|[A-Z_]+[^|\n]*\|)", re.MULTILINE)
_JOB_ID = re.compile(r"(\d+)(?:_(\d+|\[[^]]*\]))?(?:\+\d+)?(\.\S+)?")
_NO_ACCOUNTING = re.compile(
    r"accounting storage is disabled|persistent connection|persistinit|talking to the database|slurmdbd|"
    r"only supported with|not running a supported accounting_storage",
    re.IGNORECASE,
)
_ABSENT = re.compile(
    r"accounting storage is disabled|not running a supported accounting_storage", re.IGNORECASE
)
_MOST_IDS = 1000  # ids or names in one call: the system bounds a command line, and one argument to 128 KiB
_LONGEST_SEARCH = f"now-{14 * 86400}seconds"
_RETRIES = 2
_PATIENCE = 60.0


def read_queue(is_ours: Callable[[str], bool], timeout: float = _PATIENCE) -> list[Element]:
    """Read every job of this user whose name ``is_ours``: waiting, running, or ended less than MinJobAge ago.

    One call of squeue. Raises :class:`SlurmError`, :class:`SlurmMissing` and, for a state of a job of ours,
    :class:`slurm.states.UnknownState`.
    """
    return parse_queue(ask_queue(timeout), is_ours)


def ask_queue(timeout: float) -> str:
    """Run squeue for all jobs of this user, once. Returns its output, for :func:`parse_queue`.

    Raises :class:`SlurmError`, also where the output is not understood, and :class:`SlurmMissing`.
    """
    text = _squeue(timeout=timeout, retries=0)
    parse_known(text)
    return text


QUEUE_FORMAT = ",".join(f"{field}:|" for field in _QUEUE_FIELDS)
"""squeue's option that :func:`parse_queue` understands the output of."""


def _squeue(*filters: str, timeout: float = _PATIENCE, retries: int | None = None) -> str:
    options = ["-a", "-h", "--states=all", f"--user={os.getuid()}", f"--Format={QUEUE_FORMAT}"]
    options.append("--array-unique")  # else who was put back shows restarts and reasons of another
    retries = _retries(timeout) if retries is None else retries
    return run_command(["squeue", *options, *filters], timeout=timeout, retries=retries)


def _retries(timeout: float) -> int:
    """Return how often to retry: not at all for a caller whose timeout is shorter than usual."""
    return _RETRIES if timeout >= _PATIENCE else 0


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
    return _records(text, _QUEUE_START, len(_QUEUE_FIELDS), "squeue", end="|\n")


def _records(
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
    exit_code, signal = _exit(status) if over else (None, None)
    first = Element(
        array_id=array_id,
        index=0,
        name=name,
        state=state,
        reason=reason,
        node=_text(node),
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
    """Yield the GPUs in a list like ``gres:gpu:2,gres:gpu:a100:1``; newer versions write ``gres/gpu:2``."""
    for words in (re.split("[:/=]", part) for part in request.split(",")):
        if words[:2] == ["gres", "gpu"]:
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


def _exit(status: str) -> tuple[int | None, int | None]:
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


def _text(text: str) -> str:
    return "" if text in ("None assigned", "(null)", "N/A", "None") else text


def read_ended(ids: Collection[str], timeout: float = _PATIENCE) -> dict[tuple[str, int], Element]:
    """Read the last run of each element of these jobs, by array id and index, if accounting has its end.

    The queue takes precedence: accounting may lag behind it, and for a moment a job that is requeued after
    its node failed, say, has only the record of its old run here. One call of sacct for a thousand ids.
    Raises :class:`NoAccounting` where it cannot be asked, and :class:`SlurmError`.

    ``timeout``: seconds for each try.
    """
    known: dict[tuple[str, int], Element] = {}
    for batch in in_batches(ids):
        options = ["-D", f"--format={','.join(_ACCOUNTING_FIELDS)}", f"--jobs={','.join(batch)}"]
        known |= parse_accounting(ask_accounting(options, timeout))
    return {key: element for key, element in known.items() if phase_of(element.state) == Phase.ENDED}


def ask_accounting(options: Sequence[str], timeout: float = _PATIENCE) -> str:
    """Run sacct. Returns its output: no header, fields separated by ``|``. Raises :class:`NoAccounting`.

    ``timeout``: seconds for each try.
    """
    try:
        command = ["sacct", "-n", "-P", *options]
        return run_command(command, timeout=timeout, retries=_retries(timeout))
    except SlurmMissing as error:
        raise NoAccounting(str(error)) from None
    except SlurmTimeout as error:
        raise NoAnswer(str(error)) from None
    except SlurmError as error:
        if _NO_ACCOUNTING.search(error.stderr):
            raise NoAccounting(str(error), bool(_ABSENT.search(error.stderr))) from None
        raise


def in_batches(items: Iterable[str]) -> Iterator[list[str]]:
    """Yield ids or names without repeats, in lists short enough for one command line."""
    unique = sorted(set(items))
    return (unique[start : start + _MOST_IDS] for start in range(0, len(unique), _MOST_IDS))


@dataclass
class _Run:
    """One run of a job in accounting, with corrections from its steps."""

    job_id: str
    job: Element
    indices: list[int]
    restarts: int


def split_accounting(text: str, width: int) -> Iterator[list[str]]:
    """Split sacct's output, which must begin with JobID and State and end with JobName, into rows."""
    return _records(text, _ACCOUNTING_START, width, "sacct")


def parse_accounting(text: str) -> dict[tuple[str, int], Element]:
    """Parse the last run of each element in sacct's output, by array id and index."""
    runs: list[_Run] = []
    seen: Counter[str] = Counter()
    for row in split_accounting(text, len(_ACCOUNTING_FIELDS)):
        array_id, indices, step = _job_id(row[0])
        if step:
            _add_step(runs, row)
            continue
        runs.append(_Run(row[0], _accounted(array_id, row), expand(indices or ""), seen[row[0]]))
        seen[row[0]] += 1
    runs.sort(key=lambda run: run.job.submitted or 0.0)  # stable: sacct shows older runs first
    return {
        (run.job.array_id, index): replace(run.job, index=index, restarts=run.restarts)
        for run in runs
        for index in run.indices
    }


def _job_id(text: str) -> tuple[str, str | None, str | None]:
    """Split a job id into array id, index or indices, and step."""
    found = _JOB_ID.fullmatch(text)
    if found is None:
        raise SlurmError(["sacct"], 0, f"its output is not understood: {text[:100]!r}")
    array_id, indices, step = found.groups()
    return array_id, indices, step


def _accounted(array_id: str, row: Sequence[str]) -> Element:
    _, state_text, status, submitted, started, ended, time_limit, partition, node, reason, name = row
    state = parse_state(state_text)
    over = phase_of(state) == Phase.ENDED
    exit_code, signal = _exit(status) if over else (None, None)
    return Element(
        array_id=array_id,
        index=0,
        name=name,
        state=state,
        reason="" if over else _text(reason),  # of a job that ended, it still shows why it once waited
        node=_text(node),
        partition=partition,
        submitted=unix_time(submitted),
        started=unix_time(started),
        ended=unix_time(ended),
        exit_code=exit_code,
        signal=signal,
        restarts=None,
        time_limit=60 * float(time_limit) if time_limit.isdigit() else None,
    )


def _add_step(runs: list[_Run], row: Sequence[str]) -> None:
    """Correct a job by its step: the job may show 0:0 for TIMEOUT, or FAILED where a step lacked memory.

    sacct shows steps right after the run of the job that they belong to.
    """
    job_id, _, step = row[0].rpartition(".")
    if step == "extern" or not runs or runs[-1].job_id != job_id:
        return
    job = runs[-1].job
    if job.state == SlurmState.FAILED and parse_state(row[1]) == SlurmState.OUT_OF_MEMORY:
        job = replace(job, state=SlurmState.OUT_OF_MEMORY)
    if (job.exit_code, job.signal) == (0, 0) and job.state != SlurmState.COMPLETED:
        exit_code, signal = _exit(row[2])
        job = replace(job, exit_code=exit_code or 0, signal=signal or 0)
    runs[-1].job = job


def find_by_name(names: Collection[str]) -> dict[str, str]:
    """Find the id of the first job (or array) of this user by each name; names of no job are left out.

    Asks the queue first, then accounting, if there is any, for jobs of two weeks. Names must not hold commas.
    """
    found: dict[str, str] = {}
    for batch in in_batches(names):
        found |= _first(parse_queue(_squeue(f"--name={','.join(batch)}"), batch.__contains__))
    try:
        for batch in in_batches(name for name in names if name not in found):
            options = [f"--user={os.getuid()}", f"--name={','.join(batch)}", f"--starttime={_LONGEST_SEARCH}"]
            text = ask_accounting(["-D", "-X", f"--format={','.join(_ACCOUNTING_FIELDS)}", *options])
            found |= _first(one for one in parse_accounting(text).values() if one.name in batch)
    except (NoAccounting, SlurmError):
        pass  # no worse than before accounting was set up: the queue remembers for MinJobAge
    return found


def _first(elements: Iterable[Element]) -> dict[str, str]:
    ordered = sorted(elements, key=lambda element: int(element.array_id), reverse=True)
    return {element.name: element.array_id for element in ordered}
