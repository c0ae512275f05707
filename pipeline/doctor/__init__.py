"""``slurm-ppo doctor``: is everything here that a run needs, measured rather than assumed."""
