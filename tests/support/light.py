"""Light tasks: engines and a trainer that compute hashes, behind the contracts of the real ones.

What they give is a function of all that they were given. Responses follow from the policy's bytes, the
prompt and the seed; scores from the reward model's and the tokens; the next policy's bytes are a hash chain
over policy, critic and trainer state before it and every column of every shard. So a wrong mix, or an input
that was lost, doubled or taken from elsewhere, shows in the bytes of the last policy, as with real models.
Runner, commits, lineage, progress and verification are the real ones; torch is not imported.

``LIGHT_SECONDS`` in the environment makes every response, score or update take so long; of several numbers
each takes the next one's time, and the last is for all that come later.
"""

import errno
import hashlib
import itertools
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jinja2
import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pipeline.config.algorithm import Estimator
from pipeline.run.commits import hash_file, hash_tree
from pipeline.run.durable import fsync_path
from pipeline.run.plan import policy_maker
from pipeline.run.schemas import FinishReason, component_column, is_sampled
from pipeline.run.tasks import Stage, Task
from stages.context import Context, Result, StateWriter
from stages.engines.base import Generator, Limits, Response, Scorer, Trainer, takes_ranks, without_torch
from stages.training import hash_folders, read_shards, save_tokenizer

CONTEXT = 64
SPECIALS = ("<pad>", "<eos>")
WORDS = (
    "rollout.engine=tests.support.light:make_generator",
    "reward.engine=tests.support.light:make_scorer",
    "update.engine=tests.support.light:make_trainer",
    "model.tokenizer=tests.support.light:make_tokenizer",
    "algorithm.kl.reference_in=update",
)
"""What makes a run's tasks light."""
SECONDS = "LIGHT_SECONDS"
STATE_SECONDS = "LIGHT_STATE_SECONDS"
"""Variable: seconds that a trainer's state takes to be written."""
STATE_FAILS = "LIGHT_STATE_FAILS"
"""Variable: iterations whose state cannot be written, as on a full disk."""
STATE_WAITS = "LIGHT_STATE_WAITS"
"""Variable: if set, a state is written once a rollout of the next iteration is committed."""
HEAD = "score.weight"
EMBEDDING = "model.embed_tokens.weight"


_steps = itertools.count()


def take_time(should_stop=lambda: False) -> None:
    """As long as the environment says, unless told to stop."""
    seconds = os.environ.get(SECONDS, "0").split()
    until = time.monotonic() + float(seconds[min(next(_steps), len(seconds) - 1)])
    while (left := until - time.monotonic()) > 0 and not should_stop():
        time.sleep(min(left, 0.05))


# --- hashes ---


def digest(*parts: object) -> bytes:
    """16 bytes of parts that print the same in every process."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def fraction(*parts: object) -> float:
    """In [0, 1), exact in single precision."""
    return int.from_bytes(digest(*parts)[:2]) / 2**16


def number(below: int, *parts: object) -> int:
    return int.from_bytes(digest(*parts)[:8]) % below


def weights_digest(folder: Path) -> bytes:
    """Of every weight in a model directory but reward models' heads, which are all alike."""
    files = sorted(folder.glob("*.safetensors"))
    return digest(
        [(f.name, sorted((k, v.tobytes()) for k, v in load_file(f).items() if k != HEAD)) for f in files]
    )


def seeds_digest(files: dict[str, bytes]) -> bytes:
    """:func:`weights_digest` of a folder that is not written, whose files have these seeds."""
    return digest(
        [(f, [(EMBEDDING, hashlib.shake_256(seed).digest(4096))]) for f, seed in sorted(files.items())]
    )


# --- engines ---


@without_torch
def make_generator(config, directory):
    return LightGenerator(weights_digest(Path(directory)), config)


@without_torch
def make_scorer(config, directory):
    return LightScorer(weights_digest(Path(directory)))


class LightGenerator(Generator):
    """Bytes that follow from policy, prompt and seed; a third of them ends by itself."""

    def __init__(self, policy: bytes, config) -> None:
        self._policy = policy
        self.limits = Limits(config.model.context_length, len(SPECIALS) + 256)

    def _stream(self, requests, sampling, done, should_stop, turns):
        for index, request in enumerate(requests):
            while index not in done and request is not None:
                take_time(should_stop)
                if should_stop():
                    return
                response = self._respond(request, sampling)
                turns.ended(index, response)
                request = turns.due(wait=True)[index]
                if request is None:
                    yield {index: response}

    def _respond(self, request, sampling):
        how = "greedy" if request.greedy else (request.seed, sampling.temperature)
        given = digest(self._policy, list(request.prompt_tokens), how)
        room = self.room(request)
        is_stopped = number(3, given, "stop") == 0
        length = 1 + number(room, given, "length") if is_stopped else room
        letters = len(SPECIALS) + ord("a") - ord("!")
        tokens = [letters + number(26, given, position) for position in range(length)]
        if is_stopped:
            tokens[-1] = SPECIALS.index("<eos>")
        log_probs = [-4 * fraction(given, position, token) for position, token in enumerate(tokens)]
        return Response(tokens, log_probs, FinishReason.STOP if is_stopped else FinishReason.LENGTH)


