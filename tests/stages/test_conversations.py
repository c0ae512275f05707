"""Conversations of several turns: what schedulers see and say, what becomes of it, and where it ends."""

import itertools
import json
import math
import os
import re
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from pipeline.config.issue import ConfigError
from pipeline.config.rollout import MultiTurnConfig
from pipeline.config.update import Precision
from pipeline.data.chat import Rendering
from pipeline.data.prompts import Message, Prompt
from pipeline.data.rendering import prompt_text
from pipeline.metrics.row import Clock, iteration_row
from pipeline.run.commits import Record, require_record
from pipeline.run.directory import Run, load_run
from pipeline.run.schemas import PROMPTS, ROLLOUT, FinishReason, conform
from pipeline.run.seeds import derive_seed
from pipeline.run.shards import read_shard
from pipeline.run.tasks import PREPARE, Stage, Task
from stages.context import UserError
from stages.engines.base import Request, Response, Sampling, Stopped
from stages.engines.transformers import TransformersGenerator
from stages.generation.calls import CallPool, Late
from stages.generation.chat import continuation_text
from stages.generation.conversations import Conversations, SchedulerFailed, TokenBudget, openings_of
from stages.generation.episodes import Episode
from stages.models.loading import load_causal_lm
from tests.support import ROOT, processes, tiny
from tests.support.bad_engines import LONGEST
from tests.support.processes import make_run, stage, stage_arguments
from tests.support.schedulers import RUBBISH
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("one_thread")
CONTEXT = 400
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
STOPS = (1, *range(30, 100))
"""So many that a random model ends most of its turns."""
SHARD = Task(1, Stage.ROLLOUT)
RENDERING = Rendering(0.0)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory) -> Path:
    """As ``models``, of a policy with a chat template and a longer context, and prompts of both kinds."""
    folder = tiny.make_inputs(tmp_path_factory.mktemp("chatty"))
    shutil.rmtree(folder / "policy")
    torch.manual_seed(0)
    tokenizer = tiny.byte_tokenizer(("<pad>", "<eos>"), TEMPLATE)
    settings = tiny.llama_config(tokenizer)
    settings.max_position_embeddings = CONTEXT
    LlamaForCausalLM(settings).save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    rows = [{"id": f"p{i}", "prompt": prompt_of(i), "answer": i} for i in range(12)]
    tiny.write_jsonl(folder / "prompts.jsonl", rows)
    tiny.write_jsonl(folder / "heldout.jsonl", rows[:3])
    return folder


def prompt_of(i: int) -> str | list[dict[str, str]]:
    text = "tell " + "ab"[i % 2] * (1 + i % 5)
    return [{"role": "user", "content": text}] if i % 2 else text


# in this process, over the real engine


@pytest.fixture(scope="module")
def tokenizer(chatty):
    return AutoTokenizer.from_pretrained(chatty / "policy")


@pytest.fixture(scope="module")
def model(chatty):
    return load_causal_lm(chatty / "policy", Precision.FP32, trust_remote_code=False)


def text_of(messages: list[dict[str, str]], tokenizer) -> str:
    return prompt_text(Prompt(0, "", tuple(map(Message.of, messages)), ""), tokenizer, RENDERING)


@pytest.fixture(scope="module")
def prompts(tokenizer) -> pa.Table:
    """As prepare makes them."""
    rows = [{"id": f"p{i}", "prompt": prompt_of(i)} for i in range(8)]
    messages = [None if isinstance(row["prompt"], str) else row["prompt"] for row in rows]
    texts = [
        row["prompt"] if given is None else text_of(given, tokenizer)
        for row, given in zip(rows, messages, strict=True)
    ]
    columns = {
        "prompt_id": [row["id"] for row in rows],
        "prompt_text": texts,
        "prompt_messages": [None if given is None else json.dumps(given) for given in messages],
        "prompt_tokens": [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts],
    }
    return conform(columns, PROMPTS, extra=pa.table({"answer": list(range(8))}))


