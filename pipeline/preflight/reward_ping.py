"""Check that a scoring service answers, made once before a run begins. Sends none of the user's data."""

from http.client import HTTPException, RemoteDisconnected
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request

from pipeline.notify.deliver import opener_that_stays
from pipeline.process import within

PING_SECONDS = 5.0
_NOT_YET = (502, 503, 504)
"""HTTP codes that a gateway answers for a service that is not there."""
_LOCAL = ("localhost", "127.0.0.1", "::1")
"""Hosts that are asked directly: a proxy from the environment would reach itself, not this machine."""


def why_silent(url: str) -> str:
    """Return why nothing answers within :data:`PING_SECONDS`; empty if anything does, whatever it says."""
    return within(PING_SECONDS, lambda: _ask(url), f"no answer within {PING_SECONDS:g} s")


def _ask(url: str) -> str:
    handlers = [ProxyHandler({})] if urlsplit(url).hostname in _LOCAL else []
    try:
        opener_that_stays(*handlers).open(Request(url, method="HEAD"), timeout=PING_SECONDS).close()
    except HTTPError as error:
        return f"{error.code} {error.reason}" if error.code in _NOT_YET else ""
    except RemoteDisconnected:  # something is there, and does not know HEAD
        return ""
    except (OSError, HTTPException, ValueError) as error:
        return " ".join(str(getattr(error, "reason", error)).split()) or type(error).__name__
    return ""
