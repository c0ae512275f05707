"""Log-probabilities, entropies and values are each row's own, whatever lies beside it and in which layout."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from stages.context import UserError
from stages.models.loading import switch_off_chance
from stages.ppo.batching import MicroBatch, Row, collate
from stages.ppo.forward import (
    check_packing,
    gather_rows,
    policy_outputs,
    response_log_probs,
    response_values,
    scatter_rows,
)
from stages.ppo.logits import AskedTokens, token_outputs

pytestmark = pytest.mark.usefixtures("one_thread")
VOCABULARY = 29
CPU = torch.device("cpu")
SIZE = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "initializer_range": 0.3}
HEADS = {"intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZE, **HEADS, max_position_embeddings=32),
    "sliding window": MistralConfig(**SIZE, **HEADS, max_position_embeddings=32, sliding_window=3),
    "learned positions": GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32, initializer_range=0.3
    ),
}
every_model = pytest.mark.parametrize("name", list(CONFIGS))
every_attention = pytest.mark.parametrize("attention", ["eager", "sdpa"])
either_layout = pytest.mark.parametrize("packed", [False, True])


def model(auto_class: type, name: str, attention: str = "sdpa") -> PreTrainedModel:
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[name])
    config.num_labels = 1
    made = auto_class.from_config(config, attn_implementation=attention)
    switch_off_chance(made)
    return made


def policy(name: str = "llama", attention: str = "sdpa") -> PreTrainedModel:
    return model(AutoModelForCausalLM, name, attention)


def critic(name: str, attention: str) -> PreTrainedModel:
    return model(AutoModelForTokenClassification, name, attention)


def some_rows() -> list[Row]:
    """Ragged; one without a response, one with a prompt of one token, one of two tokens in all."""
    draw = torch.Generator().manual_seed(5)
    lengths = [(3, 4), (1, 9), (6, 0), (1, 1), (8, 2), (2, 5)]
    tokens = [torch.randint(0, VOCABULARY, (p + r,), generator=draw).tolist() for p, r in lengths]
    return [Row(t[:p], t[p:]) for t, (p, _) in zip(tokens, lengths, strict=True)]


def batch_of(rows: list[Row], packed: bool) -> MicroBatch:
    return collate(rows, range(len(rows)), packed)


def alone(policy: PreTrainedModel, row: Row, temperature: float) -> tuple[list[float], list[float]]:
    """Log-probabilities and entropies of a row, from all its logits."""
    logits = policy(torch.tensor([[*row.prompt, *row.response]])).logits[0].double() / temperature
    log_probs = logits[len(row.prompt) - 1 : -1].log_softmax(dim=-1)
    entropies = -(log_probs.exp() * log_probs).sum(dim=-1)
    return [float(log_probs[t, token]) for t, token in enumerate(row.response)], entropies.tolist()


# the layouts


@every_model
@every_attention
@either_layout
@torch.no_grad()
def test_each_row_has_the_numbers_that_it_has_alone(name, attention, packed):
    rows, made = some_rows(), policy(name, attention)
    found = policy_outputs(made, batch_of(rows, packed), 0.7, entropy=True)
    for i, row in enumerate(rows):
        log_probs, entropies = alone(made, row, 0.7)
        rest = [0.0] * (found.log_probs.shape[1] - len(row.response))
        assert found.log_probs[i].tolist() == pytest.approx(log_probs + rest, rel=1e-5, abs=1e-5)
        assert found.entropy[i].tolist() == pytest.approx(entropies + rest, rel=1e-5, abs=1e-5)


def gradients(made: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    made.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None}


@every_model
@every_attention
def test_packed_and_padded_rows_have_the_same_gradients(name, attention):
    rows, made = some_rows(), policy(name, attention)
    found = []
    for packed in (False, True):
        outputs = policy_outputs(made, batch_of(rows, packed), 1.3, entropy=True, entropy_grad=True)
        weights = torch.linspace(-1, 2, outputs.log_probs.numel()).view_as(outputs.log_probs)
        found.append(gradients(made, (weights * outputs.log_probs - 0.1 * outputs.entropy).sum()))
    torch.testing.assert_close(*found, rtol=1e-5, atol=2e-5)
    assert found[0].keys() == dict(made.named_parameters()).keys()


@every_model
@every_attention
def test_packed_and_padded_rows_have_the_same_values(name, attention):
    rows, made = some_rows(), critic(name, attention)
    found = []
    for packed in (False, True):
        values = response_values(made, batch_of(rows, packed))
        weights = torch.linspace(-1, 2, values.numel()).view_as(values)
        found.append((values, gradients(made, (weights * values).sum())))
    torch.testing.assert_close(*found, rtol=1e-5, atol=2e-5)
    scores = made(torch.tensor([[*rows[0].prompt, *rows[0].response]])).logits[0, :, 0]
    torch.testing.assert_close(found[0][0][0, :4], scores[2:6])
    assert bool((found[0][0][0, 4:] == 0).all())


@every_model
@every_attention
@either_layout
@torch.no_grad()
def test_another_neighbour_changes_nothing_at_all(name, attention, packed):
    rows, made = some_rows(), policy(name, attention)
    before = response_log_probs(made, batch_of(rows, packed), 1.0)
    rows[1] = Row(
        [VOCABULARY - 1 - t for t in rows[1].prompt], [(t + 3) % VOCABULARY for t in rows[1].response]
    )
    after = response_log_probs(made, batch_of(rows, packed), 1.0)
    kept = torch.tensor([0, 2, 3, 4, 5])
    assert torch.equal(before[kept], after[kept])
    assert not torch.equal(before[1], after[1])


@every_attention
@either_layout
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_training_sees_exactly_the_old_log_probabilities(attention, packed, entropy_grad):
    batch, made = batch_of(some_rows(), packed), policy(attention=attention)
    with torch.no_grad():
        old = response_log_probs(made, batch, 0.7)
    new = policy_outputs(made, batch, 0.7, entropy=True, entropy_grad=entropy_grad)
    assert torch.equal(old, new.log_probs)
    assert new.entropy.requires_grad is entropy_grad


@either_layout
def test_rows_without_responses_pass_through(packed):
    batch, made = collate([Row([1, 2], []), Row([3], [])], [0, 1], packed), policy()
    outputs = policy_outputs(made, batch, 1.0, entropy=True)
    assert outputs.log_probs.shape == outputs.entropy.shape == (2, 1)
    assert not any(bool(g.any()) for g in gradients(made, outputs.log_probs.sum()).values())


@either_layout
def test_results_of_a_half_precision_model_are_fp32(packed):
    batch = batch_of(some_rows(), packed)
    outputs = policy_outputs(policy().bfloat16(), batch, 1.0, entropy=True)
    values = response_values(critic("llama", "sdpa").bfloat16(), batch)
    assert outputs.log_probs.dtype == outputs.entropy.dtype == values.dtype == torch.float32


# models that cannot be packed


@every_model
@every_attention
def test_models_that_tell_rows_apart_are_packed(name, attention):
    rows = some_rows()
    check_packing(policy(name, attention), (rows[0], rows[1]), CPU)


def test_an_attention_that_ignores_positions_is_refused():
    """transformers makes no mask for an attention that it does not know."""
    AttentionInterface.register("careless", sdpa_attention_forward)
    rows = some_rows()
    with pytest.raises(UserError, match=r"off by .* per token.*remove_padding=false"):
        check_packing(policy(attention="careless"), (rows[0], rows[1]), CPU)


# log-probabilities of logits


def some_logits(dtype: torch.dtype = torch.float64, size: tuple[int, int] = (7, 11)) -> torch.Tensor:
    draw = torch.Generator().manual_seed(2)
    return torch.randn(size, generator=draw, dtype=dtype).mul_(3).requires_grad_()


def test_gradients_are_those_of_the_formulas():
    positions, tokens = torch.tensor([5, 0, 3]), torch.tensor([10, 0, 4])
    others = torch.tensor([[1, 10], [2, 3], [4, 0]])
    asked = AskedTokens(positions, tokens, 0.7, entropy_grad=True, others=others)
    assert torch.autograd.gradcheck(lambda logits: token_outputs(logits, asked)[:3], some_logits())


class Operations(TorchDispatchMode):
    """Counts what torch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += 1
        return function(*args, **(kwargs or {}))


