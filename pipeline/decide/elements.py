"""How many elements a run may have in the queue. Pure."""

_KEPT_FOR_DRIVERS = 4


def most_elements(own_bound: int, max_submit: int | None, of_drivers: int) -> int:
    """Return how many elements of stages may wait and run at once; a few jobs are kept for drivers.

    Args:
        own_bound: most that the run puts into the queue.
        max_submit: jobs that the user may have waiting and running; None: any number.
        of_drivers: driver jobs that wait or run.
    """
    if max_submit is None:
        return own_bound
    return max(0, min(own_bound, max_submit - max(of_drivers, _KEPT_FOR_DRIVERS)))


def free_elements(own_bound: int, max_submit: int | None, of_stages: int, of_drivers: int) -> int:
    """Return how many elements of stages may still be submitted.

    Args:
        of_stages: elements of stages that wait or run.
        own_bound, max_submit, of_drivers: as for :func:`most_elements`.
    """
    return max(0, most_elements(own_bound, max_submit, of_drivers) - of_stages)
