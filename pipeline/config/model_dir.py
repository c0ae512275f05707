"""Settings of a Hugging Face model directory, read from its files without torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurm.sharedfiles import read_plainly

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
    text: dict[str, Any] = settings.get("text_config", settings)
    return text


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
    """Return how many outputs a classification model has, as transformers counts them: two by default."""
    settings = read_json(directory / "config.json") or {}
    labels = settings.get("id2label")
    return len(labels) if labels else int(settings.get("num_labels", 2))


def has_chat_template(directory: Path) -> bool:
    """Whether the tokenizer has a chat template, in any of the places where transformers looks."""
    if any((directory / name).exists() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    settings = directory / "tokenizer_config.json"
    return settings.exists() and "chat_template" in (read_json(settings) or {})
