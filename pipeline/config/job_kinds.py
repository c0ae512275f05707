"""Job kinds of driver jobs: the Slurm jobs that advance a run and are no stage's."""

DRIVER = "driver"
"""Kind of ordinary driver jobs, in names where other jobs have their stage."""


EVALUATION_DRIVER = "evaldriver"


GUARD = "guard"
"""Kind of the guard: a driver job with a start time, which runs whatever happens to the others."""


DRIVERS = frozenset({DRIVER, EVALUATION_DRIVER, GUARD})
"""Kinds of jobs that advance the run; those of all others are stages."""
