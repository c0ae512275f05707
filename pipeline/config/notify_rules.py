"""Checks of the notification settings, made before a run begins."""

import os
import shutil
from collections.abc import Iterator
from urllib.parse import urlsplit

from pipeline.config.issue import ConfigIssue
from pipeline.config.notify import NotifyConfig
from pipeline.config.schema import Config

_SECRET_HOSTS = (
    *("hooks.slack.com", "discord.com", "discordapp.com", "webhook.office.com", "logic.azure.com"),
    *("chat.googleapis.com", "api.telegram.org", "maker.ifttt.com", "open.feishu.cn", "qyapi.weixin.qq.com"),
)
"""Hosts of webhooks whose address is a secret: whoever knows it may post there."""


def notify_problems(config: Config) -> Iterator[ConfigIssue]:
    """Yield keys that do not go together, and a secret address that would be written to config.yaml. Pure."""
    given = config.notify
    names = ("webhook", "webhook_env", "webhook_file")
    addresses = [name for name in names if getattr(given, name) is not None]
    if len(addresses) > 1:
        yield ConfigIssue("notify", ", ".join(addresses), "say the same in several ways; give one of them")
    host = urlsplit(given.webhook or "").hostname or ""
    if f".{host}".endswith(tuple(f".{known}" for known in _SECRET_HOSTS)):
        why = (
            "whoever knows this address may post to it, and settings are written to config.yaml; put it into "
            "an environment variable and give its name: notify.webhook_env=NAME, or notify.webhook_file=FILE"
        )
        yield ConfigIssue("notify.webhook", f"https://{host}/...", why)


def missing_means(given: NotifyConfig) -> Iterator[ConfigIssue]:
    """Yield a program that does not exist here, and a file that cannot be read."""
    if given.command and shutil.which(given.command[0]) is None:
        why = "no such program on this machine; give its full path"
        yield ConfigIssue("notify.command", given.command[0], why)
    if given.webhook_file and not os.access(given.webhook_file, os.R_OK):
        yield ConfigIssue("notify.webhook_file", given.webhook_file, "cannot be read")


def notify_warnings(given: NotifyConfig) -> Iterator[str]:
    """Yield warnings about environment variables that sending needs and this shell lacks."""
    if (variable := given.webhook_env) and not os.environ.get(variable):
        yield (
            f"warning: notify.webhook_env={variable}: is not set here; the run's driver needs it, and driver "
            "jobs get it from the shell that submits"
        )
