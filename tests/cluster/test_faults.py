"""Whatever happens to jobs, nodes and daemons, a run on Slurm ends in the policy of an undisturbed one.

Tasks are light: each version of the policy is a hash of all that it was made from.
"""

import json
import random
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.run.attempts import AttemptId
from pipeline.run.benchmarks import read_measured
from pipeline.run.commits import require_record
from pipeline.run.paths import RunPaths
from pipeline.run.tasks import PREPARE, parse_task
from pipeline.workers.beats import Doing
from slurm.devcluster import Layout, PracticeCluster, PracticePartition
from slurm.devcluster.layout import PARTITIONS
from slurm.sharedfiles import is_there, read_newest
from tests.cluster.scenario import (
    Hold,
    Job,
    SlurmRun,
    assert_same_policy,
    element_of,
    failed,
    kill_job,
    restarts_of,
    results_of,
    room_on,
    take,
    take_the_place_of,
    worker_who,
)
from tests.support.tables import ON_CLUSTER

SHIMS = Path(__file__).parent / "shims"
AT_WORK = [*take("0.6", "rollout"), *take("0.4", "reward"), *take("1.6", "update")]
"""Tasks that work for one or two seconds."""


def gate(stage: str, go: Path) -> str:
    """Tasks of a stage wait for a file before they start."""
    return f"scheduler.{stage}.setup=['until test -e {go}; do sleep 0.1; done']"


def at_random_moment(run: SlurmRun, stage: str, chance: random.Random) -> Job:
    """A job of a stage that has been running for a while: starting, at work, or with results saved."""
    job = run.wait_for_job(stage)
    time.sleep(chance.uniform(0, 1.8))
    return job


# --- submitted first and looked at last: meanwhile the other tests run ---


MEASURE = """
import json, os, signal, sys, time

policy, output, iteration = sys.argv[1:]
assert os.path.exists(policy + "/config.json")
with open(os.environ["NOTES"], "a") as file:  # jobs of no other stage have it
    print(iteration, os.environ["SLURM_JOB_PARTITION"], os.environ["SLURM_CPUS_PER_TASK"], file=file)
with open(os.environ["NOTES"]) as file:
    is_first = [line.split()[0] for line in file].count(iteration) == 1
if iteration == "0":
    time.sleep(1000)
if is_first:
    with open(f"/proc/{os.getppid()}/stat") as file:  # of what starts programs for the task
        os.kill(int(file.read().rpartition(")")[2].split()[1]), signal.SIGKILL)
    time.sleep(1000)
with open(output, "w") as file:
    json.dump({"acc": 0.25}, file)
"""
"""A program that hangs at the first policy; at another its task is killed, as by the kernel, but once."""


@pytest.fixture(scope="module", autouse=True)
def poorly_measured(cluster, inputs, make_run, tmp_path_factory) -> SlurmRun:
    """Its policies are measured by evaluate.command, in jobs with resources of their own."""
    folder = tmp_path_factory.mktemp("poorly_measured")
    (folder / "measure.py").write_text(MEASURE)
    own = ("partition=cpu", "cpus_per_task=3", f"environment={{NOTES: '{folder / 'notes'}'}}")
    given = "'{policy}','{output}','{iteration}'"
    command = f"evaluate.command=[{sys.executable},{folder / 'measure.py'},{given}]"
    heldout = (f"data.heldout={inputs / 'heldout.jsonl'}", "evaluate.every=1")
    words = [*heldout, *(f"scheduler.benchmark.{word}" for word in own), command]
    words += ["evaluate.command_every=2", "evaluate.command_seconds=2"]
    run = make_run(cluster, room_on(cluster, folder) / "run", *words, folder=folder)
    run.submit()
    return run


# --- jobs ---


@pytest.fixture
def with_low_priority(own_cluster) -> PracticeCluster:
    """A cluster where jobs of rollout-low lose their place at once."""
    low = PracticePartition("rollout-low", ("rollout0",), preemptible=True)
    partitions = tuple(low if partition.name == low.name else partition for partition in PARTITIONS)
    return own_cluster(Layout(partitions=partitions), has_runs=True)


