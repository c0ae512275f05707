"""Attempts at tasks: check, compute, commit, or say why that failed."""
