"""The accounts and qualities of service that this user may name."""

import os
import pwd
from dataclasses import dataclass

from slurm.commands import SlurmError, SlurmMissing, run_command
from slurm.limits import of_cluster, parse_settings

_TIMEOUT = 15.0


@dataclass(frozen=True)
class Associations:
    """Associations of this user, by accounting."""

    accounts: frozenset[str]
    qos: frozenset[str]
    """QOS that any of the accounts may use."""
    enforced: bool
    """Whether the controller refuses other accounts and QOS."""
    is_limited: bool = False
    """Whether it enforces their limits."""


def read_associations() -> Associations | None:
    """Ask accounting for the user's associations; None where there is none, or none that answers."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
        config = run_command(["scontrol", "show", "config"], timeout=_TIMEOUT)
        here = of_cluster(parse_settings(config).get("ClusterName", ""))
        asked = ["show", "assoc", f"user={user}", *here, "format=Account,QOS,DefaultQOS"]
        rows = run_command(["sacctmgr", "-n", "-P", "-r", *asked], timeout=_TIMEOUT)
    except (KeyError, SlurmError, SlurmMissing):
        return None
    return parse_associations(rows, config)


def parse_associations(rows: str, config: str) -> Associations:
    """Parse rows of Account|QOS|DefaultQOS and the output of ``scontrol show config``."""
    fields = [line.split("|") for line in rows.splitlines() if line]
    names = {name for row in fields for name in [*row[1].split(","), row[2]] if name}
    enforced = parse_settings(config).get("AccountingStorageEnforce", "")
    words = {word.strip().lower() for word in enforced.split(",")}
    return Associations(
        accounts=frozenset(row[0] for row in fields),
        qos=frozenset(names),
        enforced=bool(words & {"associations", "limits", "qos", "safe", "all", "1"}),
        is_limited=bool(words & {"limits", "safe", "all"}),
    )
