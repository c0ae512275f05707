"""Jobs as accounting knows them, how they ended and what they used: one sacct call for all; and jobs by their
names."""

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from slurm.commands import SlurmError, SlurmMissing, SlurmTimeout, run_command
from slurm.query import (
    PATIENCE,
    Element,
    count_gpus,
    count_resource,
    expand,
    parse_exit,
    parse_queue,
    parse_text,
    retries_within,
    split_records,
    squeue,
    unix_time,
)
from slurm.states import Phase, SlurmState, parse_state, phase_of


class NoAccounting(RuntimeError):
    """Failure to ask accounting: what it holds is unknown, not empty."""

    def __init__(self, why: str, is_absent: bool = False) -> None:
        super().__init__(why)
        self.is_absent = is_absent
        """Whether the cluster has none, rather than one that is away."""


class NoAnswer(NoAccounting):
    """Missing answer of accounting, which may come if it is asked again or waited for."""


_ACCOUNTING_FIELDS = (
    *("JobID", "State", "ExitCode", "Submit", "Start", "End"),
    *("TimelimitRaw", "Partition", "NodeList", "Reason", "JobName"),
)
_USAGE_FIELDS = (
    *("JobID", "State", "Submit", "Eligible", "Start", "ElapsedRaw", "AllocTRES", "NodeList", "Partition"),
    "JobName",
)
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


def read_ended(ids: Collection[str], timeout: float = PATIENCE) -> dict[tuple[str, int], Element]:
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


def read_runs(ids: Collection[str], timeout: float = PATIENCE) -> list[Element]:
    """Read when, where and on what every run of these jobs and arrays ran. Raises :class:`NoAccounting`.

    ``timeout``: seconds for each call of sacct; it is retried only if they are the usual 60 or more.
    """
    runs: list[Element] = []
    for batch in in_batches(ids):
        options = ["-D", "-X", f"--format={','.join(_USAGE_FIELDS)}", f"--jobs={','.join(batch)}"]
        runs += parse_runs(ask_accounting(options, timeout))
    return runs


def parse_runs(text: str) -> list[Element]:
    """Parse the runs in sacct's output. The part of an array that waits, one line for all, is left out."""
    found: list[Element] = []
    for row in split_accounting(text, _USAGE_FIELDS):
        array_id, index, _ = _job_id(row["JobID"])
        if not (index or "").startswith("["):
            found.append(_accounted(array_id, row, int(index or 0)))
    return _numbered(found)


def _numbered(runs: Iterable[Element]) -> list[Element]:
    """Number the runs of each job, in the order of submission, which requeuing renews."""
    seen: Counter[str] = Counter()
    found = []
    for run in sorted(runs, key=lambda run: run.submitted or 0.0):  # stable: sacct shows older runs first
        found.append(replace(run, restarts=seen[run.job_id]))
        seen[run.job_id] += 1
    return found


def ask_accounting(options: Sequence[str], timeout: float = PATIENCE) -> str:
    """Run sacct. Returns its output: no header, fields separated by ``|``. Raises :class:`NoAccounting`.

    ``timeout``: seconds for each try.
    """
    try:
        command = ["sacct", "-n", "-P", *options]
        return run_command(command, timeout=timeout, retries=retries_within(timeout))
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


def split_accounting(text: str, fields: Sequence[str]) -> Iterator[dict[str, str]]:
    """Split sacct's output, which must begin with JobID and State and end with JobName, into rows."""
    for row in split_records(text, _ACCOUNTING_START, len(fields), "sacct"):
        yield dict(zip(fields, row, strict=True))


def parse_accounting(text: str) -> dict[tuple[str, int], Element]:
    """Parse the last run of each element in sacct's output, by array id and index."""
    runs: list[_Run] = []
    seen: Counter[str] = Counter()
    for row in split_accounting(text, _ACCOUNTING_FIELDS):
        array_id, indices, step = _job_id(job_id := row["JobID"])
        if step:
            _add_step(runs, row)
            continue
        runs.append(_Run(job_id, _accounted(array_id, row), expand(indices or ""), seen[job_id]))
        seen[job_id] += 1
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


def _accounted(array_id: str, row: Mapping[str, str], index: int = 0) -> Element:
    """Return a run of a job by the fields of sacct that were asked for."""
    state, resources = parse_state(row["State"]), row.get("AllocTRES", "")
    over = phase_of(state) == Phase.ENDED
    exit_code, signal = parse_exit(row.get("ExitCode", "")) if over else (None, None)
    limit, elapsed = row.get("TimelimitRaw", ""), row.get("ElapsedRaw")
    return Element(
        array_id=array_id,
        index=index,
        name=row["JobName"],
        state=state,
        # Of a job that ended, it still shows why it once waited.
        reason="" if over else parse_text(row.get("Reason", "")),
        node=parse_text(row["NodeList"]),
        partition=row["Partition"],
        submitted=unix_time(row["Submit"]),
        started=unix_time(row["Start"]),
        ended=unix_time(row.get("End", "")) if over else None,
        exit_code=exit_code,
        signal=signal,
        time_limit=60 * float(limit) if limit.isdigit() else None,
        eligible=unix_time(row.get("Eligible", "")),
        elapsed=None if elapsed is None else float(elapsed or 0),
        cpus=None if elapsed is None else count_resource(resources, "cpu"),
        gpus=None if elapsed is None else count_gpus(resources),
    )


def _add_step(runs: list[_Run], row: Mapping[str, str]) -> None:
    """Correct a job by its step: the job may show 0:0 for TIMEOUT, or FAILED where a step lacked memory.

    sacct shows steps right after the run of the job that they belong to.
    """
    job_id, _, step = row["JobID"].rpartition(".")
    if step == "extern" or not runs or runs[-1].job_id != job_id:
        return
    job = runs[-1].job
    if job.state == SlurmState.FAILED and parse_state(row["State"]) == SlurmState.OUT_OF_MEMORY:
        job = replace(job, state=SlurmState.OUT_OF_MEMORY)
    if (job.exit_code, job.signal) == (0, 0) and job.state != SlurmState.COMPLETED:
        exit_code, signal = parse_exit(row["ExitCode"])
        job = replace(job, exit_code=exit_code or 0, signal=signal or 0)
    runs[-1].job = job


def find_by_name(names: Collection[str]) -> dict[str, str]:
    """Find the id of the first job (or array) of this user by each name; names of no job are left out.

    Asks the queue first, then accounting, if there is any, for jobs of two weeks. Names must not hold commas.
    """
    found: dict[str, str] = {}
    for batch in in_batches(names):
        found |= _first(parse_queue(squeue(f"--name={','.join(batch)}"), batch.__contains__))
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
