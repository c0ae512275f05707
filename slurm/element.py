"""Entry point of every array element: ``python -m slurm.element TASKS [--rank]``.

TASKS is a JSON file with a checksum: ``module`` to run, ``arguments`` common to all elements, and
``elements``, by array index, with the arguments of each; the word ``{attempt}`` is replaced
by an id that no other start of a job has.
With ``--rank`` the process is one of several under srun, and gets its rank in torch's variables.
"""

import contextlib
import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurm.sealing import unsealed
from slurm.sharedfiles import read_shared

ATTEMPT = "{attempt}"
_MOST_RETURNS = 100
"""Number of times that a job is requeued because its task list cannot be read. Slurm holds it for two minutes
each time: enough for most outages of a file server, and an end where the run was removed."""


def main(argv: list[str]) -> None:
    """Find this element's task and run it in this process."""
    tasks, is_rank = Path(argv[0]), "--rank" in argv[1:]
    environment = os.environ
    work = read_work(tasks, environment)
    index = environment["SLURM_ARRAY_TASK_ID"]
    restarts = int(environment.get("SLURM_RESTART_COUNT", "0"))
    start = f"{environment['SLURM_ARRAY_JOB_ID']}r{restarts}"
    if restarts:
        _note(f"restart {restarts} of job {environment['SLURM_ARRAY_JOB_ID']}_{index}")
    if restarts > work["max_restarts"]:
        sys.exit(f"started {restarts} times without coming to an end; not started again")
    if is_rank:
        environment.update(rank_variables(environment, tasks.with_suffix(f".{index}-{start}.rendezvous")))
    attempt = f"{work['number']}-{start}"
    sys.argv = [work["module"], *(attempt if word == ATTEMPT else word for word in words(work, index))]
    runpy.run_module(work["module"], run_name="__main__", alter_sys=True)


def read_work(tasks: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Read the task list. Does not return where that fails: the job is requeued, or exits with an error."""
    try:
        return unsealed(read_shared(tasks))
    except ValueError as error:
        sys.exit(
            f"{tasks} is spoilt: {error}. Nothing was run: the run's next driver job submits its tasks "
            "again, and slurm-ppo submit RUN does where none is left"
        )
    except OSError as error:
        returns = int(environment.get("SLURM_RESTART_COUNT", "0"))
        if returns < _MOST_RETURNS and environment.get("SLURM_PROCID", "0") == "0":
            _note(f"{error}; this job waits in the queue once more, and tries again")
            go_back(environment["SLURM_JOB_ID"])
        sys.exit(f"{error}. Nothing was run; once the file can be read: slurm-ppo submit RUN")


def go_back(job: str) -> None:
    """Requeue this job, if Slurm lets it: otherwise its exit code says that it failed."""
    from slurm.commands import SlurmError, SlurmMissing
    from slurm.submission import requeue

    with contextlib.suppress(SlurmError, SlurmMissing):
        requeue(job)


def _note(line: str) -> None:
    """Print to the log, unless its disk is full: a job that waits for space there must not end by this."""
    with contextlib.suppress(OSError):
        print(line, flush=True)


def words(work: Mapping[str, Any], index: str) -> list[str]:
    """Return the arguments of one element."""
    return [*work["arguments"], *work["elements"][index]]


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
