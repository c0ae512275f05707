"""A W&B server on this machine: keeps what the real client (0.31) sends, and answers what it asks.

``with WandbServer() as server:`` and give ``server.environment`` to what is tested.

What the hosted service does is inferred from what the client needs. Known to differ: history never moves to
parquet files, filters of the public API are ignored, and a run whose client is gone stays "running".
"""

import base64
import gzip
import json
import sys
import threading
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import unquote

from tests.support.wandb_graphql import HISTORY, Answer, Store, StoredRun, operation

KEY = "local-" + "0" * 40


@dataclass
class Faults:
    """What the server does instead of answering. Set at any time; all off at first."""

    status: int | None = None
    """Answer with this HTTP status, e.g. 401, 403 or 500."""
    hang: bool = False
    """Take the request and never answer, until this is off again."""
    drop_after_rows: int | None = None
    """Store so many history rows, of all runs together; from then on hang up on whoever calls."""
    lose: bool = False
    """Say yes to history rows and forget them."""
    only: str = ""
    """Only requests whose path or GraphQL operation has this in it, such as ``file_stream``."""


class Disconnect(Exception):
    """The answer is none: hang up."""


class WandbServer(Store):
    """Serves while it is entered; everything that came is there to look at afterwards, too."""

    def __init__(self) -> None:
        self.faults = Faults()
        self.requests: list[str] = []
        """``POST graphql UpsertBucket`` and so on, in order."""
        self._stopping = threading.Event()
        self._http = _Http(self)
        super().__init__(f"http://127.0.0.1:{self._http.server_port}")

    @property
    def environment(self) -> dict[str, str]:
        """What makes a process use this server, whatever the machine's own W&B settings are."""
        return {
            "WANDB_BASE_URL": self.url,
            "WANDB_API_KEY": KEY,
            "WANDB_MODE": "online",
            "WANDB_ERROR_REPORTING": "false",
        }

    def __enter__(self) -> Self:
        serve = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        serve.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._http.shutdown()
        self._http.server_close()

    def run(self, run_id: str) -> StoredRun:
        """The one run of that id, whatever its project. KeyError if there is none, or more than one."""
        found = [run for key, run in self.runs.items() if key[2] == run_id]
        if len(found) != 1:
            raise KeyError(f"{len(found)} runs of the id {run_id}; there are {sorted(self.runs)}")
        return found[0]

    def rows(self, run_id: str) -> list[dict[str, Any]]:
        """The history of the one run of that id; of W&B's own keys only ``_step``."""
        history = self.run(run_id).history
        return [{k: v for k, v in row.items() if k == "_step" or k[0] != "_"} for row in history]

    def fault(self, what: str) -> int | None:
        """Do what the faults say of a request; the status to refuse it with, if any."""
        faults = self.faults
        if faults.only not in what:
            return None
        while faults.hang and not self._stopping.wait(0.02):
            pass
        if self._stopping.is_set():
            raise Disconnect
        if self._room() == 0:
            raise Disconnect
        return faults.status

    def _room(self) -> int | None:
        """History rows until the server hangs up."""
        most = self.faults.drop_after_rows
        stored = sum(len(run.streams.get(HISTORY, {})) for run in self.runs.values())
        return None if most is None else max(0, most - stored)

    def answer(self, path: list[str], body: bytes) -> Answer:
        """What a request that nothing is wrong with is told."""
        if path == ["graphql"]:
            asked = json.loads(body)
            return {"data": self.graphql(asked["query"], asked.get("variables") or {})}
        if path[-1] == "file_stream":
            _, entity, project, run_id, _ = path
            room = 0 if self.faults.lose else self._room()
            answer = self.file_stream((entity, project, run_id), json.loads(body), room)
            if self._room() == 0:
                raise Disconnect
            return answer
        if path[0] == "upload":
            self.store(path[1:], body)
        return {}  # telemetry


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, owner: WandbServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.owner = owner

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that are killed hang up; anything else is a mistake of ours, and is to be seen."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Http
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self._body()
        path = [unquote(part) for part in self.path.split("?")[0].strip("/").split("/")]
        called = operation(json.loads(body)["query"]) if path == ["graphql"] else ""
        what = f"{self.command} {'/'.join(path)} {called}".strip()
        owner = self.server.owner
        owner.requests.append(what)
        try:
            status = owner.fault(what) or self._unauthorized(path)
            refusal = {"errors": [{"message": HTTPStatus(status or 200).phrase}]}
            self._send(status or 200, refusal if status else owner.answer(path, body))
        except Disconnect:
            self.close_connection = True

    do_PUT = do_GET = do_POST

    def _unauthorized(self, path: list[str]) -> int | None:
        if path[0] in ("upload", "sdk"):  # having the URL is the permission; telemetry needs none
            return None
        sent = self.headers.get("Authorization", "").removeprefix("Basic ")
        return None if base64.b64decode(sent).decode().endswith(f":{KEY}") else 401

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b"".join(iter(self._chunk, b""))
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _chunk(self) -> bytes:
        chunk = self.rfile.read(int(self.rfile.readline(), 16))
        self.rfile.readline()
        return chunk

    def _send(self, status: int, answer: Answer) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass
