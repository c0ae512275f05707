"""Checks of the reward's components: what each is, and whether services answer."""

import os
from collections.abc import Iterator, Sequence
from http.client import HTTPException, RemoteDisconnected
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from pipeline.config.findings import Findings
from pipeline.config.issue import ConfigError, ConfigIssue
from pipeline.config.reward import Component, RemoteConfig, RewardModelConfig, strange_column, unknown_field
from pipeline.config.schema import Config
from pipeline.data.tables import PromptError
from pipeline.plugins.trial import SampleRow
from pipeline.process import within

PING_SECONDS = 5.0
_NOT_YET = (502, 503, 504)
"""HTTP codes that a gateway answers for a service that is not there."""
_LOCAL = ("localhost", "127.0.0.1", "::1")
"""Hosts that are asked directly: a proxy from the environment would reach itself, not this machine."""


def describe_components(config: Config, samples: Sequence[SampleRow], found: Findings) -> Iterator[str]:
    """Yield a line for each component of the reward, and what services that are asked now answer."""
    for name, teacher in config.reward.teachers.items():
        yield f"teacher {name}: {teacher.path}, weight {teacher.weight:g}"
        for sample in samples:
            if why := strange_column(teacher, list(sample.columns)):
                found.add([ConfigIssue(f"reward.teachers.{name}.only", teacher.only, why)])
    for name, component in config.reward.components.items():
        yield f"reward {name}: {describe_component(component)}, weight {component.weight:g}"
        if isinstance(component, RemoteConfig):
            with found.collecting(f"reward.components.{name}"):
                yield from remote_warnings(name, component, samples, is_here=config.slurm is None)


def describe_component(component: Component) -> str:
    if isinstance(component, RewardModelConfig):
        return f"model {component.path}"
    if isinstance(component, RemoteConfig):
        return f"{component.api} at {component.url}"
    return f"rule {component.function}"


def remote_warnings(
    name: str, remote: RemoteConfig, samples: Sequence[SampleRow], is_here: bool
) -> Iterator[str]:
    """Warn of an API key that is not set in this shell, and of a service that does not answer.

    Args:
        is_here: whether tasks will run on this machine too; elsewhere they may have both.

    Raises:
        PromptError: the judge's message names a column that a prompt file does not have.
        ConfigError: the service does not answer, and tasks will run on this machine.
    """
    key = f"reward.components.{name}"
    for sample in samples:
        if why := unknown_field(remote, list(sample.columns)):
            raise PromptError(f"{key}.template: {why} ({sample.source})")
    variable = remote.api_key_env
    if variable and not os.environ.get(variable):
        yield f"warning: {key}.api_key_env={variable}: is not set here; tasks need it"
    if not remote.trial:
        yield f"reward {name}: not asked whether it answers (trial=false)"
    elif why := why_silent(remote.url):
        text = f"{key}.url={remote.url}: nothing answers there ({why})"
        later = f"if it is started later, set {key}.trial=false"
        if is_here:
            raise ConfigError(f"{text}; {later}")
        yield f"warning: {text}; compute nodes may reach it; {later}"


def why_silent(url: str) -> str:
    """Return why nothing answers within :data:`PING_SECONDS`; empty if anything does, whatever it says."""
    return within(PING_SECONDS, lambda: _ask(url), f"no answer within {PING_SECONDS:g} s")


def _ask(url: str) -> str:
    handlers = [ProxyHandler({})] if urlsplit(url).hostname in _LOCAL else []
    try:
        build_opener(*handlers).open(Request(url, method="HEAD"), timeout=PING_SECONDS).close()
    except HTTPError as error:
        return f"{error.code} {error.reason}" if error.code in _NOT_YET else ""
    except RemoteDisconnected:  # something is there, and does not know HEAD
        return ""
    except (OSError, HTTPException, ValueError) as error:
        return " ".join(str(getattr(error, "reason", error)).split()) or type(error).__name__
    return ""
