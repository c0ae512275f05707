"""A look before training: one small iteration by the run's own tasks, what it shows, and what the run would
take."""
