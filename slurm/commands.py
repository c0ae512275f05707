"""Calls of Slurm's commands: a clean environment, a time limit, and errors that say if a retry can help."""

import base64
import contextlib
import gzip
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import IO

from slurm.errors import ServiceError, UserError

calls: Counter[str] = Counter()
"""Number of commands started by this process, by program, retries included. Tests check that it does not
grow with the number of shards."""

_KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})
# Variables like SBATCH_PARTITION, SQUEUE_FORMAT or, inside a job, SLURM_MEM_PER_NODE change what commands do.
_DROPPED = re.compile(
    r"_?(SLURM|SBATCH|SQUEUE|SACCT|SACCTMGR|SINFO|SCANCEL|SALLOC|SRUN|SCONTROL|SSTAT|SPRIO)_|"
    r"(CUDA_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ROCR_VISIBLE_DEVICES|ZE_AFFINITY_MASK)$|"  # a driver's own
    r"(RANK|LOCAL_RANK|WORLD_SIZE|RENDEZVOUS_FILE)$"  # a rank's own, whose job submits others
)
BEFORE = "SLURM_PPO_BEFORE"
"""Variable with the environment that a worker's job began with (``env -0``, gzip, base64): what a stage's
setup and ``environment`` give its own workers is not for the jobs that a pass submits from there, though
sbatch passes the whole environment on."""
REMEMBER_BEFORE = (
    f"{BEFORE}=$(env -0 | gzip -c | base64 -w 0); [ ${{#{BEFORE}}} -gt 100000 ] || export {BEFORE}"
)
"""Shell line that sets it, before anything else of the job; one variable may have 128 KiB."""
_FORCED = {
    "SLURM_BITSTR_LEN": "0",  # array expressions in full, not cut at 64 bytes
    "SLURM_TIME_FORMAT": "%s",  # unix seconds: no time zone, no daylight saving
    "LC_ALL": "C.UTF-8",
}
# Messages of commands when the controller may not have got the request, or did and its answer was lost.
_TRANSIENT = re.compile(
    r"timed out|unable to contact slurm controller|failed to contact|unable to contact|"
    r"connection (refused|reset)|communication (connection|shutdown) failure|zero bytes were transmitted|"
    r"header lengths are longer|insane message length|unexpected message received|"
    r"protocol authentication error|munge (encode|decode) failed|munged? .*(unavailable|not running)|"
    r"standby mode|temporarily (un|dis)able|temporarily unavailable|try again|"
    r"name resolution|service not known|no route to host|network is unreachable|broken pipe",
    re.IGNORECASE,
)
_NOISE = re.compile(r"^(\w+: )?(error|fatal): ", re.IGNORECASE)
_BACK_OFF_SECONDS = 1.0
_LONGEST_MESSAGE = 300
_LEAST_SECONDS = 0.25
"""Seconds without which a command is not started: it would only be ended before its answer."""
_LEAST_OF_SBATCH = 2.5
"""The same for sbatch: whether the job is there is unknown after one is ended."""
_POLL_SECONDS = 0.02
_MOST_SAID = 1 << 20
_QUIET_SECONDS = 0.2
"""Seconds in which a command that has said enough says nothing more, before it is ended."""


class SlurmError(ServiceError, RuntimeError):
    """Failure of a Slurm command."""

    def __init__(self, command: Sequence[str], returncode: int | None, stderr: str) -> None:
        self.command = tuple(command)
        self.returncode = returncode
        """Exit code; None where the command did not end by itself."""
        self.stderr = stderr
        super().__init__(f"{_shown(command)} failed: {_words(stderr, returncode)}")


class SlurmTimeout(SlurmError):
    """Missing answer of the controller. The request may have been carried out all the same."""


class NotStarted(SlurmTimeout):
    """Command that was not even started, since there was no time left for it (:func:`within`)."""


class SlurmMissing(UserError, ValueError):
    """Absence of a Slurm program on this machine."""

    def __init__(self, program: str) -> None:
        self.program = program
        super().__init__(f"{program} is not on this machine's PATH; run on a login node of the cluster")


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without variables that alter Slurm's commands or their output."""
    kept = {name: value for name, value in environ.items() if name in _KEPT or not _DROPPED.match(name)}
    # A driver job's setup adds folders to PATH-like variables, which the jobs that it submits inherit:
    # without repeats they do not grow.
    paths = {name: value for name, value in kept.items() if name.endswith("PATH")}
    shorter = {name: ":".join(dict.fromkeys(value.split(":"))) for name, value in paths.items()}
    return kept | shorter | _FORCED


