"""A reward service on this machine: a real HTTP server whose answers a test writes."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Answer:
    """What the server sends; ``body`` as it is if it is bytes, else as JSON."""

    body: Any
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    """It waits before."""


@dataclass
class Seen:
    """What the server was asked."""

    url: str
    bodies: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most_at_once: int = 0
    at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def service(answer: Callable[[Any, int], Answer | None], head: int = 405) -> Iterator[Seen]:
    """A server that posts ``answer(body, number)`` back; the number counts requests from 0. None hangs up.

    Args:
        head: status with which it answers who only asks whether it is there.
    """
    stopping = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            with seen.lock:
                number = len(seen.bodies)
                seen.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                seen.headers.append(dict(self.headers))
                seen.at_once += 1
                seen.most_at_once = max(seen.most_at_once, seen.at_once)
            try:
                self._send(answer(seen.bodies[number], number))
            finally:
                with seen.lock:
                    seen.at_once -= 1

        def do_HEAD(self) -> None:
            self._send(Answer(b"", head))

        def _send(self, given: Answer | None) -> None:
            if given is None:
                self.close_connection = True
                return
            stopping.wait(given.seconds)
            body = given.body if isinstance(given.body, bytes) else json.dumps(given.body).encode()
            self.send_response(given.status)
            for name, value in {"Content-Length": str(len(body)), **given.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    seen = Seen(f"http://127.0.0.1:{server.server_port}/score")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield seen
    finally:
        stopping.set()
        server.shutdown()
        thread.join()
        server.server_close()
