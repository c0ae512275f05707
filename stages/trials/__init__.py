"""Trials of models and of torch before anything is computed, some as programs of their own."""
