"""Runs that another version of slurm-ppo made: a warning, or an error where file formats differ."""

from collections.abc import Iterator

from pipeline.run.commits import RECORD_VERSION
from pipeline.run.directory import Run
from pipeline.run.identity import RunError, version
from pipeline.run.paths import RunPaths
from pipeline.run.tasks import PREPARE, Stage, Task
from slurm.sealing import from_json
from slurm.sharedfiles import read_plainly


def version_warning(run: Run) -> str:
    """Return the warning before going on with a run of another version; empty if it is of this version.

    Raises:
        RunError: files of the run are in a format that this version does not read.
    """
    began, here = run.identity.version, version()
    if began == here:
        return ""
    if foreign := next(foreign_formats(run), ""):
        raise RunError(
            f"{run.paths.root} was begun with slurm-ppo {began}, and this is {here}: {foreign}. Go on with "
            f"{began}, or export its policy and start a new run"
        )
    return (
        f"warning: the run began with slurm-ppo {began}, and goes on with {here}: results may differ from "
        f"here on (to compare, see the rows before and after); or go on with {began}"
    )


def foreign_formats(run: Run) -> Iterator[str]:
    """Yield, in words, formats of committed files that are not what this version writes."""
    from pipeline.run.schemas import PROMPTS, ROLLOUT, version_of  # pyarrow is slow to import

    first = run.plan.start + 1
    for task, schema in ((PREPARE, PROMPTS), (Task(first, Stage.ROLLOUT, 0), ROLLOUT)):
        said = _said(run.paths, task)
        if said.get("version", RECORD_VERSION) != RECORD_VERSION:
            yield f"its records are of format {said['version']}, and {RECORD_VERSION} is read here"
        elif said.get("schema", version_of(schema)) != version_of(schema):
            yield f"its data is {said['schema']}, and {version_of(schema)} is read here"


def _said(paths: RunPaths, task: Task) -> dict[str, object]:
    """Return a record's content, unchecked; empty where there is none, or none that can be read."""
    try:
        found = from_json(read_plainly(paths.task(task).record))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
