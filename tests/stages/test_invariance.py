"""What is learned does not depend on how the work is divided: by micro-batches, ranks, ZeRO stage or layout.

In fp32, to 1e-5 of the largest number of each tensor.
"""

import itertools
import json
from pathlib import Path

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from safetensors.torch import load_file, save_file

from pipeline.config.algorithm import PolicyLossName
from stages import ranks
from stages.ppo.minibatches import split_epoch
from stages.ppo.trainer import Trainer
from tests.support.learning import experience, make_learner, updated
from tests.support.ranks import ended, start_ranks
from tests.support.tables import sample

ZERO_STAGES = (0, 1, 2, 3)
BUDGETS = {"one": 1, "four": 64, "all": 4096}
"""Tokens of a micro-batch of one row, of about four rows, and of all; the longest row has 22."""
GROUPS = ("algorithm=grpo", "rollout.samples_per_prompt=4", "data.prompts_per_iteration=4")
RATIOS = {
    "plain": ("data.prompts_per_iteration=16",),
    "m2po": (
        "algorithm.correction={level: token, mode: m2po, second_moment: 0.02}",
        "data.prompts_per_iteration=16",
    ),
    "rollouts": (*GROUPS, "algorithm.old_log_probs=rollout"),
}
"""What the policy loss compares, and how it weighs."""
OTHERS = [
    (0, "four", False),
    *itertools.product(ZERO_STAGES[1:], ("four", "all"), [False]),
    (0, "one", False),
    (3, "one", False),
    (0, "four", True),
    (0, "all", True),
]
REFERENCES = {ratios: (ratios, 0, "all", False) for ratios in RATIOS}
ALIKE = [
    *REFERENCES.values(),
    *(("plain", *other) for other in sample(OTHERS, 1 / 4)),
    *(("m2po", *other) for other in sample(OTHERS[1:], 1 / 10)),
    *(("rollouts", *other) for other in sample(OTHERS[2:], 1 / 10)),
]
"""Ratios, ZeRO stage, rows of a micro-batch, whether it is packed. A row alone is the same so or so."""
LOSS = sample(list(PolicyLossName), 1 / len(PolicyLossName))[0]
SIZES = (1, 2)
TOLERANCE = 1e-5


def name_of(size: int, ratios: str, zero_stage: int, rows: str, packed: bool) -> str:
    return f"{size}-{ratios}-{zero_stage}-{rows}-{'packed' if packed else 'padded'}"


def remember_gradients(trainer: Trainer, seen: dict[str, torch.Tensor]) -> None:
    """Keep the whole gradients of every step."""
    step = trainer.step

    def remember(*arguments: object):
        for name, parameter in trainer.model.named_parameters():
            gradient = safe_get_full_grad(parameter)
            seen[f"gradient of step {trainer.steps}/{trainer.name}/{name}"] = gradient.detach().clone()
        return step(*arguments)

    trainer.step = remember


def learn(models: Path, folder: Path, rank: int) -> None:
    """Every way to divide the same update, of two epochs, among these ranks."""
    ranks.start_distributed()
    for case in ALIKE:
        ratios, zero_stage, rows, packed = case
        given = experience(rows=16, samples=4 if ratios == "rollouts" else 1, holes=True)
        settings = (
            f"update.zero_stage={zero_stage}",
            f"update.tokens_per_micro_batch={BUDGETS[rows]}",
            f"update.remove_padding={packed}",
            "update.minibatches=1",
            *RATIOS[ratios],
            "algorithm.entropy_coef=0.01",
            f"algorithm.policy_loss={LOSS if ratios == 'plain' else PolicyLossName.PPO}",
        )
        learner = make_learner(models, folder / f"run-{rank}", *settings)
        seen: dict[str, torch.Tensor] = {}
        for trainer in learner.trainers:
            remember_gradients(trainer, seen)
        done = updated(learner, given)
        steps = done.steps
        for trainer in learner.trainers:
            for name, p in trainer.model.named_parameters():
                weight = p if zero_stage == 0 else safe_get_full_fp32_param(p)
                seen[f"weight/{trainer.name}/{name}"] = weight.detach().clone()
        (batch,) = split_epoch(learner.config, given, 1, 0)
        numbers = {
            "losses": [[sums["policy_loss"], sums["value_loss"]] for sums in steps.sums],
            "norms": [steps.policy_norms, steps.critic_norms],
            "sizes": [len(micro.rows) for micro in batch.micro_batches],
            "left_out": int((done.targets.weights[given.mask] == 0).sum()) if ratios == "m2po" else 0,
        }
        if rank == 0:
            path = folder / f"{name_of(ranks.size(), *case)}.safetensors"
            save_file(seen, path)
            path.with_suffix(".json").write_text(json.dumps(numbers))


@pytest.fixture(scope="module")
def learned(models, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("learned")
    for size in SIZES:
        assert ended(start_ranks(size, folder / "meeting", learn, models, folder)) == [0] * size
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