class Played:
    """Conversations of :func:`prompts` with a scheduler, played to their end."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        prompts: pa.Table,
        scheduler: str,
        new_tokens: int = 60,
        budget: int = 10_000,
        context: int = CONTEXT,
        done: Sequence[int] = (),
        **settings: Any,
    ) -> None:
        given = MultiTurnConfig(scheduler=f"tests.support.schedulers:{scheduler}", **settings)
        generator = TransformersGenerator(model, budget, context)
        room = TokenBudget(new_tokens, given.max_turn_tokens, generator.limits.context)
        self.requests = [
            Request(tokens, max(1, room.of_turn(len(tokens), 0)), seed=i)
            for i, tokens in enumerate(prompts["prompt_tokens"].to_pylist())
        ]
        from tests.support import schedulers

        calls = CallPool(getattr(schedulers, scheduler), given.workers, given.step_seconds)
        openings = openings_of(prompts, [0])
        self.turns = Recorded(
            given,
            openings,
            self.requests,
            tokenizer,
            RENDERING,
            room,
            generator.problem_with,
            calls,
            lambda: False,
        )
        self.episodes: dict[int, Episode] = {}
        try:
            sampling = Sampling(stop_token_ids=STOPS)
            for finished in generator.stream(self.requests, sampling, done, turns=self.turns):
                self.episodes |= {i: self.turns.episode(i, r) for i, r in finished.items()}
        finally:
            calls.close()
        self.plan = generator.plan(self.requests)


class Recorded(Conversations):
    """Notes what the engine is asked for and what it answers."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.asked: dict[int, list[Request]] = {i: [r] for i, r in enumerate(self._requests)}
        self.answered: dict[int, list[Response]] = {}

    def ended(self, index: int, response: Response) -> None:
        self.answered.setdefault(index, []).append(response)
        super().ended(index, response)

    def due(self, wait: bool):
        found = super().due(wait)
        for index, request in found.items():
            if request is not None:
                self.asked[index].append(request)
        return found


@pytest.fixture
def play(model, tokenizer, prompts):
    return lambda scheduler, **settings: Played(model, tokenizer, prompts, scheduler, **settings)


def test_the_row_is_what_the_engine_wrote_and_what_was_said_to_it_nothing_else(play, tokenizer):
    """Every request is the conversation so far, and the policy's own ids are in it untouched."""
    played = play("until_third", new_tokens=200)
    assert {e.num_turns for e in played.episodes.values()} == {3}
    for index, episode in played.episodes.items():
        prompt = played.requests[index].prompt_tokens
        asked, answered = played.turns.asked[index], played.turns.answered[index]
        assert len(asked) == len(answered) == episode.num_turns
        whole = [*prompt, *episode.tokens]
        assert len(episode.tokens) == len(episode.mask) == len(episode.log_probs)
        for request, response in zip(asked, answered, strict=True):
            start = len(request.prompt_tokens)
            assert list(request.prompt_tokens) == whole[:start]
            assert whole[start : start + len(response.tokens)] == response.tokens
            place = slice(start - len(prompt), start - len(prompt) + len(response.tokens))
            assert episode.mask[place] == [True] * len(response.tokens)
            assert episode.log_probs[place] == response.log_probs
        written = sum(len(response.tokens) for response in answered)
        assert sum(episode.mask) == written
        assert all(p == 0.0 for p, own in zip(episode.log_probs, episode.mask, strict=True) if not own)
        assert episode.finish_reason == answered[-1].finish_reason
        said = f"[user]go on {index}<eos>\n[assistant]" if index % 2 else f"go on {index}"
        for response, between in zip(answered, pieces(episode, own=False), strict=False):
            end = "" if index % 2 == 0 else "\n" if response.tokens[-1] == 1 else "<eos>\n"
            assert tokenizer.decode(between, skip_special_tokens=False) == end + said


def pieces(episode: Episode, own: bool) -> list[list[int]]:
    """The policy's turns, or what was said between them."""
    groups = itertools.groupby(zip(episode.tokens, episode.mask, strict=True), lambda pair: pair[1])
    return [[token for token, _ in group] for is_own, group in groups if is_own is own]


