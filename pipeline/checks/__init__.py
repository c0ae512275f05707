"""``slurm-ppo doctor``: checks that all that a run needs is here, measured rather than assumed."""
