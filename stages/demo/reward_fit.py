"""The demo's reward model: preference pairs labelled by the hidden rule, and the Bradley-Terry fit."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch.nn.functional import logsigmoid
from transformers import LlamaForSequenceClassification, PreTrainedTokenizerFast

from stages.demo.hidden_rule import NEGATIVE, POSITIVE, hidden_rule, words_of
from stages.demo.policy_sft import TrainedPolicy, sample_responses
from stages.demo.review_grammar import DemoPrompt
from stages.demo.tiny_llama import fit, pad_right, shuffled_batches, tiny_config, train_tokenizer

VOCAB_SIZE = 640  # not the policy's, so that a pipeline that reuses the policy's token ids fails visibly
BATCH_PAIRS = 32
EPOCHS = 3
PEAK_LR = 1e-3
SAMPLE_TOKENS = 40
# Sharpness of the labels: a difference of 1 in the rule is preferred with probability sigmoid(3) = 0.95.
LABEL_SHARPNESS = 3.0
# What the second response of a pair is (the first is the policy's); the rest is a spoiled response.
SHARE_POLICY, SHARE_HUMAN = 0.60, 0.10


@dataclass(frozen=True, slots=True)
class Pair:
    prompt: str
    chosen: str
    rejected: str


@dataclass(slots=True)
class TrainedRewardModel:
    model: LlamaForSequenceClassification
    tokenizer: PreTrainedTokenizerFast
    train_loss: float


def spoil(rng: Random, response: str) -> str:
    """A degenerate response: optimisation finds such texts, so the reward model must have seen their like."""
    words = response.split()
    if not words:
        return response
    word = rng.choice(words_of(response) or words)
    spoiled = (
        " ".join(words[: rng.randint(1, len(words))]).rstrip(".!"),  # never finished
        f"{word}.",  # one word
        " ".join([word] * rng.randint(3, 16)) + rng.choice(("", ".")),  # one word again and again
        " ".join(words + words[-rng.randint(2, len(words) + 1) :]),  # says the end twice
        " ".join(rng.sample(words, len(words))),  # shuffled
        re.sub("|".join(NEGATIVE + POSITIVE), rng.choice(POSITIVE), " ".join(words)),  # one praise for all
    )
    return " " + rng.choice(spoiled)


def second_response(rng: Random, prompt: DemoPrompt, sampled: str) -> str:
    """Another sample of the policy, the text a person wrote, or a spoiled sample."""
    draw = rng.random()
    if draw < SHARE_POLICY:
        return sampled
    return prompt.rest if draw < SHARE_POLICY + SHARE_HUMAN else spoil(rng, sampled)


def label(rng: Random, prompt: str, first: str, second: str) -> Pair:
    """A noisy judge: the closer the two are under the rule, the nearer to a coin toss."""
    difference = hidden_rule(prompt, first) - hidden_rule(prompt, second)
    prefers_first = rng.random() < 1 / (1 + math.exp(-LABEL_SHARPNESS * difference))
    return Pair(prompt, first, second) if prefers_first else Pair(prompt, second, first)


def make_pairs(policy: TrainedPolicy, prompts: Sequence[DemoPrompt], rng: Random) -> list[Pair]:
    """One pair per prompt, two samples of the trained policy being drawn for each."""
    texts = [prompt.prompt for prompt in prompts]
    samples = sample_responses(policy, texts + texts, SAMPLE_TOKENS)
    firsts, others = samples[: len(texts)], samples[len(texts) :]
    return [
        label(rng, prompt.prompt, first, second_response(rng, prompt, other))
        for prompt, first, other in zip(prompts, firsts, others, strict=True)
    ]


def pair_texts(pairs: Sequence[Pair]) -> list[str]:
    """Rows 2i and 2i + 1 are pair i's chosen and rejected text."""
    return [pair.prompt + response for pair in pairs for response in (pair.chosen, pair.rejected)]


def train_reward_model(pairs: Sequence[Pair], rng: Random) -> TrainedRewardModel:
    """Bradley-Terry: the probability that `chosen` wins is sigmoid(score(chosen) - score(rejected))."""
    texts = pair_texts(pairs)
    tokenizer = train_tokenizer(texts, VOCAB_SIZE, padding_side="right")
    model = LlamaForSequenceClassification(tiny_config(tokenizer, num_labels=1))
    sequences = tokenizer(texts)["input_ids"]
    lengths = [max(len(sequences[2 * i]), len(sequences[2 * i + 1])) for i in range(len(pairs))]

    def loss_of(batch: list[int]) -> torch.Tensor:
        rows = [sequences[2 * index + side] for side in (0, 1) for index in batch]
        scores = model(input_ids=pad_right(rows, tokenizer.pad_token_id), use_cache=False).logits[:, 0]
        chosen, rejected = scores.chunk(2)
        return -logsigmoid(chosen - rejected).mean()

    epochs = [list(shuffled_batches(lengths, BATCH_PAIRS, rng)) for _ in range(EPOCHS)]
    train_loss = fit(model, epochs, loss_of, PEAK_LR, "reward model")[-1]
    model.eval()
    return TrainedRewardModel(model, tokenizer, train_loss)


@torch.no_grad()
def score_texts(reward: TrainedRewardModel, texts: Sequence[str], batch_size: int = 128) -> torch.Tensor:
    """One score per text, [len(texts)]: read at each text's last token."""
    sequences = reward.tokenizer(list(texts))["input_ids"]
    scores = torch.empty(len(texts))
    order = sorted(range(len(texts)), key=lambda index: len(sequences[index]))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        ids_BT = pad_right([sequences[index] for index in chosen], reward.tokenizer.pad_token_id)
        scores[chosen] = reward.model(input_ids=ids_BT, use_cache=False).logits[:, 0]
    return scores


def pair_accuracy(scores: torch.Tensor) -> float:
    """Share of pairs, [pairs, 2], whose chosen response scores higher, a tie counting half."""
    return (0.5 + 0.5 * torch.sign(scores[:, 0] - scores[:, 1])).mean().item()


def rule_scores(pairs: Sequence[Pair]) -> torch.Tensor:
    """[len(pairs), 2]: the hidden rule's score of each pair's chosen and rejected response."""
    return torch.tensor([[hidden_rule(p.prompt, p.chosen), hidden_rule(p.prompt, p.rejected)] for p in pairs])
