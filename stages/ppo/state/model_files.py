"""A model as a Hugging Face directory, written by all ranks at once.

Which tensor is in which file follows from the model alone, so the files are the same for any writer.
Each is written by one rank. Names and forms of tensors are those of transformers' save_pretrained.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from pipeline.config.model_files import INDEX, WEIGHTS
from stages import ranks
from stages.context import NumericalError
from stages.ppo.state.saved_state import File
from stages.ppo.state.tensor_files import Described, TensorFile

_LARGEST_FILE, _SMALLEST_FILE, _USUAL_FILES = 1 << 30, 1 << 26, 8
"""A model is divided into about so many files, of sizes in bytes between these; a larger tensor has a file
of its own."""

Gather = Callable[[str, bool], Tensor | None]
"""Return the whole weight of a name where it is wanted, in the format of the file. Every rank calls it."""


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of a model that are converted together, and what is written of them."""

    names: tuple[str, ...]
    written: tuple[Described, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.written)

    @property
    def is_plain(self) -> bool:
        """Whether it is one tensor that is written as it is."""
        return self.names == tuple(tensor.name for tensor in self.written)


@dataclass(frozen=True)
class WeightFile:
    """One file of weights."""

    name: str
    groups: tuple[TensorGroup, ...]

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self.groups)

    @property
    def tensors(self) -> list[Described]:
        return [tensor for group in self.groups for tensor in group.written]


