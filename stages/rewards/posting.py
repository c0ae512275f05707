"""JSON posted to a service, with bounded concurrency, time-outs and retries."""

import asyncio
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from pipeline.config.reward import RemoteConfig
from stages.context import Quoting, UserError

_CONNECT_SECONDS = 10.0
"""Longest wait for a connection; config.timeout where that is shorter."""
_EXCERPT = 300
"""Characters of an answer that an error quotes."""
_FOR_NOW = (408, 425, 429)
"""Status codes of refusals that a later attempt at the task may not meet."""
_LOCAL = ("localhost", "127.0.0.1", "[::1]")
"""Hosts that no proxy of the environment can reach for us."""
_JITTER = random.SystemRandom()
"""Random generator of its own: the process's may be part of a result."""


class RemoteFailed(Quoting):
    """The service gave no answer, or one that cannot be used; a retry may succeed."""


@dataclass(frozen=True)
class PostRequest:
    """One body to post."""

    body: bytes
    """JSON."""
    rows: str
    """The rows it is about, as errors name them."""


@dataclass(frozen=True)
class Reply:
    """The JSON that came back."""

    content: Any
    num_retries: int


class Service:
    """A client of the configured service ``name``. Raises UserError where its key is not set."""

    def __init__(self, name: str, config: RemoteConfig) -> None:
        self._config = config
        self._key = api_key(name, config)
        self._who = f"reward component {name!r} ({config.url})"

    def post(self, requests: Sequence[PostRequest]) -> list[Reply]:
        """Post all, at most ``max_concurrency`` at a time; replies are in the requests' order.

        Raises:
            RemoteFailed: the service is down, too slow or too busy, or answers no JSON.
            UserError: it refuses a request (another status below 500).
        """
        return asyncio.run(self._post_all(requests))

    async def _post_all(self, requests: Sequence[PostRequest]) -> list[Reply]:
        config = self._config
        authorization = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        free = asyncio.Semaphore(config.max_concurrency)
        client = httpx.AsyncClient(
            headers={"Content-Type": "application/json", **authorization},
            timeout=httpx.Timeout(None, connect=min(_CONNECT_SECONDS, config.timeout)),
            limits=httpx.Limits(max_connections=config.max_concurrency),
            mounts={f"all://{host}": None for host in _LOCAL},
        )

        async def post(request: PostRequest) -> Reply:
            async with free:
                return await self._post(client, request)

        async with client:
            return await asyncio.gather(*map(post, requests))

    async def _post(self, client: httpx.AsyncClient, request: PostRequest) -> Reply:
        """Send a request until there is an answer, or no try is left."""
        began = time.monotonic()
        for tries in range(1, self._config.max_retries + 2):
            response, trouble = await self._try(client, request)
            if response is not None and response.status_code < 500:
                return Reply(self._content(response, request), tries - 1)
            if tries <= self._config.max_retries:
                await asyncio.sleep(self._pause(tries, response))
        seconds = time.monotonic() - began
        count = "1 try" if tries == 1 else f"{tries} tries"
        raise self._failed(f"is down: {trouble}; {count} over {seconds:.0f} s", request)

    async def _try(
        self, client: httpx.AsyncClient, request: PostRequest
    ) -> tuple[httpx.Response | None, str]:
        """Try once; return the response, and what is wrong where the request is to be sent again."""
        try:
            async with asyncio.timeout(self._config.timeout):
                response = await client.post(self._config.url, content=request.body)
        except TimeoutError:  # not sent again: a service that is too slow is not helped by more to do
            limit = f"{self._config.timeout:g} s"
            raise self._failed(f"gave no answer within {limit} (timeout)", request) from None
        except httpx.TransportError as error:
            return None, f"{type(error).__name__} {error}".strip()
        except (httpx.RequestError, httpx.InvalidURL) as error:
            raise self._failed(f"cannot be used: {type(error).__name__} {error}", request) from None
        return response, f"answered {self._quoted(response)}"

    def _pause(self, tries: int, response: httpx.Response | None) -> float:
        """Return seconds to wait before the next try: exponential backoff with jitter, or more if the service
        asks for it; bounded."""
        config = self._config
        wait = config.backoff * 2 ** (tries - 1) * _JITTER.uniform(0.5, 1.0)
        asked = response.headers.get("Retry-After", "") if response is not None else ""
        return min(max(wait, float(asked) if asked.isdecimal() else 0.0), config.max_backoff)

    def _content(self, response: httpx.Response, request: PostRequest) -> Any:
        if not response.is_success:
            hints = {
                401: "; its key is taken from the environment variable that api_key_env names",
                429: "; lower max_concurrency, or run fewer reward tasks at once",
            }
            hint = hints.get(response.status_code, "")
            text = f"{self._who} refused {request.rows}: {self._quoted(response)}{hint}"
            raise (RemoteFailed if response.status_code in _FOR_NOW else UserError)(text)
        try:
            return json.loads(response.content)
        except ValueError:
            raise self._failed(f"answered no JSON: {self._quoted(response)}", request) from None

    def _quoted(self, response: httpx.Response) -> str:
        """Return status and the answer's beginning on one line, without the key."""
        text = response.content[: 16 * _EXCERPT].decode(errors="replace")
        text = " ".join((text.replace(self._key, "***") if self._key else text).split())[:_EXCERPT]
        return f"{response.status_code} {response.reason_phrase}".strip() + (f": {text}" if text else "")

    def _failed(self, what: str, request: PostRequest) -> RemoteFailed:
        return RemoteFailed(f"{self._who} {what}; asked about {request.rows}")


def api_key(name: str, config: RemoteConfig) -> str:
    """Return the key from the environment; "" where none is configured. Raises UserError where it is not set
    or cannot be a key."""
    variable = config.api_key_env
    key = os.environ.get(variable, "").strip() if variable else ""
    if variable and not key:
        raise UserError(f"reward.components.{name}.api_key_env={variable}: this variable is not set")
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"reward.components.{name}.api_key_env={variable}: holds characters that no key has")
    return key
