"""What the stand-in W&B server knows, and how it answers the GraphQL operations of the client (0.31)."""

import base64
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

ENTITY = "me"
VIEWER = {"id": "VXNlcjox", "name": ENTITY, "username": ENTITY, "email": f"{ENTITY}@localhost"}

HISTORY, EVENTS, CONSOLE = "wandb-history.jsonl", "wandb-events.jsonl", "output.log"

RunKey = tuple[str, str, str]
Answer = dict[str, Any]


@dataclass
class StoredRun:
    """What the server has of a run. A stream is kept by the offsets that its lines were sent with."""

    entity: str
    project: str
    id: str
    display_name: str = ""
    state: str = "running"
    exit_code: int | None = None
    sent_config: dict[str, Any] = field(default_factory=dict)
    """As W&B has it: ``{name: {"value": ...}}``, the client's own notes under ``_wandb``."""
    tags: list[str] = field(default_factory=list)
    notes: str | None = None
    group: str | None = None
    job_type: str | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    streams: dict[str, dict[int, str]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def history(self) -> list[dict[str, Any]]:
        """Rows in the order of their offsets, each with its ``_step``."""
        return [json.loads(line) for line in self.lines(HISTORY)]

    @property
    def config(self) -> dict[str, Any]:
        return {name: entry["value"] for name, entry in self.sent_config.items() if name != "_wandb"}

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """What define_metric was told by the process that wrote the configuration last."""
        return self.sent_config.get("_wandb", {}).get("value", {}).get("m", [])

    @property
    def storage_id(self) -> str:
        return base64.b64encode(f"Run:v1:{self.id}:{self.project}:{self.entity}".encode()).decode()

    def lines(self, stream: str) -> list[str]:
        return [line for _, line in sorted(self.streams.get(stream, {}).items())]

    def end(self, stream: str) -> int:
        """The offset after the last line."""
        return max(self.streams.get(stream, {}), default=-1) + 1


class Store:
    """Runs, artifacts and workspaces, all in memory. ``_on_X`` answers the operation X."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.runs: dict[RunKey, StoredRun] = {}
        self.views: dict[str, dict[str, Any]] = {}
        """Saved workspaces by id."""
        self.artifacts: dict[str, dict[str, Any]] = {}
        self.lock = threading.RLock()

    def upload_url(self, *where: str) -> str:
        return "/".join([self.url, "upload", *(quote(part, safe="") for part in where)])

    def store(self, where: list[str], content: bytes) -> None:
        """Keep a file that was asked for with an upload URL of ours."""
        kind, *rest = where
        with self.lock:
            if kind == "run":
                entity, project, run_id, name = rest
                self.runs[(entity, project, run_id)].files[name] = content
            else:
                artifact, name = rest
                self.artifacts[artifact]["files"][name] = content

    def file_stream(self, key: RunKey, body: dict[str, Any], room: int | None = None) -> Answer:
        """Take lines of history, summary, console and system metrics, and whether the run has ended.

        A chunk that is sent again replaces itself. ``room``: forget history rows after so many.
        """
        with self.lock:
            run = self.runs[key]
            for name, chunk in (body.get("files") or {}).items():
                if name == "wandb-summary.json":
                    run.summary = json.loads(chunk["content"][-1])
                else:
                    lines = chunk["content"][: room if name == HISTORY else None]
                    run.streams.setdefault(name, {}).update(enumerate(lines, start=chunk["offset"]))
            if body.get("complete"):
                run.exit_code = body.get("exitcode") or 0
                run.state = "failed" if run.exit_code else "finished"
            return {"exitcode": None, "limits": {}}

    def graphql(self, query: str, given: dict[str, Any]) -> Answer:
        """The ``data`` of the answer to one operation; nothing to one that is not known here."""
        with self.lock:
            answer = getattr(self, f"_on_{operation(query)}", None)
            return answer(given) if answer else {}

    def _on_Viewer(self, _: dict[str, Any]) -> Answer:
        no_edges: dict[str, Any] = {"edges": []}
        more = {"admin": False, "deletedAt": None, "apiKeys": no_edges, "teams": no_edges, "flags": "{}"}
        return {"viewer": {**VIEWER, **more, "entity": ENTITY}}

    _on_GetViewer = _on_GetDefaultEntity = _on_Viewer

    def _on_ServerFeaturesQuery(self, _: dict[str, Any]) -> Answer:
        return {"serverInfo": {"features": []}}

    def _on_OrganizationCoreWeaveOrganizationID(self, _: dict[str, Any]) -> Answer:
        return {"entity": {"organization": None}}

    def _on_XXHashDigestsEnabled(self, _: dict[str, Any]) -> Answer:
        return {"entity": {"xxhashDigestsEnabled": False}}

    def _on_UpsertBucket(self, given: dict[str, Any]) -> Answer:
        key = self._key(given) if given.get("name") else _decoded(given["id"])
        inserted = key not in self.runs
        run = self.runs.setdefault(key, StoredRun(*key))
        run.display_name = given.get("displayName") or run.display_name or run.id
        run.sent_config = json.loads(given["config"]) if given.get("config") else run.sent_config
        if given.get("tags") is not None:
            run.tags = given["tags"]
        for name, ours in {"notes": "notes", "groupName": "group", "jobType": "job_type"}.items():
            setattr(run, ours, given.get(name) or getattr(run, ours))
        if given.get("summaryMetrics"):
            run.summary = json.loads(given["summaryMetrics"])
        if given.get("name"):  # by id it is the public API, which does not begin a run
            run.state, run.exit_code = given.get("state") or "running", None
        return {"upsertBucket": {"bucket": _bucket(run), "inserted": inserted}}

    def _on_RunResumeStatus(self, given: dict[str, Any]) -> Answer:
        key = self._key(given)
        bucket = _bucket(self.runs[key]) if key in self.runs else None
        has_project = self._has_project(*key[:2])
        return {"model": {**_project(*key[:2]), "bucket": bucket} if has_project else None}

    def _on_Run(self, given: dict[str, Any]) -> Answer:
        return self._of_run(given, _bucket)

    _on_RunState = _on_QueryRunInfo = _on_RunHistoryKeys = _on_Run

    def _of_run(self, given: dict[str, Any], what: Callable[[StoredRun], Answer]) -> Answer:
        """An answer about one run; null for a run or a project that is not there."""
        key = self._key(given)
        if (run := self.runs.get(key)) is not None:
            return {"project": {"run": what(run)}}
        return {"project": {"run": None} if self._has_project(*key[:2]) else None}

    def _has_project(self, entity: str, project: str) -> bool:
        return any(key[:2] == (entity, project) for key in self.runs) or bool(self._views(entity, project))

    def _on_CreateRunFiles(self, given: dict[str, Any]) -> Answer:
        key = (given.get("entity") or ENTITY, given["project"], given["run"])
        files = [{"name": name, "uploadUrl": self.upload_url("run", *key, name)} for name in given["files"]]
        made = {"runID": self.runs[key].storage_id, "uploadHeaders": [], "files": files}
        return {"createRunFiles": made}

    def _on_MarkRunFilesUploaded(self, _: dict[str, Any]) -> Answer:
        return {"markRunFilesUploaded": {"success": True}}

    def _on_ArtifactType(self, given: dict[str, Any]) -> Answer:
        name = given["name"].partition(":")[0]
        types = [a["asked"]["artifactTypeName"] for a in self.artifacts.values() if a["name"] == name]
        found = {"artifactType": {"name": types[0]}} if types else None
        return {"project": {"artifact": found}}

    def _on_CreateArtifact(self, given: dict[str, Any]) -> Answer:
        asked = given["input"]
        same = [i for i, a in self.artifacts.items() if a["digest"] == asked["digest"] and a["committed"]]
        made = same[0] if same else f"artifact-{len(self.artifacts) + 1}"
        name = asked["artifactCollectionName"]
        self.artifacts.setdefault(
            made, {"name": name, "digest": asked["digest"], "committed": False, "files": {}, "asked": asked}
        )
        state = "COMMITTED" if same else "PENDING"
        sequence = {"latestArtifact": {"id": made} if same else None}
        return {"createArtifact": {"artifact": {"id": made, "state": state, "artifactSequence": sequence}}}

    def _on_CreateArtifactManifest(self, given: dict[str, Any]) -> Answer:
        return {"createArtifactManifest": {"artifactManifest": self._manifest(given["artifactID"])}}

    def _on_UpdateArtifactManifest(self, given: dict[str, Any]) -> Answer:
        artifact = given["artifactManifestID"].removesuffix("/manifest")
        return {"updateArtifactManifest": {"artifactManifest": self._manifest(artifact)}}

    def _manifest(self, artifact: str) -> Answer:
        url = self.upload_url("artifact", artifact, "wandb_manifest.json")
        return {"id": f"{artifact}/manifest", "file": {"id": "1", "uploadUrl": url, "uploadHeaders": []}}

    def _on_CreateArtifactFiles(self, given: dict[str, Any]) -> Answer:
        nodes = []
        for asked in given["input"]["artifactFiles"]:
            artifact = asked["artifactID"]
            url = self.upload_url("artifact", artifact, asked["name"])
            place = {"storagePath": f"{artifact}/{asked['name']}", "uploadUrl": url, "uploadHeaders": []}
            nodes.append({"node": {**place, "uploadMultipartUrls": None, "artifact": {"id": artifact}}})
        return {"createArtifactFiles": {"files": {"edges": nodes}}}

    def _on_CommitArtifact(self, given: dict[str, Any]) -> Answer:
        artifact = self.artifacts[given["artifactID"]]
        artifact["committed"] = True
        return {"commitArtifact": {"artifact": {"id": given["artifactID"], "digest": artifact["digest"]}}}

    def _on_View(self, given: dict[str, Any]) -> Answer:
        """Saved workspaces of a project, all or those of one name."""
        key = (given.get("entityName") or ENTITY, given["name"])
        wanted = given.get("viewName")
        nodes = [{"node": v} for v in self._views(*key) if wanted in (None, v["name"])]
        return {"project": {"allViews": {"edges": nodes}} if self._has_project(*key) else None}

    def _views(self, entity: str, project: str) -> list[dict[str, Any]]:
        return [v for v in self.views.values() if (v["entityName"], v["projectName"]) == (entity, project)]

    def _on_UpsertView2(self, given: dict[str, Any]) -> Answer:
        asked = given.get("id")
        view_id = asked if asked in self.views else f"view-{len(self.views) + 1}"
        inserted = view_id not in self.views
        kept = {k: v for k, v in given.items() if k != "id"} | {"id": view_id}
        kept["entityName"] = kept.get("entityName") or ENTITY
        self.views[view_id] = self.views.get(view_id, {}) | kept
        return {"upsertView": {"view": {"id": view_id, "name": kept["name"]}, "inserted": inserted}}

    def _key(self, given: dict[str, Any]) -> RunKey:
        run_id = given.get("run") or given.get("runName") or given["name"]
        return given.get("entity") or ENTITY, given.get("project") or "uncategorized", run_id


def operation(query: str) -> str:
    """The name of a GraphQL operation."""
    found = re.search(r"\b(?:query|mutation)\s+(\w+)", query)
    return found.group(1) if found else "anonymous"


def _decoded(storage_id: str) -> RunKey:
    _, _, run_id, project, entity = base64.b64decode(storage_id).decode().split(":")
    return entity, project, run_id


def _project(entity: str, project: str) -> Answer:
    named = base64.b64encode(f"Project:v1:{project}:{entity}".encode()).decode()
    return {"id": named, "name": project, "entity": {"id": "RW50aXR5OjE=", "name": entity}}


def _bucket(run: StoredRun) -> Answer:
    """Everything that any query asks of a run."""
    history = run.history
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    names = {name for row in history for name in row}
    keys = {name: {"typeCounts": [{"type": "number", "count": len(history)}]} for name in names}
    last_step = history[-1]["_step"] if history else -1
    return {
        "id": run.storage_id,
        "projectId": "1",
        "name": run.id,
        "displayName": run.display_name,
        "description": None,
        "state": run.state,
        "config": json.dumps(run.sent_config),
        "tags": run.tags,
        "notes": run.notes,
        "group": run.group,
        "jobType": run.job_type,
        "commit": None,
        "sweepName": None,
        "readOnly": False,
        "createdAt": now,
        "heartbeatAt": now,
        "systemMetrics": "{}",
        "summaryMetrics": json.dumps(run.summary),
        "project": _project(run.entity, run.project),
        "user": VIEWER,
        "historyKeys": {"sets": [], "keys": keys, "lastStep": last_step},
        "historyLineCount": run.end(HISTORY),
        "eventsLineCount": run.end(EVENTS),
        "logLineCount": run.end(CONSOLE),
        "historyTail": json.dumps(run.lines(HISTORY)[-1:]),
        "eventsTail": json.dumps(run.lines(EVENTS)[-1:]),
        "wandbConfig": json.dumps({"t": 1}),
    }
