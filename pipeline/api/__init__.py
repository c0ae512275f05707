"""A run in Python, read only, for notebooks and scripts: ``from pipeline import open_run``."""