def test_the_messages_are_the_turns_in_order(play, tokenizer):
    for episode in play("until_third").episodes.values():
        roles = [message.role for message in episode.messages]
        assert roles == (["assistant", "user"] * episode.num_turns)[: 2 * episode.num_turns - 1]
        spoken = [message.content for message in episode.messages if message.role == "assistant"]
        assert spoken == [tokenizer.decode(t, skip_special_tokens=True) for t in pieces(episode, own=True)]


def test_each_turn_has_a_seed_of_its_own_and_the_first_that_of_a_single_turn(play):
    played = play("echo", max_turns=4)
    for index, asked in played.turns.asked.items():
        expected = [index, *(derive_seed(index, "turn", n) for n in range(1, len(asked)))]
        assert [request.seed for request in asked] == expected


def test_the_same_conversations_come_of_any_token_budget(play):
    """Tokens, masks and messages; log-probabilities differ as far as padding changes float sums."""
    one, *others = (play("echo", budget=budget) for budget in (1, 150, 100_000))
    assert max(e.num_turns for e in one.episodes.values()) >= 3
    for other in others:
        assert {i: bare(e) for i, e in one.episodes.items()} == {
            i: bare(e) for i, e in other.episodes.items()
        }
    assert play("echo", budget=150).episodes == others[0].episodes, "the same bytes of the same groups"


def bare(episode: Episode) -> Episode:
    return replace(episode, log_probs=[])


def test_what_is_left_of_a_call_gives_the_same_bytes(play):
    whole = play("echo", budget=300)
    assert len(whole.plan) > 2
    for left in whole.plan:
        done = [i for i in whole.episodes if i not in left]
        rest = play("echo", budget=300, done=done)
        assert rest.episodes == {i: whole.episodes[i] for i in left}


# limits


@pytest.mark.parametrize("max_turns", [1, 2, 5])
def test_no_conversation_has_more_turns_than_allowed_and_the_last_ones_reason_stands(play, max_turns):
    played = play("echo", max_turns=max_turns, new_tokens=200)
    assert max(e.num_turns for e in played.episodes.values()) == max_turns
    for index, episode in played.episodes.items():
        assert episode.finish_reason is played.turns.answered[index][-1].finish_reason
        assert episode.messages[-1].role == "assistant"


def test_no_turn_is_longer_than_allowed_and_one_without_a_stop_token_is_the_last(play):
    played = play("echo", max_turn_tokens=5, max_turns=50, new_tokens=300)
    cut = 0
    for index, answered in played.turns.answered.items():
        assert all(1 <= request.max_new_tokens <= 5 for request in played.turns.asked[index])
        assert all(response.finish_reason is FinishReason.STOP for response in answered[:-1])
        cut += answered[-1].finish_reason is FinishReason.LENGTH
        assert all(len(response.tokens) <= 5 for response in answered)
    assert cut


@pytest.mark.parametrize("budget", [1, 10_000])
@pytest.mark.parametrize("limits", [{"new_tokens": 70}, {"new_tokens": 10_000, "context": 90}])
def test_a_conversation_that_outgrows_its_room_ends_with_length_and_no_half_message(play, limits, budget):
    played = play("long_winded", max_turns=1000, budget=budget, **limits)
    for index, episode in played.episodes.items():
        asked = played.turns.asked[index]
        assert all(request.max_new_tokens >= 1 for request in asked)
        room = min(limits["new_tokens"], limits.get("context", CONTEXT) - len(asked[0].prompt_tokens))
        assert len(episode.tokens) <= room
        assert episode.finish_reason is FinishReason.LENGTH
        assert episode.mask[-1], "what did not fit is left out whole"
        assert episode.messages[-1].role == "assistant"


@pytest.mark.parametrize("left", [-1, 0, 1])
def test_the_last_token_that_fits_is_still_written(left, tokenizer, prompts):
    """A message may leave room for one token, not for none."""
    room = TokenBudget(10, None, CONTEXT)
    turns = scripted("ten", room, tokenizer, prompts)
    first = Response([40] * (9 - left - 5) + [1], [-1.0] * (10 - left - 5), FinishReason.STOP)
    turns.ended(0, first)
    following = turns.due(wait=True)[0]
    if left == 1:
        assert following.max_new_tokens == 1
    else:
        assert following is None
        episode = turns.episode(0, first)
        assert (list(episode.tokens), episode.finish_reason) == (first.tokens, FinishReason.LENGTH)


