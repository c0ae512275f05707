"""What a GGUF file says of its model, and how a model directory differs from it.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Needs the package gguf.
"""

import importlib.util
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.model_files import read_tensors
from pipeline.data.tokens import affixes_of
from stages.context import UserError
from stages.models.gguf_header import MAGIC, BadHeader, read_header

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_DIMENSIONS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "expert_count": "num_experts",
}
"""Keys below the architecture's name -> names in a configuration of transformers."""
_CONTROL = 3
"""Token type of tokens that no text holds, as ``<|im_end|>``."""
_ENDS = ("eos", "eot", "eom")
_FREQUENCIES, _OUTPUT = "rope_freqs.weight", "output.weight"
_DIGIT_BY_DIGIT = frozenset({"smollm"})
"""Values of ``tokenizer.ggml.pre`` that split numbers into digits before all else, which transformers' reader
leaves out."""
_AS_GPT2 = frozenset({"default", "gpt-2"})


@dataclass(frozen=True)
class Metadata:
    """Contents of a GGUF file's header."""

    file: Path
    keys: Mapping[str, Any]
    tensors: Mapping[str, int]
    """Number of weights of each tensor."""

    @property
    def architecture(self) -> str:
        return str(self.keys["general.architecture"])

    @property
    def num_weights(self) -> int:
        """All weights, without constants that follow from the configuration."""
        return sum(size for name, size in self.tensors.items() if name != _FREQUENCIES)

    @property
    def tokens(self) -> Sequence[str]:
        return self._of_tokenizer("tokens") or ()

    @property
    def chat_template(self) -> str | None:
        return self.keys.get("tokenizer.chat_template")

    @property
    def adds_bos(self) -> bool:
        """Whether the file says that a text begins with the begin token."""
        return bool(self._of_tokenizer("add_bos_token"))

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids of end of sequence, end of turn and end of message, as far as there are such."""
        found = (self._of_tokenizer(f"{name}_token_id") for name in _ENDS)
        return tuple(dict.fromkeys(id_ for id_ in found if id_ is not None))

    @property
    def splits_digits(self) -> bool:
        """Whether numbers are split into digits before all else."""
        return self._of_tokenizer("pre") in _DIGIT_BY_DIGIT

    @property
    def unknown_split(self) -> str | None:
        """Value of ``tokenizer.ggml.pre`` that neither transformers nor this module has a rule for."""
        from transformers.integrations.gguf import gguf_tokenizer_mapping as reader

        name = self._of_tokenizer("pre")
        known = {*_DIGIT_BY_DIGIT, *_AS_GPT2, *getattr(reader, "GGUF_PRE_TOKENIZER_SPLITS", ())}
        return None if self._of_tokenizer("model") != "gpt2" or name in known else name or "nothing is said"

    def of_model(self, key: str) -> Any:
        """Return a value below the architecture's name; None where there is none."""
        return self.keys.get(f"{self.architecture}.{key}")

    def _of_tokenizer(self, key: str) -> Any:
        return self.keys.get(f"tokenizer.ggml.{key}")


def read_metadata(file: Path) -> Metadata:
    """Read the header of a GGUF file.

    Raises:
        UserError: it is none, it is damaged, it lacks what names a model, or the package gguf is missing.
    """
    if not importlib.util.find_spec("gguf"):
        raise UserError("GGUF files are read by the package gguf: pip install 'slurm-ppo[gguf]'")
    if not file.is_file():
        raise UserError(f"{file}: no such file; give a GGUF file")
    with file.open("rb") as opened:
        if opened.read(len(MAGIC)) != MAGIC:
            raise UserError(f"{file} is no GGUF file; give one")
    try:
        header = read_header(file)
    except BadHeader as error:
        raise UserError(f"{file} is damaged ({error}); copy it again") from error
    keys, tensors = header.keys, {name: one.num_weights for name, one in header.tensors.items()}
    tokens = keys.get("tokenizer.ggml.tokens")
    if not isinstance(keys.get("general.architecture"), str) or not isinstance(tokens, list) or not tensors:
        raise UserError(f"{file} holds no language model with its tokenizer; give one that does")
    return Metadata(file, keys, tensors)


