"""A process that does task after task: its loop, how it finds, waits, beats and ends."""