def takes_all(request: Request) -> None:
    """In place of an engine's opinion."""


def scripted(said: str, room: TokenBudget, tokenizer: Any, prompts: pa.Table, should_stop=lambda: False):
    """Conversations whose scheduler always says five letters."""
    calls = CallPool(lambda conversation: [{"role": "user", "content": (said * 5)[:5]}], 1, 60.0)
    return conversing(calls, room, tokenizer, prompts, should_stop)


def conversing(
    calls: CallPool, room: TokenBudget, tokenizer: Any, prompts: pa.Table, should_stop=lambda: False
):
    settings = MultiTurnConfig(scheduler="tests.support.schedulers:echo")
    requests = [Request(tokens, 5) for tokens in prompts["prompt_tokens"].to_pylist()]
    return Conversations(
        settings,
        openings_of(prompts, [0]),
        requests,
        tokenizer,
        RENDERING,
        room,
        takes_all,
        calls,
        should_stop,
    )


def test_words_outside_the_vocabulary_end_their_own_conversation_and_no_other(chatty, model, prompts, caplog):
    """The tokenizer has a token that the model has no embedding for."""
    tokenizer = AutoTokenizer.from_pretrained(chatty / "policy")
    tokenizer.add_tokens(["go on 4"])
    played = Played(model, tokenizer, prompts, "until_third", new_tokens=200)
    expected = Played(model, tokenizer, prompts, "stops", new_tokens=200)
    assert played.episodes[4] == replace(expected.episodes[4], finish_reason=FinishReason.REFUSED)
    assert all(e.num_turns == 3 for i, e in played.episodes.items() if i != 4)
    said = "prompt_id p4, sample 0: the conversation ends after turn 1: token id 258 is outside the model's"
    assert caplog.messages[0].startswith(said)


def test_a_prompt_that_the_engine_refuses_has_no_turn(model, tokenizer, prompts):
    wrong = pa.array([[5, 999], *prompts["prompt_tokens"].to_pylist()[1:]], pa.list_(pa.int32()))
    spoiled = prompts.set_column(3, "prompt_tokens", wrong)
    played = Played(model, tokenizer, spoiled, "until_third")
    assert played.episodes[0] == Episode([], [], [], FinishReason.REFUSED, 0, ())
    whole = Played(model, tokenizer, prompts, "until_third")
    assert {i: bare(e) for i, e in played.episodes.items() if i} == {
        i: bare(e) for i, e in whole.episodes.items() if i
    }


# what is said


def test_unicode_comes_through_as_it_is(play, tokenizer):
    said = '≈ 3,14 · 好的 🙂\x00 "quoted" <eos>'
    episodes = [e for e in play("unicode_tool", new_tokens=200).episodes.values() if e.num_turns > 1]
    assert episodes
    for episode in episodes:
        assert episode.messages[1] == Message("tool", said)
        between = [t for t, own in zip(episode.tokens, episode.mask, strict=True) if not own]
        assert said in tokenizer.decode(between, skip_special_tokens=False)


def test_nothing_may_be_said(play):
    """After a plain prompt the policy then goes on where it stopped."""
    episode = next(e for i, e in play("silent").episodes.items() if i % 2 == 0 and e.num_turns > 1)
    assert all(episode.mask)
    assert episode.messages[1] == Message("user", "")


def test_what_a_scheduler_is_given_is_its_own(play):
    spoiled, kept = play("spoils_what_it_gets"), play("spoils_what_it_gets")
    assert spoiled.episodes == kept.episodes
    assert all(m.content != "changed" for e in spoiled.episodes.values() for m in e.messages)


