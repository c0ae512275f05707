"""What a card cannot compute in is refused before a task fails on it."""

import json
import subprocess
import sys

import pytest

from pipeline.checks.finding import Verdict, line
from pipeline.checks.machine import judge_cards
from pipeline.checks.nodes import aims_of, judge_node
from pipeline.run.cards import capability_of, format_problems, formats_of, is_built_for, missing_code
from slurm import probe_task
from slurm.probe import ProbeResult
from tests.support.composed import composed_of

CU130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
"""What PyTorch's build for CUDA 13.0 has code for."""
CU126 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]
CARDS = {"V100": (7, 0), "T4": (7, 5), "A100": (8, 0), "L40S": (8, 9), "H100": (9, 0), "B200": (10, 0)}


@pytest.fixture
def config(inputs, tmp_path):
    def call(*words):
        engines = ("rollout.engine=vllm", "reward.engine=transformers", "update.engine=deepspeed")
        return composed_of(inputs, tmp_path / "run", *engines, "update.zero_stage=1", *words)

    return call


@pytest.mark.parametrize(
    ("card", "build", "has_code"),
    [
        *((card, CU130, card != "V100") for card in CARDS),
        *((card, CU126, card != "B200") for card in CARDS),
        ("L40S", ["sm_80"], True),  # of the same generation, and earlier
        ("A100", ["sm_86"], False),
        ("H100", ["sm_90a"], True),
        ("B200", ["sm_90", "compute_90"], True),  # compiled by the driver
        ("V100", [], True),  # nothing is known of the build
    ],
)
def test_builds_have_code_for_cards(card, build, has_code):
    assert is_built_for(CARDS[card], build) == has_code
    said = missing_code(card, CARDS[card], "2.13.0 (CUDA 13.0)", build)
    assert bool(said) != has_code
    assert has_code or f"no code for {card} (compute capability" in said


@pytest.mark.parametrize(
    ("words", "job_kind", "keys"),
    [
        ([], "rollout", ["rollout.precision"]),  # vLLM's of an update in fp32
        ([], "evaluate", ["rollout.precision"]),
        ([], "update", []),
        ([], "driver", []),
        (["update.precision=bf16"], "update", ["update.precision"]),
        (["update.precision=bf16"], "reward", ["reward.precision"]),
        (["update.precision=bf16"], "evaluate", ["reward.precision", "rollout.precision"]),
        (["update.precision=bf16"], "prepare", []),
        (["update.precision=bf16", "rollout.precision=fp16"], "rollout", []),
        (["update.precision=fp16"], "update", []),
        (["update.precision=fp16", "update.attention=flash_attention_2"], "update", ["update.attention"]),
    ],
)
def test_a_stage_needs_what_its_own_engines_compute_in(config, words, job_kind, keys):
    model = ["reward.components={rm: {kind: model, path: /models/rm}}", "evaluate.every=1"]
    formats = formats_of(config(*model, *words), job_kind)
    for card in ("V100", "T4"):
        assert sorted(issue.key for issue in format_problems(formats, CARDS[card], "here")) == keys
    assert not list(format_problems(formats, CARDS["A100"], "here"))


def test_a_probe_of_an_old_card_refuses_bf16_of_the_stage_that_goes_there(config):
    given = config(
        *("scheduler=slurm", "update.precision=bf16", "rollout.precision=bf16"),
        *("scheduler.rollout.partition=v100", "scheduler.update.partition=a100"),
    )
    aims = {aim.stages: aim for aim in aims_of(given)}
    rollout = next(aim for stages, aim in aims.items() if "rollout" in stages)
    update = next(aim for stages, aim in aims.items() if "update" in stages)

    def said(aim, *capabilities):
        seen = ProbeResult("gpu07", "3.11.7", {}, [], {}, 1, capabilities=capabilities)
        return [line(found) for found in judge_node("it", aim, seen)]

    (refused,) = said(rollout, "7.0")
    assert refused == (
        "node for it: rollout.precision=bf16: the GPUs on node gpu07 have compute capability 7.0, and bf16 "
        "needs 8.0; give rollout.precision=fp16, or other GPUs"
    )
    assert said(rollout, "8.0", "7.0") == [refused], "the oldest of them"
    assert said(update, "8.0") == [
        "node for it: gpu07, Python 3.11.7, GPUs: 1 of compute capability 8.0; what the stage needs is there"
    ]
    assert said(rollout) == ["node for it: gpu07, Python 3.11.7, GPUs: 1; what the stage needs is there"]


def test_doctor_refuses_formats_and_builds_that_the_cards_of_this_machine_do_not_take(config):
    facts = {"version": "2.13.0", "cuda": "13.0", "cards": [["Tesla V100", 7, 0], ["A100", 8, 0]]}
    facts["architectures"] = CU130
    found = list(judge_cards(facts, config("update.precision=bf16")))
    assert {one.verdict for one in found} == {Verdict.PROBLEM}
    assert [one.measured.partition(" ")[0] for one in found] == [
        *("torch", "rollout.precision=bf16:", "reward.precision=bf16:", "update.precision=bf16:"),
    ]
    assert not list(judge_cards({**facts, "cards": [["A100", 8, 0]]}, config("update.precision=bf16")))
    assert [one.title for one in judge_cards(facts, None)] == ["PyTorch"]


DRIVER = """
int cuInit(unsigned flags) { return FAILS; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? 7 : attribute == 76 ? 5 * device : -1;
    return 0;
}
"""
"""Of a driver with a V100 and a T4."""


@pytest.mark.parametrize(("fails", "seen"), [(0, ["7.0", "7.5"]), (100, [])])
def test_a_probe_asks_the_driver_for_what_its_cards_can(tmp_path, fails, seen):
    library = tmp_path / "libcuda.so.1"
    command = ["cc", "-shared", "-fPIC", f"-DFAILS={fails}", "-x", "c", "-", "-o", library]
    subprocess.run(command, input=DRIVER, text=True, check=True)
    request = json.dumps({"modules": [], "paths": [], "programs": []})
    program = [sys.executable, "-P", probe_task.__file__, request, tmp_path / "answer"]
    subprocess.run(program, env={"LD_LIBRARY_PATH": str(tmp_path)}, check=True)
    answer = ProbeResult(**json.loads((tmp_path / "answer").read_text()))
    assert answer.capabilities == seen
    assert capability_of("10.3") == (10, 3)
