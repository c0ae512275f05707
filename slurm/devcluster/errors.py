"""What can go wrong with a development cluster, in words for whoever asked for it."""

from slurm.errors import UserError


class DevclusterError(UserError, ValueError):
    """A development cluster cannot do what was asked of it."""


class PackagesMissing(DevclusterError):
    """Slurm, munge or MariaDB is not installed; the message says how to get them."""
