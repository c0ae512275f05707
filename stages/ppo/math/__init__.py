"""Formulas of PPO and its relatives: tensors in, tensors out."""
