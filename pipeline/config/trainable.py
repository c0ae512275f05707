"""Rules about what a model directory is used as: a policy to be trained, a classifier that scores."""

import re
from collections.abc import Mapping
from typing import Any

from pipeline.config.model_classes import Classes, why_unknown
from pipeline.config.model_dir import architectures_of
from pipeline.config.model_files import Tensors

QUANTISED = ("quantization_config", "compression_config")
"""Keys of config.json that say how weights are quantised."""
OTHER_SENSES = re.compile(r"vis(ion|ual)|audio|image|vq_?model")
"""Parts of the names of weights that only images and sound go through."""


def quantisation_of(settings: Mapping[str, Any]) -> str | None:
    """Return how the weights that config.json describes are quantised, in a word; None where they are not."""
    given = [settings.get("text_config"), settings]
    for part in (part for part in given if isinstance(part, dict)):
        for how in (part[key] for key in QUANTISED if part.get(key)):
            return (
                str(how.get("quant_method") or "in a way it does not name")
                if isinstance(how, dict)
                else str(how)
            )
    return None


def why_untrainable(settings: Mapping[str, Any]) -> str | None:
    """Return why no training engine can train a model, whatever transformers is installed; else None."""
    if how := quantisation_of(settings):
        return f"is quantised ({how[:40]}), which cannot be trained: give the weights it was made from"
    if settings.get("is_encoder_decoder"):
        return (
            "is an encoder-decoder model, such as T5 and BART, whose prompts go through an encoder that is "
            "not trained here; give a decoder-only model (...ForCausalLM)"
        )
    return None


def why_not_known(settings: Mapping[str, Any], classes: Classes, is_trusted: bool) -> str | None:
    """Return why neither transformers nor code that is trusted has the model of a config.json; else None."""
    kind = settings.get("model_type")
    return why_unknown(
        kind, classes.version, kind in classes.types, bool(settings.get("auto_map")), is_trusted
    )


def why_not_of_class(
    table: Mapping[str, str], auto_class: str, settings: Mapping[str, Any], classes: Classes, is_trusted: bool
) -> str | None:
    """Return why transformers cannot load a directory with one of its auto classes; None where it can.

    Args:
        table: the auto class's classes.
    """
    kind, code = settings.get("model_type"), settings.get("auto_map")
    if why := why_not_known(settings, classes, is_trusted):
        return why
    if kind in table or (is_trusted and isinstance(code, dict) and auto_class in code):
        return None
    return (
        f"is a {kind} model, of which transformers {classes.version} has no {auto_class}; give a model that "
        "this class loads"
    )


def why_not_causal(settings: Mapping[str, Any], classes: Classes) -> str | None:
    """Return why each token's probability would depend on those after it; None where it does not.

    Families that have a masked language model besides are decoders only where config.json says so.
    """
    kind = settings.get("model_type")
    if kind not in classes.masked or settings.get("is_decoder") or settings.get("auto_map"):
        return None
    return (
        f"is a {kind} model that reads in both directions, as its config.json does not set is_decoder; give "
        "one that was trained as a decoder"
    )


def why_maimed(settings: Mapping[str, Any], tensors: Tensors, classes: Classes) -> str | None:
    """Return why training would lose a part of a policy: of some models of images and text transformers loads
    the language model alone, and only that would be written. None where all of it is kept."""
    kind = str(settings.get("model_type"))
    whole, text = classes.with_images.get(kind), classes.causal.get(kind)
    if whole is None or text is None or whole == text or settings.get("auto_map"):
        return None
    lost = [name for name in tensors if OTHER_SENSES.search(name)]
    if not lost and whole not in architectures_of(settings):
        return None
    return (
        f"is a {whole}, of which only the language model ({text}) is trained: its other weights (such as "
        f"{lost[0] if lost else 'those of images'}) would be missing from every policy; load it with "
        "AutoModelForCausalLM, save_pretrained, and give that directory"
    )
