"""What can go wrong with a development cluster, in words for whoever asked for it."""


class DevclusterError(ValueError):
    """A development cluster cannot do what was asked of it."""


class PackagesMissing(DevclusterError):
    """Slurm, munge or MariaDB is not installed; the message says how to get them."""