@ON_CLUSTER
def test_jobs_are_preempted_cancelled_requeued_and_killed(
    with_low_priority, make_run, long_local_run, chance, tmp_path
):
    """Where there is no accounting. The first rollouts wait until a guard has come."""
    hold = Hold(tmp_path / "hold")
    hold.begin()
    root = room_on(with_low_priority, tmp_path) / "run"
    words = ["iterations=5", "scheduler.rollout.partition=rollout-low", *AT_WORK]
    run = make_run(with_low_priority, root, *words, hold.on("rollout", "0.6"))
    run.submit()
    assert run.cluster.call("sacct").returncode != 0

    preempted = at_random_moment(run, "rollout", chance)
    take_the_place_of(run, preempted.id, preempted.node)
    let_a_guard_come(run)
    hold.end()
    kill(run, at_random_moment(run, "reward", chance))

    requeued = at_random_moment(run, "rollout", chance)
    before = restarts_of(run, requeued.id)
    run.cluster.call("scontrol", "requeue", requeued.id)
    run.wait_for(lambda: restarts_of(run, requeued.id) > before, "a requeued job")
    wait_until_saved(run, run.wait_for_job("update"))
    run.cluster.kill_controller()
    run.cluster.start_controller()
    cancelled = worker_who(run, "update", Doing.BUSY, lambda beat: True)
    run.cluster.call("scancel", element_of(cancelled))

    run.wait_until_complete()
    assert_same_policy(run, long_local_run)
    only_its_state = [
        event for event in run.events("state_lost") if f"{event['iteration']}/update" == cancelled.task
    ]
    made_by = AttemptId.parse(require_record(RunPaths(run.root), parse_task(cancelled.task)).attempt)
    was_done = made_by.job == cancelled.worker.partition("_")[0]  # it had committed when the signal came
    assert was_done or only_its_state or (cancelled.task, "killed") in failed(run), run.story()
    # Whoever was put back into the queue with a part of its responses saved says so.
    assert {kind for _, kind in failed(run)} <= {"killed", "preempted", "paused"}, run.story()
    assert len([e for e in run.events("submitted") if ".guard." in e["array"]]) > 1


def kill(run: SlurmRun, job: Job) -> None:
    """A job may be running for Slurm before it has a process."""
    run.wait_for(lambda: kill_job(job), f"processes of {job}", 10)


def wait_until_saved(run: SlurmRun, job: Job) -> None:
    """The controller would remember the job. One that it has started and forgotten it starts again; then it
    takes the job's node away, until an administrator gives it back."""
    run.cluster.call("scontrol", "update", f"jobid={job.id}", "Comment=saved")
    state = run.cluster.folder / "state" / "job_state"
    run.wait_for(lambda: b"saved" in state.read_bytes(), "the controller's state on disk")


def let_a_guard_come(run: SlurmRun) -> None:
    """At once, and not when its minute has passed."""
    guard = min(int(job.id.partition("_")[0]) for job in run.jobs("PENDING") if job.stage == "guard")
    assert run.cluster.call("scontrol", "update", f"jobid={guard}", "StartTime=now").returncode == 0


@ON_CLUSTER
def test_what_slurm_says_of_a_job_that_it_ends_is_kept(cluster, make_run, tmp_path):
    run = make_run(cluster, room_on(cluster, tmp_path) / "run", gate("prepare", tmp_path / "never"))
    run.submit()
    assert run.cluster.call("scancel", run.wait_for_job("prepare").id).returncode == 0
    said = run.root / "logs" / "slurm.log"
    run.wait_for(lambda: "CANCELLED AT" in said.read_text(), "what Slurm says of it")
    assert "error: *** JOB" in run.command("logs", run.root, "slurm").stdout
    assert run.command("cancel", run.root).returncode == 0


# --- the controller ---


