"""Carry the workspace to W&B: made once for a project, brought up to date ever after.

The client does so in a process of its own, ``python -m pipeline.tracking.push TARGET SECONDS``, which is
ended when it has answered or takes too long: at its exit the client waits for its service without a limit.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pipeline.config.schema import WandbConfig
from pipeline.process import signal_session, wait_or_kill
from pipeline.run.directory import Run, is_run, load_run
from pipeline.run.wandb_place import DEFAULT_URL, settled
from pipeline.tracking.destination import Destination
from pipeline.tracking.state import NO_KEY, has_key, mirror_id, place_of
from pipeline.tracking.workspace import NAME, Spec, build, merged, pinned
from slurm.errors import ServiceError, UserError

_SLUG = "slurmppo001"
"""Part of the workspace's address that stays when people rename it, by which it is found again."""
_VIEW = f"nw-{_SLUG}-v"

_START_SECONDS = 60
"""Seconds to import the client, on a slow filesystem."""
_FIND = """
query View($entityName: String, $name: String, $viewName: String) {
  project(name: $name, entityName: $entityName) {
    allViews(viewType: "project-view", viewName: $viewName) {
      edges { node { id displayName spec } }
    }
  }
}
"""
_FIND_RUN = """
query Run($entity: String, $project: String, $name: String!) {
  project(name: $project, entityName: $entity) { run(name: $name) { id } }
}
"""
_SAVE = """
mutation UpsertView2($id: ID, $entityName: String, $projectName: String, $type: String, $name: String,
    $displayName: String, $description: String, $spec: String) {
  upsertView(input: {id: $id, entityName: $entityName, projectName: $projectName, name: $name,
      displayName: $displayName, description: $description, type: $type, spec: $spec,
      createdUsing: WANDB_SDK}) {
    view { id name }
    inserted
  }
}
"""


_ERRORS = {error.__name__: error for error in (UserError, ServiceError)}
"""Errors that pass from the client's process to its caller, by name."""


@dataclass(frozen=True)
class Target:
    """Project and entity that the workspace belongs to."""

    project: str
    entity: str | None = None
    """Owner of the project. None: the API key's own."""
    runs: tuple[str, ...] = ()
    """W&B ids of runs to keep in view."""
    base_url: str = DEFAULT_URL
    """Address of the server."""

    def to_json(self) -> dict[str, Any]:
        """Return the workspace as it is when new, in a schema that stays stable."""
        return {
            "schema": 1,
            "name": NAME,
            "entity": self.entity,
            "project": self.project,
            "pinned_runs": list(self.runs),
            "spec": build(),
        }


def target_of(run: Run | None, project: str | None, entity: str | None) -> Target:
    """Choose by the arguments first, then the run's place, without a run W&B's variables and settings."""
    place = place_of(run, os.environ) if run else settled(WandbConfig(), "", os.environ, Path.cwd())
    runs = tuple(lineage(run)) if run else ()
    return Target(project or place.project, entity or place.entity, runs, place.base_url)


def lineage(run: Run) -> list[str]:
    """Return the W&B ids of a run and of those it was forked from, itself last."""
    parent, own = run.identity.parent, mirror_id(run, Destination.WANDB)
    if parent is None:
        return [own]
    folder = Path(parent.path)
    before = load_run(folder) if is_run(folder) else None
    is_there = before is not None and before.identity.id == parent.id
    return [*(lineage(before) if before and is_there else [parent.id]), own]


@dataclass(frozen=True)
class Pushed:
    """Result of a push."""

    url: str
    is_new: bool
    has_changed: bool
    absent: tuple[str, ...] = ()
    """Runs that W&B does not have."""

    def __str__(self) -> str:
        done = "is new" if self.is_new else "was brought up to date" if self.has_changed else "was up to date"
        absent = f"; not on W&B yet, so not kept in view: {', '.join(self.absent)}" if self.absent else ""
        return f"the workspace {done}{absent}"


