"""Jobs that have ended, as accounting knows them: one sacct call for all; and jobs by their names."""

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from slurm.commands import SlurmError, SlurmMissing, SlurmTimeout, run_command
from slurm.query import (
    PATIENCE,
    Element,
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


def split_accounting(text: str, width: int) -> Iterator[list[str]]:
    """Split sacct's output, which must begin with JobID and State and end with JobName, into rows."""
    return split_records(text, _ACCOUNTING_START, width, "sacct")


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
    exit_code, signal = parse_exit(status) if over else (None, None)
    return Element(
        array_id=array_id,
        index=0,
        name=name,
        state=state,
        reason="" if over else parse_text(reason),  # of a job that ended, it still shows why it once waited
        node=parse_text(node),
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
        exit_code, signal = parse_exit(row[2])
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
