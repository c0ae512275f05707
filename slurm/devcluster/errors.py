"""Errors of a development cluster, with messages for its user."""

from slurm.errors import UserError


class DevclusterError(UserError, ValueError):
    """Failure of a development cluster to do what was asked of it."""


class PackagesMissing(DevclusterError):
    """Absence of packages (Slurm, munge, MariaDB, GlusterFS); the message says how to install them."""
