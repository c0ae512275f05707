"""Memory that tasks need, computed from the configuration and the headers of the models."""
