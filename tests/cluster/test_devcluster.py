"""The development cluster: a real Slurm comes up, does what clusters do, and leaves nothing behind."""

import dataclasses
import json
import multiprocessing
import os
import pwd
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm.devcluster import (
    DevclusterError,
    Layout,
    PackagesMissing,
    PracticeCluster,
    PracticeNode,
    PracticePartition,
    attach,
    processes,
    programs,
)
from slurm.devcluster import layout as rendering
from slurm.devcluster import start as start_cluster
from tests.support import ROOT

GOLDEN = Path(__file__).parent / "golden"

IDENTITY = rendering.PracticeIdentity(
    name="dev0123ab",
    root=Path("/scratch/dev"),
    user="ada",
    host="login1",
    ports=rendering.Ports(
        20000, 20001, {"rollout0": 20002, "reward0": 20003, "update0": 20004, "update1": 20005}
    ),
    version=(22, 5),
)
NEWER = dataclasses.replace(IDENTITY, version=(24, 11))
SMALL = Layout(
    nodes=(PracticeNode("one", gpus=0),), partitions=(PracticePartition("cpu", ("one",), default=True),)
)


def wait_until(condition: Callable[[], object], what: str, seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"waited {seconds} s in vain until {what}"
        time.sleep(0.05)


def submit(cluster: PracticeCluster, script: str, *options: str, output: Path | str = os.devnull) -> str:
    command = ("sbatch", "--parsable", "--chdir=/", f"--output={output}", *options, "--wrap", script)
    done = cluster.call(*command)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def field(cluster: PracticeCluster, job: str, name: str) -> str:
    said = cluster.call("scontrol", "show", "job", job).stdout
    return next((word.partition("=")[2] for word in said.split() if word.startswith(f"{name}=")), "")


def wait_for(cluster: PracticeCluster, job: str, state: str, seconds: float = 20) -> None:
    wait_until(lambda: field(cluster, job, "JobState") == state, f"job {job} is {state}", seconds)


def related_to(folder: Path) -> list[str]:
    """Command lines of the processes that mention a folder or hold files in it open."""
    found = []
    for process in processes.everything():
        command = Path(f"/proc/{process.pid}/cmdline")
        text = command.read_bytes().replace(b"\0", b" ").decode() if command.exists() else ""
        files = processes.open_files(process)
        if process.pid != os.getpid() and any(str(folder) in item for item in [text, *files]):
            found.append(f"{process.pid} {text}")
    return found


# --- what is written, without a Slurm ---


@pytest.mark.parametrize(
    ("name", "rendered"),
    [
        ("slurm.conf", rendering.slurm_conf(IDENTITY, Layout(), accounting=False)),
        ("slurm-accounting.conf", rendering.slurm_conf(IDENTITY, Layout(), accounting=True)),
        ("slurm-newer.conf", rendering.slurm_conf(NEWER, Layout(more=("MinJobAge=2",)), accounting=False)),
        ("gres.conf", rendering.gres_conf(IDENTITY, Layout())),
        ("cgroup.conf", rendering.cgroup_conf(IDENTITY)),
        ("cgroup-newer.conf", rendering.cgroup_conf(NEWER)),
        ("slurmdbd.conf", rendering.slurmdbd_conf(IDENTITY)),
    ],
)
def test_configuration_files_are_as_they_were(name, rendered):
    assert rendered == (GOLDEN / name).read_text()


def test_nodes_without_gpus_ask_for_none():
    small = dataclasses.replace(IDENTITY, ports=rendering.Ports(1, 2, {"one": 3}))
    assert "gpu" not in rendering.slurm_conf(small, SMALL, accounting=True).lower()
    assert rendering.gres_conf(small, SMALL) == "AutoDetect=off\n"


def test_what_a_folder_records_is_what_it_was_started_with():
    layout = dataclasses.replace(Layout(), more=("EnforcePartLimits=ALL",), slurmd_timeout=7)
    assert rendering.layout_from_json(json.loads(json.dumps(dataclasses.asdict(layout)))) == layout
    plain = json.loads(json.dumps(dataclasses.asdict(IDENTITY), default=str))
    assert rendering.identity_from_json(plain) == IDENTITY


def test_missing_packages_are_named_with_the_command_that_installs_them(monkeypatch, tmp_path):
    monkeypatch.setattr(programs, "find", lambda name: None)
    with pytest.raises(PackagesMissing, match=r"sudo apt install .*munge slurmctld slurmd slurm-client$"):
        start_cluster(tmp_path)
    with pytest.raises(PackagesMissing, match=r"slurm-client slurmdbd mariadb-server$"):
        start_cluster(tmp_path, accounting=True)


def test_a_folder_with_something_in_it_is_left_alone(cluster, tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(DevclusterError, match="not an empty folder"):
        start_cluster(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(DevclusterError, match="holds a cluster already"):
        start_cluster(cluster.folder)


# --- processes ---


@pytest.fixture
def sleeper(tmp_path) -> Iterator[tuple[Path, processes.Process]]:
    record = tmp_path / "record"
    processes.start_daemon(["sleep", "1000"], record, tmp_path / "log", {"PATH": os.defpath})
    running = processes.recorded(record)
    assert running is not None
    yield record, running
    processes.end([running], patience=0)


def test_a_process_is_recorded_and_ends(sleeper):
    record, running = sleeper
    wait_until(lambda: processes.recorded(record).name == "sleep", "it is sleep")
    processes.end([running], patience=1)
    assert processes.recorded(record) is None


@pytest.mark.parametrize("spoil", ["start time", "boot"])
def test_another_process_with_the_same_number_is_not_taken_for_it(sleeper, spoil):
    record, running = sleeper
    text = record.read_text()
    other = text.replace(str(running.started), "1") if spoil == "start time" else text[:-3] + "00\n"
    record.write_text(other)
    assert processes.recorded(record) is None
    processes.end([dataclasses.replace(running, started=1)], patience=0)
    assert processes.alive(running)


def test_what_ignores_sigterm_is_killed(tmp_path):
    record, log = tmp_path / "record", tmp_path / "log"
    stubborn = ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done"]
    processes.start_daemon(stubborn, record, log, {"PATH": os.defpath})
    wait_until(lambda: log.read_text() == "ready\n", "the trap is set")
    began = time.monotonic()
    processes.end([processes.recorded(record)], patience=0.3)
    assert 0.3 <= time.monotonic() - began < 2
    assert processes.recorded(record) is None


# --- a cluster that is shared ---


def test_every_node_is_idle(cluster):
    wait_until(lambda: set(cluster.node_states().values()) == {"idle"}, "every node is idle")
    assert set(cluster.node_states()) == {"rollout0", "reward0", "update0", "update1"}
    assert all(daemon.alive for daemon in cluster.status().daemons)


def test_a_job_runs_in_every_partition(cluster, tmp_path):
    names = [partition.name for partition in cluster.layout.partitions]
    script = "echo $SLURM_JOB_PARTITION $SLURMD_NODENAME"
    ids = {name: submit(cluster, script, f"-p{name}", output=tmp_path / name) for name in names}
    for job in ids.values():
        wait_for(cluster, job, "COMPLETED")
    for partition in cluster.layout.partitions:
        name, node = (tmp_path / partition.name).read_text().split()
        assert name == partition.name
        assert node in partition.nodes


def test_without_a_partition_a_job_goes_to_cpu(cluster):
    job = submit(cluster, "true")
    assert field(cluster, job, "Partition") == "cpu"
    wait_for(cluster, job, "COMPLETED")


def test_jobs_that_share_a_node_see_a_gpu_each(cluster, tmp_path):
    # The first waits for the second, so that both hold their GPU at once.
    script = "echo $CUDA_VISIBLE_DEVICES $SLURM_JOB_GPUS; until test -s {other}; do sleep 0.05; done"
    first, second = tmp_path / "first", tmp_path / "second"
    options = ("-preward", "--gpus-per-node=1")
    ids = [
        submit(cluster, script.format(other=other), *options, output=mine)
        for mine, other in [(first, second), (second, first)]
    ]
    for job in ids:
        wait_for(cluster, job, "COMPLETED")
    assert sorted([first.read_text(), second.read_text()]) == ["0 0\n", "1 1\n"]


def test_a_node_has_the_gpu_type_of_its_stage(cluster):
    with_l40 = cluster.call("sbatch", "--test-only", "-preward", "--gpus-per-node=l40:2", "--wrap", "true")
    with_a100 = cluster.call("sbatch", "--test-only", "-preward", "--gpus-per-node=a100:1", "--wrap", "true")
    assert with_l40.returncode == 0
    assert with_a100.returncode != 0


def test_a_preemptible_job_is_told_before_it_loses_its_place(cluster, tmp_path):
    ready, told = tmp_path / "ready", tmp_path / "told"
    script = f"trap 'touch {told}; exit 0' USR1; touch {ready}; sleep 1000 & wait"
    low = submit(cluster, script, "-prollout-low", "--exclusive", "--signal=B:USR1@1")
    wait_until(ready.exists, "the trap is set")
    high = submit(cluster, "true", "-prollout-high", "--exclusive")
    wait_for(cluster, high, "COMPLETED")
    assert told.exists()
    assert field(cluster, low, "JobState") == "COMPLETED"


def test_another_cluster_runs_beside_it(cluster, own_cluster, tmp_path):
    other = own_cluster(SMALL)
    assert set(other.node_states()) == {"one"}
    job = submit(other, "echo $SLURM_CLUSTER_NAME", output=tmp_path / "out")
    wait_for(other, job, "COMPLETED")
    assert (tmp_path / "out").read_text() == f"{other.identity.name}\n"
    other.stop()
    assert len(cluster.node_states()) == 4


# --- with accounting ---


def test_sacct_knows_what_ended_also_while_slurmdbd_was_away(cluster_with_accounting):
    cluster = cluster_with_accounting

    def accounted(job: str) -> str:
        said = cluster.call("sacct", "-XnP", "-j", job, "--format=State,AllocTRES")
        return said.stdout.strip()

    first = submit(cluster, "true", "-preward", "--gpus-per-node=1")
    wait_until(lambda: accounted(first).startswith("COMPLETED|"), "sacct knows the first job")
    assert "gres/gpu:l40=1" in accounted(first)
    cluster.stop_slurmdbd()
    second = submit(cluster, "true")
    wait_for(cluster, second, "COMPLETED")
    assert cluster.call("sacct", "-j", second).returncode != 0
    cluster.start_slurmdbd()
    wait_until(lambda: accounted(second).startswith("COMPLETED|"), "sacct knows the second job", 40)


# --- a cluster to break ---


def test_a_lost_node_is_down_and_its_job_runs_again(own_cluster, tmp_path):
    cluster = own_cluster(Layout(slurmd_timeout=3, more=("MessageTimeout=3",)))
    out = tmp_path / "out"
    script = 'echo $SLURMD_NODENAME; test -n "$SLURM_RESTART_COUNT" || sleep 1000'
    job = submit(cluster, script, "-pupdate", output=out)
    wait_until(lambda: out.exists() and out.read_text(), "the job is running")
    lost = out.read_text().strip()
    cluster.kill_node(lost)
    assert related_to(out) == []
    wait_until(lambda: cluster.node_states()[lost] == "down*", f"{lost} is down", 60)
    wait_for(cluster, job, "COMPLETED", 60)
    assert field(cluster, job, "Restarts") == "1"
    cluster.start_slurmd(lost)
    assert cluster.node_states()[lost] == "idle"
    drain = ("scontrol", "update", "state=drain")
    cluster.call(
        *drain, f"nodename={lost}", "reason=Duplicate jobid"
    )  # as a controller says that has forgotten
    cluster.call(*drain, "nodename=rollout0", "reason=maintenance")
    assert cluster.return_nodes() == [lost]
    wait_until(lambda: cluster.node_states()[lost] == "idle", f"{lost} is back")
    assert cluster.node_states()["rollout0"] == "drained"


def test_a_preempted_job_is_requeued(own_cluster):
    low = PracticePartition("low", ("one",), default=True, preemptible=True)
    high = PracticePartition("high", ("one",), priority_tier=2)
    cluster = own_cluster(dataclasses.replace(SMALL, partitions=(low, high)))
    first = submit(cluster, "sleep 1000", "-plow", "--exclusive")
    wait_for(cluster, first, "RUNNING")
    second = submit(cluster, "true", "-phigh", "--exclusive")
    wait_for(cluster, second, "COMPLETED")
    assert field(cluster, first, "JobState") == "PENDING"
    assert field(cluster, first, "Restarts") == "1"


def test_jobs_outlive_their_daemon_and_their_controller(own_cluster, tmp_path):
    cluster = own_cluster(SMALL)
    go = tmp_path / "go"
    script = f"until test -e {go}; do sleep 0.05; done"
    job = submit(cluster, script)
    wait_for(cluster, job, "RUNNING")
    cluster.call("scontrol", "update", f"JobId={job}", "Comment=kept")
    saved = cluster.folder / "state" / "job_state"
    wait_until(lambda: saved.exists() and b"kept" in saved.read_bytes(), "the controller has saved its state")
    cluster.kill_slurmd("one")
    cluster.kill_controller()
    dead = {daemon.name for daemon in cluster.status().daemons if not daemon.alive}
    assert dead == {"slurmctld", "slurmd-one"}
    assert cluster.status().nodes == {}
    cluster.start_controller()
    cluster.start_slurmd("one")
    assert field(cluster, job, "JobState") == "RUNNING"
    go.touch()
    wait_for(cluster, job, "COMPLETED")
    assert field(cluster, job, "Restarts") == "0"


def test_a_cluster_in_a_long_folder_leaves_nothing_behind(own_cluster, tmp_path):
    folder = tmp_path / ("a folder with spaces" + "-and-a-long-name" * 6)
    own_cluster(SMALL).stop()  # skips without the packages
    cluster = start_cluster(folder)
    assert cluster.identity.root.is_symlink()
    stays = "(setsid sleep 1000 &) ; srun --overlap sleep 1001 & sleep 1002"
    job = submit(cluster, stays, "-n2", output=folder / "tmp" / "out")
    wait_until(lambda: cluster.call("squeue", "-hs").stdout.count(f"{job}.") >= 2, "its step runs")
    assert related_to(folder)
    began = time.monotonic()
    cluster.stop()
    assert time.monotonic() - began < 5
    assert related_to(folder) == related_to(cluster.identity.root) == []
    assert not folder.exists()
    assert not cluster.identity.root.is_symlink()


def test_who_comes_later_cleans_up_after_a_crash(own_cluster, tmp_path):
    own_cluster(SMALL).stop()  # skips without the packages
    folder = tmp_path / "crashed"
    code = (
        "import os, pathlib, signal; from slurm.devcluster import cluster\n"
        "cluster.PracticeCluster._wait_for_nodes = lambda *a: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"cluster.start(pathlib.Path({str(folder)!r}))"
    )
    crashed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60)
    assert crashed.returncode == -signal.SIGKILL
    found = attach(folder)
    assert all(daemon.alive for daemon in found.status().daemons)
    found.stop()
    assert related_to(folder) == []
    assert not folder.exists()


def test_a_daemon_that_does_not_come_up_is_quoted_and_nothing_stays(own_cluster, tmp_path):
    own_cluster(SMALL).stop()  # skips without the packages
    folder = tmp_path / "wrong"
    with pytest.raises(DevclusterError, match=r"slurmctld ended before it .*\n(.*\n)*.*Nonsense"):
        start_cluster(folder, dataclasses.replace(SMALL, more=("Nonsense=1",)))
    assert related_to(folder) == []
    assert not folder.exists()


def test_a_node_that_is_not_there_is_an_error(cluster):
    with pytest.raises(DevclusterError, match="no node 'rollout7'; the nodes are rollout0, reward0"):
        cluster.kill_node("rollout7")


# --- as an ordinary user ---


@pytest.mark.skipif(os.getuid() != 0, reason="every test of this file runs as an ordinary user already")
def test_an_ordinary_user_has_a_cluster_too(cluster):
    nobody = pwd.getpwnam("nobody")
    folder = Path(tempfile.mkdtemp(prefix="nobody-", dir="/tmp"))  # tmp_path is for its owner's eyes only
    os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    process = multiprocessing.get_context("fork").Process(target=_as_user, args=(nobody, folder))
    process.start()
    process.join(60)
    try:
        assert process.exitcode == 0
        assert (folder / "out").read_text() == "nobody 0\n"
        assert not (folder / "cluster").exists()
        assert related_to(folder) == []
    finally:
        shutil.rmtree(folder)


def _as_user(user: pwd.struct_passwd, folder: Path) -> None:
    os.setgroups([])
    os.setgid(user.pw_gid)
    os.setuid(user.pw_uid)
    os.environ["PATH"] = "/usr/bin:/bin"  # without the folders of daemons
    cluster = start_cluster(folder / "cluster")
    try:
        script = "echo $(id -un) $CUDA_VISIBLE_DEVICES"
        job = submit(cluster, script, "-preward", "--gpus-per-node=1", output=folder / "out")
        wait_for(cluster, job, "COMPLETED")
    finally:
        cluster.stop()


# --- on the command line ---


def test_up_env_status_and_down(cluster, slurm_ppo, environment, tmp_path):
    folder = tmp_path / "it's here"
    up = slurm_ppo("devcluster", "up", folder)
    assert up.returncode == 0, up.stderr
    assert "4 nodes are up" in up.stdout
    try:
        status = slurm_ppo("devcluster", "status", folder)
        assert status.returncode == 0
        assert "slurmd-update1" in status.stdout
        assert "node reward0         idle" in status.stdout
        exports = slurm_ppo("devcluster", "env", folder).stdout
        script = f"{exports}\nsinfo --noheader --Node --partition=update --format=%N"
        said = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True)
        assert said.stdout == "update0\nupdate1\n"
        attach(folder).kill_slurmd("reward0")
        broken = slurm_ppo("devcluster", "status", folder)
        assert broken.returncode == 1
        assert "slurmd-reward0       has ended" in broken.stdout
        again = slurm_ppo("devcluster", "up", folder)
        assert again.returncode == 2
        assert again.stderr.startswith("error: ")
        assert again.stderr.count("\n") == 1
    finally:
        down = slurm_ppo("devcluster", "down", folder)
    assert down.returncode == 0, down.stderr
    assert not folder.exists()


def test_next_commands_can_be_pasted(cluster, slurm_ppo, tmp_path):
    folder = tmp_path / "my cluster"
    up = slurm_ppo("devcluster", "up", folder)
    remove = next(line for line in up.stdout.splitlines() if line.startswith("remove it:"))
    words = shlex.split(remove.partition(":")[2])
    assert words[0] == "slurm-ppo"
    assert slurm_ppo(*words[1:]).returncode == 0
    assert not folder.exists()


@pytest.mark.parametrize("command", ["down", "status", "env"])
def test_where_no_cluster_is_the_commands_say_so(slurm_ppo, tmp_path, command):
    done = slurm_ppo("devcluster", command, tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"error: no development cluster in {tmp_path}\n"


def test_the_package_imports_nothing_heavy():
    code = (
        "import sys, slurm.devcluster, pipeline.cli.devcluster\n"
        "print(sorted({'torch', 'pyarrow', 'numpy', 'pydantic', 'submitit', 'stages'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
