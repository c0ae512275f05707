"""What a fork takes along of a parent that has no trainer's state where the fork begins.

It is a run directory of its own, with the parent's identity and configuration, over hard links to the
parent's files: its newest state before, and the policies and shards since. The fork's first update learns the
state there, as the parent would have, and begins with it.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from pipeline.config.update import TrainingEngine
from pipeline.run.commits import BadCommit, Record, publish, read_record, require_record
from pipeline.run.directory import Run
from pipeline.run.identity import RunError, identity_text, read_config
from pipeline.run.packed import archives
from pipeline.run.paths import RunPaths
from pipeline.run.plan import policy_maker, state_of
from pipeline.run.retention import Thinned
from pipeline.run.states import can_go_on, state_before
from pipeline.run.tasks import PREPARE, Task
from slurm.sharedfiles import is_there

_CANNOT_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP)


def can_take_along(run: Run, version: int) -> bool:
    """Whether a fork can learn the state of a committed version that has none. Trainers of users cannot."""
    is_ours = run.config.update.engine == TrainingEngine.DEEPSPEED
    return is_ours and version > run.plan.start and can_go_on(run.plan, run.paths, version)


def take_along(parent: Run, version: int, target: RunPaths) -> None:
    """Link into ``target`` all from which the state of ``version`` can be learned again. Whoever reads it
    verifies it.

    Raises:
        RunError: something of it is gone or cannot be read.
    """
    before = state_before(parent.plan, parent.paths, version)
    if before is None:
        raise RunError(f"{parent.paths.root} has nothing that its state {version} can be learned again from")
    target.root.mkdir(parents=True)
    target.run_json.write_text(identity_text(parent.identity))
    target.config_yaml.write_bytes(read_config(parent.paths))
    try:
        prepared = require_record(parent.paths, PREPARE)  # says which files of the user's models are right
        publish(target, prepared)
        for task in _tasks(before, version):
            if (record := read_record(parent.paths, task)) is not None:
                _link_all(parent.paths, record, target)
        for iteration in range(before + 1, version + 1):
            _link_shards(parent, iteration, target)
    except (BadCommit, Thinned, FileNotFoundError) as error:
        raise RunError(f"{parent.paths.root}: {error}; choose another iteration") from None


def _tasks(before: int, version: int) -> Iterator[Task]:
    """Yield the tasks of the state, and of the policies from it on."""
    yield from (policy_maker(number) for number in range(max(1, before), version + 1))
    if before:
        yield state_of(before)


def _link_shards(parent: Run, iteration: int, target: RunPaths) -> None:
    """Link an iteration's shards, or the archive that they are packed in."""
    packed = next((path for path in archives(parent.paths, iteration) if is_there(path)), None)
    if packed is not None:
        _link(packed, target.root / parent.paths.relative(packed))
        return
    for task in parent.plan.inputs(policy_maker(iteration)):
        if task.stage.is_sharded:
            _link_all(parent.paths, require_record(parent.paths, task), target)


def _link_all(paths: RunPaths, record: Record, target: RunPaths) -> None:
    for entry in record.outputs:
        _link(paths.root / entry.path, target.root / entry.path)
    publish(target, record)


def _link(source: Path, target: Path) -> None:
    """Hard-link a file, or copy it where it cannot be."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        shutil.copyfile(source, target)