def test_a_scheduler_sees_the_whole_conversation(tokenizer, prompts):
    seen = []
    calls = CallPool(lambda c: (seen.append(c), [{"role": "user", "content": "more"}])[1], 1, 60.0)
    turns = conversing(calls, TokenBudget(60, None, CONTEXT), tokenizer, prompts)
    ids = tokenizer("hello")["input_ids"]
    for _ in range(2):
        turns.ended(1, Response([*ids, 1], [-1.0] * 6, FinishReason.STOP))
        turns.due(wait=True)
    calls.close()
    first, second = seen
    assert (first.prompt_id, first.sample_index, first.num_turns) == ("p1", 0, 1)
    assert first.prompt_text == "[user]tell bb<eos>\n[assistant]"
    assert first.prompt_messages == [{"role": "user", "content": "tell bb"}]
    assert first.response_messages == [{"role": "assistant", "content": "hello"}]
    assert (first.last_turn, first.columns) == ("hello", {"answer": 1})
    assert second.num_turns == 2
    assert [m["content"] for m in second.response_messages] == ["hello", "more", "hello"]


# chat templates

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BRACKETS = (
    "{{ '<s>' }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>{% endif %}"
    "{% endfor %}"
)
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LINES = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SPECIALS = ("<pad>", "<eos>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]")


def speaker(template: str) -> Any:
    tokenizer = tiny.byte_tokenizer(SPECIALS, template)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIALS[2:])})
    return tokenizer


@pytest.mark.parametrize(
    ("template", "end", "before_answer"),
    [(TEMPLATE, "<eos>", ""), (CHATML, "<|im_end|>", ""), (BRACKETS, "</s>", " ")],
    ids=["eos", "chatml", "brackets"],
)
def test_ids_are_those_of_the_whole_conversation_where_a_template_only_appends(template, end, before_answer):
    tokenizer = speaker(template)
    question = {"role": "user", "content": "2 + 2?"}
    turns = [("4", "and 3 + 3?"), ("6 äöü", "thanks 🙂"), ("bye", None)]
    text = tokenizer.apply_chat_template([question], tokenize=False, add_generation_prompt=True)
    messages, ids = [question], tokenizer(text, add_special_tokens=False)["input_ids"]
    for answer, reply in turns:
        ids += tokenizer(before_answer + answer + end, add_special_tokens=False)["input_ids"]
        messages.append({"role": "assistant", "content": answer})
        if reply is not None:
            said = continuation_text([Message("user", reply)], end, tokenizer, RENDERING)
            ids += tokenizer(said, add_special_tokens=False)["input_ids"]
            messages.append({"role": "user", "content": reply})
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    expected = tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert expected[: len(ids)] == ids
    assert tokenizer.decode(expected[len(ids) :]).strip() == ""


@pytest.mark.parametrize(
    ("template", "end", "text"),
    [
        (CHATML, "<|im_end|>", "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"),
        (CHATML, "<eos>", "<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"),
        (CHATML, "\n", "<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"),
        (THINKING, "<|im_end|>", "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"),
        (LINES, "<eos>", "\ntool: 42\nassistant: "),
    ],
    ids=["as the template", "another end", "a stop token within", "thinking is left out", "no end"],
)
def test_what_comes_between_two_turns_ends_the_first_and_begins_the_second(template, end, text):
    assert continuation_text([Message("tool", "42")], end, speaker(template), RENDERING) == text


def test_other_keys_of_what_is_said_the_arguments_and_the_date_reach_the_template():
    template = (
        "{{ strftime_now('%Y') }}"
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.tool_call_id }}<eos>"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{{ mode }}{% endif %}"
    )
    said = [Message("tool", "42", {"tool_call_id": "c1"})]
    text = continuation_text(said, "<eos>", speaker(template), Rendering(0.0, {"mode": "brief"}))
    assert text == "[tool]42c1<eos>[assistant]brief"


def test_a_message_that_looks_like_the_fixed_answer_is_said_all_the_same():
    said = continuation_text(
        [Message("user", "ANSWER QUESTION ANSWER")], "<|im_end|>", speaker(CHATML), RENDERING
    )
    assert said == "\n<|im_start|>user\nANSWER QUESTION ANSWER<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_does_not_go_on_after_an_answer_is_a_clear_error():
    template = "{% for m in messages %}{{ m.content }}{{ '<eos>' if loop.last else '|' }}{% endfor %}"
    with pytest.raises(UserError, match=r"ends an answer with '<eos>', but not when messages follow"):
        continuation_text([Message("user", "x")], "<eos>", speaker(template), RENDERING)


