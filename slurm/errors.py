"""Two kinds of errors that end a command with one readable message: what the user mends, and what passes."""


class UserError(Exception):
    """Something that whoever typed the command can mend. Exit code 2."""


class ServiceError(Exception):
    """Slurm, W&B or a file server did not do its part. Nothing is lost, and later it may. Exit code 1."""