class LightScorer(Scorer):
    """Scores in [-1, 1)."""

    limits = Limits(CONTEXT, 2**31)

    def __init__(self, model: bytes) -> None:
        self._model = model

    def _score(self, sequences):
        scores = []
        for sequence in sequences:
            take_time()
            scores.append(2 * fraction(self._model, list(sequence)) - 1)
        return scores


# --- training ---


@without_torch
def make_trainer(config):
    return LightTrainer()


@takes_ranks
def make_trainer_of_ranks(config):
    """One that says that it takes several ranks; it is only asked whether it does."""
    return make_trainer(config)


@without_torch
def make_trainer_at_once(config):
    return LightTrainer(commits_at_once=True)


class Learnt(NamedTuple):
    """What the next iteration begins with, besides the policy."""

    digests: list[bytes]
    """Of the critic's weights, if there is a critic, and of all moments; none for version 0."""
    count: int
    """Responses rolled out so far."""


class LightTrainer(Trainer):
    """Each version's weights are a hash of the version before it and of all that it learns from.

    Its state, critic and moments, is committed behind the policy; one that was lost is learnt again, from the
    newest that there is. ``commits_at_once``: policy and state are one commit, as it may be with users'.
    """

    def __init__(self, commits_at_once: bool = False) -> None:
        self.commits_at_once = commits_at_once

    def update(self, context, iteration):
        config, files, attempt = context.config, context.files, context.attempt
        first = context.newest_state(iteration - 1)
        learnt = read_learnt(context, first)
        for lost in range(first + 1, iteration):
            print(f"iteration {lost} is learnt again", flush=True)
            chain, count, *_ = learn(context, lost, learnt)
            check_is_committed(context, lost, chain)
            learnt = Learnt(digests_of(config, chain), count)
        chain, count, responses, rewards = learn(context, iteration, learnt)
        print(f"epoch 1, mini-batch 1: policy loss {fraction(chain, 'policy/loss'):.4f}", flush=True)
        policy = files.policy(attempt)
        write_model(policy, chain, Path(config.model.policy) / "config.json")
        save_tokenizer(context, policy)
        outputs = hash_folders(context, [policy])
        if self.commits_at_once:
            outputs += write_at_once(context, chain, iteration, count)
        else:
            outputs += (write_learned(context, chain, count),)
            context.state_writer = LightStateWriter(context, chain)
        metrics = learning_metrics(chain) | reward_metrics(config, responses, rewards)
        metrics |= {"samples": float(count), "objective/kl_coef": config.algorithm.kl.coef}
        metrics["seconds/update/steps"] = context.compute_seconds
        return Result(outputs, responses.num_rows, "trainer/1", iteration, metrics)


def learn(context, iteration, learnt):
    """One iteration: the chain that everything it makes follows from, the responses so far, what was read."""
    responses, rewards, shards = read_shards(context, iteration)
    policy = context.policy_directory(iteration - 1)
    print(f"read {responses.num_rows} responses", flush=True)
    with context.computing():
        take_time()
        parts = [weights_digest(policy), *learnt.digests]
        chain = digest(iteration, parts, contents(responses), contents(rewards), list(shards))
    return chain, learnt.count + responses.filter(is_sampled(responses)).num_rows, responses, rewards


def check_is_committed(context, version, chain) -> None:
    """What is learnt again gives the same policy."""
    found = weights_digest(context.policy_directory(version))
    assert found == seeds_digest({"model.safetensors": chain}), f"policy {version} was learnt otherwise"


def state_seeds(config, chain) -> dict[str, dict[str, bytes]]:
    """Folder -> file -> seed of its weights."""
    moments = {"policy.safetensors": digest("moments", chain)}
    if config.algorithm.estimator is not Estimator.GAE:
        return {"moments": moments}
    moments["critic.safetensors"] = digest("critic's moments", chain)
    return {"critic": {"model.safetensors": digest("critic", chain)}, "moments": moments}


def digests_of(config, chain) -> list[bytes]:
    """As :class:`Learnt` has them, of weights that are not written."""
    return [seeds_digest(seeds) for seeds in state_seeds(config, chain).values()]


