"""Settings, weights and tokenizer of a Hugging Face model directory. No weight is read, only headers."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm.sharedfiles import read_plainly

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_SETTINGS = "adapter_config.json"
_ADAPTER = "adapter_model.safetensors"
_CONFIG, _GENERATION = "config.json", "generation_config.json"
_HEADER_LIMIT = 100_000_000
"""Bytes; safetensors' own limit."""
_LFS = b"version "
_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "C64": 64, "I64": 64, "U64": 64, "F64": 64,
}  # fmt: skip
"""Bits of a number, by every dtype that safetensors knows."""
_EMBEDDINGS = (
    *("embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings", "tokens_embed"),
    "embeddings",
)
"""Names that token embeddings have in the families of transformers."""
_HEADS = ("score", "classifier", "v_head", "value_head", "reward_head", "regression_head", "v_head.summary")
"""Names that linear heads have in transformers, TRL and others."""
_OTHER_HEADS = ("classification_head", "logits_proj", "classifier")
"""Names of heads of several layers."""
_VOCABULARIES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt"),
    *("spiece.model", "sentencepiece.bpe.model", "tekken.json"),
)


class BadModel(ValueError):
    """A file of a model directory cannot be used. The message names the file, not the directory."""


@dataclass(frozen=True)
class Tensor:
    """A tensor as the header of its file describes it."""

    path: Path
    dtype: str
    """safetensors' name, such as BF16."""
    shape: tuple[int, ...]
    start: int
    """First byte in the file."""
    size: int
    """Bytes."""


Tensors = Mapping[str, Tensor]


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Return every tensor that transformers would load, by name.

    Raises:
        BadModel: there is no weight file, or one is missing, cut short or not of safetensors.
    """
    settings = read_json(directory / "config.json") if (directory / "config.json").exists() else None
    explicit = (settings or {}).get("transformers_weights")
    if not isinstance(explicit, str | None):
        raise BadModel("its config.json names no file as transformers_weights; copy it again")
    name = explicit or (WEIGHTS if (directory / WEIGHTS).is_file() else INDEX)
    if not (directory / name).is_file() and (directory / _ADAPTER).is_file():
        raise BadModel(
            f"has only an adapter's weights ({_ADAPTER}); merge it into its base model (peft's "
            "merge_and_unload, then save_pretrained) and give that directory"
        )
    if not (directory / name).is_file():
        wanted = f"{WEIGHTS} nor {INDEX}" if name == INDEX else f"the {name} that its config.json names"
        raise BadModel(
            f"has *.safetensors, but neither {wanted}; save it again with transformers' save_pretrained"
        )
    return read_shards(directory, name) if name.endswith(".index.json") else read_header(directory / name)


def read_shards(directory: Path, index: str) -> dict[str, Tensor]:
    """Return the tensors that an index file names. Raises BadModel."""
    names = (read_json(directory / index) or {}).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise BadModel(f"its {index} has no weight_map; copy it again from where the model is from")
    files = sorted(set(names.values()))
    if missing := [file for file in files if not (directory / file).is_file()]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise BadModel(
            f"lacks {missing[0]}{more} of {len(files)} files that its {index} names; copy what is missing"
        )
    headers = {file: read_header(directory / file) for file in files}
    for tensor, file in names.items():
        if tensor not in headers[file]:
            raise BadModel(f"its {file} lacks the tensor {tensor} that {index} says is in it; copy it again")
    return {tensor: headers[file][tensor] for tensor, file in names.items()}


def read_header(path: Path) -> dict[str, Tensor]:
    """Return the tensors of one safetensors file, from its header. Raises BadModel."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(8)
            length = int.from_bytes(first, "little")
            text = file.read(length) if 0 < length <= min(size - 8, _HEADER_LIMIT) else b""
    except OSError as error:
        raise BadModel(f"its {path.name} cannot be read: {error.strerror}") from error
    if first == _LFS:
        raise BadModel(f"its {path.name} is a pointer of Git LFS, not the weights; run git lfs pull there")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise BadModel(f"its {path.name} ({size} bytes) is cut short or not of safetensors; copy it again")
    tensors = dict(_described(path, header, 8 + length))
    _check_no_gaps(path, tensors, 8 + length)
    end = max((tensor.start + tensor.size for tensor in tensors.values()), default=8 + length)
    if size != end:
        raise BadModel(f"its {path.name} has {size} bytes, and its header says {end}; copy it again")
    return tensors


