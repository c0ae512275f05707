"""Workers: processes that stay after a task, take the next of their stage, and leave when that pays more."""
