"""Trials before anything is computed: of models, and of torch."""
