"""Entry point of every array element: ``python -m slurm.element TASKS [--rank]``.

TASKS is a JSON file with a checksum, see :class:`slurm.tasklist.TaskList`. With ``--rank`` the process is one
of several under srun, and gets its rank in torch's variables.
"""

import contextlib
import os
import runpy
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from slurm.sharedfiles import is_there, read_shared, unsealed
from slurm.tasklist import ELIGIBLE, KNOWN, TaskList, attempt_id

_MOST_RETURNS = 100
"""Number of times that a job is requeued because its task list cannot be read. Slurm holds it for two minutes
each time: enough for most outages of a file server, and an end where the run was removed."""
_MOST_RETURNS_OF_FORGOTTEN = 3
"""The same where its folder is there without it: a node may see a new file late, but not by minutes."""


def main(argv: list[str]) -> None:
    """Find this element's task and run it in this process."""
    path, is_rank = Path(argv[0]), "--rank" in argv[1:]
    environment = os.environ
    tasks = read_tasks(path, environment)
    job, index = environment["SLURM_ARRAY_JOB_ID"], environment["SLURM_ARRAY_TASK_ID"]
    restarts = int(environment.get("SLURM_RESTART_COUNT", "0"))
    if restarts:
        _note(f"restart {restarts} of job {job}_{index}")
    if restarts > tasks.max_restarts:
        sys.exit(f"started {restarts} times without coming to an end; not started again")
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a hint that comes before a worker waits must not end it
    environment[ELIGIBLE] = str(tasks.eligible)
    environment[KNOWN] = str(tasks.known.get(index, 0))
    attempt = attempt_id(tasks.number, job, index, restarts)
    sys.argv = tasks.words(index, attempt)
    if is_rank:
        meeting = path.with_suffix(f".{attempt.partition('-')[2]}.rendezvous")
        environment.update(rank_variables(environment, meeting))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def read_tasks(path: Path, environment: Mapping[str, str]) -> TaskList:
    """Read the task list. Does not return where that fails: the job is requeued, or exits with an error."""
    try:
        return TaskList.of(unsealed(read_shared(path)))
    except ValueError as error:
        sys.exit(
            f"{path} is corrupt: {error}. Nothing was run: the run's next driver job submits its tasks "
            "again, and slurm-ppo submit RUN does where none is left"
        )
    except OSError as error:
        returns = int(environment.get("SLURM_RESTART_COUNT", "0"))
        is_forgotten = isinstance(error, FileNotFoundError) and is_there(path.parent)
        most = _MOST_RETURNS_OF_FORGOTTEN if is_forgotten else _MOST_RETURNS
        if returns < most and environment.get("SLURM_PROCID", "0") == "0":
            _note(f"{error}; this job waits in the queue once more, and tries again")
            go_back(environment["SLURM_JOB_ID"])
        sys.exit(f"{error}. Nothing was run; once the file can be read: slurm-ppo submit RUN")


def go_back(job: str) -> None:
    """Requeue this job, if Slurm lets it, for another node: this one may not see what others do. Otherwise
    its exit code says that it failed."""
    from slurm.commands import SlurmError, SlurmMissing
    from slurm.elsewhere import requeue_elsewhere

    with contextlib.suppress(SlurmError, SlurmMissing):
        requeue_elsewhere(job, os.environ.get("SLURMD_NODENAME", ""))


def _note(line: str) -> None:
    """Print to the log, unless its disk is full: a job that waits for space there must not end by this."""
    with contextlib.suppress(OSError):
        print(line, flush=True)


def rank_variables(environment: Mapping[str, str], rendezvous: Path) -> dict[str, str]:
    """Return this rank's place among the job's ranks, in torch's variables, and their rendezvous file."""
    return {
        "RANK": environment["SLURM_PROCID"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "WORLD_SIZE": environment["SLURM_NTASKS"],
        "RENDEZVOUS_FILE": str(rendezvous),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
