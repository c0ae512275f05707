"""How many elements a run may submit. Pure."""

_KEPT_FOR_DRIVERS = 4


def free_elements(own_bound: int, max_submit: int | None, of_stages: int, of_drivers: int) -> int:
    """Return how many elements of stages may still be submitted; a few jobs are kept for drivers.

    Args:
        own_bound: most that the run puts into the queue.
        max_submit: jobs that the user may have waiting and running; None: any number.
        of_stages: elements of stages that wait or run.
        of_drivers: driver jobs that do.
    """
    bounds = [own_bound]
    if max_submit is not None:
        bounds.append(max_submit - max(of_drivers, _KEPT_FOR_DRIVERS))
    return max(0, min(bounds) - of_stages)