def read_learnt(context, version) -> Learnt:
    """What a committed version holds, in whatever form."""
    if version == 0:
        return Learnt([], 0)
    if context.read(policy_maker(version)).holds_state:
        critic, state = context.critic_directory(version), context.trainer_directory(version)
        count = json.loads((state / "state.json").read_text())["responses"]
        return Learnt([weights_digest(folder) for folder in (critic, state) if folder], count)
    folder = context.state_directory(version)
    folders = [folder / name for name in ("critic", "moments") if (folder / name).is_dir()]
    count = context.json(policy_maker(version), "learned")["responses"]
    return Learnt([weights_digest(folder) for folder in folders], count)


def write_learned(context, chain, count):
    """The small numbers, which the policy's commit holds."""
    path = context.files.data(context.attempt, "learned", "json")
    path.write_text(json.dumps({"responses": count, "digest": digest("state", chain).hex()}))
    fsync_path(path)
    return hash_file(context.paths, path)


def write_at_once(context, chain, iteration, count):
    """Critic and trainer state as parts of the policy's commit."""
    trainer = context.files.trainer(context.attempt)
    seeds = state_seeds(context.config, chain)
    for name, seed in seeds["moments"].items():
        write_weights(trainer / name, seed)
    time.sleep(float(os.environ.get(STATE_SECONDS, "0")))
    (trainer / "state.json").write_text(json.dumps({"iteration": iteration, "responses": count}))
    folders = [trainer]
    if "critic" in seeds:
        folders.append(context.files.critic(context.attempt))
        config = Path(context.config.model.policy) / "config.json"
        write_model(folders[1], seeds["critic"]["model.safetensors"], config)
    return hash_folders(context, folders)


@dataclass
class LightStateWriter(StateWriter):
    """Writes critic and moments of a version, as slowly or badly as the environment says."""

    context: Context
    chain: bytes

    def detach(self):
        """There are no devices."""

    def write(self, is_wanted):
        context, iteration = self.context, self.context.task.iteration
        if not is_wanted:
            return ()
        wait_for_rollout(context, iteration + 1)
        folder = context.files.state(context.attempt)
        for name, seeds in state_seeds(context.config, self.chain).items():
            for file, seed in seeds.items():
                write_weights(folder / name / file, seed)
        if str(iteration) in os.environ.get(STATE_FAILS, "").split():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        time.sleep(float(os.environ.get(STATE_SECONDS, "0")))
        return hash_tree(context.paths, folder)


def wait_for_rollout(context, iteration: int) -> None:
    """Wait for the next iteration's first rollout, if the environment says so: a run whose rollouts waited
    for the state would not go on."""
    is_last = iteration > context.config.iterations
    until = time.monotonic() + 60
    record = context.paths.task(Task(iteration, Stage.ROLLOUT)).record
    while STATE_WAITS in os.environ and not is_last and not record.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"no rollout of iteration {iteration} was committed")
        time.sleep(0.01)


def contents(table):
    """A table's values, whatever its batches."""
    return {name: table[name].to_pylist() for name in table.column_names}


def write_model(folder: Path, seed: bytes, config: Path) -> None:
    folder.mkdir(parents=True)
    write_weights(folder / "model.safetensors", seed)
    (folder / "config.json").write_bytes(config.read_bytes())


def write_weights(path: Path, seed: bytes, has_head: bool = False) -> None:
    """Numbers of no model, with the headers of one: a row for every token."""
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = np.frombuffer(hashlib.shake_256(seed).digest(4096), dtype=np.uint8)
    tensors = {EMBEDDING: weights.reshape(512, 8)}
    if has_head:
        tensors[HEAD] = np.zeros((1, 8), np.uint8)
    save_file(tensors, path, metadata={"format": "pt"})


def learning_metrics(chain: bytes) -> dict[str, float]:
    """What a healthy update reports, as functions of the chain."""
    shares = ("policy/clip_fraction_low", "policy/clip_fraction_high", "value/clip_fraction")
    others = ("policy/loss", "policy/entropy", "policy/approx_kl", "policy/grad_norm", "policy/advantage_std")
    others += ("value/loss", "value/grad_norm", "value/explained_variance", "value/mean", "mismatch/max")
    others += ("objective/kl", "objective/kl_per_token", "policy/advantage_mean", "value/returns_mean")
    metrics = {name: 0.1 * fraction(chain, name) for name in shares}
    metrics |= {name: fraction(chain, name) for name in others}
    metrics |= {"policy/ratio": 1.0, "policy/ratio_error_first": 0.0, "mismatch/kl": 0.0}
    metrics |= {"policy/learning_rate": 1e-3, "policy/padding_efficiency": 1.0}
    return metrics | {f"policy/{name}": 0.0 for name in ("skipped_steps", "overflow_steps", "stopped_early")}


