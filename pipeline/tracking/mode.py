"""Whether and how a run is mirrored on W&B: online, offline, or not at all."""

from collections.abc import Mapping
from pathlib import Path

from pipeline.config.schema import WandbMode
from slurm.errors import UserError

NO_KEY = "there is no API key for W&B: type `wandb login`, or set WANDB_API_KEY"


_OLD_WORDS = {"dryrun": WandbMode.OFFLINE, "run": WandbMode.ONLINE}
"""Values of WANDB_MODE that W&B goes on to take."""


class NoKey(UserError, ValueError):
    """There is no API key for W&B."""


def wandb_mode(asked: WandbMode, environment: Mapping[str, str]) -> WandbMode:
    """Decide by the configuration; if that is auto, by WANDB_MODE, else by whether there is a key."""
    if asked is not WandbMode.AUTO:
        return asked
    named = environment.get("WANDB_MODE", "")
    named = _OLD_WORDS.get(named, named)
    if named in tuple(WandbMode) and named != WandbMode.AUTO:
        return WandbMode(named)
    return WandbMode.ONLINE if has_key(environment) else WandbMode.OFFLINE


def has_key(environment: Mapping[str, str]) -> bool:
    """Whether an API key is in the environment or in ~/.netrc."""
    if environment.get("WANDB_API_KEY"):
        return True
    try:
        return "wandb" in (Path.home() / ".netrc").read_text(errors="replace")
    except OSError:
        return False