def _described(path: Path, header: Mapping[str, Any], data: int) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of a header by name. Raises BadModel where a tensor's bytes do not fit its shape, and
    where metadata is not texts by name."""
    for name, entry in header.items():
        if name == "__metadata__":
            if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
                raise BadModel(f"the header of its {path.name} is damaged at __metadata__; copy it again")
            continue
        try:
            dtype, shape = str(entry["dtype"]), tuple(map(_whole, entry["shape"]))
            start, end = map(_whole, entry["data_offsets"])
            if (end - start) * 8 != math.prod(shape) * _BITS[dtype]:
                raise ValueError(f"{end - start} bytes")
        except (KeyError, TypeError, ValueError) as error:
            raise BadModel(f"the header of its {path.name} is damaged at {name}; copy it again") from error
        yield name, Tensor(path, dtype, shape, data + start, end - start)


def _whole(number: object) -> int:
    """Return a number of a header. Raises ValueError where it is none that counts something."""
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is no count")
    return number


def _check_no_gaps(path: Path, tensors: Tensors, data: int) -> None:
    """Raise BadModel where tensors do not lie end to end from the byte ``data`` on, as safetensors wants."""
    at = data
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].size)):
        if tensor.start != at:
            raise BadModel(f"the header of its {path.name} is damaged at {name}; copy it again")
        at += tensor.size


def embedding_rows(tensors: Tensors) -> int | None:
    """Return how many token ids a model has an embedding for; None where it has no tensor of a known name."""
    found = _matrices(tensors, _EMBEDDINGS)
    return max((tensors[name].shape[0] for name in found if "vision" not in name), default=None)


def _matrices(tensors: Tensors, modules: Sequence[str]) -> Iterator[str]:
    """Yield the names of weights of two dimensions that belong to one of the modules and to no layer."""
    endings = tuple(f".{module}.weight" for module in modules)
    for name, tensor in tensors.items():
        is_in_layer = any(part.isdigit() for part in name.split("."))
        if f".{name}".endswith(endings) and len(tensor.shape) == 2 and not is_in_layer:
            yield name


def head_of(tensors: Tensors) -> str | None:
    """Return a linear head's name without ``.weight``: of a classifier, reward model or critic; or None."""
    return next((name.removesuffix(".weight") for name in _matrices(tensors, _HEADS)), None)


def has_head(tensors: Tensors) -> bool:
    """Whether the model has a head that makes a score, of one layer or several."""
    others = (part in _OTHER_HEADS for name in tensors for part in name.split("."))
    return head_of(tensors) is not None or any(others)


@dataclass(frozen=True)
class Vocabulary:
    """The ids of a tokenizer."""

    base: Mapping[str, int]
    """Ids of the tokens of the tokenizer's model (BPE, Unigram, ...), by token."""
    added: Mapping[str, int]
    """Ids of the tokens that were added to it, special ones among them, by token."""

    @property
    def num_base(self) -> int:
        """One more than the highest id that ordinary text may have."""
        return max(self.base.values(), default=-1) + 1

    @property
    def num_ids(self) -> int:
        """One more than the highest id."""
        return max(self.num_base, *(id_ + 1 for id_ in self.added.values()), 0)

    def tokens(self) -> dict[int, str]:
        return {id_: token for token, id_ in [*self.base.items(), *self.added.items()]}


def has_tokenizer(directory: Path) -> bool:
    """Whether the directory has any file of a tokenizer."""
    return any((directory / name).is_file() for name in _VOCABULARIES)


