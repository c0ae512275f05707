"""Log lines of tasks: ``2026-01-31 12:00:00 INFO iteration 1 update: committed: ...``, on standard error."""

import logging

log = logging.getLogger("stages")
log.setLevel(logging.INFO)


def set_up_log() -> None:
    """Write the lines of this process with time and level. Those of other libraries stay as they are."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    log.handlers, log.propagate = [handler], False
