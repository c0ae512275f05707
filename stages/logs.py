"""Log lines of tasks: ``2026-01-31 12:00:00 INFO iteration 1 update: committed: ...``, on standard error."""

import logging

# Not registered by name: a user's code or a library that configures logging switches off all that are.
log = logging.Logger("stages", logging.INFO)
log.parent = logging.root


def set_up_log() -> None:
    """Write the lines of this process with time and level. Those of other libraries stay as they are."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    log.handlers, log.propagate = [handler], False