@ON_CLUSTER
def test_a_controller_that_forgets_the_last_seconds(own_cluster, make_run, chance, tmp_path):
    """It saves its state every few seconds. What is lost now is everything that would go on by itself."""
    cluster = own_cluster(has_runs=True)
    run = make_run(cluster, room_on(cluster, tmp_path) / "run")
    state, saved = cluster.folder / "state", tmp_path / "saved"
    shutil.copytree(state, saved)
    run.submit()
    first = run.events("submitted")
    cluster.kill_controller()
    shutil.rmtree(state)
    saved.rename(state)
    submitting = run.begin("submit", run.root)  # the controller is still down
    time.sleep(chance.uniform(0, 4))
    cluster.start_controller()
    _, said = submitting.communicate(timeout=120)
    assert submitting.returncode == 0, said
    run.wait_until_complete()
    again = run.events("submitted")[len(first) :]
    assert {e["job"] for e in first} & {e["job"] for e in again}, "ids are used again"
    assert {e["array"] for e in first}.isdisjoint({e["array"] for e in again})


# --- answers of sbatch ---


def behind_shim(run: SlurmRun, fault: str, *, after: int, times: int) -> SlurmRun:
    """The run with our sbatch in front of Slurm's, also in its driver jobs."""
    count = run.root.parent / f"{run.root.name}-calls"
    variables = {
        "FAULT": fault,
        "FAULT_FROM": str(after),
        "FAULT_TIMES": str(times),
        "FAULT_COUNT": str(count),
    }
    path = f"{SHIMS / 'sbatch'}:{run.environment['PATH']}"
    return replace(run, environment={**run.environment, **variables, "PATH": path})


def calls_of_sbatch(run: SlurmRun) -> int:
    return int((run.root.parent / f"{run.root.name}-calls").read_text())


def assert_one_job_for_each_name(run: SlurmRun) -> None:
    names = [job.name for job in run.jobs_ever()]
    assert len(names) == len(set(names))


@ON_CLUSTER
@pytest.mark.parametrize(("fault", "times"), [("answer-lost", 5), ("request-lost", 1)])
def test_sbatch_times_out(cluster, make_run, chance, tmp_path, fault, times):
    """Jobs that were accepted all the same are found by their names, the others submitted again."""
    after = chance.randrange(8)
    run = behind_shim(make_run(cluster, room_on(cluster, tmp_path) / "run"), fault, after=after, times=times)
    run.submit()
    run.wait_until_complete()
    assert_one_job_for_each_name(run)
    calls = calls_of_sbatch(run)
    lost = max(0, min(calls - after, times)) if fault == "request-lost" else 0
    assert calls == len(run.jobs_ever()) + lost
    assert not failed(run), run.story()


@ON_CLUSTER
def test_submit_is_killed_beside_sbatch(cluster, make_run, chance, tmp_path):
    """Before or after Slurm took the job, whose id is not noted yet in either case."""
    runs, room = [], room_on(cluster, tmp_path)
    for fault in ("killed-before", "killed-after"):
        run = make_run(cluster, room / fault, "iterations=1")
        # two guards, prepare and a driver job at least; rollouts too where places are free
        runs.append(behind_shim(run, fault, after=chance.randrange(4), times=1))
        assert runs[-1].command("submit", *run.words).returncode == -9
    for run in runs:
        again = run.command("submit", run.root)
        assert again.returncode == 0, again.stderr
    for run in runs:
        run.wait_until_complete()
        assert_one_job_for_each_name(run)


# --- people ---


@pytest.fixture
def accounting_away(cluster_with_accounting) -> Iterator[PracticeCluster]:
    """A cluster whose slurmdbd is stopped. A test may start it."""
    cluster = cluster_with_accounting
    cluster.stop_slurmdbd()
    yield cluster
    if "slurmdbd" in {daemon.name for daemon in cluster.status().daemons if not daemon.alive}:
        cluster.start_slurmdbd()


@ON_CLUSTER
def test_a_cancelled_run_goes_on_while_accounting_is_away(
    accounting_away, make_run, complete_run, chance, tmp_path
):
    """The user's other jobs are left alone."""
    cluster = accounting_away
    run = make_run(cluster, room_on(cluster, tmp_path) / "run", "iterations=1", *AT_WORK)
    run.submit()
    assert cluster.call("sacct").returncode != 0
    other = cluster.call("sbatch", "--parsable", "-o/dev/null", "--wrap", "sleep 1000").stdout.strip()
    at_random_moment(run, "rollout", chance)
    cancelled = run.command("cancel", run.root)
    assert f"slurm-ppo resume {run.root}" in cancelled.stdout
    run.wait_for(lambda: not run.jobs(), "an empty queue")
    assert cluster.call("squeue", "-h", "-j", other, "-o", "%T").stdout == "RUNNING\n"

    cluster.call("scancel", other)

    resuming = run.begin("resume", run.root)
    at_random_moment(run, "rollout", chance)
    cluster.start_slurmdbd()
    _, said = resuming.communicate(timeout=120)
    assert resuming.returncode == 0, said
    assert_same_policy(run, complete_run)
    run.wait_for(lambda: not run.jobs(), "an empty queue")


