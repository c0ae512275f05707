"""The kinds of Slurm jobs of a run that are no stage's: those that advance it."""

DRIVER = "driver"
"""Name of the jobs that advance a run, where stages have theirs."""


EVALUATION_DRIVER = "evaldriver"


GUARD = "guard"
"""The driver job that starts after some time, whatever happens to the others."""


DRIVERS = frozenset({DRIVER, EVALUATION_DRIVER, GUARD})
"""Purposes of jobs that advance the run; those of all others are stages."""
