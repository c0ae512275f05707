"""What a configuration needs of its GPUs, and what would make it fit."""

import re
from dataclasses import replace

import pytest

from pipeline.checks.finding import Verdict
from pipeline.checks.memory import card_of_job, check_memory
from pipeline.config.algorithm import ReferenceStage
from pipeline.config.reward import RewardModelConfig
from pipeline.config.scheduler import ResourcesConfig
from pipeline.config.update import LoraConfig, UpdateConfig
from pipeline.forecast.cards import card_named
from pipeline.forecast.parts import GIB
from pipeline.forecast.shapes import read_shape
from pipeline.forecast.stages import stage_needs, update_need
from slurm.limits import NodeKind, Partition
from stages.engines.base import SequenceLimits
from stages.engines.vllm_arguments import scorer_arguments
from tests.support import tiny
from tests.support.large_models import eight_billion
from tests.support.processes import config_of


@pytest.fixture
def policy(inputs, tmp_path):
    return eight_billion(tmp_path / "policy", inputs / "policy")


@pytest.fixture
def config(inputs, policy, tmp_path):
    """Eight billion weights on one rank, in fp32, beside a critic of as many."""
    found = config_of(inputs, tmp_path / "run")
    model = replace(found.model, policy=str(policy), context_length=8192)
    rollout = replace(found.rollout, engine="transformers", max_new_tokens=1024, precision=None)
    reward = replace(found.reward, precision=None)  # as the update's, which tests change
    update = UpdateConfig(engine="deepspeed")
    return replace(found, model=model, rollout=rollout, reward=reward, update=update)


def test_what_cannot_fit_is_refused_and_fits_with_the_words_that_are_proposed(
    inputs, policy, tmp_path, slurm_ppo
):
    words = tiny.overrides(inputs, tmp_path / "run", f"model.policy={policy}", "update.engine=deepspeed")
    refused = slurm_ppo("plan", "--gpu-memory", "80", *words)
    assert refused.returncode == 2
    assert "scheduler: update cannot fit:" in refused.stderr
    proposed = re.search(r"it would fit with (.*)", refused.stderr)[1].split()
    assert not (tmp_path / "run").exists()
    planned = slurm_ppo("plan", "--gpu-memory", "80", *words, *proposed)
    assert planned.returncode == 0, planned.stderr
    assert "\nmemory of update: " in planned.stdout
    assert "cannot fit" not in planned.stdout


def test_every_stage_is_told_of_and_nothing_is_refused_where_the_gpus_are_not_known(config):
    found = {one.title: one for one in check_memory(config)}
    assert list(found) == ["memory of rollout", "memory of update"]
    assert all(one.verdict is Verdict.OK for one in found.values())
    assert "GiB of each process (" in found["memory of update"].measured


@pytest.mark.parametrize(
    ("memory", "ranks", "given", "words"),
    [
        (80, 1, {"precision": "fp32"}, "update.offload_optimizer=true"),
        (80, 8, {"precision": "bf16", "zero_stage": 1}, "update.zero_stage=2"),
        (60, 8, {"precision": "bf16", "zero_stage": 3, "tokens_per_micro_batch": 16384}, "micro_batch"),
        (1000, 1, {"precision": "fp32"}, None),
    ],
)
def test_the_smallest_change_is_proposed(config, memory, ranks, given, words):
    scheduler = replace(config.scheduler, update=replace(config.scheduler.update, ranks=ranks))
    config = replace(config, scheduler=scheduler, update=replace(config.update, **given))
    found = next(one for one in check_memory(config, memory) if one.title == "memory of update")
    if words is None:
        assert found.verdict is Verdict.OK
    else:
        assert found.verdict is not Verdict.OK
        assert words in found.advice


def test_adapters_need_next_to_no_optimizer(config):
    whole = update_need(config, 1)
    lora = update_need(replace(config, update=replace(config.update, lora=LoraConfig(rank=8))), 1)
    policies = [
        sum(p.size for p in need.parts if p.name in ("optimizer", "gradients")) for need in (whole, lora)
    ]
    assert policies[0] == 12 * 8_030_261_248
    assert policies[1] < policies[0] / 300


def test_vllm_says_how_many_sequences_it_serves_and_is_split_where_it_cannot_serve_one(config):
    def told(memory: float):
        rollout = replace(config.rollout, engine="vllm")
        given = replace(config, rollout=rollout, update=replace(config.update, precision="bf16"))
        return next(one for one in check_memory(given, memory) if one.title == "memory of rollout")

    assert re.search(r"its cache is for 5\d sequences of the longest", told(80).measured)
    refused = told(16)
    assert refused.verdict is Verdict.PROBLEM
    assert refused.advice == "it would fit with rollout.vllm.tensor_parallel_size=2"


