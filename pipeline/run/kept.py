"""What identifies a run outlives purges by age: it is kept twice, and refreshed while the run is active.

run.json and config.yaml are written once and are a run's oldest files, which many filesystems for temporary
files remove first. Readers take the copy where the file is gone; the holder of the run's lease writes it
again, and renews the times of these few small files, once an hour at most. Nothing else is renewed:
what is to be kept longer is copied to where nothing is purged.
"""

import contextlib
import os
import time
from pathlib import Path

from pipeline.config.compose import to_yaml
from pipeline.run.changes import mend_changes
from pipeline.run.directory import Run
from pipeline.run.durable import replace_durably
from pipeline.run.identity import RunError, config_hash, identity_in, identity_text, read_config
from pipeline.run.paths import RunPaths
from pipeline.run.twofold import both_of
from slurm.sharedfiles import names_in, read_shared

_REFRESH_SECONDS = 3600.0


def keep(run: Run) -> list[str]:
    """Write again what is gone or spoilt of what identifies the run, and renew the rest, for the holder of
    the run's lease. Returns the names of what was, without copies. Raises OSError."""
    paths = run.paths
    gone, names = _mend_identity(run), names_in(paths.root)
    for path in (paths.config_yaml, paths.config_copy):
        if path.name not in names:
            replace_durably(path, _config_text(run))
            gone.append(path)
    if names & {paths.settings.name, paths.settings_copy.name}:
        mend_changes(paths)
    for path in identifying(paths):
        _renew(path)
    return [path.name for path in gone if path in (paths.run_json, paths.config_yaml)]


def _mend_identity(run: Run) -> list[Path]:
    """Have run.json and its copy say the same. Returns which of them was written again."""
    paths = run.paths
    first, copy = (_whole_text(paths, path) for path in (paths.run_json, paths.run_copy))
    text = first or copy or identity_text(run.identity)
    gone = [path for path, found in ((paths.run_json, first), (paths.run_copy, copy)) if found != text]
    for path in gone:
        replace_durably(path, text)
    return gone


def _whole_text(paths: RunPaths, path: Path) -> str | None:
    """Return the text of one of the two files; None where it is gone or spoilt."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        text = read_shared(path).decode()
        with contextlib.suppress(RunError):  # of a later version: it is that one's
            identity_in(paths, path)
        return text
    return None


def _config_text(run: Run) -> str:
    """Return the configuration as it was frozen; where both files are gone, as this process knows it."""
    try:
        return read_config(run.paths).decode()
    except FileNotFoundError:
        if config_hash(text := to_yaml(run.with_settings(0).config)) != run.identity.config_hash:
            raise
        return text


def identifying(paths: RunPaths) -> tuple[Path, ...]:
    """Return the files that are renewed, whether or not they are there."""
    frozen = paths.run_json, paths.run_copy, paths.config_yaml, paths.config_copy
    return (*frozen, *both_of(paths.control), *both_of(paths.settings))


def _renew(path: Path) -> None:
    """Renew the times of a file that has not been written for long; one that is gone is left to others."""
    try:
        if time.time() - path.stat().st_mtime > _REFRESH_SECONDS:
            os.utime(path)
    except (FileNotFoundError, PermissionError):  # of another owner's file the run's user may change none
        return
