"""Shared by tests: inputs, stand-ins for services, helpers. No test imports another test."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""Folder of the checkout."""
