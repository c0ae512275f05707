"""The output layer applied some tokens at a time gives the numbers of whole logits, in every model."""

import copy
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaForCausalLM, PreTrainedModel

from stages import ranks
from stages.models.hidden import Hiding
from stages.ppo import head
from stages.ppo.batching import MicroBatch, Row, collate
from stages.ppo.forward import policy_outputs, response_log_probs
from tests.support import tiny
from tests.support.families import FAMILIES, VOCABULARY, family
from tests.support.learning import difference, experience, make_learner, updated
from tests.support.ranks import ended, start_ranks
from tests.support.tables import sample

pytestmark = pytest.mark.usefixtures("one_thread")
TRAINED = [name for name in FAMILIES if name != "reformer"]  # which refuses a gradient in evaluation mode
SHAPED = {"gemma2": {}, "cohere": {}, "granite": {"logits_scaling": 4.0}, "phi": {}, "llama": {}, "gpt2": {}}
"""Logits that are capped, multiplied, divided, with a bias, from a layer of its own, and from embeddings."""


@pytest.fixture
def at_a_time(monkeypatch):
    """Set how many logits there may be at a time."""
    return lambda number: monkeypatch.setitem(head._CHUNK, "cpu", number)


def batch_of(packed: bool = False) -> MicroBatch:
    """Ragged; one row without a response, one with a prompt of one token."""
    draw = torch.Generator().manual_seed(5)
    lengths = [(3, 4), (1, 9), (6, 0), (1, 1), (8, 2), (2, 5)]
    tokens = [torch.randint(3, VOCABULARY - 2, (p + r,), generator=draw).tolist() for p, r in lengths]
    rows = [Row(t[:p], t[p:]) for t, (p, _) in zip(tokens, lengths, strict=True)]
    return collate(rows, range(len(rows)), packed)


def learned(model: nn.Module, batch: MicroBatch, is_whole: bool = False) -> dict[str, Tensor]:
    """Log-probabilities, entropies, and the gradients of both."""
    head._HEADS.pop(model, None)
    if is_whole:
        head._HEADS[model] = None
    model.zero_grad()
    shape = (len(batch.rows), batch.num_response_columns, 3)
    ids = torch.arange(shape[0] * shape[1] * 3).view(shape) * 7 % (VOCABULARY - 3) + 1
    found = policy_outputs(model, batch, 0.7, entropy=True, entropy_grad=True, others=ids)
    further = found.others.clamp(min=-100)  # of ids that are hidden
    weights = torch.linspace(-1, 2, found.log_probs.numel()).view_as(found.log_probs)
    of_others = further.exp().square().sum(dim=2)
    (weights * (found.log_probs + of_others) - 0.1 * found.entropy).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    outputs = {"log_probs": found.log_probs, "entropy": found.entropy, "others": further}
    return {name: one.detach() for name, one in outputs.items()} | gradients


def largest_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Relative to the largest number of each tensor; some gradients are 0 but for rounding."""
    assert found.keys() == expected.keys()
    least = 1e-2 * max(float(one.abs().max()) for one in expected.values())
    return max(
        float((one - found[name]).abs().max()) / max(float(one.abs().max()), least)
        for name, one in expected.items()
    )


def shaped(name: str) -> PreTrainedModel:
    made = family(name)
    vars(made.config).update(SHAPED[name])
    if name == "phi":
        nn.init.normal_(made.lm_head.bias)
    return made


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize("name", list(SHAPED))
def test_some_logits_at_a_time_give_the_numbers_of_all(at_a_time, name, hides, packed):
    model, batch = shaped(name), batch_of(packed)
    if hides:
        model.register_forward_hook(Hiding([0, 1, VOCABULARY - 1]))
    expected = learned(model, batch, is_whole=True)
    for number in (1 << 24, 4 * VOCABULARY, VOCABULARY // 2):
        at_a_time(number)
        assert largest_error(learned(model, batch), expected) < 5e-6, number
        assert head._HEADS[model] is not None


def test_what_is_done_to_logits_is_found():
    found = {name: learned_shaping(shaped(name)) for name in SHAPED}
    kinds = {name: shaping.kind.value for name, shaping in found.items()}
    plain = dict.fromkeys(("phi", "llama", "gpt2"), "none")
    assert kinds == {"gemma2": "cap", "cohere": "times", "granite": "over", **plain}
    assert (found["gemma2"].number, found["granite"].number) == (30.0, 4.0)


def learned_shaping(model: PreTrainedModel) -> head.Shaping:
    learned(model, batch_of())
    return head._HEADS[model].shaping


@pytest.mark.parametrize("name", sample(TRAINED, 1 / 3))
def test_every_family_has_the_numbers_of_whole_logits(at_a_time, name):
    model, batch = family(name), batch_of()
    expected = learned(model, batch, is_whole=True)
    at_a_time(4 * VOCABULARY)
    found = learned(model, batch)
    assert head._HEADS[model] is not None
    assert largest_error(found, expected) < 1e-4


class Largest(TorchDispatchMode):
    """Notes the largest tensor that is made with a number for each id."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        tensors = [one for one in tree_leaves(made) if isinstance(one, Tensor) and VOCABULARY in one.shape]
        self.numbers = max([self.numbers, *(one.numel() for one in tensors)])
        return made


