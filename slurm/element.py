"""What every array element runs: ``python -m slurm.element TASKS [--rank]``.

TASKS is a JSON file with a checksum: ``module`` to run, ``arguments`` common to all elements, and
``elements``, by array index, with the arguments of each; the word ``{attempt}`` becomes an id that no other
start of a job has.
With ``--rank`` the process is one of several under srun, and is told which in the usual variables.
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
"""Times that a job goes back into the queue because its task list cannot be read. Slurm holds it there for
two minutes each time: long enough for most outages of a file server, and an end where the run was removed."""


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
    """The task list. Does not return where it cannot be read: the job waits in the queue again, or fails."""
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
    """Let the job that this is go back into the queue, if it may: else its exit code says that it failed."""
    from slurm.commands import SlurmError, SlurmMissing
    from slurm.submission import requeue

    with contextlib.suppress(SlurmError, SlurmMissing):
        requeue(job)


def _note(line: str) -> None:
    """Into the log, unless its disk is full: a job that waited for the space must not end of this."""
    with contextlib.suppress(OSError):
        print(line, flush=True)


def words(work: Mapping[str, Any], index: str) -> list[str]:
    """The arguments of one element."""
    return [*work["arguments"], *work["elements"][index]]


def rank_variables(environment: Mapping[str, str], rendezvous: Path) -> dict[str, str]:
    """This rank's place among the job's ranks, as torch names it, and the file where they find each other."""
    return {
        "RANK": environment["SLURM_PROCID"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "WORLD_SIZE": environment["SLURM_NTASKS"],
        "RENDEZVOUS_FILE": str(rendezvous),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
