"""``slurm-ppo samples``: an iteration's responses in the terminal."""

import shlex
import shutil
import sys
from collections.abc import Iterable
from typing import TextIO

from pipeline.api.responses import Selection, newest_scored, read_selected
from pipeline.api.values import Samples
from pipeline.cli.errors import clipped
from pipeline.cli.sample_text import as_json, as_text
from pipeline.run.directory import Run, load_run
from pipeline.run.identity import RunError
from pipeline.run.records import find_frontier
from pipeline.run.versions import choose, split

_OF_EACH = Selection(best=2, worst=2, at_random=2)
"""What is shown where nothing is asked for."""
_LONGEST = 24
"""Lines of a prompt or a response that are shown."""
_WIDEST = 120


def show_samples(source: str, selection: Selection, is_full: bool, is_json: bool) -> None:
    """Print responses of a run's iteration; on standard error which shards could not be read.

    Args:
        source: ``RUN``, ``RUN@ITERATION`` or ``RUN@best``. Default: the newest iteration with rewards.

    Raises:
        RunError: no such run, iteration or prompt; or nothing of the iteration has rewards that can be read.
    """
    root, word = split(source)
    run = load_run(root)
    iteration = choose(run.paths, word, 0) if word else newest_scored(run)
    if iteration is None:
        raise RunError(f"{root} has no responses with rewards yet; {_how_far(run)}")
    if selection == Selection(seed=selection.seed):
        selection = Selection(_OF_EACH.best, _OF_EACH.worst, _OF_EACH.at_random, seed=selection.seed)
    found = read_selected(run, iteration, selection)
    for damage in found.damage:
        say([clipped(f"left out: {damage}")], sys.stderr)
    if not found.rows:
        raise RunError(_why_none(run, found))
    width = min(shutil.get_terminal_size((80, 24)).columns, _WIDEST)
    say(as_json(found) if is_json else as_text(found, str(root), width, None if is_full else _LONGEST))


def say(lines: Iterable[str], file: TextIO | None = None) -> None:
    """Print lines; characters that the terminal's encoding does not have are spelled out."""
    file = file or sys.stdout
    encoding = file.encoding or "utf-8"
    for line in lines:
        print(line.encode(encoding, "backslashreplace").decode(encoding), file=file)


def _why_none(run: Run, found: Samples) -> str:
    """Say why an iteration shows no responses, and what to do."""
    where, root = f"iteration {found.iteration} of {run.paths.root}", shlex.quote(str(run.paths.root))
    if found.damage:
        return f"none of the responses of {where} can be read; to look closer: slurm-ppo doctor {root}"
    if found.iteration <= find_frontier(run.plan, run.paths).updated:
        return f"the responses of {where} are no longer there"
    return f"{where} has no rewards yet; {_how_far(run)}"


def _how_far(run: Run) -> str:
    return f"how far it is: slurm-ppo status {shlex.quote(str(run.paths.root))}"
