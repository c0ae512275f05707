"""Carry the workspace to W&B: made once for a project, brought up to date ever after."""

import base64
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pipeline.config import WandbConfig
from pipeline.dashboard import NAME, Spec, build, merged, pinned
from pipeline.mirrorstate import wandb_id
from pipeline.runs import Run, is_run, load_run
from pipeline.sync import NoKey
from pipeline.tracking import has_key
from pipeline.wandbrun import project_of

_SECONDS = 15
"""How long each answer of the server may take."""
_SLUG = "slurmppo001"
"""Of the workspace's address. It stays when people rename the workspace, so we find it again by this."""
_VIEW = f"nw-{_SLUG}-v"

_FIND = """
query View($entityName: String, $name: String, $viewName: String) {
  project(name: $name, entityName: $entityName) {
    allViews(viewType: "project-view", viewName: $viewName) {
      edges { node { id displayName spec } }
    }
  }
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


class NoProject(ValueError):
    """W&B does not have the project."""


class PushFailed(RuntimeError):
    """W&B could not be reached, or refused."""


@dataclass(frozen=True)
class Target:
    """Where the workspace belongs."""

    project: str
    entity: str | None = None
    """None: the one that the API key belongs to."""
    runs: tuple[str, ...] = ()
    """W&B ids of runs to keep in view."""

    def to_json(self) -> dict[str, Any]:
        """The workspace as it is made anew, with keys that stay."""
        return {
            "schema": 1,
            "name": NAME,
            "entity": self.entity,
            "project": self.project,
            "pinned_runs": list(self.runs),
            "spec": build(),
        }


def target_of(run: Run | None, project: str | None, entity: str | None) -> Target:
    """What is given comes first, then the run's configuration, then W&B's environment variables."""
    config = run.config.tracking.wandb if run else WandbConfig()
    return Target(
        project or project_of(config),
        entity or config.entity or os.environ.get("WANDB_ENTITY") or None,
        tuple(lineage(run)) if run else (),
    )


def lineage(run: Run) -> list[str]:
    """W&B ids of a run and of those it was forked from, itself last."""
    parent = run.identity.parent
    if parent is None:
        return [wandb_id(run)]
    folder = Path(parent.path)
    before = load_run(folder) if is_run(folder) else None
    if before is None or before.identity.id != parent.id:
        return [parent.id, wandb_id(run)]
    return [*lineage(before), wandb_id(run)]


@dataclass(frozen=True)
class Pushed:
    """What was done."""

    url: str
    is_new: bool
    has_changed: bool

    def __str__(self) -> str:
        done = "created" if self.is_new else "updated" if self.has_changed else "is up to date"
        return f"{self.url}\n{NAME} workspace {done}"


def push(target: Target) -> Pushed:
    """Create the project's workspace, or bring it up to date.

    Raises:
        NoKey: naming the ways to give one.
        NoProject: nothing was ever logged to the project.
        PushFailed: the server cannot be reached, or refuses.
    """
    if not has_key(os.environ):
        raise NoKey("there is no API key for W&B: type `wandb login`, or set WANDB_API_KEY")
    os.environ["WANDB_SILENT"] = "true"
    import wandb
    from wandb.errors import Error

    try:
        return _push(wandb.Api(timeout=_SECONDS), target)
    except wandb.errors.UsageError as error:
        raise NoKey(_first_line(error)) from None
    except Error as error:
        raise PushFailed(f"W&B at {_server()} {_what_went_wrong(error)}") from None


def _push(api: Any, target: Target) -> Pushed:
    from wandb_workspaces._graphql import execute_graphql, get_app_url

    entity = target.entity or api.default_entity
    place = {"entityName": entity, "viewName": _VIEW}
    project = execute_graphql(api, _FIND, place | {"name": target.project}).get("project")
    if project is None:
        raise NoProject(
            f"W&B has no project {entity}/{target.project} that your key may see. It begins with the first row: "
            "start a run with tracking=wandb, or send one's rows with `slurm-ppo sync RUN`"
        )
    found = next((edge["node"] for edge in project["allViews"]["edges"]), None)
    spec, has_changed = _updated(found, [_run_key(run, target.project, entity) for run in target.runs])
    if has_changed:
        execute_graphql(api, _SAVE, _saved_as(found, entity, target.project, spec))
    url = f"{get_app_url(api)}{quote(entity)}/{quote(target.project)}?nw={_SLUG}"
    return Pushed(url, is_new=found is None, has_changed=has_changed)


def _updated(found: Mapping[str, Any] | None, runs: Sequence[str]) -> tuple[Spec, bool]:
    """The spec to save, and whether it differs from the one that is there."""
    if found is None:
        return pinned(build(), runs), True
    before = json.loads(found["spec"])
    after = pinned(merged(before, build()), runs)
    return after, after != before


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


def _run_key(run_id: str, project: str, entity: str) -> str:
    """A run's id in W&B's database."""
    return base64.b64encode(f"Run:v1:{run_id}:{project}:{entity}".encode()).decode()


def _server() -> str:
    return os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"


def _what_went_wrong(error: Exception) -> str:
    """The client calls it a busy process when the server says nothing."""
    text = _first_line(error)
    return f"did not answer within {_SECONDS} s" if "did not respond in time" in text else f"refused: {text}"


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
