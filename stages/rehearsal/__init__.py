"""Checks of `slurm-ppo rehearse`: what a machine computes, by the program's own engines and trainers on
tiny random models."""
