"""What this machine has."""

from pathlib import Path


def has_gpus(devices: Path = Path("/dev")) -> bool:
    """Whether there is a GPU of NVIDIA's or AMD's. Opens no driver."""
    return any(devices.glob("nvidia[0-9]*")) or (devices / "kfd").exists()
