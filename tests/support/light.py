"""Light tasks: engines and a trainer that compute hashes, behind the contracts of the real ones.

What they give is a function of all that they were given. Responses follow from the policy's bytes, the
prompt and the seed; scores from the reward model's and the tokens; the next policy's bytes are a hash chain
over policy, critic and trainer state before it and every column of every shard. So a wrong mix, or an input
that was lost, doubled or taken from elsewhere, shows in the bytes of the last policy, as with real models.
Runner, commits, lineage, progress and verification are the real ones; torch is not imported.

With ``LIGHT_DICE`` in the environment nothing is a function of its inputs: each response, score and update is
another each time it is made, so that no two attempts at a task give the same bytes.

``LIGHT_SECONDS`` in the environment makes every response, score or update take so long; of several numbers
each takes the next one's time, and the last is for all that come later. While the file is there that
``LIGHT_HOLD`` names, none of them ends but the first of a process, so that there is something to save; a
process that is held up makes a file of its own beside it. With ``LIGHT_DEAF`` none heeds a warning meanwhile.
"""

import hashlib
import itertools
import json
import os
import time
from pathlib import Path

import jinja2
import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pipeline.run.schemas import FinishReason
from stages.engines.base import Generator, Response, Scorer, SequenceLimits, takes_ranks, without_torch

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
SECONDS, HOLD, DEAF, DICE = "LIGHT_SECONDS", "LIGHT_HOLD", "LIGHT_DEAF", "LIGHT_DICE"
HEAD = "score.weight"
EMBEDDING = "model.embed_tokens.weight"


_steps = itertools.count()


def take_time(should_stop=lambda: False) -> None:
    """As long as the environment says, unless told to stop."""
    seconds, step = os.environ.get(SECONDS, "0").split(), next(_steps)
    until = time.monotonic() + float(seconds[min(step, len(seconds) - 1)])
    while (left := until - time.monotonic()) > 0 or (step and is_held()):
        if should_stop() and DEAF not in os.environ:
            break
        time.sleep(min(left, 0.05) if left > 0 else 0.05)


def is_held() -> bool:
    if HOLD not in os.environ or not Path(os.environ[HOLD]).exists():
        return False
    if not (mine := Path(f"{os.environ[HOLD]}.{os.getpid()}")).exists():
        mine.touch()
    return True


# --- hashes ---


def digest(*parts: object) -> bytes:
    """16 bytes of parts that print the same in every process."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def dice() -> tuple[str, ...]:
    """A part of a hash that is another each time; none where tasks are to be functions of their inputs."""
    return (os.urandom(8).hex(),) if DICE in os.environ else ()


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
        self.limits = SequenceLimits(config.model.context_length, len(SPECIALS) + 256)

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
        given = digest(self._policy, list(request.prompt_tokens), how, *dice())
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

    limits = SequenceLimits(CONTEXT, 2**31)

    def __init__(self, model: bytes) -> None:
        self._model = model

    def _score(self, sequences):
        scores = []
        for sequence in sequences:
            take_time()
            scores.append(2 * fraction(self._model, list(sequence), *dice()) - 1)
        return scores


# --- training ---


@without_torch
def make_trainer(config):
    from tests.support.light_training import LightTrainer

    return LightTrainer()


@takes_ranks
def make_trainer_of_ranks(config):
    """One that says that it takes several ranks; it is only asked whether it does."""
    return make_trainer(config)


@without_torch
def make_trainer_at_once(config):
    from tests.support.light_training import LightTrainer

    return LightTrainer(commits_at_once=True)


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
            return {
                "input_ids": self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            }
        found = self.backend_tokenizer.encode_batch(text, add_special_tokens=add_special_tokens)
        return {"input_ids": [encoded.ids for encoded in found]}

    def get_vocab(self):
        return self.backend_tokenizer.get_vocab()

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
