"""What is learned does not depend on how the work is divided: by micro-batches, ranks, ZeRO stage or layout.

In fp32, to 1e-5 of the largest number of each tensor.
"""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from safetensors.torch import load_file, save_file

from pipeline.config.algorithm import PolicyLossName
from stages import ranks
from stages.ppo.experience import Experience
from stages.ppo.minibatches import split_epoch
from stages.ppo.trainer import Trainer
from tests.support.families import make_mixture
from tests.support.learning import experience, make_learner, updated, with_scores
from tests.support.ranks import ended, start_ranks
from tests.support.tables import sample

ZERO_STAGES = (0, 1, 2, 3)
BUDGETS = {"one": 1, "four": 64, "all": 4096}
"""Tokens of a micro-batch of one row, of about four rows, and of all; the longest row has 22."""
ROWS = ("data.prompts_per_iteration=16",)
GROUPS = ("algorithm=grpo", "rollout.samples_per_prompt=4", "data.prompts_per_iteration=4")
KINDS = {
    "plain": ROWS,
    "m2po": (*ROWS, "algorithm.correction={level: token, mode: m2po, second_moment: 0.02}"),
    "rollouts": (*GROUPS, "algorithm.old_log_probs=rollout"),
    "taught": GROUPS,
    "taught in the loss": (*ROWS, "algorithm.distillation.placement=loss"),
    "taught by the likeliest": (*ROWS, "algorithm.distillation={placement: loss, top_k: 3}"),
    "steps": GROUPS,
    "lambdas": (*ROWS, "algorithm.critic_lam=1", "algorithm.lam_alpha=0.5"),
    "warmup": (*ROWS, "algorithm.critic_warmup=1"),
    "routers": (*GROUPS, "algorithm.router_aux_loss_coef=0.1", "model.context_length=64"),
}
"""What is compared and weighed. Teachers have some of the responses; lambdas have rewards of steps too; after
a warmup comes an iteration of policy and critic; a mixture's routers have a loss of each micro-batch."""
STEPPED, TAUGHT = ("steps", "lambdas"), ("taught", "taught in the loss", "taught by the likeliest")
OTHERS = [
    (0, "four", False),
    *itertools.product(ZERO_STAGES[1:], ("four", "all"), [False]),
    (0, "one", False),
    (3, "one", False),
    (0, "four", True),
    (0, "all", True),
]
BY_ROW = [(zero_stage, "one", False) for zero_stage in ZERO_STAGES[1:]]
"""Divisions that leave micro-batches as they are."""
REFERENCES = {kind: (kind, 0, "one" if kind == "routers" else "all", False) for kind in KINDS}
TRIED = {"plain": 1 / 4} | dict.fromkeys(sample(list(KINDS)[1:], 1 / 4), 1 / 10)
"""Shares of the divisions, of some kinds."""
ALIKE = [
    case
    for kind, share in TRIED.items()
    for case in (
        REFERENCES[kind],
        *(
            (kind, *other)
            for other in sample(BY_ROW if kind == "routers" else OTHERS, share, f"{kind}{{}}".format)
        ),
    )
]
"""Kind, ZeRO stage, rows of a micro-batch, whether it is packed. A row alone is the same so or so."""
LOSS = sample(list(PolicyLossName), 1 / len(PolicyLossName))[0]
LOSSES = ("policy_loss", "value_loss", "router_loss")
SIZES = (1, 2)
TOLERANCE = 1e-5


def name_of(size: int, kind: str, zero_stage: int, rows: str, packed: bool) -> str:
    return f"{size}-{kind}-{zero_stage}-{rows}-{'packed' if packed else 'padded'}"


def remember_gradients(trainer: Trainer, seen: dict[str, torch.Tensor]) -> None:
    """Keep the whole gradients of every step."""
    step = trainer.step

    def remember(*arguments: object):
        for name, parameter in trainer.model.named_parameters():
            gradient = safe_get_full_grad(parameter)
            seen[f"gradient of step {trainer.steps}/{trainer.name}/{name}"] = gradient.detach().clone()
        return step(*arguments)

    trainer.step = remember


def given_to(kind: str) -> Experience:
    given = experience(rows=16, samples=4 if KINDS[kind][0] == GROUPS[0] else 1, holes=True)
    noise = torch.randn(given.mask.shape, generator=torch.Generator().manual_seed(11))
    if kind in TAUGHT:
        weights = torch.arange(16).remainder(3).unsqueeze(1) / 2
        given = dataclasses.replace(given, teacher_log_probs=noise - 5, teacher_weights=weights)
    if kind == "taught by the likeliest":
        ids = torch.arange(noise.numel() * 3, dtype=torch.int32).view(*noise.shape, 3) % 258
        likely = (noise / 4 - 2).unsqueeze(2).expand(-1, -1, 3).contiguous()
        given = dataclasses.replace(given, teacher_top_tokens=ids, teacher_top_log_probs=likely)
    if kind in STEPPED:
        steps = torch.where(given.mask & (noise > 0.5), noise, torch.nan)
        given = with_scores(dataclasses.replace(given, step_rewards=steps), steps.nan_to_num().sum(dim=1))
    return given