@pytest.mark.parametrize(
    ("words", "shares"),
    [
        ((), {"rollout": 0.9, "reward rm": 0.6}),
        (("reward.vllm.gpu_memory_utilization=0.9",), {"rollout": 0.9, "reward rm": 0.9}),
        (("rollout.vllm.gpu_memory_utilization=0.5",), {"rollout": 0.5, "reward rm": 0.6}),
        (("algorithm.kl.reference_in=update",), {"rollout": 0.9, "reward rm": 0.9}),
        (("algorithm.kl.coef=0",), {"rollout": 0.9, "reward rm": 0.9}),
        (("reward.vllm.own_process=false",), {"rollout": 0.9, "reward rm": 0.9}),
        (("reward.components.rm.pool=big",), {"rollout": 0.9, "score-big rm": 0.9}),
    ],
)
def test_a_share_of_the_gpu_that_is_not_given_leaves_room_for_a_reference_beside_it(
    models, tmp_path, words, shares
):
    config = config_of(models, tmp_path / "run", "rollout=vllm", "reward.engine=vllm", *words)
    needs = {need.stage: need.share for need in stage_needs(config, lambda _: 1) if need.cache}
    assert needs == shares
    arguments = scorer_arguments(config, config.reward.components["rm"].path, SequenceLimits(64, 260))
    if "score-big rm" not in shares:  # which only its task knows
        assert arguments["gpu_memory_utilization"] == shares["reward rm"]


def test_a_reward_model_that_needs_the_gpu_alone_is_given_it(config):
    """Whatever is computed beside it has to make room then."""
    path = config.model.policy
    reward = replace(config.reward, components={"rm": RewardModelConfig(path=path)}, engine="vllm")
    kl = replace(config.algorithm.kl, coef=0.1, reference_in=ReferenceStage.REWARD)
    algorithm = replace(config.algorithm, kl=kl)
    bf16 = replace(config.update, precision="bf16")
    given = replace(config, reward=reward, algorithm=algorithm, update=bf16)
    memory = 22.0  # GiB, of which the weights and one sequence take 15
    found = next(one for one in check_memory(given, memory) if one.title == "memory of reward rm")
    assert found.verdict is Verdict.PROBLEM
    assert found.advice == "it would fit with reward.vllm.gpu_memory_utilization=0.9"


def test_a_critic_is_counted_without_the_output_layer(policy):
    policy_shape, critic = read_shape(policy), read_shape(policy, gives_number=True)
    assert policy_shape.parameters - critic.parameters == 128_256 * 4096
    assert critic.vocabulary == 0


def test_a_smaller_card_of_the_same_name_is_warned_of_and_the_larger_one_is_not_refused(config):
    update = replace(config.update, precision="bf16", zero_stage=3)
    scheduler = replace(config.scheduler, update=replace(config.scheduler.update, ranks=8))
    need = next(
        n for n in stage_needs(replace(config, update=update, scheduler=scheduler), lambda _: 1) if n.host
    )
    a100 = card_named("a100")
    assert a100.least < need.peak < a100.most


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("h100", 80, 94),
        ("a100", 40, 80),
        ("nvidia_a100-sxm4-80gb", 80, 80),
        ("1g.10gb", 10, 10),
        ("Tesla-V100-SXM2-32GB", 32, 32),
        ("L40S", 48, 48),
        ("gtx", None, None),
    ],
)
def test_cards_are_known_by_the_names_of_gres(name, least, most):
    card = card_named(name)
    if least is None:
        assert card is None
    else:
        assert (round(card.least / 0.97e9), round(card.most / 0.97e9)) == (least, most)


def test_a_job_may_get_any_gpu_of_its_partition_unless_it_names_a_type():
    kinds = (
        NodeKind(4, 64, 256_000, {"gpu": 4, "gpu:h100": 4}),
        NodeKind(4, 64, 256_000, {"gpu": 4, "gpu:v100": 4}),
    )
    place = Partition("gpu", None, "UP", 8, True, None, None, kinds)

    def sizes(**given):
        card = card_of_job(ResourcesConfig(**given), {"gpu": place})
        return card and (round(card.least / GIB), round(card.most / GIB))

    assert sizes(gpus_per_node="1") == (14, 85)
    assert sizes(gpus_per_node="v100:2") == (14, 29)
    assert sizes() is None