def plan_files(model: PreTrainedModel, tensors: Sequence[Described]) -> list[WeightFile]:
    """Return the files that a model of these tensors is written to."""
    groups = groups_of(model, tensors)
    groups.sort(key=lambda group: -max(t.dtype.itemsize for t in group.written))  # stable
    total = sum(group.nbytes for group in groups)
    limit = min(_LARGEST_FILE, max(_SMALLEST_FILE, total // _USUAL_FILES))
    together: list[list[TensorGroup]] = [[]]
    for group in groups:
        if together[-1] and sum(g.nbytes for g in together[-1]) + group.nbytes > limit:
            together.append([])
        together[-1].append(group)
    count, stem = len(together), WEIGHTS.removesuffix(".safetensors")
    names = [f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    return [
        WeightFile(*pair)
        for pair in zip(names if count > 1 else [WEIGHTS], map(tuple, together), strict=True)
    ]


def groups_of(model: PreTrainedModel, tensors: Sequence[Described]) -> list[TensorGroup]:
    """Divide tensors into the smallest groups that transformers converts in the same way alone as with the
    others."""
    ignored = set(model._keys_to_ignore_on_save or ())
    bare = {
        t.name: torch.empty(t.shape, dtype=t.dtype, device="meta") for t in tensors if t.name not in ignored
    }
    expected = _described(converted(model, bare))
    alone, together = [], []
    for name, tensor in bare.items():
        found = _converted_alone(model, name, tensor)
        if found is not None and set(found) <= set(expected):
            alone.append(TensorGroup((name,), found))
        else:
            together.append(name)
    if together:
        left = set(expected).difference(t for group in alone for t in group.written)
        alone.append(TensorGroup(tuple(together), tuple(t for t in expected if t in left)))
    return alone


def converted(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as transformers names and shapes them in files."""
    found: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))
    return found


def _converted_alone(model: PreTrainedModel, name: str, tensor: Tensor) -> tuple[Described, ...] | None:
    """Return what becomes of one tensor; None if it cannot be converted without others."""
    try:
        return _described(converted(model, {name: tensor}))
    except (RuntimeError, ValueError, KeyError, IndexError, TypeError):
        return None


def _described(tensors: Mapping[str, Tensor]) -> tuple[Described, ...]:
    return tuple(Described(name, t.dtype, tuple(t.shape)) for name, t in tensors.items())


@dataclass(frozen=True)
class ModelFiles:
    """A model, and how its weights come into files."""

    model: PreTrainedModel
    files: Sequence[WeightFile]
    gather: Gather

    def write(self, folder: Path) -> list[File]:
        """Write the directory. Every rank takes part, and gets the files of weights that it wrote, which are
        durable; the first one also writes small files, which are not yet.

        Raises:
            NumericalError: a weight is not finite.
            OSError: a file cannot be written. Other ranks raise RuntimeError with the same words. All ranks
                raise it at the end of what they do together.
        """
        self.write_settings(folder)
        return self.write_weights(folder)

    def write_settings(self, folder: Path) -> None:
        """Write everything of the directory but weights, on the first rank. Every rank takes part. Raises
        OSError as :meth:`write`."""
        with ranks.agreed(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if ranks.is_first():
                self._write_settings(folder)  # first, since transformers removes files of weights

    def write_weights(self, folder: Path) -> list[File]:
        """Write the weights, where everything else is written; as :meth:`write`."""
        written: list[File] = []
        error: Exception | None = None
        for together in rounds(self.files, ranks.size()):
            gathered = in_step(together, self.gather)
            try:
                for file in together[ranks.rank() :][:1]:
                    written.append(self._write_file(file, folder, gathered))
            except (OSError, MemoryError, RuntimeError) as problem:
                error = error or problem
            for _ in gathered:  # the others wait for this rank's part of theirs
                pass
        ranks.agree(error)
        return written

    def _write_file(
        self, file: WeightFile, folder: Path, gathered: Iterator[list[tuple[str, Tensor]]]
    ) -> File:
        path = folder / file.name
        with TensorFile(path, file.tensors, {"format": "pt"}) as target:
            for group, weights in zip(file.groups, gathered, strict=False):
                for name, weight in weights:
                    if weight.numel() and not all(bound.isfinite() for bound in weight.aminmax()):
                        raise NumericalError(f"weight {name} is not finite; nothing is committed")
                found = dict(weights) if group.is_plain else converted(self.model, dict(weights))
                for tensor in group.written:
                    target.add(found[tensor.name])
            for _ in gathered:
                pass
            return (path, *target.end())

    def _write_settings(self, folder: Path) -> None:
        """Write everything of the directory but weights: settings, the model's own code, the index."""
        if self.model.can_generate():
            # transformers refuses to save settings that it loaded with a warning; the caller copies the file.
            self.model.generation_config = GenerationConfig.from_model_config(self.model.config)
        self.model.save_pretrained(folder, state_dict={}, safe_serialization=True)
        if len(self.files) > 1:
            index = {tensor.name: file.name for file in self.files for tensor in file.tensors}
            size = sum(tensor.nbytes for file in self.files for tensor in file.tensors)
            content = {"metadata": {"total_size": size}, "weight_map": dict(sorted(index.items()))}
            (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n")

    def on_host(self) -> "ModelFiles":
        """Copy what this rank writes, even from the host's memory, so that no rank has to gather later, and
        the model may change.

        Raises:
            MemoryError, RuntimeError: there is no room for it. Every rank raises one of them at the end.
        """
        held: dict[str, Tensor] = {}
        error: Exception | None = None
        for together in rounds(self.files, ranks.size()):
            gathered = in_step(together, self.gather)
            try:
                for weights in gathered:
                    held |= {name: weight.to("cpu", copy=True) for name, weight in weights}
            except (MemoryError, RuntimeError) as problem:
                error = error or problem
            for _ in gathered:  # the others wait for this rank's part of theirs
                pass
        ranks.agree(error)
        return replace(self, gather=lambda name, is_wanted: held[name] if is_wanted else None)


def rounds(files: Sequence[WeightFile], size: int) -> Iterator[Sequence[WeightFile]]:
    """Divide files into rounds in which each of ``size`` ranks writes at most one."""
    return (files[start : start + size] for start in range(0, len(files), size))


def in_step(together: Sequence[WeightFile], gather: Gather) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the weights of this rank's file, group by group; ranks gather one of each file in turn, and each
    has to go on to the end."""
    for number in range(max(len(file.groups) for file in together)):
        own: list[tuple[str, Tensor]] | None = None
        for owner, file in enumerate(together):
            if number < len(file.groups):
                is_wanted = owner == ranks.rank()
                found = [(name, gather(name, is_wanted)) for name in file.groups[number].names]
                if is_wanted:
                    own = [(name, weight) for name, weight in found if weight is not None]
        if own is not None:
            yield own
