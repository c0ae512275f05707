"""What every array element runs: ``python -m slurm.element TASKS [--rank]``.

TASKS is a JSON file: ``module`` to run, ``arguments`` common to all elements, and ``elements``, by array
index, with the arguments of each; the word ``{attempt}`` becomes an id that no other start of a job has.
With ``--rank`` the process is one of several under srun, and is told which in the usual variables.
"""

import json
import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ATTEMPT = "{attempt}"


def main(argv: list[str]) -> None:
    """Find this element's task and run it in this process."""
    tasks, is_rank = Path(argv[0]), "--rank" in argv[1:]
    work = json.loads(tasks.read_text())
    environment = os.environ
    index = environment["SLURM_ARRAY_TASK_ID"]
    restarts = int(environment.get("SLURM_RESTART_COUNT", "0"))
    start = f"{environment['SLURM_ARRAY_JOB_ID']}r{restarts}"
    if restarts:
        print(f"restart {restarts} of job {environment['SLURM_ARRAY_JOB_ID']}_{index}", flush=True)
    if restarts > work["max_restarts"]:
        sys.exit(f"started {restarts} times without coming to an end; not started again")
    if is_rank:
        environment.update(rank_variables(environment, tasks.with_suffix(f".{index}-{start}.rendezvous")))
    attempt = f"{work['number']}-{start}"
    sys.argv = [work["module"], *(attempt if word == ATTEMPT else word for word in words(work, index))]
    runpy.run_module(work["module"], run_name="__main__", alter_sys=True)


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
