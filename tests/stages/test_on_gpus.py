"""What tasks do otherwise on a GPU, as far as that shows without one: a card is pretended."""

import subprocess
import sys

import pytest
import torch

from pipeline.config.update import Precision
from pipeline.run.environment import TASK_ENVIRONMENT
from stages.context import UserError
from stages.engines import vllm
from stages.engines.vllm import make_generator, make_scorer
from stages.models import loading
from stages.models.loading import load_causal_lm, placement
from stages.models.numerics import is_deterministic
from stages.ppo.critics import load_critic
from stages.ppo.forward import packing_problem
from tests.support.processes import config_of


@pytest.fixture
def card(monkeypatch):
    """A card of this compute capability: the fourth that this process sees."""

    def call(major: int, minor: int = 0) -> None:
        monkeypatch.setattr(loading, "device", lambda: torch.device("cuda"))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, minor))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "some card")
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_90"])

    return call


def test_weights_go_straight_to_the_card_that_the_process_uses(card, monkeypatch):
    assert placement(None, Precision.BF16) == {}
    card(9)
    monkeypatch.setenv("LOCAL_RANK", "0")  # which transformers would take for "cuda"
    assert placement(None, Precision.BF16) == {"device_map": torch.device("cuda", 3)}
    assert placement("cpu", Precision.BF16) == {"device_map": "cpu"}  # shared out over ranks afterwards
    assert placement("auto", Precision.BF16) == {"device_map": "auto"}


def test_weights_that_go_straight_to_a_device_are_the_same(models):
    for load in (load_causal_lm, load_critic):
        usual = load(models / "policy", Precision.BF16, False)
        straight = load(models / "policy", Precision.BF16, False, device_map="cpu")
        assert usual.state_dict().keys() == straight.state_dict().keys()
        for name, weight in usual.state_dict().items():
            assert torch.equal(weight, straight.state_dict()[name])
        assert [p.requires_grad for p in usual.parameters()] == [
            p.requires_grad for p in straight.parameters()
        ]


@pytest.mark.parametrize("load", [load_causal_lm, load_critic])
def test_a_card_that_cannot_compute_a_model_is_refused_before_it_is_loaded(models, card, load):
    card(7)
    with pytest.raises(UserError, match=r"no code for some card \(compute capability 7\.0\), but for sm_75"):
        load(models / "policy", Precision.FP32, False)
    card(7, 5)
    with pytest.raises(
        UserError, match=r"some card: precision=bf16: .* 7\.5, and bf16 needs 8\.0; give .*fp16"
    ):
        load(models / "policy", Precision.BF16, False)


@pytest.mark.parametrize(
    ("stage", "directory", "make"),
    [("rollout", "policy", make_generator), ("reward", "reward_model", make_scorer)],
)
def test_vllm_is_not_started_on_a_card_that_cannot_compute_the_model(
    models, tmp_path, card, monkeypatch, stage, directory, make
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(vllm, "start", lambda *given: pytest.fail("vLLM was started"))
    config = config_of(models, tmp_path / "run", f"{stage}.engine=vllm", f"{stage}.precision=bf16")
    card(7, 5)
    with pytest.raises(UserError, match=rf"some card: {stage}\.precision=bf16: .* 7\.5, and bf16 needs 8\.0"):
        make(config, str(models / directory))
    card(7)
    with pytest.raises(UserError, match=r"no code for some card \(compute capability 7\.0\)"):
        make(config, str(models / directory))


@pytest.mark.parametrize(
    ("attention", "budget", "is_gpu", "is_refused"),
    [
        ("sdpa", 8193, True, True),
        ("eager", 16384, True, True),
        ("sdpa", 8192, True, False),
        ("flash_attention_2", 16384, True, False),
        ("flex_attention", 16384, True, False),
        ("sdpa", 16384, False, False),
    ],
)
def test_rows_are_not_packed_where_most_of_what_attention_computes_is_masked(
    attention, budget, is_gpu, is_refused
):
    said = packing_problem(attention, budget, is_gpu)
    assert bool(said) == is_refused
    assert not said or ("update.attention=flash_attention_2" in said and f"{attention} attention" in said)


def test_deterministic_kernels_are_left_out_with_the_workspace_that_they_need(monkeypatch):
    name = "CUBLAS_WORKSPACE_CONFIG"
    assert name not in TASK_ENVIRONMENT, "what a stage's environment gives would be lost"
    assert is_deterministic({name: ""}), "on CPUs they cost nothing"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert is_deterministic({name: ":4096:8"})
    assert not is_deterministic({name: ""})


def test_tf32_is_off_unless_the_environment_says_otherwise():
    """As docs/howto/gpus.md says. The variable is PyTorch's own."""
    assert not torch.backends.cuda.matmul.allow_tf32
    given = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    program = "import torch; print(torch.backends.cuda.matmul.allow_tf32)"
    done = subprocess.run([sys.executable, "-c", program], env=given, capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr
