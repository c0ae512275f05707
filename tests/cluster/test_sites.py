"""What sites ask of every job, on a real Slurm: jobs without an environment, profiles full of options, setup
that fails, and several clusters with one accounting."""

from collections.abc import Iterator

import pytest

from pipeline.run.control import read_control
from pipeline.run.paths import RunPaths
from pipeline.run.submissions import is_job_of
from slurm.devcluster import Layout, PracticeCluster
from tests.cluster.scenario import Job, SlurmRun, assert_same_policy, failed, queue_of, room_on, staying
from tests.slurm.test_inherited_variables import SPANK, VARIABLES
from tests.support.tables import ON_CLUSTER

pytestmark = ON_CLUSTER
KEPT = ("SLURM_CONF", "SLURM_CLUSTERS")
"""What says which Slurm is meant, and which of its clusters."""


def test_a_profile_that_sets_every_option_of_sbatch_and_jobs_without_an_environment(
    cluster, make_run, complete_run, tmp_path
):
    """Submitted from inside a job, or so it looks. What jobs need they get from setup and environment."""
    root = room_on(cluster, tmp_path) / "run"
    run = make_run(
        *(cluster, root, "iterations=1", *staying(20), "scheduler.options={export: NONE}"),
        f"scheduler.environment={{PYTHONPATH: '{make_run.environment['PYTHONPATH']}', WANDB_MODE: offline}}",
        "scheduler.setup=[umask 022, source /etc/profile || true]",
    )
    run.environment |= dict.fromkeys([*(name for name in VARIABLES if name not in KEPT), SPANK], "7")
    run.submit()
    run.wait_until_complete()
    assert_same_policy(run, complete_run)
    assert not run.events("failed")


def test_a_line_of_setup_that_fails_is_the_sites_fault_with_its_line_and_node(cluster, make_run, tmp_path):
    root = room_on(cluster, tmp_path) / "run"
    run = make_run(
        *(cluster, root, "iterations=1", *staying(20)),
        *(
            "scheduler.rollout.setup=[umask 022, module load cuda/12.6]",
            "scheduler.driver.setup=[module purge]",
        ),
    )
    run.submit()
    run.wait_for(lambda: run.events("failed"), "rollouts that failed")
    assert {kind for _, kind in failed(run)} == {"setup"}
    said = run.command("status", root).stdout
    line = "line 2 of setup failed on node rollout0 (exit code 127): module load cuda/12.6"
    assert any(line in event["message"] for event in run.events("failed"))
    assert line in said
    judged = [log for log in run.logs("*driver/*/*").values() if "line 1 of setup failed on node" in log]
    assert judged, "a driver job goes on, as it was one that judged this"
    assert run.command("cancel", root).returncode == 0


@pytest.fixture
def two_clusters(
    cluster_with_accounting: PracticeCluster, own_cluster
) -> tuple[PracticeCluster, PracticeCluster]:
    """The practice cluster with accounting, and another whose jobs are in the same database."""
    near = cluster_with_accounting
    shared = (
        "AccountingStorageType=accounting_storage/slurmdbd",
        "AccountingStorageHost=127.0.0.1",
        f"AccountingStoragePort={near.identity.ports.slurmdbd}",
        f"AccountingStoragePass={near.identity.root}/munge.sock",
        f"AuthInfo=socket={near.identity.root}/munge.sock,cred_expire=5",
    )
    return near, own_cluster(Layout(more=shared))


def jobs_of(run: SlurmRun, cluster: PracticeCluster) -> list[Job]:
    """Jobs of a run that a cluster knows, ended ones too."""
    return [job for job in queue_of(cluster, "--states=all") if is_job_of(run.id, job.name)]


def test_a_run_on_the_other_of_two_clusters(two_clusters, make_run, complete_run, tmp_path):
    near, far = two_clusters
    run: SlurmRun = make_run(
        near,
        tmp_path / "run",
        "iterations=1",
        *staying(20),
        f"scheduler.options={{clusters: {far.identity.name}}}",
    )
    run.submit()
    assert not jobs_of(run, near), "nothing goes to the cluster of this machine"
    assert jobs_of(run, far)
    assert "running" in run.command("status", run.root).stdout
    run.cluster = far
    run.wait_until_complete()
    assert_same_policy(run, complete_run)
    assert not jobs_of(run, near), "nor do those that its jobs submit"
    costs = run.command("status", run.root, "--cost")
    assert costs.returncode == 0, costs.stderr
    assert read_control(RunPaths(run.root)).owner.cluster == far.identity.name
    there = run.environment | far.environment()
    for command in ("resume", "cancel"):  # on a login node of the cluster itself it is the same run
        again = run.slurm_ppo(command, run.root, env=there, cwd=run.folder)
        assert again.returncode == 0, again.stderr


@pytest.fixture
def federation(
    two_clusters: tuple[PracticeCluster, PracticeCluster],
) -> Iterator[tuple[PracticeCluster, PracticeCluster]]:
    """Both clusters, which take each other's jobs."""
    near, far = two_clusters
    names = f"clusters={near.identity.name},{far.identity.name}"
    added = near.call("sacctmgr", "-i", "add", "federation", "practice", names)
    assert added.returncode == 0, added.stderr + added.stdout
    yield near, far
    near.call("sacctmgr", "-i", "delete", "federation", "practice")


def test_a_run_in_a_federation_stays_on_the_cluster_that_it_was_submitted_to(
    federation, make_run, complete_run, tmp_path
):
    """Its jobs are arrays, which no other cluster takes; their ids have the cluster's number in them."""
    near, far = federation
    run: SlurmRun = make_run(far, tmp_path / "run", "iterations=1", *staying(20))
    run.wait_for(lambda: "practice" in far.call("scontrol", "show", "federation").stdout, "a federation")
    run.submit()
    run.wait_until_complete()
    assert_same_policy(run, complete_run)
    assert min(int(job.id.partition("_")[0]) for job in jobs_of(run, far)) > 1 << 26
    assert not jobs_of(run, near)