# --- the comparison ---


def differences(metadata: Metadata, directory: Path) -> list[str]:
    """Return in what a model directory, as it is read from disk, differs from the file it was made of."""
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    headers = read_tensors(directory)
    facts = [
        *_of_tokenizer(metadata, tokenizer),
        *_of_ids(metadata, tokenizer),
        *_of_config(metadata, config.get_text_config()),
        ("number of weights", metadata.num_weights, sum(math.prod(one.shape) for one in headers.values())),
    ]
    return [
        f"{name}: {theirs!r} in the file, {ours!r} here" for name, theirs, ours in facts if theirs != ours
    ]


Fact = tuple[str, Any, Any]
"""What it is, in the file, in the directory."""


def _of_tokenizer(metadata: Metadata, tokenizer: "PreTrainedTokenizerBase") -> Iterator[Fact]:
    size = len(metadata.tokens)
    yield "tokens", size, len(tokenizer)
    ours = tokenizer.convert_ids_to_tokens(list(range(min(size, len(tokenizer)))))
    pairs = enumerate(zip(metadata.tokens, ours, strict=False))
    yield from ((f"token {i}", one, other) for i, (one, other) in pairs if one != other and _is_plain(one))
    merges = metadata.keys.get("tokenizer.ggml.merges")
    if merges is not None:
        found = json.loads(tokenizer.backend_tokenizer.to_str())["model"].get("merges") or ()
        yield "merges", len(merges), len(found)
        joined = [merge if isinstance(merge, str) else " ".join(merge) for merge in found]
        yield "order of merges", True, list(merges) == joined
    yield "chat template", metadata.chat_template, tokenizer.chat_template
    types = metadata.keys.get("tokenizer.ggml.token_type") or ()
    control = {metadata.tokens[i] for i, kind in enumerate(types) if kind == _CONTROL}
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    yield "control tokens that are not special", set(), {t for t in control - special if _is_plain(t)}
    if (adds := metadata.keys.get("tokenizer.ggml.add_bos_token")) is not None and tokenizer.bos_token:
        yield "texts begin with the begin token", bool(adds), bool(affixes_of(tokenizer).before)


def _is_plain(token: str) -> bool:
    """Whether a token is spelled in one way: no spaces and no letters that byte-level vocabularies write
    differently, which transformers renames."""
    return token.isascii() and not token.isspace()


def _of_ids(metadata: Metadata, tokenizer: "PreTrainedTokenizerBase") -> Iterator[Fact]:
    names = {"bos": "bos", "eos": "eos", "padding": "pad"}
    for theirs, ours in names.items():
        id_ = metadata.keys.get(f"tokenizer.ggml.{theirs}_token_id")
        if id_ is not None:
            yield f"{ours} id", id_, getattr(tokenizer, f"{ours}_token_id")


def _of_config(metadata: Metadata, config: "PreTrainedConfig") -> Iterator[Fact]:
    for key, name in _DIMENSIONS.items():
        theirs, ours = metadata.of_model(key), getattr(config, name, None)
        if isinstance(theirs, int | float) and ours is not None:
            yield name, theirs, theirs if math.isclose(theirs, ours, rel_tol=1e-6) else ours
    yield "tied embeddings", _OUTPUT not in metadata.tensors, bool(config.tie_word_embeddings)
    yield "vocabulary of the embeddings", len(metadata.tokens), config.vocab_size
    rope = getattr(config, "rope_parameters", None) or {}
    base, theta = metadata.of_model("rope.freq_base"), rope.get("rope_theta")
    if base is not None and theta is not None:
        yield "rope theta", base, base if math.isclose(base, theta, rel_tol=1e-6) else theta
    scaling = metadata.of_model("rope.scaling.type")
    is_scaled = _FREQUENCIES in metadata.tensors or scaling not in (None, "none")
    if "rope_type" in rope:
        yield "scaled positions", is_scaled, rope["rope_type"] != "default"
