"""Where rows of metrics.jsonl are mirrored to: W&B, event files of TensorBoard, or MLflow.

Imports next to nothing, as commands name destinations.
"""

import importlib.util
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.config.schema import TrackingConfig


class Destination(StrEnum):
    """One mirror of the rows; also its package, its extra, and its folder in the run directory."""

    WANDB = "wandb"
    TENSORBOARD = "tensorboard"
    MLFLOW = "mlflow"

    @property
    def label(self) -> str:
        """Name for people."""
        return {"wandb": "W&B", "tensorboard": "TensorBoard", "mlflow": "MLflow"}[self]


def switched_on(tracking: "TrackingConfig") -> list[Destination]:
    """Return the destinations besides W&B that the configuration asks for."""
    return [to for to in (Destination.TENSORBOARD, Destination.MLFLOW) if getattr(tracking, to).enabled]


def package_problem(to: Destination) -> str:
    """Say that the package of a destination is not installed, and how to install it. Empty: it is."""
    found = importlib.util.find_spec(to)
    if found and found.origin:  # a folder of that name, such as W&B's own, has none
        return ""
    extra = "" if to is Destination.WANDB else f"[{to}]"
    return f"the package of {to.label} is not installed here: pip install 'slurm-ppo{extra}'"