def test_logits_never_stand_whole(at_a_time):
    """The largest tensor is the output layer's gradient."""
    model = family("llama")
    rows = [Row([5, 6], [7] * 60)] * 4
    batch, numbers = collate(rows, range(4)), []
    for is_whole in (False, True):
        at_a_time(10 * VOCABULARY)
        with Largest() as largest:
            learned(model, batch, is_whole)
        numbers.append(largest.numbers)
    assert numbers[0] == model.lm_head.weight.numel() < 240 * VOCABULARY <= numbers[1]


def test_in_half_precision_the_gradient_is_as_near_as_from_whole_logits(at_a_time):
    batch, exact = batch_of(), family("llama", scale=1.0).to(torch.bfloat16)
    model = copy.deepcopy(exact)
    expected = {name: one.to(torch.bfloat16) for name, one in learned(exact.float(), batch, True).items()}
    whole = largest_error(learned(model, batch, is_whole=True), expected)
    at_a_time(2 * VOCABULARY)
    found = learned(model, batch)
    assert found["log_probs"].dtype == torch.float32
    assert largest_error(found, expected) < 1.5 * whole


def test_rows_of_the_head_that_a_frozen_layer_has_get_no_gradient():
    model = family("llama")
    model.lm_head.requires_grad_(False)
    found = learned(model, batch_of())
    assert "lm_head.weight" not in found
    model.lm_head.requires_grad_(True)
    whole = learned(model, batch_of(), is_whole=True)
    del whole["lm_head.weight"]
    assert largest_error(found, whole) < 5e-6


class Doubled(nn.Module):
    """A model that does something to logits that no number of its configuration says."""

    def __init__(self, model: PreTrainedModel, change) -> None:
        super().__init__()
        self.inner, self.config, self.change = model, model.config, change

    def get_output_embeddings(self) -> nn.Module:
        return self.inner.get_output_embeddings()

    def forward(self, **given: object):
        output = self.inner(**given)
        output.logits = self.change(output.logits)
        return output


@pytest.mark.parametrize(
    "change",
    [
        lambda logits: logits * 2.5,
        lambda logits: logits.mul_(2.5),
        lambda logits: logits[..., torch.arange(VOCABULARY)],
        lambda logits: logits - logits.detach().amax(-1, keepdim=True),
    ],
)
def test_a_head_that_is_not_known_gives_whole_logits_and_it_is_said_once(change, caplog):
    model, batch = Doubled(family("llama"), change), batch_of()
    with caplog.at_level("INFO"):
        found = [response_log_probs(model, batch, 1.0) for _ in range(2)]
    assert torch.equal(*found)
    assert caplog.text.count("Doubled: logits of a micro-batch stand whole") == 1
    logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids).logits.detach().log_softmax(-1)
    assert found[0][0, 0].item() == pytest.approx(float(logits[0, 2, batch.input_ids[0, 3]]), abs=1e-5)


def test_a_layer_that_is_replaced_is_left_alone():
    """accelerate puts weights that are elsewhere into place in a forward of its own."""
    model = family("llama")
    layer = model.lm_head
    layer.forward = lambda hidden: nn.functional.linear(hidden, layer.weight)
    learned(model, batch_of())
    assert head._HEADS[model] is None


def test_the_layer_is_as_it_was_also_after_an_error():
    model, batch = family("llama"), batch_of()
    response_log_probs(model, batch, 1.0)
    model.model.layers[1].forward = None
    with pytest.raises(TypeError):
        response_log_probs(model, batch, 1.0)
    assert "forward" not in vars(model.lm_head)
    assert not model.lm_head._forward_hooks


def learn(models: Path, folder: Path, rank: int) -> None:
    """With whole logits, with a piece of them at a time, and with a piece that is kept for the gradient. Each
    step is of several micro-batches, whose gradients DeepSpeed's stages add up in different ways."""
    ranks.start_distributed()
    rows = experience()
    for stage, precision, tolerance in (
        (3, "fp32", 1e-5),
        (1, "fp32", 1e-5),
        (1, "bf16", 2e-2),
        (2, "bf16", 2e-2),
    ):
        words = (
            "algorithm.estimator=reinforce++",
            f"update.zero_stage={stage}",
            f"update.precision={precision}",
            "update.epochs=1",
            "update.tokens_per_micro_batch=16",
        )
        found, norms = [], []
        for number in (0, 2000, 1 << 24):
            learner = make_learner(models, folder / f"run-{rank}", *words)
            module = learner.policy.engine.module
            if number:
                head._CHUNK["cpu"] = number
            else:
                head._HEADS[module] = None
            norms.append(updated(learner, rows).steps.policy_norms)
            assert (head._HEADS[module] is not None) == bool(number)
            found.append({name: learner.policy._master(p).clone() for name, p in learner.policy.trained()})
        assert "lm_head.weight" not in found[0]
        for several in norms[1:]:
            assert several == pytest.approx(norms[0], rel=tolerance), words
        if precision == "fp32":
            assert max(difference(one, found[0]) for one in found[1:]) < 1e-6


def test_ranks_that_share_tied_weights_learn_what_whole_logits_teach(models, tmp_path):
    inputs = tmp_path / "inputs"
    shutil.copytree(models, inputs)
    tied = tiny.llama_config(tiny.byte_tokenizer(("<pad>", "<eos>")), tie_word_embeddings=True)
    LlamaForCausalLM(tied).save_pretrained(inputs / "policy")
    assert ended(start_ranks(2, tmp_path / "meeting", learn, inputs, tmp_path)) == [0, 0]