def inherited_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the jobs that a process submits: that which its own job began with, if it
    knows that, else its own."""
    ours = {name: environ[name] for name in _KEPT & environ.keys()}
    return clean_environment({**(_before(environ.get(BEFORE, "")) or environ), **ours})


def _before(packed: str) -> dict[str, str]:
    try:
        unpacked = gzip.decompress(base64.b64decode(packed)) if packed else b""
    except (
        ValueError,
        OSError,
        EOFError,
        zlib.error,
    ):  # without gzip on its PATH a job has remembered nothing
        return {}
    pairs = (pair.partition("=") for pair in os.fsdecode(unpacked).split("\0") if pair)
    return {name: value for name, _, value in pairs}


@dataclass
class Patience:
    """Seconds that may still be waited for answers of Slurm's commands, all together."""

    left: float


_patience: ContextVar[Patience | None] = ContextVar("patience", default=None)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[Patience]:
    """Bound what the commands of a block are waited for, all together: once that is over none is started, and
    each raises :class:`SlurmTimeout` at once. None is tried again, as that is waited for too. Of blocks
    within blocks the innermost counts."""
    token = _patience.set(patience := Patience(seconds))
    try:
        yield patience
    finally:
        _patience.reset(token)


def run_command(
    arguments: Sequence[str], *, timeout: float = 60.0, retries: int = 0, input: str | None = None
) -> str:
    """Run a command. Returns its standard output.

    ``timeout``: seconds for each try, if :func:`within` leaves as many. ``retries``: further tries after a
    :class:`SlurmTimeout`; only for commands that change nothing, since a lost answer does not mean that a
    request was not carried out.
    Raises :class:`SlurmError`, :class:`SlurmTimeout`, :class:`SlurmMissing`.
    """
    if (patience := _patience.get()) is not None:
        return _run_within(arguments, timeout, input, patience)
    for attempt in range(retries):
        try:
            return _run_once(arguments, timeout, input)
        except SlurmTimeout:
            time.sleep(_BACK_OFF_SECONDS * 2**attempt)
    return _run_once(arguments, timeout, input)


def _run_within(arguments: Sequence[str], timeout: float, input: str | None, patience: Patience) -> str:
    if patience.left < (_LEAST_OF_SBATCH if arguments[0] == "sbatch" else _LEAST_SECONDS):
        raise NotStarted(arguments, None, "not started, as Slurm has been waited for long enough for now")
    began = time.monotonic()
    try:
        return _run_once(arguments, min(timeout, patience.left), input)
    finally:
        patience.left -= time.monotonic() - began


def _run_once(arguments: Sequence[str], timeout: float, input: str | None) -> str:
    process = _start(arguments, subprocess.PIPE, input is not None)
    with process:
        try:
            stdout, stderr = process.communicate(input, timeout)
        except subprocess.TimeoutExpired as expired:
            _end(process)
            told = (expired.stderr or b"").decode(errors="replace")  # bytes, whatever was asked for
            raise SlurmTimeout(arguments, None, f"no answer in {timeout:g} s\n{told}") from None
        except BaseException:
            _end(process)
            raise
    _check(arguments, process.returncode, stderr)
    return without_heading(stdout)


def _start(arguments: Sequence[str], output: int | IO[bytes], has_input: bool) -> subprocess.Popen[str]:
    """Start a command as a group of processes: a site may have scripts of its own in front of Slurm's."""
    calls[arguments[0]] += 1
    inherited = inherited_environment if arguments[0] == "sbatch" else clean_environment
    try:
        return subprocess.Popen(
            addressed(arguments, os.environ),
            executable=shutil.which(
                arguments[0]
            ),  # a module that has it may have been loaded since the start
            stdin=subprocess.PIPE if has_input else subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            text=True,
            errors="replace",  # another user's job name may be any bytes
            env=inherited(os.environ),
            process_group=0,
        )
    except FileNotFoundError:
        raise SlurmMissing(arguments[0]) from None


