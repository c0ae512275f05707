"""Keep secrets out of what is written: values of variables that look like keys, addresses of webhooks."""

import re
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|WEBHOOK|HOOK|AUTH|COOKIE", re.IGNORECASE)
_SHORTEST = 6
"""Fewest characters of a secret: shorter ones would be found in everything."""
_HIDDEN = "[hidden]"


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name probably holds a secret."""
    return bool(_SECRET_NAME.search(name))


def secrets_of(environment: Mapping[str, str], *addresses: str) -> set[str]:
    """Collect what must not be shown: values of variables named like secrets, addresses and their parts."""
    found = {value for name, value in environment.items() if is_secret_name(name)}
    for address in addresses:
        parts = urlsplit(address)
        found |= {address, parts.path, parts.path.lstrip("/"), parts.query, parts.netloc.rpartition("@")[0]}
    return {value.strip() for value in found if len(value.strip()) >= _SHORTEST}


def without_secrets(text: str, secrets: Collection[str]) -> str:
    """Hide every secret in ``text``, longer ones first."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, _HIDDEN)
    return text
