"""Base classes of errors that end a command with one readable message: the user's to fix, or a service's."""


class UserError(Exception):
    """Mistake that the user can fix. Exit code 2."""


class ServiceError(Exception):
    """Failure of Slurm, W&B or a file server. Nothing is lost, and a later try may succeed. Exit code 1."""


class UnfinishedError(ServiceError):
    """Failure of a service after a part of what was asked for was done, which it names. Exit code 1."""
