"""What every engine must do: transformers, vLLM, and one of a user's own that is named module:function."""

import json
import math
import os
import signal
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import torch._dynamo
from transformers import (
    AutoTokenizer,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    OpenAIGPTConfig,
    OpenAIGPTForSequenceClassification,
)

from pipeline.config.engines import Engine
from pipeline.config.schema import Config
from pipeline.config.update import Precision
from pipeline.run.schemas import FinishReason
from stages.context import UserError
from stages.engines import make_generator, make_scorer
from stages.engines.base import REFUSED, BadSequence, Request, Response, Sampling
from stages.models.adapters import merge_into, read_adapter
from stages.models.loading import load_causal_lm, load_reward_model
from stages.models.passes import PassedTokens, counted_passes, forget_passes
from tests.support import tiny
from tests.support.adapters import make_adapter
from tests.support.processes import config_of
from tests.support.tables import IS_SOAK, LONG
from tests.support.tiny import prompts

TRIAL = pytest.mark.trial(1 / 2)
"""Mark of vLLM's engines that have processes of their own."""
END = 1
ENGINES = ["transformers", "vllm", "naive_engine"]
OPINIONS = {
    "do_sample": True,
    "temperature": 0.1,
    "top_k": 2,
    "top_p": 0.3,
    "repetition_penalty": 3.0,
    "max_new_tokens": 2,
    "min_new_tokens": 19,
    "suppress_tokens": [7, 8, 9],
    "eos_token_id": [END, 77],
}
"""Of a model directory. Only the ids that end a sequence count."""
ONE, OTHER = 21, 22
"""Seeds of policies of one shape."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Policies whose directories have opinions on how to generate, and two reward models."""
    folder = tiny.make_inputs(tmp_path_factory.mktemp("contract"))
    (folder / "policy/generation_config.json").write_text(json.dumps(OPINIONS))
    for seed in (ONE, OTHER):
        tied_policy(folder / f"tied-{seed}", seed)
    tiny.make_reward_model(folder / "padding_ends", seed=5)
    described = json.loads((folder / "padding_ends/config.json").read_text())
    described["pad_token_id"] = described["eos_token_id"]
    (folder / "padding_ends/config.json").write_text(json.dumps(described))
    return folder


@pytest.fixture(scope="module", params=ENGINES)
def config(request, folder):
    """vLLM changes its process: what other tests start from here must not know."""
    before, threads, dynamo = dict(os.environ), torch.get_num_threads(), torch._dynamo.config.disable
    torch.set_num_threads(1)
    is_ours = request.param != "naive_engine"
    engine, scoring = (
        (request.param, request.param)
        if is_ours
        else ("tests.support.naive_engine:make_generator", "tests.support.naive_engine:make_scorer")
    )
    made = config_of(
        folder,
        folder / "run",
        f"rollout.engine={engine}",
        f"reward.engine={scoring}",
        "rollout.precision=fp32",
        "rollout.vllm.enforce_eager=true",
        "rollout.vllm.max_num_seqs=8",
        "reward.vllm.enforce_eager=true",
        "rollout.tokens_per_batch=400",
        "reward.tokens_per_batch=100",
    )
    if request.param == "vllm":
        look_at_models_here(made)
    yield made
    torch.set_num_threads(threads)
    torch._dynamo.config.disable = dynamo
    os.environ.clear()
    os.environ.update(before)


def look_at_models_here(config: Config) -> None:
    """To see what a model's class can do, vLLM starts another interpreter, which imports vLLM once more."""
    from stages.engines.vllm_setup import set_up

    set_up(config.rollout.vllm)
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()


