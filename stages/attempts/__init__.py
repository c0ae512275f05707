"""One try at a task: check, compute, commit, or say why that failed."""
