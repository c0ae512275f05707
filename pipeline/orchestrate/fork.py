"""Forks: a new run that goes on from a policy of another one, with a configuration of its own.

Its iterations continue the parent's numbering, and so do seeds, position in the data, learning-rate schedule
and the axis of the curves. It begins with a commit of its own for the parent's update, over hard links to the
parent's files, and one for its trainer's state: an iteration without a state cannot be forked.
"""

import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.config.algorithm import Estimator, KLController
from pipeline.config.compose import to_mapping
from pipeline.config.findings import Findings
from pipeline.config.home import full_path
from pipeline.config.issue import ConfigError, ConfigIssue
from pipeline.config.resolve import configure
from pipeline.config.reward import RewardModelConfig
from pipeline.config.schema import Config
from pipeline.run.commits import CorruptData, FileEntry, Record, publish, require_record
from pipeline.run.copies import link_verified, new_folder
from pipeline.run.directory import Run, load_run, write_run
from pipeline.run.durable import is_unchanged
from pipeline.run.identity import Parent, RunError
from pipeline.run.paths import PASSED_ON, RunPaths
from pipeline.run.states import state_record, too_rare
from pipeline.run.tasks import PREPARE, task_key
from pipeline.run.versions import Version, find_version_with_state
from pipeline.tracking.state import place_of

_ATTEMPT = "fork"
"""Attempt id under which a fork has the files it begins with."""
_LEARNING = tuple(f"seconds/update/{part}" for part in ("read", "old_log_probs", "steps"))
"""Metrics of an update: the time that learning an iteration again takes."""


def find_parent(source: str) -> Version:
    """Find the version to go on from. Raises RunError unless its policy is there, and its trainer's state if
    its trainer keeps any; the message names the nearest iteration that has one."""
    return find_version_with_state(source)


def fork_config(
    parent: Version,
    root: Path,
    overrides: Sequence[str],
    config_dir: Path | None,
    found: Findings | None = None,
) -> Config:
    """Compose the fork's configuration: the parent's with the overrides, resolved and checked. What was auto
    in the parent stays as it was decided then.

    Args:
        found: takes what was decided of settings that the overrides make auto.

    Raises:
        ConfigError: the overrides are invalid, or they or the user's models do not fit the parent's state.
        RunError: what the parent was made from cannot be read.
    """
    if any(text.lstrip("+").startswith("run_dir=") for text in overrides):
        raise ConfigError("run_dir: the fork's directory is the second argument; leave it out")
    root = full_path(root)
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", root.name).lstrip("_.-")[:100]
    frozen = to_mapping(parent.run.config)
    base = frozen | {"run_dir": str(root), "name": name or parent.run.config.name}
    config = configure(overrides, config_dir, base, found)
    if problems := list(misfits(parent, config)):
        raise ConfigError("\n".join(map(str, problems)))
    return config


def misfits(parent: Version, config: Config) -> Iterator[ConfigIssue]:
    """Find settings of a fork that its parent's state contradicts, or that would silently have no effect."""
    before, model = parent.run.config, config.model
    if config.iterations <= parent.number:
        why = f"{parent} is its last; give iterations=N, more than {parent.number}"
        yield ConfigIssue("iterations", config.iterations, why)
    if model.policy != before.model.policy:
        why = f"the fork goes on from {parent}; leave it out, or start a new run from that model"
        yield ConfigIssue("model.policy", model.policy, why)
    has_critic = before.algorithm.estimator is Estimator.GAE
    if config.algorithm.estimator is Estimator.GAE and not has_critic:
        why = (
            f"needs a critic, and the parent (algorithm.estimator={before.algorithm.estimator}) has none; "
            "start a new run from an export of its policy"
        )
        yield ConfigIssue("algorithm.estimator", config.algorithm.estimator, why)
    if has_critic and model.critic != before.model.critic:
        yield ConfigIssue(
            "model.critic", model.critic, "the fork goes on from the parent's critic; leave it out"
        )
    for key in ("lora", "precision"):
        mine, theirs = getattr(config.update, key), getattr(before.update, key)
        if mine != theirs:
            why = f"the trainer state to go on from was made with {theirs}; leave it out, or start a new run"
            yield ConfigIssue(f"update.{key}", mine, why)
    kl = config.algorithm.kl
    if kl.controller is KLController.ADAPTIVE and kl.coef != before.algorithm.kl.coef:
        why = "the adaptive controller goes on from where the parent's was; leave it out"
        yield ConfigIssue("algorithm.kl.coef", kl.coef, why)
    if config.algorithm.shaping.normalize and config.reward.components != before.reward.components:
        why = (
            "the trainer state has the mean and spread of the parent's reward, and this fork has another one "
            "(reward.components); set it to false, or start a new run from an export of the parent's policy"
        )
        yield ConfigIssue("algorithm.shaping.normalize", True, why)
    if problem := too_rare(config, sum(parent.record.metrics.get(name, 0.0) for name in _LEARNING)):
        yield ConfigIssue("update.save_every", config.update.save_every, problem)
    yield from changed_models(parent, config)


