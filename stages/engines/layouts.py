"""Layouts of model directories: all that a loaded model depends on, except for the numbers in its weights.

Where two directories have the same layout, an engine made of one of them can take the weights of the other.
No torch.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config.model_files import BadModel, read_tensors

_SETTINGS = ("config.json", "generation_config.json")
_SAYS_NOTHING = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype"})
"""Keys of those files that no engine reads: weights are loaded in the stage's precision."""
_OWN_CODE = "auto_map"
"""Key of models that bring code, which may compute anything from weights while it loads them."""
_FLOATS = frozenset({"F64", "F32", "BF16", "F16"})


@dataclass(frozen=True)
class ModelLayout:
    """A model directory without its numbers."""

    settings: tuple[Any, ...]
    """Contents of its configuration files; None where there is none."""
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    """Kind of number and shape of each tensor, by name."""


def layout_of(directory: Path) -> ModelLayout | None:
    """Return the layout of a model directory; None where it brings code of its own or cannot be described."""
    try:
        settings = tuple(_settings(directory / name) for name in _SETTINGS)
        headers = read_tensors(directory)
    except (BadModel, OSError, ValueError):
        return None
    if settings[0] is None or _OWN_CODE in settings[0]:
        return None
    return ModelLayout(settings, {name: (_kind(found.dtype), found.shape) for name, found in headers.items()})


def _settings(path: Path) -> Any:
    try:
        return _without_noise(json.loads(path.read_text()))
    except FileNotFoundError:
        return None


def _without_noise(value: Any) -> Any:
    """Return settings without keys that say nothing, also those of models within the model."""
    if isinstance(value, dict):
        return {key: _without_noise(part) for key, part in value.items() if key not in _SAYS_NOTHING}
    return [_without_noise(part) for part in value] if isinstance(value, list) else value


def _kind(dtype: str) -> str:
    """Return a number format; one word for all that are converted when they are loaded."""
    return "float" if dtype in _FLOATS else dtype
