"""Candidates for the settings of an update, each timed in a process of its own on this machine.

``slurm-ppo doctor --time-candidates KEY=VALUE ...`` prints what is found. From Python::

    found = list(timed_here(config, lengths))  # lengths: prompt and response tokens of each row
    best_of(found), conclusion(found)          # of pipeline.forecast.candidates
"""

import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from pipeline.config.compose import to_mapping
from pipeline.config.issue import ConfigError, ConfigIssue
from pipeline.config.schema import Config
from pipeline.config.update import TrainingEngine
from pipeline.forecast.candidates import (
    MachineFacts,
    Timed,
    UpdateCandidate,
    conclusion,
    in_words,
    time_candidates,
)
from pipeline.process import ask_program
from pipeline.text import exit_in_words

Lengths = Sequence[tuple[int, int]]
"""Prompt and response tokens of each row."""
_PROGRAM = "stages.rehearsal.candidates"
_SECONDS = 600.0
"""Limit of one candidate's process."""
_SAID = 200
"""Characters that are shown of the last line of a process that failed."""
_ROUNDS = {False: 1, True: 3}
"""Updates that count, on CPUs and on a GPU."""
_TOKENS = {False: 2048, True: 16_384}
"""Tokens of all rows, on CPUs and on a GPU: one micro-batch of the largest size that is tried."""
_PROMPT = 256
"""Most tokens of the prompts, where their lengths are not known."""


def machine_facts() -> MachineFacts:
    """Return what this machine's device can do. Raises ConfigError where torch does not say."""
    found = _answer({"config": None})
    if isinstance(found, str):
        raise ConfigError(f"the update's settings cannot be timed here: {found}")
    return MachineFacts(**found)


def usual_lengths(config: Config, machine: MachineFacts) -> list[tuple[int, int]]:
    """Return prompt and response tokens of rows that are as long as the configuration allows, prompts of at
    most 256 tokens: about 2,048 tokens in all on CPUs, 16,384 on a GPU. Pure."""
    prompt, response = min(config.data.max_prompt_tokens or _PROMPT, _PROMPT), config.rollout.max_new_tokens
    return [(prompt, response)] * max(2, _TOKENS[machine.has_gpu] // (prompt + response))


def timed_here(
    config: Config, lengths: Lengths | None = None, machine: MachineFacts | None = None
) -> Iterator[Timed]:
    """Time the configuration's own settings first, then each that may be better than the best so far.

    Args:
        lengths: of the rows of one optimizer step. Default: :func:`usual_lengths`.
        machine: as :func:`machine_facts` says.

    Raises:
        ConfigError: torch cannot be asked, or the trainer is the user's, which has settings of its own.
    """
    check_trainer(config)
    facts = machine or machine_facts()
    rows, rounds = lengths or usual_lengths(config, facts), _ROUNDS[facts.has_gpu]
    return time_candidates(config, facts, lambda candidate: time_one(config, candidate, rows, rounds))


def check_trainer(config: Config) -> None:
    """Check that the trainer is one whose settings can be timed. Raises ConfigError."""
    if config.update.engine != TrainingEngine.DEEPSPEED:
        why = "has settings of its own; those of deepspeed are timed"
        raise ConfigError(str(ConfigIssue("update.engine", config.update.engine, why)))


def time_one(config: Config, candidate: UpdateCandidate, lengths: Lengths, rounds: int) -> Timed:
    """Time one candidate in a process of its own."""
    given = {"config": to_mapping(with_candidate(config, candidate)), "lengths": lengths, "rounds": rounds}
    found = _answer(given)
    return Timed(candidate, problem=found) if isinstance(found, str) else Timed(candidate, **found)


def with_candidate(config: Config, candidate: UpdateCandidate) -> Config:
    """Return a configuration with a candidate's settings. Pure."""
    update = replace(
        config.update,
        precision=candidate.precision,
        zero_stage=candidate.zero_stage,
        tokens_per_micro_batch=candidate.tokens,
        attention=candidate.attention,
    )
    return replace(config, update=update)


def timed_lines(config: Config, lengths: Lengths | None = None) -> Iterator[str]:
    """Yield a line for the work, one for each candidate as it was timed, and the words that set the best.

    Raises:
        ConfigError: torch cannot be asked, or the trainer is the user's.
    """
    check_trainer(config)
    facts = machine_facts()
    rows = lengths or usual_lengths(config, facts)
    work = f"an optimizer step of {len(rows)} rows, {sum(map(sum, rows)):,} tokens, on {facts.name}"
    yield f"{work}; each candidate in a process of its own"
    found: list[Timed] = []
    for one in timed_here(config, rows, facts):
        found.append(one)
        yield in_words(one)
    yield conclusion(found)


def _answer(given: dict[str, Any]) -> Any:
    """Return the object that the program prints last; a text that says why there is none."""
    try:
        done = ask_program(_PROGRAM, json.dumps(given), _SECONDS)
    except subprocess.TimeoutExpired:
        return f"took longer than {_SECONDS:g} s"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    last = lines[-1] if lines else ""
    if done.returncode or not last:
        return f"{exit_in_words(done.returncode)}{f' ({last[:_SAID]})' if last else ''}"
    return json.loads(last)