def test_messages_that_the_template_refuses_are_an_error_that_names_the_row(model, prompts):
    tokenizer = speaker(BRACKETS)
    with pytest.raises(UserError) as refused:
        Played(model, tokenizer, prompts.slice(1, 1), "two_messages", new_tokens=200)
    assert (
        "template refuses what rollout.multi_turn.scheduler=tests.support.schedulers:two_messages returned"
        in str(refused.value)
    )
    assert "for prompt_id p1, sample 0: roles must alternate" in str(refused.value)


# schedulers that fail


@pytest.mark.parametrize("key", [*RUBBISH])
def test_what_is_neither_messages_nor_none_names_scheduler_and_row(play, key):
    with pytest.raises(UserError) as refused:
        play(f"rubbish_{key}")
    assert re.search(
        rf"^rollout\.multi_turn\.scheduler=tests\.support\.schedulers:rubbish_{key} "
        r"returned .* for prompt_id p\d, sample 0; "
        "wanted is a list of messages",
        str(refused.value),
    )
    str(refused.value).encode()


def test_a_generator_is_no_answer(play):
    with pytest.raises(UserError, match="returned generator "):
        play("generates")


def test_an_error_of_the_schedulers_own_names_row_and_line(play):
    with pytest.raises(SchedulerFailed) as failed:
        play("raises", new_tokens=200)
    assert re.search(
        r"tests.support.schedulers:raises raised KeyError: 'no tool for it' for prompt_id p3, sample 0, "
        r"at .*schedulers\.py:\d+$",
        str(failed.value),
    )


def test_leaving_the_interpreter_is_an_error_too(play):
    with pytest.raises(SchedulerFailed, match="raised SystemExit: 0 for prompt_id"):
        play("leaves")


def test_a_call_that_takes_too_long_names_the_row_while_others_come_back():
    calls = CallPool(lambda key: time.sleep(3600 if key == 3 else 0), workers=2, seconds=0.3)
    for key in range(6):
        calls.start(key, key)
    found: set[int] = set()
    while len(found) < 5:
        found |= set(calls.answers(wait=True, should_stop=lambda: False))
    assert found == {0, 1, 2, 4, 5}
    with pytest.raises(Late) as late:
        calls.answers(wait=True, should_stop=lambda: False)
    calls.close()
    assert late.value.key == 3


def test_waiting_for_a_scheduler_ends_when_the_process_is_to_stop(tokenizer, prompts):
    asked = iter(range(100))
    room = TokenBudget(60, None, CONTEXT)
    turns = scripted("x", room, tokenizer, prompts, should_stop=lambda: next(asked) >= 2)
    turns._calls = CallPool(lambda conversation: time.sleep(3600), 1, 3600.0)
    turns.ended(0, Response([40, 1], [-1.0, -1.0], FinishReason.STOP))
    with pytest.raises(Stopped):
        turns.due(wait=True)
    turns._calls.close()


def test_an_answer_is_given_once_and_asking_without_waiting_waits_for_nothing():
    calls = CallPool(lambda key: key * 2, workers=3, seconds=60.0)
    assert calls.answers(wait=True, should_stop=lambda: False) == {}
    assert calls.answers(wait=False, should_stop=lambda: False) == {}
    for key in range(10):
        calls.start(key, key)
    found: dict[int, int] = {}
    while len(found) < 10:
        new = calls.answers(wait=True, should_stop=lambda: False)
        assert new
        assert not found.keys() & new.keys()
        found |= {key: answer.returned for key, answer in new.items()}
    assert found == {key: key * 2 for key in range(10)}
    calls.close()


# whole tasks, in processes of their own

SETTINGS = (
    "rollout.num_shards=1",
    "data.prompts_per_iteration=12",
    "rollout.samples_per_prompt=2",
    "rollout.max_new_tokens=120",
    "rollout.tokens_per_batch=500",
    f"rollout.stop_token_ids=[{','.join(map(str, STOPS))}]",
    "rollout.multi_turn.max_turns=5",
)