def test_an_entropy_that_is_only_reported_costs_the_backward_pass_nothing():
    numbers, gradients = [], []
    for entropy in (False, True):
        logits = some_logits(torch.float32)
        found = token_outputs(logits, AskedTokens(torch.arange(7), torch.arange(7), entropy=entropy))
        with Operations() as counted:
            found.log_probs.sum().backward()
        numbers.append(counted.number)
        gradients.append(logits.grad)
    assert numbers[0] == numbers[1] > 0
    assert torch.equal(*gradients)


def test_many_tokens_are_done_in_pieces_with_the_same_result():
    logits, tokens = some_logits(torch.float32, (900, 1000)), torch.arange(900)
    positions = torch.randperm(900, generator=torch.Generator().manual_seed(0))
    plain = logits.detach().clone().requires_grad_()
    distribution = torch.distributions.Categorical(logits=plain[positions] / 1.5)
    expected = distribution.log_prob(tokens), distribution.entropy()
    found = token_outputs(logits, AskedTokens(positions, tokens, 1.5, entropy_grad=True))
    torch.testing.assert_close(tuple(found[:2]), expected, rtol=1e-5, atol=1e-5)
    for outputs in (found, expected):
        (outputs[0].sum() - 0.3 * outputs[1].sum()).backward()
    torch.testing.assert_close(logits.grad, plain.grad, rtol=1e-5, atol=1e-6)


