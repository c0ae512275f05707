"""Model directories of GGUF files: ``python -m stages.models.gguf FILE DIR``.

transformers reads and dequantises the file. What is left is here: it saves no model while the file's
quantiser is on it, it splits texts as the file says for some tokenizers only, and what ends a response is
found in the chat template as well. The directory is compared with the file's metadata before it is there.
Needs the extra ``gguf``.
"""

import argparse
import shutil
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config.update import Precision
from pipeline.data.tokens import affixes_of, ends_of
from stages.context import UserError
from stages.models.gguf_metadata import Metadata, differences, read_metadata

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SHARD = "4GB"
"""Largest file of weights."""


@dataclass(frozen=True)
class Converted:
    """A model directory that was made of a GGUF file."""

    directory: Path
    metadata: Metadata
    ends: tuple[tuple[int, str], ...]
    """Ids that end a response, with their tokens."""


def convert(file: Path, directory: Path, precision: Precision = Precision.FP32) -> Converted:
    """Make a model directory of a GGUF file: safetensors, tokenizer with its chat template, end tokens.

    Args:
        directory: it must not exist; it is built beside its place and renamed when it is complete.
        precision: format of the weights. fp32 keeps every number that the file stands for; the whole model
            must fit into memory in it.

    Raises:
        UserError: the file is none of GGUF, transformers cannot read it, or what came of it differs from the
            file's metadata; the message says in what.
    """
    if directory.exists():
        raise UserError(f"{directory} exists; give a new directory")
    metadata = read_metadata(file)
    with _published(directory) as building:
        tokenizer = _tokenizer(metadata)
        tokenizer.save_pretrained(building)
        _save_model(_model(metadata, precision), building)
        ends = sorted(ends_of(building, tokenizer, metadata.end_ids).ids)
        _write_ends(building, ends)
        if found := differences(metadata, building):
            raise UserError(
                f"{file}: the model directory differs from the file's metadata: {'; '.join(found)}"
            )
    return Converted(directory, metadata, tuple((id_, str(tokenizer.decode([id_]))) for id_ in ends))


@contextmanager
def _published(directory: Path) -> Iterator[Path]:
    """Give a folder to build in, which becomes the directory if the body ends well, and else is removed."""
    from stages.models.merging import settle

    directory.parent.mkdir(parents=True, exist_ok=True)
    building = directory.with_name(f".{directory.name}.making-{uuid.uuid4().hex[:8]}")
    building.mkdir()
    try:
        yield building
        settle(path for path in building.iterdir() if path.is_file())
        building.rename(directory)
    finally:
        shutil.rmtree(building, ignore_errors=True)


@contextmanager
def _reading(metadata: Metadata) -> Iterator[None]:
    """Say in one line, as a UserError, what transformers cannot read."""
    from transformers import __version__

    try:
        yield
    except (ValueError, KeyError, NotImplementedError, ImportError) as error:
        why = str(error).strip().partition("\n")[0]
        said = f"transformers {__version__} cannot read this {metadata.architecture}: {why}"
        raise UserError(f"{metadata.file}: {said}") from error


def _model(metadata: Metadata, precision: Precision) -> "PreTrainedModel":
    from transformers import AutoModelForCausalLM, GgufConfig

    from stages.models.loading import DTYPES

    with _reading(metadata):
        return AutoModelForCausalLM.from_pretrained(
            metadata.file.parent,
            gguf_file=metadata.file.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=DTYPES[precision],
            local_files_only=True,
        )


def _save_model(model: "PreTrainedModel", folder: Path) -> None:
    """Save a model of which every weight is dequantised, as the plain one that it is."""
    vars(model).pop("hf_quantizer", None)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder, max_shard_size=_SHARD)


def _tokenizer(metadata: Metadata) -> "PreTrainedTokenizerBase":
    """Load the tokenizer, with its splits and its beginning of texts as the file says."""
    from tokenizers import pre_tokenizers, processors
    from transformers import AutoTokenizer

    with _reading(metadata):
        tokenizer = AutoTokenizer.from_pretrained(
            metadata.file.parent, gguf_file=metadata.file.name, local_files_only=True
        )
    backend = tokenizer.backend_tokenizer
    if metadata.splits_digits:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    bos = tokenizer.bos_token
    if metadata.adds_bos and bos and not affixes_of(tokenizer).before:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
        )
    return tokenizer


def _write_ends(folder: Path, ends: Sequence[int]) -> None:
    """Write the ids that end a response into generation_config.json, which every engine reads."""
    from transformers import GenerationConfig

    settings = GenerationConfig.from_pretrained(folder)
    settings.eos_token_id = list(ends)
    settings.save_pretrained(folder)


def main(argv: Sequence[str]) -> int:
    """Convert a file, and say what it is. Returns the exit code: 2 where that cannot be done."""
    parser = argparse.ArgumentParser(
        prog="python -m stages.models.gguf",
        description="Make a Hugging Face model directory of a GGUF file: dequantised safetensors, tokenizer, "
        "chat template and end tokens, compared with the file's metadata.",
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--precision", type=Precision, choices=[*Precision], default=Precision.FP32)
    given = parser.parse_args(argv)
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        made = convert(given.file, given.directory, given.precision)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(described(made)))
    return 0


def described(made: Converted) -> Iterator[str]:
    """Yield lines that say what a directory was made of."""
    data = made.metadata
    ends = ", ".join(f"{id_} {token!r}" for id_, token in made.ends)
    yield f"{made.directory}: {data.architecture}, {data.num_weights:,} weights, {len(data.tokens):,} tokens"
    yield f"responses end at {ends or 'nothing: give rollout.stop_token_ids'}"
    if data.chat_template is None:
        yield "it has no chat template: give data.chat_template for prompts of messages"
    if data.unknown_split:
        yield (
            f"note: how texts are split ({data.unknown_split}) was not compared: compare ids of some "
            "texts with those of the original tokenizer"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
