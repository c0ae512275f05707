"""Checks of the notification settings, made before a run begins."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from pipeline.config.issue import ConfigIssue
from pipeline.config.notify import NotifyConfig

_SECRET_HOSTS = (
    *("hooks.slack.com", "discord.com", "discordapp.com", "webhook.office.com", "logic.azure.com"),
    *("chat.googleapis.com", "api.telegram.org", "maker.ifttt.com", "open.feishu.cn", "qyapi.weixin.qq.com"),
)
"""Hosts of webhooks whose address is a secret: whoever knows it may post there."""


def notify_problems(given: NotifyConfig) -> Iterator[ConfigIssue]:
    """Yield keys that do not go together, and a secret address that would be written to config.yaml. Pure."""
    addresses = {
        name: value
        for name in ("webhook", "webhook_env", "webhook_file")
        if (value := getattr(given, name)) is not None
    }
    if len(addresses) > 1:
        yield ConfigIssue("notify", ", ".join(addresses), "say the same in several ways; give one of them")
    host = urlsplit(given.webhook or "").hostname or ""
    if any(host == known or host.endswith(f".{known}") for known in _SECRET_HOSTS):
        why = (
            "whoever knows this address may post to it, and settings are written to config.yaml; put it into "
            "an environment variable and give its name: notify.webhook_env=NAME, or notify.webhook_file=FILE"
        )
        yield ConfigIssue("notify.webhook", f"https://{host}/...", why)


def missing_means(given: NotifyConfig) -> Iterator[ConfigIssue]:
    """Yield a program that does not exist here, and a file that cannot be read."""
    if given.command and shutil.which(given.command[0]) is None:
        yield ConfigIssue(
            "notify.command", given.command[0], "no such program on this machine; give its full path"
        )
    if given.webhook_file and not os.access(given.webhook_file, os.R_OK):
        yield ConfigIssue("notify.webhook_file", given.webhook_file, "cannot be read")


def notify_warnings(given: NotifyConfig) -> Iterator[str]:
    """Yield warnings about environment variables that sending needs and this shell lacks."""
    if (variable := given.webhook_env) and not os.environ.get(variable):
        yield (
            f"warning: notify.webhook_env={variable}: is not set here; the run's driver needs it, and driver "
            "jobs get it from the shell that submits"
        )


def absolute(given: NotifyConfig) -> NotifyConfig:
    """Return the settings with absolute paths. A program without a slash is looked for on PATH."""
    command, file = given.command, given.webhook_file
    if command and "/" in command[0]:
        command = (_full(command[0]), *command[1:])
    return replace(given, command=command, webhook_file=None if file is None else _full(file))


def _full(path: str) -> str:
    return str(Path(path).expanduser().absolute())