def reward_metrics(config, responses, rewards) -> dict[str, float]:
    sampled = is_sampled(responses)
    responses, rewards = responses.filter(sampled), rewards.filter(sampled)
    lengths = np.array([len(tokens) for tokens in responses["response_tokens"].to_pylist()])
    scores = rewards["reward"].to_numpy()
    reasons = responses["finish_reason"].to_pylist()
    metrics = {f"reward/{name}": float(getattr(scores, name)()) for name in ("mean", "std", "min", "max")}
    metrics |= {f"response_length/{name}": float(getattr(lengths, name)()) for name in ("mean", "min", "max")}
    metrics |= {f"finish_reason/{reason}": reasons.count(reason) / len(reasons) for reason in FinishReason}
    for name in config.reward.components:
        column = rewards[component_column(name)].to_numpy()
        metrics |= {f"reward/{name}/mean": float(column.mean()), f"reward/{name}/std": float(column.std())}
    return metrics | {
        "response_tokens": float(lengths.sum()),
        "response_length/clip_ratio": reasons.count(FinishReason.LENGTH) / len(reasons),
        "num_turns/mean": float(np.mean(responses["num_turns"].to_pylist())),
        "reward/frac_zero_std": 0.0,
        "reward/discarded": 0.0,
    }


# --- tokenizer ---


@without_torch
def make_tokenizer(directory):
    return LightTokenizer(Path(directory))


class LightTokenizer:
    """What stages ask of transformers' tokenizers, over the tokenizers library alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.backend_tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        self.chat_template = settings.get("chat_template")
        self.eos_token_id = self.backend_tokenizer.token_to_id(settings["eos_token"])

    def __call__(self, text, add_special_tokens=True, verbose=True):
        if isinstance(text, str):
            return {"input_ids": self.backend_tokenizer.encode(text).ids}
        return {"input_ids": [encoded.ids for encoded in self.backend_tokenizer.encode_batch(text)]}

    def decode(self, ids, skip_special_tokens=False):
        return self.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def batch_decode(self, rows, skip_special_tokens=False):
        return [self.decode(ids, skip_special_tokens) for ids in rows]

    def apply_chat_template(self, messages, tokenize, add_generation_prompt=False):
        assert not tokenize
        template = jinja2.Template(self.chat_template)
        return template.render(messages=messages, add_generation_prompt=add_generation_prompt)

    def save_pretrained(self, folder):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (Path(folder) / name).write_bytes((self._folder / name).read_bytes())


# --- inputs ---


def make_inputs(folder: Path) -> Path:
    """policy/, reward_model/, prompts.jsonl and heldout.jsonl; and words.json, what a run of them needs."""
    make_directory(folder / "policy", 0, "LlamaForCausalLM")
    make_directory(folder / "reward_model", 1, "LlamaForSequenceClassification", ("<eos>", "<x>", "<pad>"))
    (folder / "words.json").write_text(json.dumps(WORDS))
    return write_prompts(folder)


def write_prompts(folder: Path) -> Path:
    rows = [
        {"id": f"p{i}", "prompt": "say " + "ab"[i % 2] * (1 + i % 5) + str(i), "answer": i} for i in range(24)
    ]
    write_jsonl(folder / "prompts.jsonl", rows)
    write_jsonl(folder / "heldout.jsonl", [{"id": f"h{i}", "prompt": f"tell {i}"} for i in range(4)])
    return folder


def make_directory(
    folder: Path,
    seed: int,
    architecture: str = "LlamaForCausalLM",
    specials: tuple[str, ...] = SPECIALS,
    chat_template: str | None = None,
) -> Path:
    """A model directory: the files are all there, but the weights are those of no model."""
    folder.mkdir(parents=True)
    is_scoring = architecture.endswith("SequenceClassification")
    tokenizer = byte_level(specials)
    settings = {
        "architectures": [architecture],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 64,
        "max_position_embeddings": CONTEXT,
        "pad_token_id": specials.index("<pad>"),
        "eos_token_id": specials.index("<eos>"),
    }
    if is_scoring:
        settings["id2label"] = {"0": "LABEL_0"}
    else:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": settings["eos_token_id"]}))
    (folder / "config.json").write_text(json.dumps(settings))
    write_weights(folder / "model.safetensors", digest("version 0", seed), is_scoring)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<eos>"}
    tokens |= {"chat_template": chat_template} if chat_template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    return folder


def byte_level(specials: tuple[str, ...]) -> Tokenizer:
    """One token per byte after the special tokens, which other specials move."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda sign: (ord(sign) > 255, ord(sign)))
    tokenizer = Tokenizer(models.BPE({sign: i for i, sign in enumerate([*specials, *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    return tokenizer


def write_jsonl(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