def read_vocabulary(directory: Path) -> Vocabulary | None:
    """Return a tokenizer's ids; None where their format needs the tokenizer's library. Raises BadModel."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    content = read_json(path) or {}
    model = content.get("model")
    if not isinstance(model, dict):
        raise BadModel("its tokenizer.json is cut short or no tokenizer; copy it again")
    vocab = model.get("vocab") or {}
    try:
        if not isinstance(vocab, dict):  # Unigram models list tokens with scores in the order of ids
            vocab = {token: id_ for id_, (token, _) in enumerate(vocab)}
        added = {str(one["content"]): int(one["id"]) for one in content.get("added_tokens") or ()}
        return Vocabulary({str(token): int(id_) for token, id_ in vocab.items()}, added)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadModel("the vocabulary of its tokenizer.json is damaged; copy it again") from error


# --- settings ---

ROUTER_LOGITS = "output_router_logits"
"""Setting of config.json with which a mixture of experts gives the logits of its routers too."""


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object that a file holds; None when it holds none. A pipe is not waited for."""
    try:
        content = json.loads(read_plainly(path))
    except (ValueError, RecursionError):  # the latter for brackets in thousands
        return None
    return content if isinstance(content, dict) else None


def text_settings(directory: Path) -> dict[str, Any]:
    """Return the part of config.json that describes the language model; all of it for text-only models."""
    settings = read_json(directory / "config.json") or {}
    text = settings.get("text_config")
    return text if isinstance(text, dict) else settings


def architectures_of(settings: Mapping[str, Any]) -> list[str]:
    """Return the names of the classes that config.json says the model was saved as."""
    given = settings.get("architectures") or []
    return [str(name) for name in (given if isinstance(given, list) else [given])]


def position_limit(directory: Path) -> int | None:
    """Return how many tokens the model has positions for; None when its configuration names no limit."""
    settings = text_settings(directory)
    limit = settings.get("max_position_embeddings") or settings.get("n_positions")
    return limit if isinstance(limit, int) and limit > 0 else None


def num_labels(directory: Path) -> int:
    """Return how many outputs a classification model has, as transformers counts them: two by default.
    Raises BadModel where they cannot be counted."""
    settings = read_json(directory / "config.json") or {}
    labels = settings.get("id2label")
    found: object = settings.get("num_labels", 2)
    if labels:
        found = len(labels) if isinstance(labels, dict) else None
    if type(found) is not int:
        raise BadModel("its config.json does not count outputs (id2label, num_labels); copy it again")
    return found


def model_end_ids(directory: Path) -> frozenset[int]:
    """Return the end-of-sequence ids of a model's configuration and of its generation settings. Raises
    BadModel where they are none."""
    settings = read_json(directory / _CONFIG) or {}
    own = settings.get("eos_token_id")
    if own is None and isinstance(text := settings.get("text_config"), dict):
        own = text.get("eos_token_id")
    generation = read_json(directory / _GENERATION) if (directory / _GENERATION).is_file() else {}
    if generation is None:
        raise BadModel(f"its {_GENERATION} is not JSON of settings; copy it again, or remove it")
    return frozenset([*_ids(_CONFIG, own), *_ids(_GENERATION, generation.get("eos_token_id"))])


def _ids(file: str, given: object) -> list[int]:
    """Return the ids that a setting gives: one, several, or none. Raises BadModel."""
    ids: list[Any] = given if isinstance(given, list) else [] if given is None else [given]
    if not all(type(id_) is int for id_ in ids):
        raise BadModel(f"its {file} has eos_token_id={given!r:.40}, which is no token's id; give its number")
    return ids


def has_chat_template(directory: Path) -> bool:
    """Whether the tokenizer has a chat template, in any of the places where transformers looks."""
    if any((directory / name).exists() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    settings = directory / "tokenizer_config.json"
    return settings.exists() and bool((read_json(settings) or {}).get("chat_template"))
