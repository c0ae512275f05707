"""The accounts and qualities of service (QOS) that this user may name, and the most that one job may ask for
by their limits.

sbatch takes what exceeds these, unless a QOS denies it, and such a job waits for ever. Limits of what a user
or an account has at once are ceilings of one job too.
"""

import os
import pwd
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from slurm.commands import SlurmError, SlurmMissing, run_command
from slurm.limits import of_cluster, parse_duration, parse_memory, parse_settings, read_cluster_name

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
        rows = _show("assoc", ("Account", "QOS", "DefaultQOS"), f"user={user}", *here)
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


# --- ceilings ---

_OF_ACCOUNTS = ("Account", "QOS", "DefaultQOS", "MaxWall", "MaxTRES", "GrpTRES", "Partition")
_OF_QOS = ("Name", "MaxWall", "MaxTRES", "MaxTRESPU", "GrpTRES", "MaxSubmitJobsPerUser", "GrpSubmit")


@dataclass(frozen=True)
class Ceiling:
    """The most that one job may ask for; what is missing has no limit."""

    whose: str
    """Account or QOS in words, like ``QOS short``."""
    wall: float | None = None
    """Seconds that it may run."""
    amounts: Mapping[str, int] = field(default_factory=dict)
    """By Slurm's names: cpu, node, mem (in MiB), gres/gpu, gres/gpu:a100."""
    submitted: int | None = None
    """Jobs that its user may have waiting and running."""


@dataclass(frozen=True)
class Ceilings:
    """Ceilings of the accounts and QOS that a user may name."""

    accounts: Mapping[str, Ceiling] = field(default_factory=dict)
    qos: Mapping[str, Ceiling] = field(default_factory=dict)
    default_qos: Mapping[str, str] = field(default_factory=dict)
    """QOS of jobs that name none, by account."""

    def of_job(self, account: str | None, qos: str | None) -> Iterator[Ceiling]:
        """Yield the ceilings of a job: its QOS's, which goes before its account's, and that. It is
        unknown for a user with several accounts who names none."""
        if account is None and len(self.accounts) == 1:
            account = next(iter(self.accounts))
        named = qos or self.default_qos.get(account or "")
        found = (self.qos.get(named or ""), self.accounts.get(account or ""))
        yield from (ceiling for ceiling in found if ceiling is not None)

    def wall_of(self, account: str | None, qos: str | None) -> Ceiling | None:
        """Return whose limit of time holds for a job; None where there is none."""
        return next((one for one in self.of_job(account, qos) if one.wall is not None), None)


def read_ceilings() -> Ceilings | None:
    """Ask accounting for those of this cluster; None where there is none, or none that answers."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
        here = of_cluster(read_cluster_name(_TIMEOUT))
        accounts = _show("assoc", _OF_ACCOUNTS, f"user={user}", *here)
        return parse_ceilings(accounts, _show("qos", _OF_QOS))
    except (KeyError, ValueError, SlurmError, SlurmMissing):
        return None


def _show(what: str, fields: Iterable[str], *more: str) -> str:
    asked = ["sacctmgr", "-n", "-P", "-r", "show", what, *more, f"format={','.join(fields)}"]
    return run_command(asked, timeout=_TIMEOUT)


def parse_ceilings(accounts: str, qos: str) -> Ceilings:
    """Parse rows of the fields that are asked for. What holds in one partition alone is left out. Raises
    ValueError."""
    found = [line.split("|") for line in accounts.splitlines() if line]
    rows = [row for row in found if not any(row[6:7])]
    of_qos = [line.split("|") for line in qos.splitlines() if line]
    named = {row[0]: row[2] or (row[1] if "," not in row[1] else "") for row in rows}
    return Ceilings(
        accounts={row[0]: _ceiling(f"account {row[0]}", row[3], row[4:6]) for row in rows},
        qos={row[0]: _ceiling(f"QOS {row[0]}", row[1], row[2:5], row[5:7]) for row in of_qos},
        default_qos={account: name for account, name in named.items() if name},
    )


def _ceiling(whose: str, wall: str, amounts: Iterable[str], submitted: Iterable[str] = ()) -> Ceiling:
    least: dict[str, int] = {}
    for name, count in (pair for text in amounts for pair in _amounts(text)):
        least[name] = min(count, least.get(name, count))
    bounds = [int(bound) for bound in submitted if bound.isdigit()]
    return Ceiling(whose, parse_duration(wall) if wall else None, least, min(bounds, default=None))


def _amounts(text: str) -> Iterator[tuple[str, int]]:
    """Yield the amounts in a list like ``cpu=4,gres/gpu=2,mem=16G``; names that are not known are omitted."""
    for name, count in re.findall(r"(?:^|,)([\w/:.-]+)=(\d+(?:\.\d+)?[KMGT]?)", text):
        if name == "mem":
            yield name, parse_memory(count)
        elif count.isdigit():
            yield name, int(count)
