"""Classes that transformers loads models as, read from its source: importing it takes seconds.

What is read is what AutoModelForCausalLM and the like look classes up in. Where transformers is not
installed, or is laid out in another way, nothing is known here, and the run's first task judges.
"""

import functools
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config.allocation import AllocationConfig
from pipeline.config.scheduler import SlurmConfig, resources_of
from pipeline.config.schema import Config

_TABLES = Path("models", "auto", "modeling_auto.py")
_TYPES = Path("models", "auto", "auto_mappings.py")


@dataclass(frozen=True)
class Classes:
    """Names of classes by model_type."""

    version: str
    """Version of transformers."""
    types: frozenset[str]
    """Every model_type that it knows."""
    causal: Mapping[str, str]
    """Classes of AutoModelForCausalLM."""
    scoring: Mapping[str, str]
    """Classes of AutoModelForSequenceClassification."""
    tokens: Mapping[str, str]
    """Classes of AutoModelForTokenClassification."""
    with_images: Mapping[str, str]
    """Classes that take images and text."""
    masked: Mapping[str, str]
    """Classes of AutoModelForMaskedLM, which read a text in both directions."""
    folder: Path
    """Folder of the installed library."""
    modules: Mapping[str, str]
    """Modules of those that are not in one of their own name."""


def classes_of_tasks(config: Config) -> Classes | None:
    """Return the classes of the transformers that tasks will load models with; None where that is not the one
    installed here, or cannot be read."""
    return installed_classes() if run_with_this_python(config) else None


def run_with_this_python(config: Config) -> bool:
    """Whether tasks have the Python of this process, and so the same libraries."""
    scheduler = config.scheduler
    if isinstance(scheduler, SlurmConfig):
        given = resources_of(scheduler, "prepare")
        return given.python == sys.executable and not given.container
    if isinstance(scheduler, AllocationConfig):
        step = scheduler.resources["prepare"]
        is_inside = step.container or scheduler.container
        return (step.python or scheduler.python or sys.executable) == sys.executable and not is_inside
    return True


@functools.cache
def installed_classes() -> Classes | None:
    """Return the classes of the transformers that is installed here."""
    spec = importlib.util.find_spec("transformers")
    try:
        folder = Path(((spec and spec.submodule_search_locations) or [])[0])
        source, types = (folder / _TABLES).read_text(), (folder / _TYPES).read_text()
        version = importlib.metadata.version("transformers")
    except (IndexError, OSError, importlib.metadata.PackageNotFoundError):
        return None
    tables = (
        *("CAUSAL_LM", "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION"),
        *("IMAGE_TEXT_TO_TEXT", "MASKED_LM"),
    )
    names = (f"MODEL_FOR_{name}_MAPPING_NAMES" for name in tables)
    causal, scoring, tokens, images, masked = (table(source, name) for name in names)
    known = frozenset(table(types, "CONFIG_MAPPING_NAMES")) | causal.keys()
    is_read = "llama" in known and "llama" in causal and "llama" in scoring
    modules = table(types, "SPECIAL_MODEL_TYPE_TO_MODULE_NAME")
    found = Classes(version, known, causal, scoring, tokens, images, masked, folder, modules)
    return found if is_read else None


@functools.cache
def _read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def source_of(model_type: str, classes: Classes) -> str:
    """Return the source of a model's classes; empty where it is not found."""
    module = classes.modules.get(model_type, model_type.replace("-", "_"))
    return _read(classes.folder / "models" / module / f"modeling_{module}.py")


def table(source: str, name: str) -> dict[str, str]:
    """Return a table of a module's source, ``NAME = OrderedDict([(key, class), ...])``; empty where it has
    none of this form. Of several classes the first is returned."""
    found = re.search(rf"^{name} = OrderedDict\(\n(.*?)^\)", source, re.MULTILINE | re.DOTALL)
    return dict(re.findall(r'\(\s*"([^"]+)",\s*\(?\s*"([^"]+)"', found[1])) if found else {}


SEQUENCES, TOKENS = "AutoModelForSequenceClassification", "AutoModelForTokenClassification"
"""Auto classes of reward models: a score for a sequence, or at each token."""


def scoring_class(settings: Mapping[str, Any], gives_steps: bool) -> str:
    """Return the auto class that loads a reward model of this config.json: of one that scores steps also
    AutoModel, for code of its own that has no other class."""
    if not gives_steps:
        return SEQUENCES
    code, names = settings.get("auto_map"), settings.get("architectures")
    of_code = code if isinstance(code, dict) else {}
    if TOKENS in of_code or "TokenClassification" in str(names):
        return TOKENS
    return "AutoModel" if "AutoModel" in of_code and SEQUENCES not in of_code else SEQUENCES


def why_unknown(
    model_type: object, version: str, is_known: bool, has_code: bool, is_trusted: bool
) -> str | None:
    """Return why neither the installed transformers nor code that is trusted has a model; None where one has.

    Args:
        has_code: whether the directory has code of its own (``auto_map`` in config.json).
    """
    if is_known or (has_code and is_trusted):
        return None
    if has_code:
        return (
            f"its model_type {model_type!r} needs Python code from its directory; if you trust it, set "
            "model.trust_remote_code=true"
        )
    return (
        f"transformers {version} knows no model_type {model_type!r}; install a version that does, or give "
        "another model"
    )