def test_ids_that_are_ruled_out_add_nothing():
    logits = torch.tensor([[0.5, -torch.inf, 1.5]], requires_grad=True)
    found = token_outputs(logits, AskedTokens(torch.tensor([0]), torch.tensor([2]), entropy_grad=True))
    expected = torch.distributions.Categorical(logits=torch.tensor([0.5, 1.5]))
    torch.testing.assert_close(found.entropy, expected.entropy()[None])
    (found.log_probs + found.entropy).sum().backward()
    assert logits.grad[0, 1] == 0
    assert bool(torch.isfinite(logits.grad).all())


def test_logits_of_tokens_that_do_not_count_may_be_anything():
    logits = some_logits(torch.float32).detach()
    logits[3], logits[4, 2] = torch.nan, torch.inf
    logits.requires_grad_()
    positions, tokens = torch.arange(7), torch.arange(7)
    found = token_outputs(logits, AskedTokens(positions, tokens, entropy_grad=True))
    counts = torch.tensor([True, True, True, False, False, True, True])
    torch.where(counts, found.log_probs - found.entropy, 0.0).sum().backward()
    assert bool(torch.isfinite(logits.grad).all())
    assert (logits.grad != 0).any(dim=1).tolist() == counts.tolist()


# rows of matrices


def test_rows_go_to_their_places_and_come_back():
    rows = some_rows()
    batch, matrix = collate(rows, [4, 0]), torch.zeros(6, 9)
    scatter_rows(matrix, batch, torch.tensor([[1.0, 2, 0, 0], [3, 4, 5, 6]]))
    assert matrix[4].tolist() == [1, 2, 0, 0, 0, 0, 0, 0, 0]
    assert gather_rows(matrix, batch).tolist() == [[1, 2, 0, 0], [3, 4, 5, 6]]
    assert int((matrix != 0).any(dim=1).sum()) == 2
