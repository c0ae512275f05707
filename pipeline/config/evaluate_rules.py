"""Checks of the evaluation settings, made before a run begins."""

import difflib
import shutil
from collections.abc import Iterator
from pathlib import Path

from pipeline.config.evaluate import COMMAND_PREFIX, HELDOUT_REWARD, PLACEHOLDERS, placeholders_in
from pipeline.config.issue import ConfigIssue
from pipeline.config.job_kinds import BENCHMARK
from pipeline.config.scheduler import resources_of
from pipeline.config.schema import Config
from slurm.limits import parse_duration


def evaluation_problems(config: Config) -> Iterator[ConfigIssue]:
    """Yield settings of evaluation that cannot work. Pure."""
    yield from _heldout_problems(config)
    yield from _sampling_problems(config)
    yield from _command_problems(config)
    yield from _best_problems(config)


def _heldout_problems(config: Config) -> Iterator[ConfigIssue]:
    if config.evaluate.every and not config.data.has_heldout:
        why = "needs data.heldout=FILE; or set it to 0"
        if config.evaluate.command and config.evaluate.command_every is None:
            why += "; for evaluate.command alone give evaluate.command_every=N"
        yield ConfigIssue.at(config, "evaluate.every", why)


def _sampling_problems(config: Config) -> Iterator[ConfigIssue]:
    given = config.evaluate
    if given.samples_per_prompt is None:
        for name in ("temperature", "top_p", "top_k", "seed", "pass_at"):
            if getattr(given, name) is not None:
                why = "greedy responses are not sampled; give evaluate.samples_per_prompt=N too"
                yield ConfigIssue.at(config, f"evaluate.{name}", why)
        return
    if too_many := [k for k in given.pass_at or () if k > given.samples_per_prompt]:
        why = f"pass@{too_many[0]} needs evaluate.samples_per_prompt={too_many[0]} or more"
        yield ConfigIssue("evaluate.pass_at", list(given.pass_at or ()), f"{why}; give smaller ones")
    if not config.evaluate.every:
        why = "nothing is evaluated; give data.heldout=FILE and evaluate.every=N"
        yield ConfigIssue.at(config, "evaluate.samples_per_prompt", why)


def _command_problems(config: Config) -> Iterator[ConfigIssue]:
    given = config.evaluate
    if given.command is None:
        if given.command_every is not None:
            why = "says when to run a program; give evaluate.command=[...] too, or leave it out"
            yield ConfigIssue.at(config, "evaluate.command_every", why)
        return
    shown = " ".join(given.command)
    if not given.measured_every:
        why = "does not say how often to run it; give evaluate.command_every=N"
        yield ConfigIssue("evaluate.command", shown, why)
    found = placeholders_in(given.command)
    for name in dict.fromkeys(name for name in found if name not in PLACEHOLDERS):
        close = difflib.get_close_matches(name, PLACEHOLDERS, n=1)
        hint = f" (did you mean {{{close[0]}}}?)" if close else ""
        legal = ", ".join(f"{{{legal}}}" for legal in PLACEHOLDERS)
        yield ConfigIssue("evaluate.command", shown, f"unknown {{{name}}}; legal: {legal}{hint}")
    means = {"policy": "the directory of the policy to measure", "output": "the file to write numbers to"}
    for name, what in means.items():
        if name not in found:
            yield ConfigIssue("evaluate.command", shown, f"lacks {{{name}}}, {what}")
    key, seconds = _limit_of_task(config)
    if seconds is not None and given.command_seconds >= seconds:
        why = f"its task is ended after {seconds:g} s ({key}); give less, or give the task more"
        yield ConfigIssue.at(config, "evaluate.command_seconds", why)


def _limit_of_task(config: Config) -> tuple[str, float | None]:
    """Return the key and the seconds of the time limit of a task that runs the program; None: unlimited."""
    if config.slurm is None:
        return "scheduler.time_limit", float(config.scheduler.time_limit)  # type: ignore[union-attr]
    seconds = parse_duration(config.slurm.benchmark.time)
    warned = config.slurm.benchmark.signal
    return "scheduler.benchmark.time, signal", None if seconds is None else seconds - warned


def _best_problems(config: Config) -> Iterator[ConfigIssue]:
    best, given = config.evaluate.best, config.evaluate
    if given.best_is_measured:
        if given.command is None:
            yield ConfigIssue.at(config, "evaluate.best", "is a number of evaluate.command; give that too")
    elif not best.startswith("evaluate/"):
        legal = f"{HELDOUT_REWARD}, evaluate/NAME/reward, or {COMMAND_PREFIX}NAME of evaluate.command"
        yield ConfigIssue.at(config, "evaluate.best", f"is not a metric of an evaluation; legal: {legal}")
    elif best != HELDOUT_REWARD and not given.every:
        why = "nothing is evaluated; give data.heldout=FILE and evaluate.every=N"
        yield ConfigIssue.at(config, "evaluate.best", why)


def missing_programs(config: Config) -> Iterator[ConfigIssue]:
    """Yield programs that do not exist where they will run, as far as that can be known here."""
    measures = () if _may_be_elsewhere(config) else config.evaluate.command
    for key, command in (("notify.command", config.notify.command), ("evaluate.command", measures)):
        if command and shutil.which(command[0]) is None:
            yield ConfigIssue(key, command[0], "no such program on this machine; give its full path")


def _may_be_elsewhere(config: Config) -> bool:
    """Whether jobs of Slurm may have evaluate.command by a container or by modules."""
    if config.slurm is None or config.evaluate.command is None:
        return False
    given = resources_of(config.slurm, BENCHMARK)
    is_absolute = Path(config.evaluate.command[0]).is_absolute()
    return bool(given.container or given.setup or given.python or not is_absolute)
