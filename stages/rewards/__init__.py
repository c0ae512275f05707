"""Scores of responses: reward models, rules, services, and the reference."""
