"""An adapter merged into the model that it is for, by a process that uses torch; this one does not."""

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from pipeline.run.commits import CorruptData, NotCommitted, is_unchanged, require_record
from pipeline.run.environment import TASK_ENVIRONMENT
from pipeline.run.identity import RunError
from pipeline.run.tasks import PREPARE
from pipeline.run.versions import Version
from pipeline.text import exit_in_words, printable

_OUR_PLACE = Path(__file__).parents[2]
"""Folder in which this package and ``stages`` are."""


def check_can_merge(version: Version) -> None:
    """Check that the model which the adapter of a policy is for is as the run began with it, and that this
    Python can merge.

    Raises:
        RunError: if not; says what to do.
    """
    otherwise = "or take the adapter alone: --adapter"
    if importlib.util.find_spec("torch") is None:
        raise RunError(
            f"{version} is an adapter, and merging it into its model takes torch, which {sys.executable} "
            f"lacks; run this where tasks run (srun slurm-ppo export ...), {otherwise}"
        )
    base, run = Path(version.run.config.model.policy), version.run
    try:
        recorded = require_record(run.paths, PREPARE).inputs
    except (NotCommitted, CorruptData) as error:
        raise RunError(f"{run.paths.root}: {error}; slurm-ppo resume makes it again") from None
    for path in (Path(key.removeprefix("file:")) for key in recorded):
        if path.is_relative_to(base) and not is_unchanged(path, recorded[f"file:{path}"]):
            happened = "has changed" if path.exists() else "is gone"
            raise RunError(
                f"{version} is an adapter for {base}, and {path.name} there {happened} since the run began; "
                f"restore it, {otherwise}"
            )


def merge(version: Version, adapter: Path, folder: Path, say: Callable[[str], None]) -> None:
    """Write the weights and settings of a merged model into a folder, durably.

    Args:
        adapter: verified copy of the policy's adapter.
        say: callback that gets a line after every file of weights.

    Raises:
        RunError: it failed; says why.
    """
    config = version.run.config
    words = [config.model.policy, str(adapter), str(folder), "--precision", str(config.update.precision)]
    words += ["--trust-remote-code"] if config.model.trust_remote_code else []
    paths = filter(None, [str(_OUR_PLACE), os.environ.get("PYTHONPATH")])
    environment = os.environ | TASK_ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-P", "-m", "stages.models.merging", *words]
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as child:
            for line in child.stdout or ():
                say(line.rstrip())
        if child.returncode:
            errors.seek(0)
            why = printable(errors.read().strip().rpartition("\n")[2]) or "it may have run out of memory"
            raise RunError(f"{version} could not be merged ({exit_in_words(child.returncode)}): {why}")
