"""Settings that a person changes while a run goes on: what is refused, and how a change is noted."""

import os
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from pipeline.cli.errors import will_change
from pipeline.config.changeable import differences, refusals
from pipeline.config.compose import to_mapping
from pipeline.config.findings import Findings
from pipeline.config.issue import ConfigError
from pipeline.config.resolve import configure_what_can_be, resolve_what_can_be
from pipeline.config.schema import Config, WandbMode
from pipeline.orchestrate.fork import misfits
from pipeline.run import journal
from pipeline.run.changes import SettingsChange, read_changes, write_changes
from pipeline.run.directory import Run, no_setting
from pipeline.run.forking import fork_command, nearest_parent
from pipeline.run.identity import write_identity
from pipeline.run.lease import Lease
from pipeline.run.owner import owner_by_id
from pipeline.run.records import find_frontier
from pipeline.tracking.state import place_of

CHANGED = "changed_settings"
"""Name of the event of a change in the journal."""
_SCHEDULER = ("scheduler", "scheduler.kind")
_REFERENCE = 'what may change is in the reference, under "Settings that may change"'


def check_change(run: Run, words: Sequence[str], config_dir: Path | None = None) -> Config:
    """Return the configuration of a run with settings changed.

    Raises:
        ConfigError: a word is wrong, the run's numbers depend on it, or the cluster refuses jobs with it.
        RunError: a word sets nothing.
    """
    from pipeline.checks.cluster import check_cluster  # slow to import
    from pipeline.checks.finding import refuse

    for word in words:
        if "=" not in word and not word.startswith("~"):
            raise no_setting(word)
    config = _configured(run, words, config_dir)
    if refused := list(refusals(run.config, config)):
        ways = _ways_out(run, words, config, config_dir)
        raise ConfigError("\n".join([*map(str, refused), *ways, _REFERENCE]))
    if config.slurm and config.scheduler != run.config.scheduler:
        refuse(check_cluster(config))
    return config


def _configured(run: Run, words: Sequence[str], config_dir: Path | None) -> Config:
    """Return the run's configuration with words applied. Raises ConfigError with what is wrong with it, but
    for what is wrong without them too: inputs that the run has read may be gone since."""
    kinds = [word for word in words if word.partition("=")[0].lstrip("+") in _SCHEDULER]
    if kinds:
        command = shlex.join(["slurm-ppo", "fork", str(run.paths.root), "NEW_RUN", *kinds])
        raise ConfigError(
            f"{kinds[0]}: a run stays with the scheduler that it began with; instead: {command}"
        )
    found, before = Findings(), Findings()
    config = configure_what_can_be(words, config_dir, found, to_mapping(run.config))
    if config is None:
        found.refuse()
    assert config is not None
    resolve_what_can_be(run.config, before)
    if new := [line for line in found.lines if line not in before.lines]:
        raise ConfigError("\n".join(new))
    return config


def _ways_out(run: Run, words: Sequence[str], config: Config, config_dir: Path | None) -> list[str]:
    """Return the command that goes on with refused settings in a run of its own, or why there is none."""
    parent = nearest_parent(run, config.iterations)
    if parent is None:
        return ["nothing of the run can be forked yet: start another run with them, and another run_dir=..."]
    if problems := [str(one) for one in misfits(parent, config)]:
        return ["nor can a fork have them:", *problems]
    root = run.paths.root
    given = [word for word in words if not word.lstrip("+").startswith("run_dir=")]
    given += [f"--config-dir={config_dir}"] if config_dir else []
    return [f"to go on with them in a run of its own: {fork_command(root, parent.number, given)}"]


def change_settings(
    run: Run,
    config: Config,
    lease: AbstractContextManager[Lease],
    words: Sequence[str],
    config_dir: Path | None = None,
) -> Run:
    """Note changed settings in the run, whose lease is held meanwhile: of two people the second changes what
    the first has made. Returns the run as it is then.

    Args:
        config: what :func:`check_change` has made of the words.

    Raises:
        ConfigError, RunError: as that function, of what another has changed since.
    """
    with lease as held:
        newest = run.with_newest_settings()
        if newest.changes != run.changes:
            config = check_change(newest, words, config_dir)
        run = newest
        if not (found := differences(run.config, config)):
            print("the run has these settings already", file=sys.stderr)
            return run
        will_change("the run's settings")
        held.beat()
        trained = max(find_frontier(run.plan, run.paths).updated, run.plan.start)
        iteration = min(trained + 1, run.plan.iterations)
        change = SettingsChange(time.time(), owner_by_id(os.getuid()).user, iteration, found)
        changed = _with_place(replace(run, config=config, changes=(*run.changes, change)))
        _note(run, changed.changes)
    print(f"changed {change.in_words}", file=sys.stderr)
    return changed


def _note(run: Run, changes: Sequence[SettingsChange]) -> None:
    """Write changes, of which the last is new. It is made once one of the two files has it: what a full disk
    has not taken then, a later pass writes.

    Raises:
        OSError: neither file could be written, so that nothing is changed.
    """
    newest = changes[-1]
    try:
        write_changes(run.paths, changes)
        keys = [one.key for one in newest.settings]
        journal.event(run.paths.events, CHANGED, by=newest.by, iteration=newest.iteration, keys=keys)
    except OSError:
        if read_changes(run.paths) != tuple(changes):
            raise


def _with_place(run: Run) -> Run:
    """Settle the place on W&B of a run that had none, so that no later shell moves it."""
    if run.identity.wandb is not None or run.config.tracking.wandb.mode is WandbMode.DISABLED:
        return run
    identity = replace(run.identity, wandb=place_of(run, os.environ))
    write_identity(run.paths, identity)
    return replace(run, identity=identity)
