"""A trial of the models that a run loads, in a process of its own, as this one imports no torch."""

import json
import subprocess
from collections.abc import Iterator

from pipeline.config.compose import to_yaml
from pipeline.config.issue import ConfigError
from pipeline.config.schema import Config
from pipeline.process import ask_program
from pipeline.text import exit_in_words

_TRIAL = "stages.trials.check"
"""Module that is run: it makes each model without its weights, and looks for NaN in these."""
_ANSWER = '{"problems": '
"""Beginning of the line that it answers with: libraries may print others."""
_TRIAL_SECONDS = 600.0
_SAID = 200
"""Characters that are shown of the last line of a process that failed."""


def try_models(config: Config) -> Iterator[str]:
    """Try whether the models can be loaded as they will be used, and whether their numbers are finite. Yields
    lines for people, also where that could not be tried. Raises ConfigError with every problem."""
    try:
        done = ask_program(_TRIAL, to_yaml(config), _TRIAL_SECONDS)
    except subprocess.TimeoutExpired:
        yield _not_tried(f"took longer than {_TRIAL_SECONDS:g} s")
        return
    answers = [line for line in done.stdout.splitlines() if line.startswith(_ANSWER)]
    if done.returncode or not answers:
        last = (done.stderr.strip().splitlines() or [""])[-1][:_SAID]
        was = "was " if done.returncode < 0 else ""
        yield _not_tried(f"{was}{exit_in_words(done.returncode)}{f' ({last})' if last else ''}")
        return
    found = json.loads(answers[-1])
    if problems := found["problems"]:
        raise ConfigError("\n".join(problems))
    yield from found["lines"]


def _not_tried(why: str) -> str:
    return (
        "warning: not checked: whether the models can be loaded, and their numbers: the process that does "
        f"so {why}; the run's first task does"
    )