def run_of(models: Path, run_dir: Path, scheduler: str, *more: str) -> Run:
    return make_run(
        models,
        run_dir,
        *SETTINGS,
        f"rollout.multi_turn.scheduler=tests.support.schedulers:{scheduler}",
        *more,
    )


@pytest.fixture(scope="module")
def prepared(chatty, tmp_path_factory) -> Path:
    """A run of conversations whose prompts are prepared."""
    run = run_of(chatty, tmp_path_factory.mktemp("prepared") / "run", "echo")
    done = stage(run, "prepare")
    assert done.code == 0, done.log
    return run.paths.root


@pytest.fixture
def run(prepared, tmp_path) -> Run:
    shutil.copytree(prepared, tmp_path / "run")
    return load_run(tmp_path / "run")


def rows_of(run: Run, task: Task = SHARD) -> list[dict[str, Any]]:
    return read_shard(run.paths, require_record(run.paths, task), ROLLOUT).to_pylist()


def test_a_shard_has_a_row_per_conversation_and_all_of_it(run):
    done = stage(run, "rollout", 1)
    assert done.code == 0, done.log
    rows = rows_of(run)
    assert len(rows) == 24
    assert len({row["num_turns"] for row in rows}) > 1
    for row in rows:
        lengths = {len(row[name]) for name in ("response_tokens", "response_mask", "rollout_logprobs")}
        assert len(lengths) == 1
        messages = json.loads(row["response_messages"])
        assert sum(message["role"] == "assistant" for message in messages) == row["num_turns"]
        assert all(message["content"] in row["response_text"] for message in messages)
    metrics = require_record(run.paths, SHARD).metrics
    assert metrics["turns"] == sum(row["num_turns"] for row in rows)
    assert metrics["refused"] == 0


@pytest.mark.parametrize("name", ["hangs", "raises"])
def test_a_scheduler_that_hangs_or_raises_ends_the_task_with_one_error(chatty, tmp_path, name):
    run = run_of(chatty, tmp_path / "run", name, "rollout.multi_turn.step_seconds=1")
    assert stage(run, "prepare").code == 0
    done = stage(run, "rollout", 1)
    assert done.code == 1, done.log
    last = done.log.strip().splitlines()[-1]
    assert f"SchedulerFailed: rollout.multi_turn.scheduler=tests.support.schedulers:{name} " in last
    assert "prompt_id p3, sample " in last


def test_a_scheduler_that_stops_the_whole_interpreter_ends_the_task_with_its_name_in_the_log(
    chatty, tmp_path, environment
):
    """No thread of Python's can run any more, and no signal is handled."""
    run = run_of(chatty, tmp_path / "run", "never_yields", "rollout.multi_turn.step_seconds=1")
    assert stage(run, "prepare").code == 0
    done = stage(run, "rollout", 1)
    assert done.code == 1, done.log
    assert re.search(r'Timeout .*!.*File ".*schedulers\.py", line \d+ in never_yields', done.log, re.S)


def test_a_warning_while_the_scheduler_thinks_ends_the_task_at_once(chatty, tmp_path):
    run = run_of(chatty, tmp_path / "run", "hangs", "rollout.multi_turn.step_seconds=3600")
    assert stage(run, "prepare").code == 0
    log = tmp_path / "log"
    process = processes.start_stage(stage_arguments(run, "rollout", 1), log)
    wait_for(lambda: "SIGUSR2" in signals_of(process.pid), "a task that heeds warnings")
    time.sleep(3)
    os.kill(process.pid, signal.SIGUSR2)
    process.join(timeout=30)
    assert process.exitcode == 5, log.read_text()


def signals_of(pid: int) -> set[str]:
    """Names of the signals that a process catches."""
    caught = int(re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[0], 16)
    return {s.name for s in signal.Signals if caught >> (s - 1) & 1}


# a whole iteration

RULES = '''
def length(*, prompts, responses, response_messages, answer):
    """Of what the policy said; and a check that rules get the conversation."""
    assert all(messages[0]["role"] == "assistant" for messages in response_messages)
    spoken = [[m["content"] for m in messages if m["role"] == "assistant"] for messages in response_messages]
    return [len("".join(turns)) / 10 for turns in spoken]
'''


