"""The transformers engines: what is sampled, what is noted about it, and that company changes nothing."""

import json
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
)

from pipeline.config.engines import VllmConfig
from pipeline.config.update import Precision
from pipeline.run.schemas import FinishReason
from stages.context import UserError
from stages.engines import Wanted, engine, kept, release_all, take_facts
from stages.engines.base import EngineFacts, Request, Sampling, Scorer
from stages.engines.transformers import TransformersGenerator, TransformersScorer
from stages.models.adapters import merge_into, read_adapter
from stages.models.loading import load_causal_lm, load_reward_model
from tests.support import tiny
from tests.support.adapters import make_adapter
from tests.support.tiny import prompts

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(models):
    return load_causal_lm(models / "policy", Precision.FP32, trust_remote_code=False)


@pytest.fixture(scope="module")
def generator(model):
    return TransformersGenerator(model, token_budget=400)


def requests(count: int = 12, max_new_tokens: int = 20) -> list[Request]:
    return [Request(p, max_new_tokens - i % 7, seed=100 + i) for i, p in enumerate(prompts(count))]


def greedily(asked: list[Request], every: int = 1) -> list[Request]:
    """The same, every so many of them greedy."""
    return [replace(request, greedy=i % every == 0) for i, request in enumerate(asked)]


def next_token_probabilities(model, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[0, -1]
    return torch.softmax(logits.double() / temperature, dim=-1)


@pytest.mark.parametrize(
    ("sampling", "every"),
    [(Sampling(), 24), (Sampling(0.6, 0.9, 40), 3)],
    ids=["one greedy", "top_k, top_p, some greedy"],
)
def test_a_response_does_not_depend_on_what_it_is_batched_with(model, generator, sampling, every):
    asked = greedily(requests(24), every)
    expected = [generator.generate([request], sampling)[0].tokens for request in asked]
    for budget in (1, 100, 100_000):
        found = TransformersGenerator(model, budget).generate(asked, sampling)
        assert [response.tokens for response in found] == expected
    backwards = TransformersGenerator(model, 300).generate(asked[::-1], sampling)
    assert [response.tokens for response in backwards[::-1]] == expected


def test_a_longer_limit_only_continues_the_response(generator):
    prompt = prompts(3)[2]
    short, long = generator.generate([Request(prompt, 5, 9), Request(prompt, 25, 9)], Sampling())
    assert long.tokens[:5] == short.tokens
    assert long.log_probs[:5] == pytest.approx(short.log_probs, abs=1e-5)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(2.0), Sampling(top_k=5), Sampling(top_p=0.5), Sampling(1.5, 0.8, 20)],
    ids=["plain", "hot", "top_k", "top_p", "all"],
)
def test_many_seeds_together_follow_the_models_distribution(model, sampling):
    prompt, count = prompts(4)[3], 4000
    asked = [Request(prompt, 1, seed) for seed in range(count)]
    found = TransformersGenerator(model, 40_000).generate(asked, sampling)
    expected = truncated(next_token_probabilities(model, prompt, sampling.temperature), sampling)
    seen = torch.zeros_like(expected)
    for token, times in Counter(response.tokens[0] for response in found).items():
        seen[token] = times
    assert seen[expected == 0].sum() == 0, "a token was sampled that top_k or top_p had cut off"
    likely = expected * count >= 5
    observed = torch.cat([seen[likely], seen[~likely].sum()[None]])
    wanted = torch.cat([expected[likely], expected[~likely].sum()[None]]) * count
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    degrees = len(wanted) - 1
    assert degrees >= 3
    # Wilson and Hilferty: the cube root of chi-square over its degrees is about normal. 4 sigmas.
    score = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    assert abs(score) < 4, f"chi-square {statistic:.1f} with {degrees} degrees of freedom"


