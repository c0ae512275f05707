"""An update holds each number once: as it loads, restores its state, learns, and saves.

Bytes are those that a process of its own takes from the system, which has them back when they are freed.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

from benchmarks.memory import ALONE, Case, config_of, experience_of, learner_of, save_model
from pipeline.forecast.shapes import read_shape
from stages import ranks
from stages.context import Stopwatch
from stages.models.numerics import set_up_torch
from stages.ppo.adamw import AdamWInParts
from stages.ppo.learner import update
from stages.ppo.math.shaping import RunningMoments
from stages.rehearsal.peaks import give_back_what_is_freed, taken_by
from tests.support.processes import in_process_of_its_own
from tests.support.trainers import save_state

STATES = {"fp32": 4 + 8, "bf16": 2 + 4 + 8 + 4}
"""Bytes of each weight before the first gradient: weights, master weights, moments, and in bf16 the sum of
gradients."""
WORDS = {"fp32": ("update.zero_stage=0",), "bf16": ("update.zero_stage=1", "update.precision=bf16")}
TINY = {"width": 64, "layers": 1, "vocabulary": 256}


def life(folder: Path, precision: str, given: dict[str, int]) -> dict[str, float]:
    """Load, learn, save and restore. Returns the bytes that each took beyond what there was before."""
    words = (ALONE, *WORDS[precision])
    case = Case("update", **given, words=words, rows=1, prompt=4, response=12)
    shutil.rmtree(folder, ignore_errors=True)
    save_model(case, folder / "model")
    config, experience, found = config_of(case, folder / "model"), experience_of(case), {}
    learners = []

    def load() -> None:
        learners.append(learner_of(config))
        learners[0].policy.sums()  # reads weights that are still in their file, as going on from a state does

    def learn() -> None:
        moments = RunningMoments().including(experience.outcome.scores)
        update(learners[0], experience, 1, 0.0, moments, Stopwatch())

    def save() -> None:
        learners[0].policy.save_model(folder / "next")
        save_state(learners[0].policy, folder / "state")

    for step in (load, learn, save):
        found[step.__name__] = taken_by(step)
    learners.pop().policy.free()
    found["restore"] = taken_by(lambda: (load(), learners[0].policy.load_state(folder / "state")))
    learners.pop().policy.free()
    return found


def measured(folder: Path, precision: str) -> None:
    give_back_what_is_freed()
    set_up_torch(1, seed=0)
    ranks.start_distributed()
    life(folder / "tiny", precision, TINY)
    found = life(folder / "large", precision, {"width": 512, "layers": 6, "vocabulary": 2000})
    (folder / "found.json").write_text(json.dumps(found))


@pytest.mark.parametrize("precision", STATES)
def test_an_update_holds_each_number_once(precision, tmp_path):
    assert in_process_of_its_own(measured, tmp_path, precision) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    weights = read_shape(tmp_path / "large/model").parameters
    of_each = {name: size / weights for name, size in found.items()}
    assert weights > 15e6
    states, copy = STATES[precision], 4.0  # of the weights, gradients or a moment
    assert of_each["load"] < states + copy / 2, of_each
    assert of_each["restore"] < states + copy / 2, of_each
    gradients = {"fp32": 4, "bf16": 0}[precision]
    assert of_each["learn"] < gradients + copy / 2, of_each
    assert of_each["save"] < copy / 2, of_each


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_step_in_parts_is_a_step(decay):
    torch.manual_seed(0)
    start = [torch.randn(*shape) for shape in ((600, 700), (1,), (7,), (1 << 18,), (1 << 18 | 1,))]
    start.append(torch.randn(500, 600).T)
    stepped = []
    for kind in (torch.optim.AdamW, AdamWInParts):
        tensors = [torch.nn.Parameter(tensor.clone()) for tensor in start]
        optimizer = kind(tensors, 1e-3, (0.9, 0.95), 1e-8, weight_decay=decay)
        for step in range(3):
            torch.manual_seed(step)
            for tensor in tensors:
                tensor.grad = torch.randn_like(tensor)
            tensors[1].grad = None
            optimizer.step()
        stepped.append(
            [*tensors, *(optimizer.state[t][name] for t in tensors[2:] for name in ("step", "exp_avg_sq"))]
        )
    assert all(torch.equal(one, other) for one, other in zip(*stepped, strict=True))
