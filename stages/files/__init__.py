"""Files of a task on its node."""
