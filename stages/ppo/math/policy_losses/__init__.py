"""Losses of the policy by name (algorithm.policy_loss): one function each, of the same arguments."""