def truncated(probabilities: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Keep the top_k likeliest, of those the smallest set of at least top_p, and scale up to 1."""
    order = probabilities.argsort(descending=True)
    kept = probabilities[order]
    if sampling.top_k:
        kept[sampling.top_k :] = 0
    kept /= kept.sum()
    kept[kept.cumsum(0) - kept >= sampling.top_p] = 0
    return torch.zeros_like(probabilities).scatter(0, order, kept / kept.sum())


def test_top_k_of_one_is_greedy(generator):
    asked = requests(6)
    cut = [r.tokens for r in generator.generate(asked, Sampling(top_k=1))]
    assert cut == [r.tokens for r in generator.generate(greedily(asked), Sampling())]


def test_greedy_and_sampled_rows_of_one_batch_are_what_each_is_alone(model):
    together = TransformersGenerator(model, 100_000)
    sampling, asked = Sampling(1.5, 0.9, 50), requests(10)
    assert len(together.plan(asked)) == 1
    mixed = together.generate(greedily(asked, every=2), sampling)
    sampled = together.generate(asked, sampling)
    greedy = together.generate(greedily(asked), Sampling())
    assert [r.tokens for r in mixed] == [(sampled if i % 2 else greedy)[i].tokens for i in range(len(asked))]
    assert all(s.tokens != g.tokens for s, g in zip(sampled, greedy, strict=True))


def test_top_k_beyond_the_vocabulary_keeps_everything(generator):
    asked = requests(4)
    assert generator.generate(asked, Sampling(top_k=10**6)) == generator.generate(asked, Sampling())


def test_log_probabilities_leave_top_k_and_top_p_out(generator, model):
    prompt = prompts(4)[3]
    (response,) = generator.generate([Request(prompt, 1, 0)], Sampling(top_k=2, top_p=0.9))
    expected = next_token_probabilities(model, prompt)[response.tokens[0]].log()
    assert response.log_probs[0] == pytest.approx(float(expected), abs=1e-4)


def test_a_model_without_any_stop_token_runs_to_the_limit(models):
    model = load_causal_lm(models / "policy", Precision.FP32, trust_remote_code=False)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    for response in TransformersGenerator(model, 300).generate(requests(8), Sampling()):
        assert response.finish_reason is FinishReason.LENGTH


def test_bf16_samples_and_notes_its_own_log_probabilities(models):
    model = load_causal_lm(models / "policy", Precision.BF16, trust_remote_code=False)
    assert model.dtype is torch.bfloat16
    asked = requests(8)
    for request, response in zip(
        asked, TransformersGenerator(model, 400).generate(asked, Sampling()), strict=True
    ):
        assert 1 <= len(response.tokens) <= request.max_new_tokens
        assert all(math.isfinite(x) and x <= 0 for x in response.log_probs)
        first = next_token_probabilities(model, list(request.prompt_tokens))[response.tokens[0]].log()
        assert response.log_probs[0] == pytest.approx(float(first), abs=0.2)


# what is kept


class Counted:
    """An engine that counts what happens to it."""

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.can_reset = self.can_reload = True

    def reset(self) -> bool:
        self.happened.append("reset")
        return self.can_reset

    def reload(self, had) -> bool:
        self.happened.append(f"reload {had[0]}")
        if self.can_reload is None:
            raise RuntimeError("no memory for other weights")
        return self.can_reload


@pytest.fixture
def asked():
    """Ask for the engine of a task, by the fingerprint of its weights and its settings."""

    def ask(attempt: str, weights: str, settings: str = "s") -> Counted:
        wanted = Wanted("test", attempt, settings, (weights,))
        return engine(wanted, Counted, lambda kept, had: kept.reload(had))

    yield ask
    release_all()


def test_a_task_gets_the_same_engine_whenever_it_asks(asked):
    one = asked("1", "a")
    assert asked("1", "a") is one
    assert one.happened == []


def test_the_next_task_gets_it_reset_and_with_its_own_weights(asked):
    one = asked("1", "a")
    assert asked("2", "a") is one
    assert one.happened == ["reset"]
    assert asked("3", "b") is asked("3", "b") is one
    assert one.happened == ["reset", "reset", "reload a"]


def test_other_settings_and_a_release_make_a_new_one(asked):
    one = asked("1", "a")
    other = asked("2", "a", "t")
    assert other is not one
    release_all()
    assert asked("3", "a", "t") is not other
    assert one.happened == other.happened == []


@pytest.mark.parametrize("given", [{"can_reset": False}, {"can_reload": False}, {"can_reload": None}])
def test_so_does_one_that_cannot_forget_or_take_other_weights(asked, given, caplog):
    one = asked("1", "a")
    vars(one).update(given)
    other = asked("2", "b")
    assert other is not one
    assert asked("2", "b") is other
    assert ("is made again" in caplog.text) == (given == {"can_reload": None})


def test_an_engine_in_which_weights_were_being_replaced_is_not_used_again(asked, monkeypatch):
    one = asked("1", "a")
    monkeypatch.setattr(one, "reload", lambda had: sys.exit(1))
    with pytest.raises(SystemExit):
        asked("2", "b")
    assert asked("3", "a") is not one


@pytest.mark.parametrize(
    ("names", "has_gpu", "stay"),
    [
        (("transformers", "transformers", "transformers"), True, 3),
        (("vllm", "transformers", "transformers"), False, 3),
        (("transformers", "vllm"), True, 1),
        (("vllm", "transformers"), True, 1),
        (("transformers", "vllm", "mine:make"), False, 2),
    ],
)
def test_one_engine_that_sets_up_its_process_stays_beside_those_of_transformers_where_no_gpu_is_shared(
    gpu, names, has_gpu, stay
):
    gpu(has_gpu)
    try:
        made = [engine(Wanted(f"role{n}", "1", "s", (), name), Counted) for n, name in enumerate(names)]
        again = [
            engine(Wanted(f"role{n}", "2", "s", (), name), Counted)
            for n, name in reversed(list(enumerate(names)))
        ]
    finally:
        release_all()
    assert sum(one in made for one in again) == stay


@pytest.fixture
def gpu(monkeypatch) -> Callable[..., None]:
    """Pretend that there is a GPU, or none, and say what is free of its memory. Garbage is left where it is:
    to look for it takes a while."""

    def pretend(is_there: bool = True, free: Sequence[float] = ()) -> None:
        found = iter(free)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: is_there)
        monkeypatch.setattr(kept, "free_gib", lambda: next(found, 0.0))
        monkeypatch.setattr(kept, "_collect", lambda: None)

    return pretend


def kept_roles() -> list[str]:
    return list(kept._kept)


def vllm(share: float, **settings: object) -> VllmConfig:
    return VllmConfig(gpu_memory_utilization=share, **settings)


@pytest.mark.parametrize(
    ("given", "has_gpu", "stay"),
    [
        ([vllm(0.5), None], True, 2),  # a scorer and the reference
        ([None, vllm(0.6), None], True, 3),
        ([vllm(0.9), None], True, 1),
        ([vllm(0.5, own_process=False), None], True, 1),
        ([vllm(0.3), vllm(0.3)], True, 2),  # two reward models
        ([vllm(0.5), vllm(0.5)], True, 1),
        ([vllm(0.3), vllm(0.3), None], True, 3),
        ([vllm(0.9), None], False, 2),
        ([vllm(0.3), vllm(0.3)], False, 1),
        ([vllm(0.3, own_process=True), vllm(0.3, own_process=True)], False, 2),
    ],
)
def test_engines_of_vllm_stay_where_their_shares_of_the_gpu_leave_enough_for_all(gpu, given, has_gpu, stay):
    gpu(has_gpu)

    def ask(attempt: str) -> list[Counted]:
        names = ["vllm" if settings else "transformers" for settings in given]
        wanted = [
            Wanted(f"role{n}", attempt, "s", (), name, settings)
            for n, (name, settings) in enumerate(zip(names, given, strict=True))
        ]
        return [engine(one, Counted) for one in wanted]

    try:
        made = ask("1")
        assert len(kept_roles()) == stay
        assert (ask("2") == made) == (stay == len(given))
    finally:
        release_all()


def test_an_engine_for_which_others_leave_no_room_after_all_is_made_without_them(gpu, caplog):
    gpu()

    def load_large() -> Counted:
        if "scorer" in kept_roles():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Counted()

    try:
        engine(Wanted("scorer", "1", "s", (), "vllm", vllm(0.5)), Counted)
        engine(Wanted("reference", "1", "s", ()), load_large)
        assert kept_roles() == ["reference"]
        assert "the reference is made again, without scorer beside it" in caplog.text
    finally:
        release_all()


def test_it_is_made_again_when_what_the_first_try_held_is_gone(gpu, monkeypatch):
    """As a traceback holds the weights that were loaded when memory ran out."""
    gpu()
    monkeypatch.setattr(kept.log, "exception", lambda text: None)  # pytest would keep the traceback
    held: weakref.WeakSet[Counted] = weakref.WeakSet()
    seen = []

    def load_large() -> Counted:
        seen.append(len(held))
        weights = Counted()
        held.add(weights)
        if "scorer" in kept_roles():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return weights

    try:
        engine(Wanted("scorer", "1", "s", (), "vllm", vllm(0.5)), Counted)
        engine(Wanted("reference", "1", "s", ()), load_large)
        assert seen == [0, 0]
    finally:
        release_all()


class Remembering(Scorer):
    """A scorer that says how it computes."""

    def _score(self, sequences):
        return [0.0 for _ in sequences]

    def facts(self) -> EngineFacts:
        return EngineFacts({"model_runner": 2.0}, memory_gib=3.0, gpu_memory_gib=5.0)


def test_how_engines_computed_is_told_once_also_of_those_that_made_room(gpu):
    gpu(free=[70.0, 69.5])
    try:
        engine(Wanted("scorer", "1", "s", (), "vllm", vllm(0.9)), Remembering)
        assert take_facts() == EngineFacts({"engine/model_runner/scorer": 2.0}, 3.0, 5.0)
        assert take_facts() == EngineFacts()
        engine(Wanted("scorer", "1", "s", (), "vllm", vllm(0.9)), Remembering)
        engine(Wanted("reference", "1", "s", ()), Counted)
        assert take_facts().numbers == {
            "engine/model_runner/scorer": 2.0,
            "engine/unreturned_gib/scorer": 0.5,
        }
    finally:
        release_all()


def directory_like(folder: Path, **settings: object) -> Path:
    """A policy that computes its frequencies for the longest sequence so far."""
    made = tiny.make_policy(folder)
    described = json.loads((made / "config.json").read_text())
    described |= settings
    (made / "config.json").write_text(json.dumps(described))
    return made


def test_what_a_model_computed_for_longer_sequences_is_forgotten(tmp_path):
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    folder = directory_like(tmp_path / "policy", rope_parameters=rope, max_position_embeddings=16)
    used, new = (
        TransformersGenerator(load_causal_lm(folder, Precision.FP32, False), 400, context=100)
        for _ in range(2)
    )
    longer, shorter = [Request([7] * 60, 8, seed=1)], [Request([5] * 20, 8, seed=2)]
    expected = new.generate(shorter, Sampling())
    used.generate(longer, Sampling())
    assert used.generate(shorter, Sampling()) != expected, "the model does remember"
    assert used.reset()
    assert used.generate(shorter, Sampling()) == expected


@pytest.fixture(scope="module")
def policies(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("policies")
    return [tiny.make_policy(folder / str(seed), seed) for seed in range(3)]


def made_of(folder: Path, precision: Precision = Precision.FP32) -> TransformersGenerator:
    made = TransformersGenerator(load_causal_lm(folder, precision, False), 400)
    made.is_like(str(folder), merges=True)
    return made


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_weights_that_are_replaced_are_those_of_a_model_that_is_loaded(policies, precision):
    used = made_of(policies[0], precision)
    for folder in (policies[1], policies[2], policies[0], policies[1]):
        assert used.reset()
        assert used.reload(str(folder))
        new = made_of(folder, precision)
        ours, wanted = used._model.state_dict(), new._model.state_dict()
        assert all(torch.equal(ours[name], wanted[name]) for name in ours.keys() | wanted.keys())
        assert {t.data_ptr() % 64 for t in ours.values()} == {t.data_ptr() % 64 for t in wanted.values()}
        assert used.generate(requests(), Sampling()) == new.generate(requests(), Sampling())


def test_so_are_tied_ones(tmp_path):
    folders = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        described = tiny.llama_config(tiny.byte_tokenizer(("<pad>", "<eos>")), tie_word_embeddings=True)
        AutoModelForCausalLM.from_config(described).save_pretrained(tmp_path / str(seed))
        folders.append(tmp_path / str(seed))
    used, new = made_of(folders[0]), made_of(folders[1])
    assert used.reload(str(folders[1]))
    assert used._model.lm_head.weight is used._model.model.embed_tokens.weight
    assert used.generate(requests(), Sampling()) == new.generate(requests(), Sampling())


@pytest.mark.parametrize(
    "settings", [{"rms_norm_eps": 0.5}, {"eos_token_id": 9}, {"auto_map": {"AutoModel": "m.M"}}]
)
def test_weights_of_a_model_that_is_not_like_it_are_refused(policies, tmp_path, settings):
    used = made_of(policies[0])
    expected = used.generate(requests(), Sampling())
    assert not used.reload(str(directory_like(tmp_path / "other", **settings)))
    assert used.reset()
    assert used.generate(requests(), Sampling()) == expected


def test_experts_that_are_joined_when_they_are_loaded_are_refused(tmp_path):
    described = MixtralConfig(
        vocab_size=260, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(described).save_pretrained(tmp_path)
    assert not made_of(tmp_path).reload(str(tmp_path))


def test_an_adapter_goes_into_the_weights_of_its_base_and_out_of_them(policies, tmp_path):
    one, other = (make_adapter(policies[0], tmp_path / str(seed), seed=seed) for seed in (1, 2))
    used = made_of(policies[0])
    for adapter in (one, other, None, one):
        assert used.reload(str(policies[0]), adapter and str(adapter))
        new = load_causal_lm(policies[0], Precision.FP32, False)
        if adapter:
            merge_into(new, read_adapter(adapter))
        expected = TransformersGenerator(new, 400).generate(requests(), Sampling())
        assert used.generate(requests(), Sampling()) == expected


# scoring


def by_hand(model, sequence: list[int]) -> float:
    """The head's output at the last token, without any batching or padding."""
    with torch.no_grad():
        hidden = model.model(input_ids=torch.tensor([sequence])).last_hidden_state
        return float(model.score(hidden[0, -1]))


def test_scores_without_a_padding_id_are_the_same(models):
    model = load_reward_model(models / "reward_model", Precision.FP32, trust_remote_code=False)
    sequences = prompts(12)
    expected = [by_hand(model, s) for s in sequences]
    model.config.pad_token_id = None
    assert TransformersScorer(model, 10_000).score(sequences) == pytest.approx(expected, abs=1e-5)


def test_a_model_with_several_outputs_is_no_reward_model(tmp_path: Path):
    tokenizer = tiny.byte_tokenizer(("<pad>", "<eos>"))
    LlamaForSequenceClassification(tiny.llama_config(tokenizer, num_labels=2)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="has 2 outputs; a reward model has 1"):
        load_reward_model(tmp_path, Precision.FP32, trust_remote_code=False)
