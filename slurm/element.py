"""Entry point of every array element: ``python -m slurm.element TASKS [--rank]``.

TASKS is a JSON file with a checksum, see :class:`slurm.tasklist.TaskList`. With ``--rank`` the process is one
of several under srun, and gets its rank in torch's variables.
"""

import contextlib
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from slurm.sealing import unsealed
from slurm.sharedfiles import is_there, read_shared
from slurm.tasklist import ELIGIBLE, KNOWN, Assignment, TaskList, attempt_id

_MOST_RETURNS = 100
"""Number of times that a job is requeued because its task list cannot be read. Slurm holds it for two minutes
each time: enough for most outages of a file server, and an end where the run was removed."""
_MOST_RETURNS_OF_FORGOTTEN = 3
"""The same where its folder is there without it: a node may see a new file late, but not by minutes."""


def main(argv: list[str]) -> None:
    """Find this element's tasks and run them: a single one in this process."""
    path, is_rank = Path(argv[0]), "--rank" in argv[1:]
    environment = os.environ
    tasks = read_tasks(path, environment)
    job, index = environment["SLURM_ARRAY_JOB_ID"], environment["SLURM_ARRAY_TASK_ID"]
    restarts = int(environment.get("SLURM_RESTART_COUNT", "0"))
    if restarts:
        _note(f"restart {restarts} of job {job}_{index}")
    if restarts > tasks.max_restarts:
        sys.exit(f"started {restarts} times without coming to an end; not started again")
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a hint that comes before anybody waits ends nothing
    environment[ELIGIBLE] = str(tasks.eligible)
    environment[KNOWN] = str(tasks.known.get(index, 0))
    attempts = []
    for position, assignment in enumerate(tasks.elements[index]):
        attempt = attempt_id(tasks.number, job, index, restarts, position)
        meeting = path.with_suffix(f".{attempt.partition('-')[2]}.rendezvous")
        variables = rank_variables(environment, meeting) if is_rank else {}
        attempts.append((assignment, tasks.words(assignment, attempt), variables))
    if len(attempts) > 1:
        sys.exit(run_in_turn(attempts, is_rank))
    _, sys.argv, variables = attempts[0]
    environment.update(variables)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def run_in_turn(attempts: list[tuple[Assignment, list[str], dict[str, str]]], is_rank: bool) -> int:
    """Run several tasks, each in a process with a log of its own. Returns the first exit code that is not 0.

    After a failure the next task is tried, unless the job is being ended, the process was killed, which may
    be the node's doing, or other ranks take part, which cannot know that this one went on.
    """
    warnings: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: object) -> None:
        warnings.append(number)
        if child is not None:
            child.send_signal(number)

    for number in (signal.SIGUSR2, signal.SIGTERM):
        signal.signal(number, pass_on)
    codes = []
    for assignment, words, variables in attempts:
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(open(assignment.log, "ab")) if assignment.log else None  # noqa: PTH123
            command = [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-m", *words]
            if warnings:
                break
            child = subprocess.Popen(command, env={**os.environ, **variables}, stdout=log, stderr=log)
            if warnings:  # it came while there was no process to pass it on to
                child.send_signal(warnings[-1])
            codes.append(child.wait())
        if warnings or codes[-1] < 0 or (is_rank and codes[-1]):
            break
    if len(codes) < len(attempts) and not any(codes):
        return 128 + warnings[0]
    code = next((code for code in codes if code), 0)
    return code if code >= 0 else 128 - code


def read_tasks(path: Path, environment: Mapping[str, str]) -> TaskList:
    """Read the task list. Does not return where that fails: the job is requeued, or exits with an error."""
    try:
        return TaskList.of(unsealed(read_shared(path)))
    except ValueError as error:
        sys.exit(
            f"{path} is spoilt: {error}. Nothing was run: the run's next driver job submits its tasks "
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
