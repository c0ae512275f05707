"""Workers: processes that stay after a task, take the next one of their stage, and leave when that pays more.

The rules (:mod:`choosing`, :mod:`staying`, :mod:`estimates`) are pure: they get the time, the queue and what
is on disk from their callers, so a simulation can drive them.
"""
