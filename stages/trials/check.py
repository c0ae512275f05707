"""Trial of models for ``slurm-ppo validate``, which imports no torch: ``python -m stages.trials.check`` reads
a configuration in YAML from standard input, and prints a JSON object in one line: what keeps models from
being used (``problems``), and what else is to be said (``lines``).
"""

import importlib
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

from pipeline.config.compose import from_mapping
from pipeline.config.conversion import from_yaml
from pipeline.config.model_classes import run_with_this_python
from pipeline.config.model_files import read_json, read_tensors
from pipeline.config.schema import Config
from pipeline.config.trainable import quantisation_of, weight_doubts
from stages.context import UserError
from stages.logs import log
from stages.trials.models import (
    check_lora,
    check_routers,
    loaded_models,
    loading_problems,
    number_problems,
    tokenizer_problems,
)

_MOST = 2 << 30
"""Bytes of each model in which NaN is looked for: seconds on the filesystem of a cluster."""
_FIRST_TASK = "the run's first task does"


class _ValidateLines(logging.Handler):
    """Keeps what would be logged, as lines of validate."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        is_warning = record.levelno >= logging.WARNING
        self.found.append(f"{'warning: ' if is_warning else ''}{record.getMessage()}")


def problems_of(config: Config) -> Iterator[UserError]:
    """Yield what keeps the models of a configuration from being used; of large ones only a part is read."""
    if why := _why_not_loaded(config):
        log.info(f"not checked: whether transformers loads the models ({why}); {_FIRST_TASK}")
        _warn_of_doubts(config)
    else:
        found = [*loading_problems(config), *tokenizer_problems(config)]
        yield from found
        if not found:
            yield from _training_problems(config)
    yield from number_problems(config, _MOST)


def _warn_of_doubts(config: Config) -> None:
    """Log what looks wrong in the headers of models that cannot be made here."""
    seen: set[Path] = set()
    for model in loaded_models(config):
        settings = read_json(model.directory / "config.json") or {}
        if model.directory not in seen and not quantisation_of(settings):
            for doubt in weight_doubts(settings, read_tensors(model.directory)):
                log.warning(
                    f"{model.key}={model.directory}: {doubt}; copy the model again if that is not meant"
                )
        seen.add(model.directory)


def _training_problems(config: Config) -> Iterator[UserError]:
    for check in (check_lora, check_routers):
        try:
            check(config)
        except UserError as error:
            yield error


def _why_not_loaded(config: Config) -> str | None:
    """Return why models are not made without their weights here; None where they can be, or none is to be."""
    if not any(loaded_models(config)):
        return None
    if not run_with_this_python(config):
        return "tasks have another Python, or a container"
    for library in ("torch", "transformers"):
        try:
            importlib.import_module(library)
        except Exception as error:  # whatever a library's own libraries raise
            said = " ".join(str(error).split())[:120]
            return f"import {library} fails here: {said or type(error).__name__}"
    return None


def main() -> None:
    lines = _ValidateLines()
    log.handlers, log.propagate = [lines], False
    config = from_mapping(from_yaml(sys.stdin.read()))
    problems = list(map(str, problems_of(config)))
    print(json.dumps({"problems": problems, "lines": lines.found}))


if __name__ == "__main__":
    main()
