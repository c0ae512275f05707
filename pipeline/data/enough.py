"""Whether enough rows of prompt files are left to train on, and whether several files go together."""

from collections import Counter
from collections.abc import Sequence

import pyarrow as pa

from pipeline.config.refill_rules import prompts_in_words
from pipeline.config.schema import PROMPTS_KEY, Config
from pipeline.data.checks import Judged, trained_on
from pipeline.data.rows import RejectReason
from pipeline.data.tables import PromptError, first_line
from pipeline.text import printable

SETS_MERGE = "permissive"
"""Arrow's way to put columns of one name together: the wider type, of numbers or of offsets."""
_MOST_QUOTED = 80
_WAYS_OUT = {
    RejectReason.BAD_ANSWER: "fix the answers",
    RejectReason.TOO_LONG: "lower rollout.max_new_tokens, set data.long_prompts=truncate",
}


def check_usable(config: Config, files: Sequence[Judged], listed_in: str = "") -> None:
    """Stop where rows that cannot be used are too many, or leave too few.

    Args:
        listed_in: the file that lists them, if there is one.

    Raises:
        PromptError: with the way out.
    """
    for judged in files:
        if why := too_few(config, judged, by_example=not listed_in):
            where = f"; unusable rows are listed in {listed_in}" if listed_in else ""
            raise PromptError(f"{judged.key}={judged.path}{why}{where}")
    check_together(config, files)


def check_sets(files: Sequence[Judged]) -> None:
    """Raise PromptError where a column is of different types in two files that are put together: those that
    are trained on, or the sets of held-out prompts."""
    groups = {
        f"{PROMPTS_KEY}: the files": trained_on(files),
        "data.heldout: the sets": [judged for judged in files if judged.is_heldout],
    }
    for what, group in groups.items():
        schemas = [judged.found.columns.schema for judged in group]
        try:
            pa.unify_schemas(schemas, promote_options=SETS_MERGE) if schemas else None
        except pa.ArrowException as error:
            raise PromptError(
                f"{what} have columns of one name that cannot be put together "
                f"({first_line(error)}); rename one, or leave it out by data.columns"
            ) from error


def check_together(config: Config, files: Sequence[Judged]) -> None:
    """Raise PromptError where the prompts of several files are too few for an iteration."""
    named, wanted = [judged for judged in files if judged.name], config.prompts_per_rollout
    usable = sum(judged.most_usable for judged in named)
    if named and usable < wanted:
        raise PromptError(
            f"{PROMPTS_KEY}: its files have {usable} usable rows together, fewer than "
            f"{prompts_in_words(config)}"
        )


def too_few(config: Config, judged: Judged, by_example: bool) -> str:
    """Return the complaint about a file of which too little is left, maybe with an example; else nothing."""
    because, usable = _because(judged, by_example), judged.most_usable
    wanted, why = _wanted_of(config, judged)
    if usable < wanted:
        return f" has {usable} usable rows, fewer than {why}{because}"
    if not usable:
        return f" has no usable row{because}"
    if judged.share_dropped > config.data.max_dropped:
        way_out = "make fewer tasks, or more different ones" if judged.is_made else "fix them"
        way_out = _WAYS_OUT.get(_commonest(judged), way_out)
        return f": {judged.portion_dropped} cannot be used{because}; {way_out}, or set data.max_dropped=1"
    return ""


def _wanted_of(config: Config, judged: Judged) -> tuple[int, str]:
    """Return the least number of rows that an iteration takes of a file, and what says so."""
    prompts = config.prompts_per_rollout
    if judged.is_heldout or (judged.name and not config.data.weights):
        return 0, ""
    if not judged.name:
        return prompts, prompts_in_words(config)
    share = config.prompt_shares.get(judged.name, 0)
    weight = f"data.weights.{judged.name}={config.data.weights.get(judged.name, 0):g}"
    return share, f"the {share} that an iteration of {prompts} takes by {weight}"


def _because(judged: Judged, by_example: bool) -> str:
    """Return, as a clause, the reason that most rejected rows have; empty where none was rejected."""
    if not judged.rejected:
        return ""
    reason = _commonest(judged)
    example = next(one for one in judged.rejected if one.reason is reason)
    return f", most are {reason}" + (f" ({printable(example.detail)[:_MOST_QUOTED]})" if by_example else "")


def _commonest(judged: Judged) -> RejectReason:
    return Counter(one.reason for one in judged.rejected).most_common(1)[0][0]
