"""The demo of ``slurm-ppo quickstart``: a policy, a reward model, prompts, and a judge."""