def first_row(run: Run, cwd: Path = ROOT, more: Sequence[Task] = ()) -> dict[str, float]:
    """Carry the first iteration out, and what comes from it, and give its row of metrics."""
    shards = range(run.config.rollout.num_shards)
    tasks = [Task(1, name, shard) for name in (Stage.ROLLOUT, Stage.REWARD) for shard in shards]
    records: dict[str, list[Record]] = {}
    for task in [PREPARE, *tasks, Task(1, Stage.UPDATE), *more]:
        done = stage(run, task.stage, task.iteration, task.shard, cwd=cwd)
        assert done.code == 0, done.log
        records.setdefault(task.stage, []).append(require_record(run.paths, task))
    return dict(iteration_row(1, records, Clock(0.0, 0.0, 1, [])))


def test_an_iteration_with_rule_reward_model_and_evaluation(chatty, tmp_path, monkeypatch):
    (tmp_path / "rules_of_conversations.py").write_text(RULES)
    monkeypatch.syspath_prepend(tmp_path)
    run = run_of(
        chatty,
        tmp_path / "run",
        "until_third",
        f"data.heldout={chatty / 'heldout.jsonl'}",
        "evaluate.every=1",
        "rollout.num_shards=2",
        "reward.components.length.kind=rule",
        "reward.components.length.function=rules_of_conversations:length",
        "algorithm.kl.coef=0.05",
    )
    row = first_row(run, tmp_path, [Task(1, Stage.EVALUATE)])
    assert row["num_turns/mean"] > 1.2
    evaluated = rows_of(run, Task(1, Stage.EVALUATE))
    assert {one["sample_index"] for one in evaluated} == {-1}, "greedy ones"
    assert row["evaluate/num_turns"] == sum(one["num_turns"] for one in evaluated) / len(evaluated) > 1
    assert row["rollout/refused"] == 0
    assert row["policy/ratio_error_first"] == 0
    assert abs(row["mismatch/kl"]) < 1e-4, "nothing but the policy's own tokens is compared"
    assert row["finish_reason/stop"] + row["finish_reason/length"] == pytest.approx(1)


@pytest.mark.parametrize("more", [[], ["rollout.multi_turn.scheduler=tests.support.schedulers:until_third"]])
def test_prompts_that_the_engine_refuses_go_through_a_whole_iteration_as_rows(chatty, tmp_path, more):
    """Through reward model, reference, policy and critic none of their tokens goes."""
    settings = [word for word in SETTINGS if "multi_turn" not in word]
    settings += [
        "rollout.engine=tests.support.bad_engines:make_refusing_generator",
        "rollout.max_new_tokens=40",
    ]
    run = make_run(chatty, tmp_path / "run", *settings, "algorithm.kl.coef=0.05", *more)
    metrics = first_row(run)
    rows = rows_of(run)
    refused = [row for row in rows if row["finish_reason"] == "refused"]
    empty = [row for row in refused if len(row["prompt_tokens"]) > LONGEST]
    assert len(rows) > len(empty) == sum(len(row["prompt_tokens"]) > LONGEST for row in rows) > 0
    for row in empty:
        assert (row["response_tokens"], row["num_turns"], row["response_text"]) == ([], 0, "")
        assert row["response_messages"] == ("[]" if more else None)
    grown = [row for row in refused if row not in empty]
    assert bool(grown) is bool(more), "the engine takes no second turn"
    assert all(row["num_turns"] == 1 and all(row["response_mask"]) for row in grown)
    assert metrics["rollout/refused"] == len(refused)
    assert metrics["finish_reason/refused"] == metrics["rollout/refused"] / len(rows)
    assert all(math.isfinite(value) for value in metrics.values())


def test_a_scheduler_is_named_by_module_and_function(chatty, tmp_path):
    """That there is one of this name is seen by validate: tests/plugins/test_rules.py."""
    said = r"rollout\.multi_turn\.scheduler: write module:function, or environment \(got 'schedulers'\)"
    with pytest.raises(ConfigError, match=said):
        make_run(chatty, tmp_path / "run", "rollout.multi_turn.scheduler=schedulers")
