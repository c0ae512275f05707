"""Where GPUs can be counted without CUDA, and where nothing may be imported before a task is forked.

The library of NVIDIA's driver is pretended, as is that torch is built for CUDA; what decides is all real.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.cli.run import modules_to_preload
from pipeline.config.compose import compose
from pipeline.run import nvml as asking
from pipeline.run.environment import TASK_ENVIRONMENT
from pipeline.run.gpus import ask_nvml, fork_hazard
from tests.support import ROOT, nvml

UNCOUNTED = (
    "GPUs cannot be counted without initialising CUDA (NVML: Driver/library version mismatch (error 18))"
)
CASES = {
    # what the driver's library and the environment say: why nothing is imported, and the accelerator
    "no library": ({}, "GPUs cannot be counted without initialising CUDA (libnvidia-ml.so.1:", "cuda"),
    "two GPUs": ({"NVML_COUNT": 2}, "", "cuda"),
    "two GPUs, one of them given by its whole UUID": (
        {"NVML_COUNT": 2, "CUDA_VISIBLE_DEVICES": "GPU-00000001-0000-0000-0000-000000000000"},
        "",
        "cuda",
    ),
    "none that this job may open": ({"NVML_COUNT": 0}, "", "cpu"),
    "none given": ({"NVML_COUNT": 2, "CUDA_VISIBLE_DEVICES": "NoDevFiles"}, "", "cpu"),
    "divided, and all seen": ({"NVML_COUNT": 2, "NVML_MIG": 1}, "", "cuda"),
    "divided, and a part given": (
        {"NVML_COUNT": 2, "NVML_MIG": 1, "CUDA_VISIBLE_DEVICES": "MIG-5555"},
        "CUDA_VISIBLE_DEVICES names parts of GPUs (MIG), which only CUDA itself can count",
        "cuda",
    ),
    "another version of the driver": ({"NVML_ERROR": 18}, UNCOUNTED, "cuda"),
    "GPUs without identifiers": (
        {"NVML_COUNT": 1, "NVML_UUID_ERROR": 999, "CUDA_VISIBLE_DEVICES": "GPU-0"},
        "GPUs cannot be counted without initialising CUDA (NVML: Unknown Error (error 999))",
        "cuda",
    ),
}


@pytest.fixture(scope="module")
def devices(tmp_path_factory) -> Path:
    """The folder of device files of a machine with a GPU."""
    folder = tmp_path_factory.mktemp("dev")
    (folder / "nvidia0").touch()
    return folder


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    return nvml.built(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="module")
def decided(devices, library, tmp_path_factory) -> dict:
    """What was decided in each case, by one process that imports torch and its forks."""
    late = tmp_path_factory.mktemp("late")
    hidden, shown = library / asking.LIBRARY, late / asking.LIBRARY
    cases = [
        {**TASK_ENVIRONMENT, **dict(zip(c, map(str, c.values()), strict=True))} for c, *_ in CASES.values()
    ]
    copy = library / "copy"
    copy.write_bytes(hidden.read_bytes())
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.pretended_cuda", str(devices), str(copy), str(shown)],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=nvml.environment(late, {}),
        check=True,
    )
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("case", list(CASES))
def test_what_is_decided_without_touching_the_driver(decided, case):
    _, hazard, accelerator = CASES[case]
    found = decided[case]
    assert found["hazard"].startswith(hazard)
    assert bool(found["hazard"]) == bool(hazard)
    assert not found["called by us"]
    assert not found["is initialized"]
    assert found["called by PyTorch"] == bool(hazard), "it must be right about what PyTorch would do"
    assert found["accelerator"] == accelerator


def test_a_machine_without_gpus_asks_nothing(tmp_path, devices):
    def ask() -> str:
        raise AssertionError("nothing is to be asked")

    assert fork_hazard({}, tmp_path, ask) == ""
    assert fork_hazard({"CUDA_VISIBLE_DEVICES": "-1"}, devices, ask) == ""
    (tmp_path / "kfd").touch()
    assert "AMD" in fork_hazard({}, tmp_path, ask)


def test_a_driver_that_hangs_is_not_waited_for(monkeypatch, devices, tmp_path):
    program = tmp_path / "hangs.py"
    program.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(asking, "__file__", str(program))
    monkeypatch.setattr("pipeline.run.gpus._NVML_SECONDS", 0.1)
    assert ask_nvml() == "no answer in 0.1 s"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("print('a note of the library'); print('{\"problem\": \"off\"}')", "off"),
        ("print('{\"uuids\": []}')", ""),
        ("", "the program that asks it gave no answer"),
        ("print('{\"uuids\"')", "the program that asks it gave no answer"),
        ("import os; os.abort()", "the program that asks it ended with exit code -6"),
    ],
)
def test_what_the_drivers_library_writes_is_no_answer(monkeypatch, tmp_path, source, said):
    program = tmp_path / "asks.py"
    program.write_text(source)
    monkeypatch.setattr(asking, "__file__", str(program))
    assert ask_nvml() == said


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list[str]:
    """Settings of a run with models, of which only the kind is looked at."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return [f"model.policy={folder}", f"reward.components.rm.path={folder}"]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"NVML_COUNT": 2}, ""),
        ({"NVML_ERROR": 18}, "NVML: Driver/library version mismatch (error 18)"),
        (None, "libnvidia-ml.so.1: cannot open shared object file: No such file or directory"),
    ],
)
def test_the_driver_says_why_no_gpu_can_be_used(monkeypatch, library, told, said):
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    for name, value in nvml.environment(library if told else None, told or {}).items():
        monkeypatch.setenv(name, value)
    assert ask_nvml() == said


def test_where_cuda_would_be_initialised_no_library_is_imported_ahead(words):
    config = compose(["experiment=quickstart_vllm", *words, "scheduler.update.ranks=2"])
    assert modules_to_preload(config, hazard="MIG") == ["stages.preload"]
    ahead = modules_to_preload(config, hazard="")
    assert {"stages.preload", "stages.preload.models", "stages.preload.vllm", "stages.ranks"} <= set(ahead)


FORKS = """
import os, sys
from pathlib import Path
from pipeline.executors.forking import Rank, fork, preload
from pipeline.run.gpus import fork_hazard
from pipeline.cli.run import modules_to_preload
from pipeline.config.compose import compose
devices, log, *words = sys.argv[1:]
hazard = fork_hazard(os.environ, Path(devices))
preload(["tests.support.pretended_cuda", *modules_to_preload(compose(words), hazard)])
(process,), _ = fork("tests.support.pretended_cuda:report", [Rank((), dict(os.environ), Path(log))])
process.join()
sys.exit(process.exitcode)
"""


@pytest.mark.trial(1 / 2)
@pytest.mark.parametrize("case", ["two GPUs", "divided, and a part given"])
def test_the_server_that_tasks_are_forked_from_has_not_touched_the_driver(
    tmp_path, devices, library, words, case
):
    """It imports DeepSpeed for CUDA and transformers where GPUs can be counted, and neither where not."""
    told, hazard, _ = CASES[case]
    log = tmp_path / "log"
    places = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**nvml.environment(library, told), **TASK_ENVIRONMENT, "PYTHONPATH": places}
    command = [sys.executable, "-c", FORKS, str(devices), str(log), "experiment=quickstart", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(log.read_text().splitlines()[-1]) == {
        "called": False,
        "is initialized": False,
        "torch": [] if hazard else ["deepspeed", "transformers"],
    }
