"""Workers: one process that does task after task, finds them, waits, beats and leaves."""
