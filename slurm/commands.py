"""Calls of Slurm's commands: a clean environment, a time limit, and errors that say if a retry can help."""

import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from slurm.errors import ServiceError, UserError

calls: Counter[str] = Counter()
"""Number of commands started by this process, by program, retries included. Tests check that it does not
grow with the number of shards."""

_KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})
# Variables like SBATCH_PARTITION, SQUEUE_FORMAT or, inside a job, SLURM_MEM_PER_NODE change what commands do.
_DROPPED = re.compile(
    r"(SLURM|SBATCH|SQUEUE|SACCT|SACCTMGR|SINFO|SCANCEL|SALLOC|SRUN|SCONTROL|SSTAT|SPRIO)_|"
    r"(CUDA_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ROCR_VISIBLE_DEVICES|ZE_AFFINITY_MASK)$|"  # a driver's own
    r"(RANK|LOCAL_RANK|WORLD_SIZE|RENDEZVOUS_FILE)$"  # a rank's own, whose job submits others
)
OWN = "SLURM_PPO_OWN_VARIABLES"
"""Variable with the names of others, with blanks between them, that jobs which this process submits do not
inherit: sbatch passes the whole environment on."""
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


class SlurmMissing(UserError, ValueError):
    """Absence of a Slurm program on this machine."""

    def __init__(self, program: str) -> None:
        self.program = program
        super().__init__(f"{program} is not on this machine's PATH; run on a login node of the cluster")


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without variables that alter Slurm's commands or their output."""
    own = set(environ.get(OWN, "").split())
    kept = {
        name: value
        for name, value in environ.items()
        if name in _KEPT or not (_DROPPED.match(name) or name in own)
    }
    # Each job's setup adds folders to PATH-like variables, which the jobs that it submits inherit: without
    # repeats they do not grow.
    paths = {name: value for name, value in kept.items() if name.endswith("PATH")}
    shorter = {name: ":".join(dict.fromkeys(value.split(":"))) for name, value in paths.items()}
    return kept | shorter | _FORCED


def run_command(
    arguments: Sequence[str], *, timeout: float = 60.0, retries: int = 0, input: str | None = None
) -> str:
    """Run a command. Returns its standard output.

    ``timeout``: seconds for each try. ``retries``: further tries after a :class:`SlurmTimeout`; only for
    commands that change nothing, since a lost answer does not mean that a request was not carried out.
    Raises :class:`SlurmError`, :class:`SlurmTimeout`, :class:`SlurmMissing`.
    """
    for attempt in range(retries):
        try:
            return _run_once(arguments, timeout, input)
        except SlurmTimeout:
            time.sleep(_BACK_OFF_SECONDS * 2**attempt)
    return _run_once(arguments, timeout, input)


def _run_once(arguments: Sequence[str], timeout: float, input: str | None) -> str:
    calls[arguments[0]] += 1
    try:
        done = subprocess.run(
            list(arguments),
            input=input,
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            text=True,
            errors="replace",  # another user's job name may be any bytes
            timeout=timeout,
            env=clean_environment(os.environ),
        )
    except FileNotFoundError:
        raise SlurmMissing(arguments[0]) from None
    except subprocess.TimeoutExpired as expired:
        told = (expired.stderr or b"").decode(errors="replace")  # bytes, whatever was asked for
        raise SlurmTimeout(arguments, None, f"no answer in {timeout:g} s\n{told}") from None
    if done.returncode != 0:
        kind = SlurmTimeout if _TRANSIENT.search(done.stderr) else SlurmError
        raise kind(arguments, done.returncode, done.stderr)
    return done.stdout


def _shown(command: Sequence[str]) -> str:
    """Return the command's name and first word, which identify it: ids and formats may be long."""
    words = [command[0], *(word for word in command[1:2] if not word.startswith("-"))]
    return " ".join(words)


def _words(stderr: str, returncode: int | None) -> str:
    """Return Slurm's message on one line, without its prefixes."""
    lines = (_NOISE.sub("", line.strip()) for line in stderr.splitlines())
    told = "; ".join(dict.fromkeys(line for line in lines if line))
    return told[:_LONGEST_MESSAGE] or f"exit code {returncode}"
