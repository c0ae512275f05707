"""A committed policy as a plain model directory, outside the run and without links into it.

An adapter is merged into the model that it is for by a process that uses torch; this one does not.
"""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from pipeline.config.home import full_path
from pipeline.run.commits import CorruptData, FileEntry, NotCommitted, require_record
from pipeline.run.copies import copy_verified, new_folder
from pipeline.run.durable import is_unchanged
from pipeline.run.environment import TASK_ENVIRONMENT
from pipeline.run.identity import RunError
from pipeline.run.paths import ADAPTER, BASE
from pipeline.run.tasks import PREPARE
from pipeline.run.versions import Version, find_version
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


_WORTH_A_LINE = 1 << 28
"""Bytes of a file from which its copy takes long enough to report it."""


def export(source: str, target: Path, adapter: bool, say: Callable[[str], None]) -> str:
    """Copy the policy that ``source`` names (``RUN``, ``RUN@ITERATION``, ``RUN@best``) to ``target``.

    A policy that is an adapter is merged into its model, in a process that uses torch.

    Args:
        adapter: copy the LoRA adapter instead of the whole model.
        say: callback that gets a line after every large file.

    Returns:
        How to list and load the copy, in words.

    Raises:
        RunError: there is no such policy, it is damaged, it cannot be merged here, or ``target`` is taken.
    """
    version, target = find_version(source, "policy", "policy"), full_path(target)
    files = policy_files(version, adapter)
    is_merged = version.record.is_adapter and not adapter
    if is_merged:
        check_can_merge(version)
    with new_folder(target) as folder:
        _copy(version, files, folder, say)
        if is_merged:
            _copy(version, policy_files(version, adapter=True), folder / ADAPTER, say)
            merge(version, folder / ADAPTER, folder, say)
            shutil.rmtree(folder / ADAPTER)
    return how_to_load(version, target, adapter)


def _copy(
    version: Version, files: list[tuple[PurePosixPath, FileEntry]], folder: Path, say: Callable[[str], None]
) -> None:
    total, done = sum(entry.bytes for _, entry in files), 0
    for name, entry in files:
        copy_verified(version.run.paths, version.record, entry, folder / name)
        done += entry.bytes
        if entry.bytes >= _WORTH_A_LINE:
            say(f"{name}: {done / 2**30:.1f} of {total / 2**30:.1f} GiB")


def policy_files(version: Version, adapter: bool) -> list[tuple[PurePosixPath, FileEntry]]:
    """Return the committed files of the model directory, or of the adapter, with their names there.

    Raises:
        RunError: there is no adapter.
    """
    entries = [entry for entry in version.record.outputs if entry.folder.startswith("policy/")]
    names = [PurePosixPath(entry.path).relative_to(entry.folder) for entry in entries]
    found = [(n, e) for n, e in zip(names, entries, strict=True) if (n.parts[0] == ADAPTER) is adapter]
    if adapter and not found:
        raise RunError(
            f"{version} has no adapter: the run trains all weights (update.lora is null); "
            "leave --adapter out for the whole model"
        )
    return [(n.relative_to(ADAPTER) if adapter else n, e) for n, e in found if str(n) != BASE]


def how_to_load(version: Version, target: Path, adapter: bool) -> str:
    """Return the command that lists the exported files, and the line of Python that loads them."""
    model = (
        f'AutoModelForCausalLM.from_pretrained("{version.run.config.model.policy if adapter else target}")'
    )
    code = f'PeftModel.from_pretrained({model}, "{target}")' if adapter else model
    what = "the adapter of " if adapter else ""
    return f"exported {what}{version}\n  files:  ls {shlex.quote(str(target))}\n  load:   {code}"
