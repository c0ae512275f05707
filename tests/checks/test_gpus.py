"""What is wrong with GPUs before anything computes on them. They are only pretended."""

import pytest

from pipeline.checks.nodes import trial_source
from pipeline.config.issue import ConfigError
from pipeline.config.resolve import resolve
from pipeline.config.rules import contradictions
from pipeline.executors.local_limits import describe_gpus, local_limits
from pipeline.gpus import unknown_to_vllm
from slurm import probe_task
from tests.support.composed import composed_of

OWN = "each rank computes on a GPU of its own, and scheduler.update."


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "scheduler=slurm scheduler.update.ntasks_per_node=4 scheduler.update.gpus_per_node=1",
            "gpus_per_node=1",
        ),
        (
            "scheduler=slurm scheduler.update.ntasks_per_node=4 scheduler.update.gpus_per_node=h100:2",
            "=h100:2",
        ),
        (
            "scheduler=slurm scheduler.update.ntasks_per_node=4 scheduler.update.gpus_per_node=null "
            "scheduler.update.gres=gpu:a100:2",
            "gres=gpu:a100:2",
        ),
        ("scheduler=allocation scheduler.update.ntasks_per_node=2", "gpus_per_node=1"),
        ("scheduler.update.ranks=4 scheduler.update.gpus=2", "gpus=2"),
        ("scheduler=slurm scheduler.update.nodes=2", None),
        ("scheduler=slurm scheduler.update.ntasks_per_node=4 scheduler.update.gpus_per_node=4", None),
        ("scheduler=slurm scheduler.update.ntasks_per_node=4 scheduler.update.gpus_per_node=null", None),
        ("scheduler.update.ranks=4 scheduler.update.gpus=0", None),
        ("scheduler.update.ranks=4", None),
    ],
)
def test_an_update_whose_ranks_would_share_a_gpu_is_refused(inputs, tmp_path, words, said):
    found = list(contradictions(composed_of(inputs, tmp_path / "run", *words.split())))
    if said is None:
        assert found == []
        return
    (line,) = map(str, found)
    ranks = 2 if "allocation" in words else 4
    assert line.partition(": ")[0] in (f"scheduler.update.{n}={ranks}" for n in ("ranks", "ntasks_per_node"))
    assert OWN in line
    assert said in line
    assert f"ask for {ranks} there, or give scheduler.update." in line


# --- names that vLLM reads as others ---

WHOLE = "GPU-8f1c2a3b-0000-1111-2222-333344445555"


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ((), ""),
        (("0", "11"), ""),
        ((WHOLE, "3"), ""),
        ((WHOLE, "GPU-8f1c"), "vLLM does not find GPU-8f1c; give numbers, or whole UUIDs as nvidia-smi -L"),
        (("MIG-5555",), "vLLM takes MIG-5555, a part of a GPU (MIG), for another GPU; give whole GPUs"),
        (("MIG-GPU-8f1c/1/0",), "vLLM takes MIG-GPU-8f1c/1/0, a part of a GPU (MIG), for another GPU"),
    ],
)
def test_names_that_vllm_cannot_look_up(names, said):
    found = unknown_to_vllm(names)
    assert found.startswith(said)
    assert bool(found) == bool(said)


@pytest.mark.parametrize("plan", [local_limits, lambda config: list(describe_gpus(config))])
def test_a_run_with_vllm_on_parts_of_gpus_is_refused_before_it_begins(inputs, tmp_path, plan):
    words = ("scheduler.gpus=[0,MIG-5555]", "rollout.engine=vllm")
    with pytest.raises(ConfigError) as refusal:
        plan(resolve(composed_of(inputs, tmp_path / "run", *words)))
    assert str(refusal.value) == (
        "scheduler.gpus (scheduler.gpus=0,MIG-5555): vLLM takes MIG-5555, a part of a GPU (MIG), for another "
        "GPU; give whole GPUs, or take engine=transformers"
    )
    plan(resolve(composed_of(inputs, tmp_path / "run", words[0])))


# --- GPUs that are there and do not compute ---

TORCH = """
class cuda: device_count = staticmethod(lambda: 2)
class version: cuda, hip = '12.8', None
class Ones:
    def __matmul__(self, other): return self
    def sum(self): return 512
"""
NODES = {
    # torch on the node: what the probe says
    "computes": ("def ones(*shape, device): return Ones()", ""),
    "too old": (
        "def ones(*shape, device): raise RuntimeError('The NVIDIA driver is too old\\n...')",
        "RuntimeError: The NVIDIA driver is too old",
    ),
    "full": ("def ones(*shape, device): raise RuntimeError('CUDA out of memory. Tried')", ""),
    "wrong numbers": (
        "def ones(*shape, device): return Ones()\nOnes.sum = lambda self: 511",
        "GPU 0 computes wrong",
    ),
    "none": ("cuda.device_count = lambda: 0", "PyTorch sees no GPU"),
    "hangs": ("import time\ndef ones(*shape, device): time.sleep(60)", "no answer in 1 s"),
    "aborts": (
        "import os\ndef ones(*shape, device): os.abort()",
        "a process that tried them ended with exit code -6",
    ),
    "slow import": ("import time\ntime.sleep(60)", ""),
    "not installed": ("raise ImportError", ""),
    "for CPUs": ("version.cuda = None", ""),
}


@pytest.mark.parametrize("name", list(NODES))
def test_a_probe_tries_the_gpus_of_its_node(tmp_path, monkeypatch, name):
    source, said = NODES[name]
    (tmp_path / "torch.py").write_text(f"{TORCH}{source}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(probe_task, "_NVIDIA", str(tmp_path))
    monkeypatch.setattr(probe_task, "_TRIAL_SECONDS", 1 if name in ("hangs", "slow import") else 60)
    found = probe_task.trial_error(trial_source())
    assert found.startswith(said)
    assert bool(found) == bool(said)


def test_a_node_without_the_driver_starts_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(probe_task, "_NVIDIA", str(tmp_path / "nothing"))
    monkeypatch.setattr(probe_task.subprocess, "Popen", None)
    assert probe_task.trial_error("raise SystemExit") == ""