def push(target: Target, seconds: int) -> Pushed:
    """Create the project's workspace, or bring it up to date.

    Args:
        seconds: how long each answer of the server may take.

    Raises:
        UserError: there is no key, or nothing was ever logged to the project.
        ServiceError: the server cannot be reached, or refuses.
    """
    if not has_key(os.environ):
        raise UserError(NO_KEY)
    limit = _START_SECONDS + seconds * (len(target.runs) + 4)
    command = [sys.executable, "-m", "pipeline.tracking.push", json.dumps(asdict(target)), str(seconds)]
    environment = os.environ | {"WANDB_SILENT": "true"}
    with tempfile.TemporaryFile("w+") as answer:
        client = subprocess.Popen(command, stdout=answer, env=environment, start_new_session=True)
        try:
            if wait_or_kill(client, limit) is None:
                raise ServiceError(f"W&B's client was not done after {limit} s")
        finally:
            signal_session(client.pid)  # its service too
        answer.seek(0)
        return _understood(answer.read())


def _understood(answer: str) -> Pushed:
    """Parse what the client's process wrote to its standard output. Raises its error."""
    if not answer:
        raise ServiceError("W&B's client broke, as it says above")
    said = json.loads(answer)
    if "error" in said:
        raise _ERRORS[said["error"]](said["text"])
    return Pushed(**said["done"])


def main(given: Sequence[str]) -> None:
    """Push, and print the result as JSON: ``done``, or ``error`` and ``text``."""
    target, seconds = Target(**json.loads(given[0])), int(given[1])
    try:
        said: dict[str, Any] = {"done": asdict(_pushed(target, seconds))}
    except tuple(_ERRORS.values()) as error:
        kind = next(name for name, one in _ERRORS.items() if isinstance(error, one))
        said = {"error": kind, "text": str(error)}
    print(json.dumps(said), flush=True)
    os._exit(0)


def _pushed(target: Target, seconds: int) -> Pushed:
    import wandb
    from wandb.sdk.lib.service.service_connection import WandbApiFailedError

    try:
        return _push(wandb.Api({"base_url": target.base_url}, timeout=seconds), target)
    except wandb.errors.UsageError:  # e.g. one for another server in ~/.netrc
        raise UserError(NO_KEY) from None
    except (wandb.errors.Error, WandbApiFailedError) as error:
        raise ServiceError(f"W&B at {target.base_url} {_what_went_wrong(error, seconds)}") from None


def _push(api: Any, target: Target) -> Pushed:
    from wandb_workspaces._graphql import execute_graphql, get_app_url

    ask, entity = partial(execute_graphql, api), target.entity or api.default_entity
    place = {"entityName": entity, "name": target.project, "viewName": _VIEW}
    project = ask(_FIND, place).get("project")
    if project is None:
        raise UserError(
            f"W&B has no project {entity}/{target.project} that your key may see; it begins with its first "
            "run: start one with tracking=wandb and a key, or send one's rows by `slurm-ppo sync RUN`"
        )
    found = next((edge["node"] for edge in project["allViews"]["edges"]), None)
    where = {"entity": entity, "project": target.project}
    runs = {name: ask(_FIND_RUN, where | {"name": name})["project"]["run"] for name in target.runs}
    before = json.loads(found["spec"]) if found else None
    spec = pinned(merged(before, build()) if before else build(), [r["id"] for r in runs.values() if r])
    if spec != before:
        ask(_SAVE, _saved_as(found, entity, target.project, spec))
    url = f"{get_app_url(api)}{quote(entity)}/{quote(target.project)}?nw={_SLUG}"
    return Pushed(url, found is None, spec != before, tuple(name for name, r in runs.items() if not r))


def _saved_as(found: Mapping[str, Any] | None, entity: str, project: str, spec: Spec) -> dict[str, Any]:
    given = {
        "entityName": entity,
        "projectName": project,
        "type": "project-view",
        "name": _VIEW,
        "displayName": found["displayName"] if found else NAME,
        "description": "",
        "spec": json.dumps(spec),
    }
    return given | ({"id": found["id"]} if found else {})


def _what_went_wrong(error: Exception, seconds: int) -> str:
    """Describe an error; the client blames a busy process when the server does not answer."""
    text = " ".join(str(error).split())[:300].rstrip(".")
    return f"did not answer within {seconds} s" if "did not respond in time" in text else f"refused: {text}"


if __name__ == "__main__":
    main(sys.argv[1:])
