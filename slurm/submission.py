"""Array jobs of one plain command: a batch script made from templates/array.sh, and its submission.

submitit's own jobs are pickled functions, which must not lie in a shared directory; here every element runs
the same command, :mod:`slurm.element`, and finds what to do in a task list on disk. submitit is imported
where it is needed, as the import takes longer than a whole look at the queue.
"""

import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from slurm.commands import NotStarted, SlurmError, SlurmMissing, SlurmTimeout, run_command
from slurm.ended import find_by_name
from slurm.errors import UserError
from slurm.reasons import help_with_refusal
from slurm.signals import cancel_command, is_over

SUBMIT_SECONDS = 60.0
"""Seconds that sbatch may take before its answer is given up and the job is looked for by its name."""

_TEMPLATE = Path(__file__).parent / "templates" / "array.sh"

Option = str | int | bool


@dataclass(frozen=True)
class Array:
    """One array job. Every value may come from a user: :func:`render` quotes it."""

    name: str
    """Job name, unique among all submissions, so that a job can be found by it."""
    indices: Sequence[int]
    """Array indices, ascending."""
    command: Sequence[str]
    """Words of the command that every element runs."""
    output: str
    """Path of the output, in sbatch's pattern language (see :func:`literal`)."""
    folder: Path
    """Working directory."""
    options: Mapping[str, Option] = field(default_factory=dict)
    """sbatch options by their long names."""
    parallelism: int | None = None
    """Number of elements that may run at once; None: no limit."""
    setup: Sequence[str] = ()
    """Shell lines before the command, taken as they are."""
    environment: Mapping[str, str] = field(default_factory=dict)
    dependency: str = ""
    begin: str = ""


def render(array: Array) -> str:
    """Make the batch script from its template.

    Raises:
        Refused: a value holds a character that an #SBATCH line cannot express.
    """
    when_given = {"dependency": array.dependency, "begin": array.begin}
    options: dict[str, Option] = {name: value for name, value in array.options.items() if value is not False}
    options |= {name: value for name, value in when_given.items() if value}
    ours = {"job-name": array.name, "chdir": str(array.folder), "output": array.output}
    for name, value in {**options, **ours}.items():
        # sbatch interprets backslashes, and one in a path disables the patterns in it.
        _check(name, value, "\n\\")
    for name, value in array.environment.items():
        _check(name, value, "\n")
    exports = [f"export {name}={shlex.quote(value)}" for name, value in array.environment.items()]
    lines = [
        f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={shlex.quote(str(value))}"
        for name, value in sorted(options.items())
    ]
    return Template(_TEMPLATE.read_text()).substitute(
        options="\n".join(lines),
        job_name=shlex.quote(array.name),
        array=array_expression(array.indices, array.parallelism),
        chdir=shlex.quote(ours["chdir"]),
        output=shlex.quote(array.output),
        setup="\n".join([*array.setup, *exports]),
        command=shlex.join(array.command),
    )


def _check(name: str, value: Option, unusable: str) -> None:
    if set(unusable) & set(str(value)):
        raise Refused(f"{name} holds a line break or a backslash, which sbatch does not take: {value!r}")


def array_expression(indices: Sequence[int], parallelism: int | None) -> str:
    """Write indices as an array expression like ``0-3,7%2``."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"{text}%{parallelism}" if parallelism else text


def literal(path: Path | str) -> str:
    """Escape a path for sbatch's pattern language, so that none of its characters is taken for a pattern."""
    return str(path).replace("%", "%%")


_IN_WORDS = re.compile(r"^Submitted batch job (\d+)(?: on cluster \S+)?\s*$", re.MULTILINE)
_PARSABLE = re.compile(r"^(\d+)(?:;\S+)?\s*$", re.MULTILINE)
"""What sbatch prints by itself and, of wrappers that pass it on, with ``--parsable``."""


class Unclear(SlurmTimeout):
    """Lost or unintelligible answer of sbatch: there may be a job or not."""


def own_answer(said: str) -> str:
    """Return sbatch's own answer of all that was printed, in the words that submitit reads; empty where it
    is not one line. Sites wrap sbatch, and their words may hold numbers of jobs too."""
    by_words = _IN_WORDS.findall(said)
    found = set(by_words or _PARSABLE.findall(said))
    return f"Submitted batch job {found.pop()}" if len(found) == 1 else ""


