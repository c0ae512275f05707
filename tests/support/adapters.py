"""Adapters that change a tiny policy, without training it."""

from pathlib import Path

from stages.rehearsal.models import save_random_adapter


def make_adapter(base: Path, folder: Path, rank: int = 4, seed: int = 0) -> Path:
    """Write an adapter of all linear layers of the model in ``base``, of random numbers."""
    save_random_adapter(base, folder, rank, seed)
    return folder