def changed_models(parent: Version, config: Config) -> Iterator[ConfigIssue]:
    """Find models of the user's that the fork shares with its parent and that changed since the parent began.

    Raises:
        RunError: the parent's record of what it was made from cannot be read.
    """
    try:
        recorded = require_record(parent.run.paths, PREPARE).inputs
    except CorruptData as error:
        raise RunError(f"{parent.run.paths.root}: {error}; slurm-ppo resume makes it again") from None
    states = {Path(key.removeprefix("file:")): state for key, state in recorded.items()}
    for key, directory in shared_models(parent.run.config, config):
        files = (path for path in states if path.is_relative_to(directory))
        changed = next((path for path in files if not is_unchanged(path, states[path])), None)
        if changed is not None:
            happened = "has changed" if changed.exists() else "was removed"
            why = (
                f"{changed} {happened} since the parent began, and what the fork goes on from belongs to "
                "what it was; restore it, or start a new run"
            )
            yield ConfigIssue(key, directory, why)


def shared_models(before: Config, config: Config) -> Iterator[tuple[str, str]]:
    """Yield keys and directories of the models that must be unchanged for the parent's state to be usable."""
    yield "model.policy", config.model.policy
    if config.model.reference and config.model.reference == before.model.reference:
        yield "model.reference", config.model.reference
    if config.algorithm.shaping.normalize:
        for name, component in config.reward.components.items():
            if isinstance(component, RewardModelConfig):
                yield f"reward.components.{name}.path", component.path


def fork(parent: Version, config: Config) -> Run:
    """Make the new run. Its directory appears whole or not at all.

    Raises:
        RunError: the directory is taken, or the parent's files are damaged.
    """
    root = Path(config.run_dir)
    came_from = parent.run
    with new_folder(root) as folder:
        paths = RunPaths(folder)
        for record in records_to_adopt(parent):
            _adopt(came_from, record, paths)
        origin = Parent(came_from.identity.id, str(came_from.paths.root), parent.number)
        place = place_of(came_from, os.environ)
        write_run(paths, config, came_from.identity.folder, origin, place)
    return load_run(root)


def records_to_adopt(parent: Version) -> tuple[Record, ...]:
    """Return the commits that a fork begins with: the update's, and the state's where it has one of its own.

    Raises:
        RunError: the state's record cannot be read.
    """
    try:
        state = state_record(parent.run.paths, parent.number)
    except CorruptData as error:
        raise RunError(f"{parent.run.paths.root}: {error}; choose another iteration") from None
    if state is None or state.task == parent.record.task:
        return (parent.record,)
    return (parent.record, state)


def _adopt(source: Run, record: Record, paths: RunPaths) -> None:
    """Commit what another run committed, over hard links to its files. Raises RunError where they are damaged
    or gone."""
    # what the parent's next update learns from, and which of its prompts the next epoch leaves out
    left = [record.find_output(part, "arrow") for part in PASSED_ON]
    kept = [entry for entry in record.outputs if entry not in left]
    outputs = tuple(_linked(source.paths, record, entry, paths) for entry in kept)
    publish(paths, _adopted(source, record, outputs))


def _linked(source: RunPaths, record: Record, entry: FileEntry, paths: RunPaths) -> FileEntry:
    """Link one file of a commit under the adopting run's own name. Returns its entry for the record."""
    path = entry.path.replace(f".{record.attempt}", f".{_ATTEMPT}")
    link_verified(source, record, entry, paths.root / path)
    return replace(entry, path=path)


def _adopted(source: Run, record: Record, outputs: tuple[FileEntry, ...]) -> Record:
    """Return the record of an adopted commit. Its lineage ends at the other run."""
    now = time.time()
    return replace(
        record,
        attempt=_ATTEMPT,
        outputs=outputs,
        inputs={f"run:{source.identity.id}/{task_key(record.task)}": record.fingerprint},
        started=now,
        ended=now,
        host=socket.gethostname(),
        pid=os.getpid(),
        job_id=os.environ.get("SLURM_JOB_ID", ""),
        metrics={},
    )