def has_failed(run: SlurmRun) -> bool:
    return json.loads(read_newest(run.root / "slurm" / "control.json"))["has_failed"]


@ON_CLUSTER
def test_a_model_that_was_changed_stops_the_run_at_once(cluster, inputs, make_run, complete_run, tmp_path):
    own = shutil.copytree(inputs / "policy", tmp_path / "policy")
    words = ["iterations=1", f"model.policy={own}"]
    root = room_on(cluster, tmp_path) / "run"
    run = make_run(cluster, root, *words, gate("rollout", tmp_path / "go"))
    run.submit()
    run.wait_for(lambda: is_there(RunPaths(run.root).task(PREPARE).record), "what the models are")
    weights = own / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    (tmp_path / "go").touch()
    run.wait_for(lambda: has_failed(run), "the stop")
    run.wait_for(lambda: not run.jobs(), "an empty queue")
    assert {kind for _, kind in failed(run)} == {"config"}, run.story()
    assert len(failed(run)) == len(set(failed(run))), "none was tried again"
    assert any("fix what the message names" in log for log in run.logs_of_passes().values())

    weights.write_bytes(good)
    resumed = run.command("resume", run.root)
    assert resumed.returncode == 0, resumed.stderr
    assert_same_policy(run, complete_run)


@ON_CLUSTER
def test_a_folder_that_cannot_be_written_empties_no_queue(cluster, make_run, complete_run, tmp_path):
    """As on a full disk: workers can make no pass, and driver jobs whose passes fail wait in the queue once
    more, which needs no file."""
    room = room_on(cluster, tmp_path)
    run = make_run(cluster, room / "run", "iterations=1", gate("rollout", tmp_path / "go"))
    run.submit()
    run.wait_for_job("rollout")
    locks, aside = run.root / "locks", room / "locks"
    locks.rename(aside)
    locks.write_text("in the place of a folder")
    (tmp_path / "go").touch()

    run.wait_for(lambda: run.events("pass_failed"), "a pass that fails")
    status = run.command("status", run.root).stdout
    assert "a driver's pass failed" in status, status
    let_a_guard_come(run)
    run.wait_for(
        lambda: [job for job in run.jobs("PENDING") if job.stage == "guard" and restarts_of(run, job.id)],
        "a driver job in the queue again",
    )
    locks.unlink()
    aside.rename(locks)
    run.wait_until_complete()
    assert_same_policy(run, complete_run)
    assert len(run.events("pass_recovered")) == 1
    assert any("tries again" in log for log in run.logs_of_passes().values())


# --- the runs that were submitted first ---


def test_a_program_that_hangs_or_is_killed_measures_what_it_can_and_stops_no_training(
    poorly_measured, complete_run
):
    run = poorly_measured
    run.wait_until_complete()
    assert_same_policy(run, complete_run)
    assert results_of(run.root) == results_of(complete_run)
    notes = (run.folder / "notes").read_text().split("\n")[:-1]
    assert notes == ["0 cpu 3"] * 2 + ["2 cpu 3"] * 2, "tries, where their jobs ran, and on how many cores"
    tried = [(event["task"], event["kind"]) for event in run.events("failed")]
    assert tried == [("0/benchmark/0", "error")] * 2 + [("2/benchmark/0", "killed")]

    missing, measured = read_measured(RunPaths(run.root))
    assert (missing.policy_version, measured.policy_version) == (0, 2)
    assert "stopped after 2 s" in missing.missing
    assert measured.numbers == {"eval/acc": 0.25}
    again = run.command("resume", run.root)
    assert again.returncode == 0, again.stderr
    assert "complete without some numbers: 1/2 policies measured" in again.stdout