def _end(process: subprocess.Popen[str]) -> None:
    """End a command with what it has started: what is given up must not be carried out minutes later."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # Pipes are not waited for: what has left the group may have them.
    for pipe in filter(None, (process.stdin, process.stdout, process.stderr)):
        with contextlib.suppress(OSError):
            pipe.close()
    process.wait()


def _check(arguments: Sequence[str], returncode: int, stderr: str) -> None:
    if returncode != 0:
        kind = SlurmTimeout if _TRANSIENT.search(stderr) else SlurmError
        raise kind(arguments, returncode, stderr)


@dataclass
class Begun:
    """A command that runs beside this process, and whose output is needed only for errors."""

    arguments: Sequence[str]
    process: subprocess.Popen[str]
    output: IO[bytes]
    """File of what it says: a full pipe would block it."""
    until: float
    """Time (monotonic) at which it is ended."""
    enough: re.Pattern[bytes] | None = None
    """What it says once it has done all that it will."""

    def finish(self) -> None:
        """Wait for its end, or make one. Raises :class:`SlurmError`, :class:`SlurmTimeout`."""
        with self.output:
            while self.process.poll() is None:
                if self._has_said_enough():
                    _end(self.process)
                    return
                if time.monotonic() >= self.until:
                    _end(self.process)
                    raise SlurmTimeout(self.arguments, None, "no answer, and it is waited for no longer")
                time.sleep(_POLL_SECONDS)
            _check(self.arguments, self.process.returncode, self._said().decode(errors="replace"))

    def _has_said_enough(self) -> bool:
        quiet = time.time() - os.fstat(self.output.fileno()).st_mtime
        return self.enough is not None and quiet >= _QUIET_SECONDS and bool(self.enough.search(self._said()))

    def _said(self) -> bytes:
        return os.pread(self.output.fileno(), _MOST_SAID, 0)


def begin_command(arguments: Sequence[str], timeout: float, enough: re.Pattern[bytes] | None = None) -> Begun:
    """Start a command and go on; :meth:`Begun.finish` looks after it. Raises :class:`SlurmMissing`.

    Args:
        timeout: seconds from now until it is ended.
        enough: what it says once it has done all that it will; it is ended soon after that.
    """
    output = tempfile.TemporaryFile()  # noqa: SIM115
    process = _start(arguments, output, False)
    return Begun(arguments, process, output, time.monotonic() + timeout, enough)


def _shown(command: Sequence[str]) -> str:
    """Return the command's name and first word, which identify it: ids and formats may be long."""
    words = [command[0], *(word for word in command[1:2] if not word.startswith("-"))]
    return " ".join(words)


def _words(stderr: str, returncode: int | None) -> str:
    """Return Slurm's message on one line, without its prefixes."""
    lines = (_NOISE.sub("", line.strip()) for line in stderr.splitlines())
    told = "; ".join(dict.fromkeys(line for line in lines if line))
    return told[:_LONGEST_MESSAGE] or f"exit code {returncode}"


# --- clusters --------------------------------------------------------------------------------------------

# At sites where one machine reaches several (``--clusters``).


_named: ContextVar[str] = ContextVar("cluster", default="")
_PROGRAMS = frozenset({"sbatch", "squeue", "scancel", "scontrol", "sacct", "sinfo"})
"""Programs that take the option. sacctmgr asks the database of all clusters."""
_HEADING = re.compile(r"\A\s*CLUSTER: \S+\n")


@contextlib.contextmanager
def on_cluster(name: str) -> Iterator[None]:
    """Have the commands of a block ask a cluster by its name; empty: the one of this machine."""
    token = _named.set(name)
    try:
        yield
    finally:
        _named.reset(token)


def addressed(arguments: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return a command for the cluster that is named (:func:`on_cluster`).

    A job of that cluster does without the name: its machine asks that cluster anyway, and a name is looked up
    in accounting, which may be away.
    """
    name, (program, *rest) = _named.get(), arguments
    if not name or program not in _PROGRAMS or environ.get("SLURM_CLUSTER_NAME") == name:
        return list(arguments)
    return [program, f"--clusters={name}", *rest]


def without_heading(output: str) -> str:
    """Return what a command printed without the line that names its cluster, which some versions print even
    where no header is wanted."""
    return _HEADING.sub("", output, count=1)