def submit_script(script: Path) -> str:
    """Submit a rendered script through submitit's executor. Returns the array's job id.

    Raises:
        Unclear: no answer, or one without an id; the job may have been accepted all the same.
        NotStarted: there was no time left for it.
        SlurmError: sbatch refused the script.
        SlurmMissing: there is no srun, without which submitit takes a machine for no part of a cluster.
    """
    from submitit import SlurmExecutor
    from submitit.core.utils import FailedSubmissionError

    if SlurmExecutor.affinity() < 0:
        raise SlurmMissing("srun")
    command = ["sbatch", "--parsable", str(script)]
    try:
        answer = own_answer(run_command(command, timeout=SUBMIT_SECONDS))
        # What submitit asks of each scheduler's plug-in; tests/executors/test_arrays.py pins it.
        return SlurmExecutor._get_job_id_from_submission_command(answer)
    except NotStarted:
        raise
    except SlurmTimeout as error:
        raise Unclear(command, error.returncode, error.stderr) from None
    except FailedSubmissionError as error:
        raise Unclear(command, 0, str(error)) from None


class Refused(UserError, ValueError):
    """Refusal by sbatch: there is no job, and asking again would not help."""


class QueueFull(Refused):
    """Refusal because a limit of submitted jobs is reached; later there is room again."""


_LIMITS = re.compile(r"\b(?:QOS|Assoc)\w+")
_FULL = re.compile(
    r"job submit limit|MaxJobCount|temporarily unable to accept job|maximum number of jobs|"
    r"Job violates accounting/QOS policy",
    re.IGNORECASE,
)


def is_full(words: str) -> bool:
    """Whether sbatch's message means that there are too many jobs, and not that one asks for too much."""
    limits = _LIMITS.findall(words)
    return any("Submit" in limit for limit in limits) if limits else bool(_FULL.search(words))


_NOISE = re.compile(r"^(sbatch: )?error: (Batch job submission failed: )?")
_TRIES = 3
_LOOKS = 5
_LOOK_SECONDS = 2.0


def submit_once(script: Path) -> str:
    """Submit, and look for nothing: of a lost answer the caller finds the job later, by its name. Returns the
    array's job id.

    Raises:
        QueueFull, Refused: sbatch does not take the job; the message has its words.
        Unclear: no answer; the job may have been accepted all the same.
        NotStarted: there was no time left for it.
    """
    try:
        return submit_script(script)
    except SlurmError as error:
        if is_full(error.stderr):
            raise QueueFull(_refusal(script, error)) from None
        if isinstance(error, SlurmTimeout):
            raise
        raise Refused(_refusal(script, error)) from None


def _refusal(script: Path, error: SlurmError) -> str:
    helps = "" if is_full(error.stderr) else help_with_refusal(error.stderr)
    said = "; ".join(_NOISE.sub("", line.strip()) for line in error.stderr.splitlines() if line.strip())
    return f"sbatch refused {script}: {said}" + (f"; {helps}" if helps else "")


def submit(script: Path, name: str, beat: Callable[[], None] = lambda: None) -> str:
    """Submit once, even if sbatch's answer is lost. Returns the array's job id.

    After a lost answer the job is looked for by its name before anything is submitted again. That may take
    minutes: it is not for the holder of a lease.
    ``beat`` is called between tries; an exception from it ends them.

    Raises:
        QueueFull, Refused: sbatch does not take the job; the message has its words.
        SlurmTimeout: no answer, and no job of that name.
    """
    for attempt in range(1, _TRIES + 1):
        try:
            return submit_once(script)
        except SlurmTimeout:
            if job := look_for(name, beat):
                return job
            if attempt == _TRIES:
                raise
    raise AssertionError("unreachable")


def look_for(name: str, beat: Callable[[], None]) -> str | None:
    """Find the job of this name; it may take the controller a while to show it. None if there is none.

    Raises:
        SlurmTimeout: Slurm could not be asked, so there may be a job.
    """
    unanswered: SlurmTimeout | None = None
    for _ in range(_LOOKS):
        beat()
        try:
            if job := find_by_name([name]).get(name):
                return job
            unanswered = None
        except SlurmTimeout as error:  # the controller that did not answer sbatch may not answer this either
            unanswered = error
        time.sleep(_LOOK_SECONDS)
    if unanswered:
        raise unanswered
    return None


def update_dependency(job: str, dependency: str) -> None:
    """Change the dependency of a pending job, which keeps its place. Raises SlurmError."""
    run_command(["scontrol", "update", f"jobid={job}", f"dependency={dependency}"])


def cancel(jobs: Sequence[str], only_pending: bool) -> None:
    """Cancel jobs by one call of scancel. Jobs that have ended meanwhile are no error."""
    try:
        run_command(cancel_command(jobs, only_pending))
    except SlurmError as error:
        if not is_over(error):
            raise


def start_now(elements: str) -> None:
    """Let pending elements like ``12_[3-7]`` start before their begin time. Raises SlurmError."""
    run_command(["scontrol", "update", f"jobid={elements}", "starttime=now"])


def requeue(job: str) -> None:
    """Requeue a running job, without adding a job to the queue. Slurm holds it for about two minutes."""
    run_command(["scontrol", "requeue", job])