def settings_of(models: Path, kind: str, zero_stage: int, rows: str, packed: bool) -> tuple[str, ...]:
    teacher = (f"reward.teachers.teacher.path={models / 'policy'}",)
    return (
        f"update.zero_stage={zero_stage}",
        f"update.tokens_per_micro_batch={BUDGETS[rows]}",
        f"update.remove_padding={packed}",
        "update.minibatches=1",
        *KINDS[kind],
        *(teacher if kind in TAUGHT else ()),
        "algorithm.entropy_coef=0.01",
        f"algorithm.policy_loss={LOSS if kind == 'plain' else PolicyLossName.PPO}",
    )


def learn(models: Path, folder: Path, rank: int) -> None:
    """Every way to divide the same update, of two epochs, among these ranks."""
    ranks.start_distributed()
    for case in ALIKE:
        kind, zero_stage, *_ = case
        given, inputs = given_to(kind), folder / "mixture" if kind == "routers" else models
        learner = make_learner(inputs, folder / f"run-{rank}", *settings_of(models, *case))
        seen: dict[str, torch.Tensor] = {}
        for trainer in learner.trainers:
            remember_gradients(trainer, seen)
        done = [updated(learner, given, iteration=k) for k in ((1, 2) if kind == "warmup" else (1,))]
        for trainer in learner.trainers:
            for name, p in trainer.model.named_parameters():
                weight = p if zero_stage == 0 else safe_get_full_fp32_param(p)
                seen[f"weight/{trainer.name}/{name}"] = weight.detach().clone()
        (batch,) = split_epoch(learner.config, given, 1, 0)
        left_out = kind == "m2po" and int((done[0].targets.weights[given.mask] == 0).sum())
        numbers = {
            "losses": [[sums[name] for name in LOSSES] for one in done for sums in one.steps.sums],
            "norms": [norms for one in done for norms in (one.steps.policy_norms, one.steps.critic_norms)],
            "sizes": [len(micro.rows) for micro in batch.micro_batches],
            "left_out": int(left_out),
            "first_ratio_error": done[-1].steps.first_ratio_error,
        }
        if rank == 0:
            path = folder / f"{name_of(ranks.size(), *case)}.safetensors"
            save_file(seen, path)
            path.with_suffix(".json").write_text(json.dumps(numbers))


@pytest.fixture(scope="module")
def learned(models, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("learned")
    if "routers" in TRIED:
        make_mixture(models, folder / "mixture", "qwen3_moe")
    for size in SIZES:
        started = start_ranks(size, folder / "meeting", learn, models, folder)
        assert ended(started, limit=60 + 10 * len(ALIKE)) == [0] * size
    return folder


def numbers_of(folder: Path, name: str) -> dict:
    return json.loads((folder / f"{name}.json").read_text())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", ALIKE, ids=lambda case: "-".join(map(str, case)))
def test_however_the_work_is_divided_the_same_is_learned(learned, size, case):
    name, reference = name_of(size, *case), name_of(1, *REFERENCES[case[0]])
    found, expected = numbers_of(learned, name), numbers_of(learned, reference)
    assert found["left_out"] == expected["left_out"]
    assert (found["left_out"] > 0) is (case[0] == "m2po")
    assert (found["first_ratio_error"] == 0) is (case[0] != "rollouts")
    for key in ("losses", "norms"):
        for ours, theirs in zip(found[key], expected[key], strict=True):
            assert ours == pytest.approx(theirs, rel=TOLERANCE), key
    tensors = load_file(learned / f"{name}.safetensors")
    for key, theirs in load_file(learned / f"{reference}.safetensors").items():
        error = float((tensors.pop(key) - theirs).abs().max())
        assert error <= TOLERANCE * float(theirs.abs().max()), (key, error)
    assert not tensors


@pytest.mark.parametrize("size", SIZES)
def test_the_work_is_divided_as_said(learned, size):
    for case in ALIKE:
        sizes = numbers_of(learned, name_of(size, *case))["sizes"]
        expected = {"one": [1] * (16 // size), "all": [16 // size]}
        assert sizes == expected.get(case[2], sizes)
        assert sum(sizes) in (7, 8, 9, 16)
        assert case[2] != "four" or all(2 <= rows <= 6 for rows in sizes), sizes


def test_something_is_learned_and_the_second_step_is_another(learned):
    tensors = load_file(learned / f"{name_of(1, *REFERENCES['plain'])}.safetensors")
    for name in ("policy/lm_head.weight", "critic/score.weight"):
        first, second = (tensors[f"gradient of step {step}/{name}"] for step in (0, 1))
        assert float(first.abs().max()) > 1e-4
        assert float((first - second).abs().max()) > 1e-4
