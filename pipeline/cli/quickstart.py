"""``slurm-ppo quickstart``: make the demo's models, train on them, and judge whether the run has learned."""

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.cli.arguments import config_in_part
from pipeline.cli.run import start
from pipeline.config.issue import ConfigError
from pipeline.run.directory import check_can_be_made, check_is_free
from pipeline.run.paths import RunPaths
from slurm.errors import UnfinishedError

_DEMO = ".cache/quickstart"
"""Where experiment=quickstart looks for models and prompts."""
_JUDGED = 6
"""Least iterations of a run that can be judged: three at its beginning, three at its end."""
_DEMO_SECONDS = 3600.0


def quickstart(words: Sequence[str]) -> int:
    """Make the demo unless it is there, carry a run out, and judge it. Returns the exit code.

    Args:
        words: settings besides experiment=quickstart.

    Raises:
        UserError: something is wrong with the settings or the run's directory, or libraries are missing;
            nothing has been made.
    """
    given = ["experiment=quickstart", *words]
    _check(given)
    if code := _carry_out("stages.demo.make", "--out", _DEMO):
        return code
    config, found = config_in_part(given, None)
    return start(config, found, watch=True) or _carry_out("stages.demo.judge", str(config.run_dir))


def _check(words: Sequence[str]) -> None:
    """Raise what is wrong with settings, but for files of the demo, which are made next."""
    config, found = config_in_part(list(words), None)
    try:
        found.refuse()
    except ConfigError as error:
        if lines := [line for line in str(error).splitlines() if f"/{_DEMO}/" not in line]:
            raise ConfigError("\n".join(lines)) from None
    if config.iterations < _JUDGED:
        raise ConfigError(f"iterations={config.iterations}: the quickstart is judged by at least {_JUDGED}")
    if not importlib.util.find_spec("transformers"):
        raise ConfigError("the quickstart trains models, which needs: pip install 'slurm-ppo[train]'")
    check_is_free(RunPaths(Path(config.run_dir)))
    check_can_be_made(Path(config.run_dir))


def _carry_out(module: str, *words: str) -> int:
    """Run a program of the demo's: torch is not imported in this process."""
    try:
        return subprocess.run([sys.executable, "-m", module, *words], timeout=_DEMO_SECONDS).returncode
    except subprocess.TimeoutExpired:
        raise UnfinishedError(f"{module} did not end within {_DEMO_SECONDS:g} s; run it again") from None
