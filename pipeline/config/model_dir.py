"""What a Hugging Face model directory says of itself, read without torch."""

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    """None when the file is not JSON."""
    try:
        return json.loads(path.read_text())
    except ValueError:
        return None


def text_settings(directory: Path) -> dict[str, Any]:
    """The part of config.json that describes the language model; all of it for text-only models."""
    settings = read_json(directory / "config.json")
    text: dict[str, Any] = settings.get("text_config", settings)
    return text


def position_limit(directory: Path) -> int | None:
    """Tokens that the model has positions for; None when its configuration names no limit."""
    settings = text_settings(directory)
    limit = settings.get("max_position_embeddings") or settings.get("n_positions")
    return limit if isinstance(limit, int) and limit > 0 else None


def num_labels(directory: Path) -> int:
    """Outputs of a classification model, counted as transformers does: two unless it says otherwise."""
    settings = read_json(directory / "config.json")
    labels = settings.get("id2label")
    return len(labels) if labels else int(settings.get("num_labels", 2))


def has_chat_template(directory: Path) -> bool:
    """Whether its tokenizer has one, in any of the places where transformers looks."""
    if any((directory / name).exists() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    settings = directory / "tokenizer_config.json"
    return settings.exists() and "chat_template" in (read_json(settings) or {})
