"""Model directories of GGUF files: ``python -m stages.models.gguf FILE DIR``.

transformers reads and dequantises the file. What is left is here: it saves no model while the file's
quantiser is on it, it splits texts as the file says for some tokenizers only, and what ends a response is
found in the chat template as well. The directory is compared with the file's metadata before it is there.
Needs the extra ``gguf``.
"""

import argparse
import errno
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.update import Precision
from pipeline.data.tokens import affixes_of, ends_of
from pipeline.memory import free_bytes
from pipeline.text import size
from stages.context import UserError
from stages.models.gguf_metadata import Metadata, differences, read_metadata
from stages.models.publishing import check_is_free, exit_code_of, published

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
    check_is_free(directory)
    metadata = read_metadata(file)
    directory.parent.mkdir(parents=True, exist_ok=True)
    _check_room(metadata, directory.parent, precision)
    with published(directory) as building, _in_one_line(metadata):
        tokenizer = _tokenizer(metadata)
        tokenizer.save_pretrained(building)
        _save_model(_model(metadata, precision), building)
        ends = sorted(ends_of(building, tokenizer, metadata.end_ids).ids)
        _write_ends(building, ends)
        if found := differences(metadata, building):
            raise UserError(
                f"{file}: the model directory differs from the file's metadata: {'; '.join(found)}"
            )
        named = tuple((id_, str(tokenizer.decode([id_]))) for id_ in ends)
    return Converted(directory, metadata, named)


def _check_room(metadata: Metadata, folder: Path, precision: Precision) -> None:
    """Refuse a model whose weights fit into neither the memory nor the folder. Raises UserError."""
    needed = metadata.num_weights * (4 if precision is Precision.FP32 else 2)
    way_out = " or give --precision bf16" if precision is Precision.FP32 else ""
    for free, where, more in (
        (free_bytes(), "memory", "take a machine with more"),
        (shutil.disk_usage(folder).free, f"the filesystem of {folder}", "make room"),
    ):
        if 0 < free < needed:
            why = f"its weights take {size(needed)} in {precision}, and {where} has {size(free)} free"
            raise UserError(f"{metadata.file}: {why}; {more}{way_out}")


@contextmanager
def _in_one_line(metadata: Metadata) -> Iterator[None]:
    """Say in one line, as a UserError, what transformers cannot read, or what cannot be written: its readers
    fail in many ways on what they do not expect."""
    from transformers import __version__

    try:
        yield
    except (UserError, OSError):
        raise
    except Exception as error:
        why = str(error).strip().partition("\n")[0] or "it says no more"
        if os.strerror(errno.ENOSPC) in why:  # as safetensors says it
            raise OSError(errno.ENOSPC, why) from error
        said = f"transformers {__version__} cannot read this {metadata.architecture}"
        raise UserError(f"{metadata.file}: {said}: {type(error).__name__}: {why}") from error


def _model(metadata: Metadata, precision: Precision) -> "PreTrainedModel":
    from transformers import AutoModelForCausalLM, GgufConfig

    from stages.models.loading import DTYPES

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        metadata.file.parent,
        gguf_file=metadata.file.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=DTYPES[precision],
        local_files_only=True,
        output_loading_info=True,
    )
    model: PreTrainedModel = loaded[0]
    info: dict[str, Any] = loaded[1]
    for what in ("missing", "unexpected", "mismatched"):
        if names := sorted(map(str, info[f"{what}_keys"])):  # transformers gives missing ones random numbers
            why = f"{len(names)} weights are {what}, such as {names[0]}"
            raise UserError(f"{metadata.file} does not hold what its architecture has ({why}); copy it again")
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise UserError(f"{metadata.file} is damaged (weights of {name} are not finite); copy it again")
    return model


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

    def make() -> Iterator[str]:
        from transformers.utils import logging

        logging.disable_progress_bar()
        return described(convert(given.file, given.directory, given.precision))

    return exit_code_of(given.directory, make)


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