@pytest.fixture(scope="module")
def generator(config, folder):
    made = make_generator(config, str(folder / f"tied-{OTHER}"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def model(folder):
    return load_causal_lm(folder / f"tied-{OTHER}", Precision.FP32, trust_remote_code=False)


@pytest.fixture(scope="module")
def adapter(folder):
    return make_adapter(folder / "policy", folder / "adapter")


def requests(count: int = 12, max_new_tokens: int = 20) -> list[Request]:
    return [Request(p, max_new_tokens - i % 7, seed=100 + i) for i, p in enumerate(prompts(count))]


def greedily(asked: list[Request]) -> list[Request]:
    return [replace(request, greedy=True) for request in asked]


def log_probs_of(model, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """[tokens] of a plain forward pass."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0]
    spread = torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, dim=-1)
    return spread.gather(-1, torch.tensor(tokens)[:, None])[:, 0]


# what is used again: first, since vLLM's engines cannot be closed while others of the process go on


def tied_policy(folder, seed: int):
    """One whose head is its embedding."""
    torch.manual_seed(seed)
    described = tiny.llama_config(tiny.byte_tokenizer(("<pad>", "<eos>")), tie_word_embeddings=True)
    LlamaForCausalLM(described).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(OPINIONS))
    return folder


@dataclass(frozen=True)
class Reloaded:
    """What an engine answered that took weights again and again, and was closed."""

    made: list[Response]
    """As it was made, of :data:`ONE`."""
    back: list[Response]
    """With these weights once more."""
    last: list[Response]
    """With those of :data:`OTHER`, which it was not made of."""
    can_forget: bool


@pytest.fixture(scope="module")
def reloaded(config, folder) -> Reloaded:
    """Whatever it is used for in between: conversations, greedy responses, what is given up half way."""
    one, other = (str(folder / f"tied-{seed}") for seed in (ONE, OTHER))
    used, asked = make_generator(config, one), requests()
    made = back = used.generate(asked, Sampling(1.3))
    for policy in (other, one, other):
        for _ in used.stream(asked, Sampling(), turns=TwoTurns(asked)):
            pass
        next(iter(used.stream(greedily(asked), Sampling())))
        can_forget = used.reset()
        assert used.reload(policy) == can_forget == ("naive" not in config.rollout.engine)
        if policy == one:
            back = used.generate(asked, Sampling(1.3))
    last = used.generate(asked, Sampling(1.3))
    used.close()
    return Reloaded(made, back, last, can_forget)


@pytest.fixture(scope="module")
def adapted(config, adapter) -> list[Response]:
    """What an engine answers that was made with the adapter. It is closed: see above."""
    with pytest.MonkeyPatch.context() as patch:
        if "naive" not in config.rollout.engine:  # ours put it on the base, and need no merged model
            patch.delattr("stages.models.merging.merged_folder")
        made = make_generator(config, config.model.policy, str(adapter))
        try:
            return made.generate(requests(), Sampling())
        finally:
            made.close()


@LONG
def test_an_engine_that_takes_another_adapter_is_as_one_made_with_it(
    config, folder, adapter, adapted, tmp_path
):
    if "naive" in config.rollout.engine:
        return
    other = make_adapter(folder / "policy", tmp_path / "other", seed=5)
    used = make_generator(config, config.model.policy, str(other))
    before = used.generate(requests(), Sampling())
    assert used.reset()
    assert used.reload(config.model.policy, str(adapter))
    found = used.generate(requests(), Sampling())
    used.close()
    assert found == adapted != before


@TRIAL
@pytest.mark.parametrize("config", ["vllm"], indirect=True)
def test_vllm_in_a_process_of_its_own_does_the_same_and_tells_what_went_wrong_in_it(
    config, folder, reloaded, tmp_path
):
    own = replace(
        config, rollout=replace(config.rollout, vllm=replace(config.rollout.vllm, own_process=True))
    )
    asked, made = requests(), make_generator(own, str(folder / f"tied-{ONE}"))
    assert made.generate(asked, Sampling(1.3)) == reloaded.made
    next(iter(made.stream(asked, Sampling())))  # and what is left of it is given up
    assert made.reset()
    assert made.reload(str(folder / f"tied-{OTHER}"))
    assert made.generate(asked, Sampling(1.3)) == reloaded.last
    facts = made.facts()
    assert facts.numbers == {"model_runner": 1, "async_scheduling": 0, "own_process": 1}
    assert 0.2 < facts.memory_gib < 4
    with pytest.raises((OSError, RuntimeError), match="nowhere"):
        made._engine.load(str(tmp_path / "nowhere"))
    (process,) = made._engine._engine.engine_core.resources.engine_manager.processes
    if IS_SOAK:
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="vLLM's process has ended"):
            made.generate(asked, Sampling())
    made.close()
    assert not process.is_alive()


@LONG
@pytest.mark.parametrize("config", ["vllm"], indirect=True)
def test_a_model_that_vllm_splits_over_two_processes_gives_the_same_with_other_weights_too(
    config, folder, reloaded
):
    split = replace(config.rollout.vllm, tensor_parallel_size=2)
    one, other = (str(folder / f"tied-{seed}") for seed in (ONE, OTHER))
    asked, made = (
        requests(),
        make_generator(replace(config, rollout=replace(config.rollout, vllm=split)), one),
    )
    first = made.generate(asked, Sampling(1.3))
    next(iter(made.stream(asked, Sampling())))  # and what is left of it is given up
    assert made.reset()
    assert made.reload(other)
    second = made.generate(asked, Sampling(1.3))
    made.close()
    for whole, halves in ((reloaded.made, first), (reloaded.last, second)):
        assert [r.tokens for r in halves] == [r.tokens for r in whole]
        assert [r.log_probs for r in halves] == [pytest.approx(r.log_probs, abs=1e-4) for r in whole]


def test_an_adapter_changes_what_is_generated_as_the_merged_model_would(folder, adapter, adapted):
    merged = load_causal_lm(folder / "policy", Precision.FP32, trust_remote_code=False)
    merge_into(merged, read_adapter(adapter))
    for request, response in zip(requests(), adapted, strict=True):
        expected = log_probs_of(merged, request.prompt_tokens, response.tokens)
        assert torch.allclose(torch.tensor(response.log_probs), expected, atol=1e-4)


def test_an_engine_that_takes_other_weights_is_as_one_made_of_them(reloaded, request):
    """The one made of them is the one of all tests below: none can be closed while it goes on."""
    if reloaded.can_forget:
        new = request.getfixturevalue("generator")
        assert reloaded.back == reloaded.made
        assert new.generate(requests(), Sampling(1.3)) == reloaded.last != reloaded.made


# what is generated


def test_greedy_takes_the_likeliest_token_each_time(generator, model):
    for request, response in zip(
        requests(6), generator.generate(greedily(requests(6)), Sampling()), strict=True
    ):
        expected: list[int] = []
        while len(expected) < request.max_new_tokens and not {END, 77}.intersection(expected[-1:]):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([[*request.prompt_tokens, *expected]])).logits
            expected.append(int(logits[0, -1].argmax()))
        assert response.tokens == expected


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_log_probabilities_are_those_of_a_forward_pass_at_the_temperature(generator, model, temperature):
    asked = requests()
    for request, response in zip(asked, generator.generate(asked, Sampling(temperature)), strict=True):
        expected = log_probs_of(model, request.prompt_tokens, response.tokens, temperature)
        torch.testing.assert_close(torch.tensor(response.log_probs), expected, atol=1e-4, rtol=0)


def test_those_of_greedy_tokens_are_at_temperature_1_also_among_sampled_ones(generator, model):
    asked = [*requests(4), *greedily(requests(4))]
    for request, response in list(zip(asked, generator.generate(asked, Sampling(1.7)), strict=True))[4:]:
        expected = log_probs_of(model, request.prompt_tokens, response.tokens)
        torch.testing.assert_close(torch.tensor(response.log_probs), expected, atol=1e-4, rtol=0)


def test_a_response_does_not_depend_on_what_it_is_batched_with(generator):
    asked = [*requests(16), *greedily(requests(4))]
    together = generator.generate(asked, Sampling())
    assert [r.tokens for r in generator.generate(asked[::-1], Sampling())[::-1]] == [
        r.tokens for r in together
    ]
    alone = [generator.generate([request], Sampling())[0].tokens for request in asked]
    assert alone == [r.tokens for r in together]


def test_the_same_call_gives_the_same_bytes(generator):
    assert generator.generate(requests(), Sampling()) == generator.generate(requests(), Sampling())


def test_samples_of_a_prompt_differ_by_their_seeds(generator):
    prompt = prompts(3)[2]
    seeds = [2**62 + 5, 1, 2, 3, 1]
    found = generator.generate([Request(prompt, 16, seed) for seed in seeds], Sampling())
    assert found[1].tokens == found[4].tokens
    assert len({tuple(response.tokens) for response in found}) == 4


def test_many_seeds_follow_the_models_distribution(generator, model):
    prompt, count = prompts(4)[3], 600
    found = generator.generate([Request(prompt, 1, seed) for seed in range(count)], Sampling(1.3))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt])).logits[0, -1]
    expected = torch.softmax(logits.double() / 1.3, dim=-1)
    seen = torch.zeros_like(expected)
    for token, times in Counter(response.tokens[0] for response in found).items():
        seen[token] = times
    likely = expected * count >= 5
    observed = torch.cat([seen[likely], seen[~likely].sum()[None]])
    wanted = torch.cat([expected[likely], expected[~likely].sum()[None]]) * count
    degrees = len(wanted) - 1
    assert degrees >= 20
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    # Wilson and Hilferty: the cube root of chi-square over its degrees is about normal. 4 sigmas.
    score = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    assert abs(score) < 4


def test_responses_end_at_a_stop_token_which_they_keep_or_at_their_limit(generator):
    asked = requests(30, max_new_tokens=24)
    free = generator.generate(asked, Sampling())
    stop = Counter(t for r in free for t in r.tokens[2:-2] if t not in (END, 77)).most_common(1)[0][0]
    stopped = generator.generate(asked, Sampling(stop_token_ids=(stop,)))
    for request, before, after in zip(asked, free, stopped, strict=True):
        cut = next((i + 1 for i, token in enumerate(before.tokens) if token in (END, 77, stop)), None)
        assert after.tokens == before.tokens[: cut or request.max_new_tokens]
        assert len(after.log_probs) == len(after.tokens)
        assert after.finish_reason is (FinishReason.LENGTH if cut is None else FinishReason.STOP)
    assert {r.finish_reason for r in stopped} == {FinishReason.STOP, FinishReason.LENGTH}


def test_a_response_whose_end_is_the_last_token_that_fits_has_ended(generator):
    asked = requests(12)
    free = generator.generate(asked, Sampling())
    stops = Sampling(stop_token_ids=tuple(token for response in free for token in response.tokens[3:4]))
    lengths = [len(response.tokens) for response in generator.generate(asked, stops)]
    tight = [replace(request, max_new_tokens=n) for request, n in zip(asked, lengths, strict=True)]
    found = generator.generate(tight, stops)
    assert [len(response.tokens) for response in found] == lengths
    assert {response.finish_reason for response in found} == {FinishReason.STOP}


def test_an_empty_response_is_a_stop_token_alone(generator):
    (free,) = generator.generate(greedily(requests(1)), Sampling())
    (empty,) = generator.generate(greedily(requests(1)), Sampling(stop_token_ids=(free.tokens[0],)))
    assert (empty.tokens, empty.finish_reason) == ([free.tokens[0]], FinishReason.STOP)


def test_text_of_any_script_goes_in_as_tokens(generator, model, folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    texts = ["žluťoučký kůň", "雪が降る", "🦙🦙", "שלום", "\x00\n\t"]
    asked = [Request(tokenizer(text)["input_ids"], 8, seed=3) for text in texts]
    for request, response in zip(asked, generator.generate(asked, Sampling()), strict=True):
        expected = log_probs_of(model, request.prompt_tokens, response.tokens)
        torch.testing.assert_close(torch.tensor(response.log_probs), expected, atol=1e-4, rtol=0)


def test_our_engines_count_what_goes_through_the_model(config, generator):
    """vLLM pads nothing, transformers each batch; users' engines need not count."""
    asked = requests()
    forget_passes()
    written = generator.generate(asked, Sampling())
    found, size = counted_passes(), sum(len(one.prompt_tokens) for one in asked)
    size += sum(len(response.tokens) for response in written)
    if config.rollout.engine == Engine.VLLM:
        assert found == PassedTokens(size, size)
    elif config.rollout.engine == Engine.TRANSFORMERS:
        assert size == found.tokens < found.positions
    else:
        assert found == PassedTokens()


@pytest.mark.parametrize("config", ["vllm"], indirect=True)
def test_vllm_gives_the_memory_of_its_cache_back_with_each_task(config, generator):
    asked, sampling = requests(12), Sampling()
    engine = generator._engine._engine
    used = partial(
        engine.collective_rpc, lambda worker: sum(map(torch.count_nonzero, worker.model_runner.kv_caches))
    )
    stream = iter(generator.stream(asked, sampling))
    first = next(stream)
    assert sum(used()) > 0
    expected = first | {i: one for part in stream for i, one in part.items()}
    assert sum(used()) == 0, "a page that was given back reads as zeros"
    assert generator.generate(asked, sampling) == [expected[i] for i in range(12)]


def test_nothing_asked_is_nothing_answered(generator):
    assert generator.generate([], Sampling()) == []


# what is refused


def test_one_bad_prompt_does_not_fail_its_batch(generator):
    """A naive engine asks for a negative number of tokens, refuses the whole batch, or hangs for ever."""
    good = requests(4)
    expected = generator.generate(good, Sampling())
    bad = [[], [5] * tiny.CONTEXT, [5] * (3 * tiny.CONTEXT), [5, 258], [5, -1], [10**9]]
    mixed = [good[0], *(Request(prompt, 8, seed=1) for prompt in bad), *good[1:]]
    found = generator.generate(mixed, Sampling())
    assert [r.tokens for r in (found[0], *found[-3:])] == [r.tokens for r in expected]
    assert found[1:-3] == [REFUSED] * len(bad)
    assert generator.generate([Request(prompt, 1) for prompt in bad], Sampling()) == [REFUSED] * len(bad)


def test_the_longest_prompt_leaves_room_for_one_token_and_more_are_never_asked_for(generator):
    asked = [Request([7] * (tiny.CONTEXT - left), 50, seed=2) for left in (1, 2, 5)]
    found = generator.generate(asked, Sampling())
    for left, response in zip((1, 2, 5), found, strict=True):
        assert 1 <= len(response.tokens) <= left
        assert len(response.tokens) == left or response.finish_reason is FinishReason.STOP


# streams


def test_what_is_done_is_left_out_and_the_rest_stays_the_same(generator):
    asked = requests(12)
    expected = generator.generate(asked, Sampling())
    for group in generator.plan(asked):
        done = set(range(12)) - set(group)
        found = {i: r for part in generator.stream(asked, Sampling(), done) for i, r in part.items()}
        assert {i: found[i] for i in group} == {i: expected[i] for i in group}
    assert sorted(i for group in generator.plan(asked) for i in group) == list(range(12))


def test_a_stopped_stream_leaves_nothing_behind(generator):
    asked = requests(12)
    expected = generator.generate(asked, Sampling())
    calls = iter([False] * 9)
    found = {}
    for part in generator.stream(asked, Sampling(), should_stop=lambda: next(calls, True)):
        found |= part
    assert len(found) < 12
    stream = iter(generator.stream(asked, Sampling()))
    next(stream)
    stream.close()
    assert generator.generate(asked, Sampling()) == expected


class TwoTurns:
    """Lets every conversation with an even number go on once, with a word from outside."""

    def __init__(self, asked: list[Request]) -> None:
        self.asked = asked
        self.first: dict[int, list[int]] = {}
        self.second: dict[int, Request] = {}
        self._due: dict[int, Request | None] = {}

    def ended(self, index, response):
        if index % 2 or index in self.first:
            self._due[index] = None
            return
        self.first[index] = response.tokens
        tokens = [*self.asked[index].prompt_tokens, *response.tokens, 40, 41]
        self.second[index] = self._due[index] = Request(tokens, 6, seed=500 + index)

    def due(self, wait):
        due, self._due = self._due, {}
        return due


def test_conversations_go_on_as_they_are_told_to(generator):
    asked = requests(10, max_new_tokens=12)
    turns = TwoTurns(asked)
    found = {}
    for part in generator.stream(asked, Sampling(), turns=turns):
        assert not found.keys() & part.keys()
        found |= part
    once = generator.generate(asked, Sampling())
    assert turns.first == {i: once[i].tokens for i in range(0, 10, 2)}
    expected = generator.generate(list(turns.second.values()), Sampling())
    assert [found[i].tokens for i in turns.second] == [r.tokens for r in expected]
    assert [found[i].tokens for i in range(1, 10, 2)] == [r.tokens for r in once[1::2]]


def test_some_conversations_are_over_before_all_have_begun(generator):
    """Or a task that is ended in between would have nothing to save, however often it is tried."""
    asked = requests(40, max_new_tokens=12)
    turns = TwoTurns(asked)
    stream = iter(generator.stream(asked, Sampling(), turns=turns))
    seen = set(next(stream))
    while not seen & turns.second.keys():
        seen |= next(stream).keys()
    assert len(turns.first) < 20
    stream.close()


# scores


@pytest.mark.parametrize("name", ["reward_model", "padding_ends"])
def test_scores_are_the_raw_logits_of_transformers(config, folder, name):
    directory = folder / name
    plain = load_reward_model(directory, Precision.FP32, trust_remote_code=False)
    end = plain.config.eos_token_id
    sequences = [*prompts(20), [7] * tiny.CONTEXT, [5], [5, 6, end], [5, 6, end, end]]
    with torch.no_grad():
        expected = [float(plain(torch.tensor([s])).logits) for s in sequences]
    scorer = make_scorer(config, config.reward.engine, str(directory))
    assert scorer.score(sequences) == pytest.approx(expected, abs=1e-4)
    assert scorer.score([]) == []
    if name == "reward_model":
        assert min(expected) < -0.1 or max(expected) > 1.1, "an activation would not show"
    for bad in ([], [5] * (tiny.CONTEXT + 1), [5, 10**6], [-1]):
        with pytest.raises(BadSequence, match="sequence 1 cannot be scored"):
            scorer.score([[5], bad, [6]])
    found = scorer.score(sequences[:3])
    assert found == pytest.approx(expected[:3], abs=1e-4)
    assert scorer.reset() == ("naive" not in config.reward.engine)
    assert scorer.score(sequences[:3]) == found
    scorer.close()


def assert_transformers_scores_if_asked(config, model, caplog):
    lenient = replace(config, reward=replace(config.reward, fall_back=True))
    scorer = make_scorer(lenient, config.reward.engine, str(model))
    assert f"{model} is scored with transformers: " in caplog.text
    (score,) = scorer.score([[5, 6]])
    assert math.isfinite(score)
    scorer.close()


@pytest.mark.parametrize("config", ["vllm"], indirect=True)
def test_a_model_that_vllm_does_not_know_is_scored_with_transformers_if_that_is_asked_for(
    config, tmp_path, caplog
):
    torch.manual_seed(3)
    described = OpenAIGPTConfig(
        vocab_size=300, n_positions=tiny.CONTEXT, n_embd=32, n_layer=1, n_head=1, num_labels=1, pad_token_id=2
    )
    OpenAIGPTForSequenceClassification(described).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"^reward\.engine=vllm: .*take engine=transformers"):
        make_scorer(config, config.reward.engine, str(tmp_path))
    assert_transformers_scores_if_asked(config, tmp_path, caplog)


@pytest.mark.parametrize("config", ["vllm"], indirect=True)
def test_so_is_one_of_a_shape_that_vllm_has_no_kernel_for(config, tmp_path, caplog):
    """On CPUs that shows at the first step only."""
    tokenizer = tiny.byte_tokenizer(("<eos>", "<x>", "<pad>"))
    described = tiny.llama_config(tokenizer, num_labels=1)
    described.head_dim = 24
    LlamaForSequenceClassification(described).save_pretrained(tmp_path)
    assert_transformers_scores_if_asked(config, tmp_path, caplog)
    assert "head_" in caplog.text, "what vLLM says of it"
