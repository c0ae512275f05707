"""Kinds of jobs: a stage, with its pool (``score-big``), or a kind of driver job, which is no stage's."""

DRIVER = "driver"
"""Kind of ordinary driver jobs, in names where other jobs have their stage."""


BENCHMARK = "benchmark"
"""Job kind of evaluate.command: that of the stage."""


GUARD = "guard"
"""Kind of the guard: a driver job with a start time, which runs whatever happens to the others."""


DRIVERS = frozenset({DRIVER, GUARD})
"""Kinds of jobs that advance the run; those of all others are stages."""


def parts_of(job_kind: str) -> tuple[str, str]:
    """Split a job kind into the stage or kind of driver job, and the pool; no pool is empty."""
    name, _, pool = job_kind.partition("-")
    return name, pool
