"""Computation of one task, which is then committed; no scheduler."""
