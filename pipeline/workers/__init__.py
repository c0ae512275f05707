"""Workers: processes that stay after a task, take the next one of their stage, and leave when that pays more."""
