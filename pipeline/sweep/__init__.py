"""Sweeps: many runs that differ in a few settings, in one folder, with a manifest that says which."""
