"""Rules about what a model directory is used as: a policy to be trained, a classifier that scores.

Which setting counts the layers is read from the source of the model's class. Where that is not clear, nothing
is said here, and the run's first task, which makes the class, compares every weight.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pipeline.config.model_classes import Classes, source_of, why_unknown
from pipeline.config.model_files import Tensors, architectures_of, embedding_rows

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


# --- layers ---

_DRAFTING = re.compile(r"(.*\.layers\.\d+\.)eh_proj\.")
"""Name of a weight that only layers behind the last have, which predict further tokens (DeepSeek-V3)."""
_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
"""Settings that count layers."""


def why_other_depth(settings: Mapping[str, Any], tensors: Tensors, classes: Classes) -> str | None:
    """Return why the weights are of more or fewer layers than config.json says; None where they are not, or
    that is not clear."""
    given = settings.get("text_config")
    text = given if isinstance(given, dict) else settings
    counted = _count_of(text, source_of(str(text.get("model_type", settings.get("model_type"))), classes))
    stack = _stack_of(tensors)
    if counted is None or stack is None or settings.get("auto_map"):
        return None
    (key, wanted), (name, found) = counted, stack
    if found == wanted:
        return None
    effect = "the others would be left out" if found > wanted else "the others would be random numbers"
    return (
        f"its weights have {found} layers ({name}.0 to {name}.{found - 1}), and its config.json says "
        f"{key}={wanted}: {effect}; copy config.json again from where the weights are from"
    )


def _count_of(text: Mapping[str, Any], source: str) -> tuple[str, int] | None:
    """Return the setting that counts the layers, by the name that config.json has for it, and its value."""
    built = {name for name in re.findall(r"\bin range\(config\.(\w+)\)", source) if name in _COUNTS}
    given = {name: text[name] for name in _COUNTS if type(text.get(name)) is int}
    if len(built) != 1:
        return None
    own = built & given.keys() or given.keys()
    return next((name, given[name]) for name in own) if len(own) == 1 else None


def drafting_layers(names: Iterable[str]) -> tuple[str, ...]:
    """Return what the names of weights begin with that predict further tokens, which transformers leaves
    out."""
    return tuple({found[1] for name in names if (found := _DRAFTING.match(name))})


def weight_doubts(settings: Mapping[str, Any], tensors: Tensors) -> Iterator[str]:
    """Yield what looks wrong in the headers of a model's weights. There may be a model that is like this, so
    that only its class can judge: for where that cannot be made.
    """
    given = settings.get("text_config")
    size, rows = (given if isinstance(given, dict) else settings).get("vocab_size"), embedding_rows(tensors)
    if rows is not None and type(size) is int and size != rows:
        yield f"has {rows} embeddings, and its config.json says vocab_size={size}"
    names = _names_in_layers(tensors)
    for layer, found in list(names.items())[1:]:  # the first lacks a norm in some families
        others = {frozenset(names[other]) for other in names if other != layer}
        if len(names) > 2 and len(others) == 1 and (missing := min(others) - found) and found <= min(others):
            yield f"lacks the weight {layer}.{min(missing)}, which each of its other layers has"


def _names_in_layers(tensors: Tensors) -> dict[str, set[str]]:
    """Return the names of weights in each layer of the largest stack, by the layer's name."""
    stack = _stack_of(tensors)
    if stack is None:
        return {}
    names: dict[str, set[str]] = {f"{stack[0]}.{number}": set() for number in range(stack[1])}
    for name in tensors:
        found = re.match(r"(\D+\.\d+)\.(.+)", name)
        if found and found[1] in names:
            names[found[1]].add(found[2])
    return names


def _stack_of(tensors: Tensors) -> tuple[str, int] | None:
    """Return the name of the largest list of modules that no other is around, and its length."""
    numbers: dict[str, set[int]] = defaultdict(set)
    sizes: dict[str, int] = defaultdict(int)
    drafting = drafting_layers(tensors)
    for name, tensor in tensors.items():
        found = re.match(r"(\D+)\.(\d+)\.", name)
        if found and not OTHER_SENSES.search(name) and not name.startswith(drafting):
            numbers[found[1]].add(int(found[2]))
            sizes[found[1]] += tensor.size
    if not sizes:
        return None
    largest = max(sizes, key=lambda name: sizes[name])
    return largest, max(numbers[largest]) + 1
