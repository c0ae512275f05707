"""A rehearsal names what is wrong with a machine before a run meets it, never hangs, and leaves nothing."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pipeline.checks import rehearsal, rehearsal_list, rehearsal_record
from pipeline.checks.finding import Finding, Verdict
from pipeline.checks.nodes import Aim
from pipeline.checks.rehearsal import CheckEnd, RehearsalRequest, RehearsalRunner, judge, judge_killed
from pipeline.checks.rehearsal_list import CHECKS, RehearsalCheck, Role, chosen
from pipeline.checks.rehearsal_places import SENT, RehearsalOptions, aims_for, in_place, probe_for
from pipeline.cli.app import main
from pipeline.config.scheduler import ResourcesConfig, resources_of
from pipeline.executors.slurm.resources import command_words
from slurm.limits import parse_partitions
from slurm.probe import Probe, ProbeResult, ProbeTimeout
from tests.support import ROOT
from tests.support.composed import composed_of
from tests.support.tables import IS_SOAK

FAULTS = "tests.support.rehearsed"
PRELOAD = rehearsal.PRELOAD


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rehearsal, "PRELOAD", ("stages.rehearsal.program", FAULTS))


def check(name: str, function: str, **more: object) -> RehearsalCheck:
    return RehearsalCheck(name, function, "", "all of it", is_short=True, **more)


def with_checks(monkeypatch: pytest.MonkeyPatch, *checks: RehearsalCheck) -> None:
    for module in (rehearsal, rehearsal_list):
        monkeypatch.setattr(module, "CHECKS", checks)


def typed(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str]:
    """Exit code and output of the command."""
    monkeypatch.setattr(sys, "argv", ["slurm-ppo", "rehearse", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capfd.readouterr()
    return int(ended.value.code or 0), out + err


# --- what processes meet ---

IN_PROCESSES = {
    "hangs": ("it hung: no end in 3 s, so it was ended; its log ends with: waiting for the driver", 1),
    "dies": ("its process gave no answer (killed by signal 9", 1),
    "leaves": (
        "its process gave no answer (ended with exit code 3); its log ends with: the licence has ended",
        1,
    ),
    "differs": ("the loss is 7", 1),
    "refuses": ("CUDA_VISIBLE_DEVICES=7: none of these GPUs can be used on this node", 1),
    "fills_the_disk": ("OSError: [Errno 28] No space left on device: 'policy-file'", 1),
    "has_an_old_driver": (
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
        1,
    ),
    "one_rank_never_comes": ("rank 0 waited 8 s for ranks [1] of 2", 2),
    "second_rank_dies": ("its process gave no answer (rank 1 of 2 killed by signal 9", 2),
}


def test_each_fault_is_named_with_a_way_out_and_the_others_are_made(tmp_path, monkeypatch, capfd):
    faults = [
        check(name, f"{FAULTS}:{name}", limit=3.0 if name == "hangs" else 60.0, sizes=(ranks,))
        for name, (_, ranks) in IN_PROCESSES.items()
    ]
    with_checks(
        monkeypatch,
        *faults,
        check("works", f"{FAULTS}:works"),
        check("is_elsewhere", f"{FAULTS}:is_elsewhere"),
    )
    code, out = typed(capfd, monkeypatch, "--json")
    assert code == 1
    report = json.loads(out)
    found = {one["title"]: one for one in report["findings"]}
    for name, (said, _) in IN_PROCESSES.items():
        assert said in found[name]["measured"]
        assert found[name]["verdict"] == "problem"
        assert found[name]["advice"]
    assert found["works"]["measured"] == "it computes"
    assert found["works"]["numbers"]["answer"] == 42
    assert found["works"]["numbers"]["seconds"] > 0
    assert found["is_elsewhere"]["measured"] == "not shown here: needs a GPU"
    assert report["problems"] == len(IN_PROCESSES)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_processes_get_devices_of_their_own_and_those_that_find_none_are_not_started(tmp_path, monkeypatch):
    names = {"one": {}, "ranks": {"sizes": (2,)}, "split": {"devices": 2}, "both": {"sizes": (1, 2)}}
    missing = "not shown here: needs 2 GPUs, there are 1"
    with_checks(monkeypatch, *(check(name, f"{FAULTS}:names", **more) for name, more in names.items()))
    for devices, said in (
        (("3",), ["3", missing, missing, f"{missing}; shown without: 3"]),
        (("3", "5"), ["3", "3,5", "3,5", "3,5"]),
    ):
        place = tmp_path / str(len(devices))
        place.mkdir()
        with RehearsalRunner(RehearsalRequest((*names,), len(devices), devices), place) as runner:
            assert [one.measured for one in runner.findings()] == said


def test_libraries_that_cannot_be_imported_are_named_once(tmp_path, monkeypatch):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", f"{broken}{os.pathsep}{ROOT}")
    driver = next(one for one in CHECKS if one.name == "driver")
    with_checks(monkeypatch, driver, check("zero", f"{FAULTS}:works", role=Role.TRAINS))
    with RehearsalRunner(RehearsalRequest(("driver", "zero")), tmp_path) as runner:
        first, second = runner.findings()
    assert first.verdict is Verdict.PROBLEM
    assert first.measured == "OSError: libcudart.so.13: cannot open shared object file"
    assert second.measured == "not shown here: needs driver, see above"


def test_what_starts_no_process_is_said():
    one = check("all-reduce", "")
    missing = judge(one, CheckEnd(0.0, refused="srun cannot be started: No such file or directory"), [], "")
    assert missing == Finding(
        "all-reduce",
        Verdict.SKIPPED,
        "not shown here: srun cannot be started: No such file or directory",
    )
    ended = judge(
        one, CheckEnd(1.0, 1, note="the server of processes ended: [Errno 32] Broken pipe"), [None], ""
    )
    assert "the server of processes ended" in ended.measured


def test_a_rank_that_fails_before_the_others_meet_it_says_why():
    missed = {"verdict": "problem", "measured": "rank 0 waited 120 s for ranks [1] of 2", "advice": "look"}
    cause = {"verdict": "problem", "measured": "rank 1 sees no GPU", "advice": "ask for one", "missed": False}
    answers = [missed | {"missed": True, "numbers": {}}, cause | {"numbers": {}}]
    found = judge(check("all-reduce", ""), CheckEnd(121.0, 1), answers, "")
    assert (found.measured, found.advice) == ("rank 1 sees no GPU", "ask for one")
    found = judge(check("all-reduce", ""), CheckEnd(121.0, 1), [answers[0], None], "")
    assert (found.measured, found.advice) == ("rank 0 waited 120 s for ranks [1] of 2", "look")


def test_ranks_say_whom_they_wait_for_long_before_a_check_is_ended():
    from stages.rehearsal.meeting import MEETING_SECONDS

    with_ranks = [one for one in CHECKS if max(one.sizes) > 1]
    assert min(one.limit for one in with_ranks) >= 2 * MEETING_SECONDS


def test_ranks_that_outlive_one_that_was_killed_are_a_finding():
    one = check("killed-rank", "")
    assert judge_killed(one, 5.0).verdict is Verdict.OK
    assert judge_killed(one, 1800.0).measured == "all ranks had ended 1800.0 s after one was killed"
    assert judge_killed(one, 1800.0).verdict is Verdict.PROBLEM


# --- jobs ---

AIM = Aim(("rollout", "evaluate"), ResourcesConfig())
ANSWER = ProbeResult("gpu7", "3.12.1", {}, [], {}, None)


def probes_of(inputs: Path, folder: Path, *words: str, is_short: bool = False) -> dict[str, Probe]:
    """The jobs of a rehearsal on a cluster whose partition rm allows half an hour."""
    config = composed_of(inputs, folder / "run", "scheduler=slurm", *words)
    known = parse_partitions("PartitionName=rm MaxTime=00:30:00\nPartitionName=gpu MaxTime=UNLIMITED", "")
    place = folder / "rehearsal"
    place.mkdir()
    for name in (SENT, f"{SENT}.digest"):
        (place / name).touch()
    wanted = RehearsalOptions(config, is_short=is_short)
    return {aim.name: probe_for(wanted, config, aim, place, known) for aim in aims_for(wanted, config)}


def requested(inputs: Path, folder: Path, *words: str, is_short: bool = False) -> dict[str, RehearsalRequest]:
    sent = probes_of(inputs, folder, *words, is_short=is_short)
    return {name: RehearsalRequest(**json.loads(probe.run[1])) for name, probe in sent.items()}


def test_a_job_asks_for_no_more_time_than_its_partition_allows(inputs, tmp_path):
    sent = probes_of(inputs, tmp_path, "scheduler.reward.partition=rm", "scheduler.update.partition='gpu,rm'")
    times = {name: probe.time for name, probe in sent.items()}
    assert {name: times[name] for name in ("rollout", "reward", "update")} == {
        "rollout": "0-01:00:00",
        "reward": "0-00:30:00",
        "update": "0-00:30:00",
    }


RANKS = ("update.nodes=2", "update.ntasks_per_node=2", "update.gpus_per_node=2", "update.cpus_per_task=3")


def test_ranks_are_those_of_an_update_although_other_stages_go_to_its_partition(
    inputs, tmp_path, monkeypatch
):
    words = [f"scheduler.{word}" for word in (*RANKS, "rollout.gpus_per_node=2")]
    words.append("scheduler.update.container='apptainer exec /images/ppo.sif'")
    sent = probes_of(inputs, tmp_path, *words, "scheduler.rollout.container='apptainer exec /images/ppo.sif'")
    asked = {"nodes": 2, "ntasks-per-node": 2, "gpus-per-node": "2", "cpus-per-task": 3}
    assert asked.items() <= sent["update"].options.items()
    request = RehearsalRequest(**json.loads(sent["update"].run[1]))
    assert (request.ranks, RehearsalRequest(**json.loads(sent["rollout"].run[1])).launcher) == (4, [])
    with_checks(monkeypatch, check("sum", "somewhere:sum", sizes=(2,)))
    (tmp_path / "srun").write_text(f'#!/bin/sh\necho "$@" >{tmp_path / "said"}\n')
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with RehearsalRunner(replace(request, names=("sum",)), tmp_path) as runner:
        (found,) = runner.findings()
    assert found.measured == "its process gave no answer (ended with exit code 0)"
    config = composed_of(inputs, tmp_path / "run", "scheduler=slurm", *words)
    real = command_words(resources_of(config.slurm, "update"), "TASKS")
    same = real[1 : real.index("slurm.element")]
    assert {"--ntasks-per-node=2", "--cpus-per-task=3", "apptainer"} < set(same)
    assert (tmp_path / "said").read_text().split()[1 : len(same) + 2] == [*same, "slurm.step"]


def said_of(
    tmp_path: Path, answer: ProbeResult | ProbeTimeout, *before: Finding
) -> list[tuple[str, str, str]]:
    (tmp_path / "findings.json").write_text(json.dumps([asdict(one) for one in before]))
    return [(one.title, str(one.verdict), one.measured) for one in in_place(AIM, answer, tmp_path)]


def test_a_job_that_has_come_to_its_end(tmp_path):
    found = said_of(tmp_path, ANSWER, Finding("driver", Verdict.OK, "H100"))
    assert found == [("rollout, evaluate: driver", "ok", "H100")]


def test_a_job_that_was_killed_half_way_keeps_what_it_has_found(tmp_path):
    lost = ProbeTimeout("job 12 on gpu7 left no answer (OUT_OF_MEMORY)", is_late=False, has_spoken=True)
    found = said_of(tmp_path, lost, Finding("driver", Verdict.OK, "H100"))
    assert found[1] == ("rollout, evaluate: job", "problem", "job 12 on gpu7 left no answer (OUT_OF_MEMORY)")


def test_a_partition_without_a_free_node_is_not_a_failure(tmp_path):
    found = said_of(tmp_path, ProbeTimeout("Resources", is_late=True))
    assert found == [
        ("rollout, evaluate: job", "skipped", "not shown here: its job did not end in time (Resources)")
    ]


def test_a_node_without_the_program_is_named(tmp_path):
    broken = ProbeResult("gpu7", "3.12.1", {"pipeline": "not installed"}, [], {}, None, exit_code=1)
    (finding,) = in_place(AIM, broken, tmp_path)
    assert finding.measured == "its program ended with code 1 on gpu7 after 0 checks"
    assert finding.advice == "install there what is missing: pipeline: not installed"


# --- all of it ---


@pytest.mark.soak
@pytest.mark.skipif(not IS_SOAK, reason="takes a quarter of an hour: make soak")
def test_the_whole_list_comes_to_its_end_on_this_machine(monkeypatch, capfd):
    monkeypatch.setattr(rehearsal, "PRELOAD", PRELOAD)
    code, out = typed(capfd, monkeypatch, "--json")
    report = json.loads(out)
    found = {one["title"]: one for one in report["findings"]}
    assert code == 0, [one for one in report["findings"] if one["verdict"] == "problem"]
    assert found.keys() == {one.name for one in CHECKS} | {"GPUs"}
    only_with_gpus = {one.name for one in CHECKS if not one.on_cpus} | {"own-device"}
    assert {name for name, one in found.items() if one["verdict"] == "skipped"} == {*only_with_gpus, "GPUs"}


# --- choosing ---


def test_job_kinds_are_rehearsed_in_what_they_do():
    assert "zero" not in chosen((), False, ("rollout",))
    assert "vllm" not in chosen((), False, ("update",))
    assert "vllm" in chosen((), False, ("score-big",))
    assert chosen((), False, ("prepare",)) == ("driver", "forked", "spawned", "device-names", "storage")
    assert set(chosen((), False)) == {one.name for one in CHECKS}
    assert {"transformers", "zero"} < set(chosen((), True)) < set(chosen((), False))
    assert chosen(("zero",), True, ("rollout",)) == ()


def test_the_short_list_has_the_engine_of_the_run(inputs, tmp_path):
    engines = {"transformers", "vllm", "vllm-split", "vllm-reload", "warned-vllm", "memory-vllm"}
    for needs_vllm, one in ((False, "transformers"), (True, "vllm")):
        assert engines & set(chosen((), True, needs_vllm=needs_vllm)) == {one}
        assert engines <= set(chosen((), False, needs_vllm=needs_vllm))
    assert chosen(("transformers",), True, needs_vllm=True) == ("transformers",)
    words = ("rollout.engine=vllm", "scheduler.reward.partition=rm")
    requests = requested(inputs, tmp_path, *words, is_short=True)
    assert ("vllm" in requests["rollout"].names, requests["rollout"].needs_vllm) == (True, True)
    assert ("transformers" in requests["reward"].names, requests["reward"].needs_vllm) == (True, False)


def test_a_check_that_does_not_exist_is_refused_with_those_that_do(tmp_path, monkeypatch, capfd):
    code, said = typed(capfd, monkeypatch, "--only", "storage,nvlink")
    assert code == 2
    assert "--only: there is no check nvlink; choose of driver, forked, spawned, device-names" in said
    assert list(tmp_path.iterdir()) == []


# --- the record ---


def test_doctor_shows_the_last_rehearsal(tmp_path, monkeypatch, capfd):
    assert rehearsal_record.last_rehearsal() == []
    with_checks(monkeypatch, check("good", f"{FAULTS}:works"), check("bad", f"{FAULTS}:differs"))
    code, out = typed(capfd, monkeypatch)
    assert code == 1
    assert "1 ok, 1 failed, 1 not shown here" in out
    assert "GPUs: not shown here: none is used. What CPUs have shown: good: all of it" in " ".join(
        out.split()
    )
    (found,) = rehearsal_record.last_rehearsal()
    assert found.verdict is Verdict.WARNING
    assert "failed: bad" in found.measured


def test_a_record_that_cannot_be_read_is_no_record(tmp_path):
    path = rehearsal_record.record_path()
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert rehearsal_record.last_rehearsal() == []


def test_the_command_imports_no_torch():
    code = "import sys, pipeline.checks.rehearsal_places; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.strip() == "False"
