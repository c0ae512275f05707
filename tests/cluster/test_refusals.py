"""A command that refuses leaves a run at work on Slurm as it is: its queue, its processes, its files."""

import shlex
import time
from dataclasses import dataclass

import pytest

from tests.cluster.scenario import Hold, SlurmRun, room_on, staying
from tests.support.every_state import Entry, differences, entries, processes_of
from tests.support.tables import sample

REFUSED = (
    "run RUN",
    "submit RUN seed=2",
    "submit SETTINGS seed=2",
    "resume RUN --from bake",
    "resume RUN --from rollout@9",
    "resume RUN --from score-nobody@1",
    "cancel RUN/iterations",
    "clean RUN --yes",
    "clean RUN --only nothing --yes",
    "fork RUN@9 RUN",
    "fork RUN@0 RUN",
    "export RUN@9 RUN",
    "samples RUN@9",
    "logs RUN rollout@9",
    "status RUN --nothing",
    "watch RUN --interval 0",
    "sync RUN",
    "advance RUN/logs",
)
"""RUN is the run's directory, SETTINGS are its own."""


BEATING = ("slurm/workers", "slurm/passes", "logs/")
"""Where workers and the passes that they ask for say that they live, also while they wait."""


@dataclass(frozen=True)
class Standing:
    """What a run has: its jobs, its processes, and its files but leases and what is renewed."""

    jobs: list[tuple[str, str, str]]
    processes: dict[int, str]
    files: dict[str, Entry]

    @staticmethod
    def of(run: SlurmRun) -> "Standing":
        jobs = sorted((job.id, job.state, job.name) for job in run.jobs())
        files = {name: one for name, one in entries(run.root).items() if not name.startswith(BEATING)}
        return Standing(jobs, processes_of(run.root), files)


def is_settled(run: SlurmRun) -> bool:
    """Whether nothing has changed for as long as a pass takes."""
    before = Standing.of(run)
    time.sleep(3)
    return Standing.of(run) == before


@pytest.mark.soak
def test_what_refuses_leaves_queue_processes_and_files_as_they_are(cluster, make_run, tmp_path):
    root, hold = room_on(cluster, tmp_path) / "run", Hold(tmp_path / "hold")
    run = make_run(cluster, root, "iterations=1", *staying(20), hold.on("rollout"))
    hold.begin()
    run.submit()
    run.wait_for(lambda: list(tmp_path.glob("hold.*")), "rollouts that are held up")
    for line in sample(REFUSED, 1 / 4):
        words = shlex.split(line.replace("RUN", str(root)))
        typed = [word for one in words for word in (run.words if one == "SETTINGS" else [one])]
        for is_last in (False, False, True):
            run.wait_for(lambda: is_settled(run), "nothing that begins or ends")
            before = Standing.of(run)
            done = run.command(*typed)
            assert done.returncode == 2, (line, done.stderr, done.stdout)
            now = Standing.of(run)
            if now == before:
                break
            # A guard may have come in the same moment. What the command changes it changes each time.
            assert not is_last, (line, done.stderr, differences(before.files, now.files))
    assert run.command("cancel", root).returncode == 0
    hold.end()
    run.wait_for(lambda: not run.jobs(), "an empty queue")
