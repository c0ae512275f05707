"""Lengths of prompts, and seconds that an iteration and the run will take, before anything starts."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from pipeline.checks.finding import Finding, ok, skipped
from pipeline.checks.memory import card_of_task, gpus_of_task, partitions_of_cluster
from pipeline.checks.prompts import judged_files
from pipeline.checks.rehearsal_record import corrections
from pipeline.config.algorithm import ReferenceStage
from pipeline.config.engine_rules import has_reference_in, scores_with
from pipeline.config.engines import Engine
from pipeline.config.issue import ConfigError, UserError
from pipeline.config.reward import RewardModelConfig
from pipeline.config.scheduler import LocalConfig
from pipeline.config.schema import Config
from pipeline.config.update import TrainingEngine
from pipeline.data.summary import all_prompt_lengths, lengths_in_words, prompt_lengths
from pipeline.executors.local_limits import local_limits
from pipeline.forecast.cards import peak_flops
from pipeline.forecast.corrections import Corrected
from pipeline.forecast.lengths import PromptLengths
from pipeline.forecast.seconds import (
    GENERATING,
    SCORING,
    UPDATE,
    IterationWork,
    SecondsForecast,
    StageFlops,
    by_earlier,
    by_flops,
    work_of,
)
from pipeline.forecast.shapes import read_shape
from pipeline.metrics.earlier import earlier_run
from pipeline.plugins.load import make_importable
from pipeline.run.tasks import Stage
from pipeline.text import duration, seconds_in_words
from slurm.limits import Partition

_ASSUMED = "assumed, not measured"
_NO_CARD = "nor a card whose peak is known (on Slurm scheduler.STAGE.gpus_per_node=a100:1 names one)"
_NO_LENGTHS = "nor are lengths of prompts known"
_MEASURES = (
    "slurm-ppo try measures them (the small run that try --keep leaves counts as an earlier one), and so "
    "does a first iteration"
)


def forecast_seconds(config: Config, lengths: PromptLengths | None) -> SecondsForecast | None:
    """Return what an iteration will take; None where there is no ground for any number.

    Responses are taken to be as long as an earlier run's were, else as long as they may be.

    Args:
        lengths: of the prompts that are trained on; None where they are not known, which an earlier run's
            stand in for.

    Raises:
        ConfigError, OSError: a model's files cannot be read.
    """
    if earlier := earlier_run(config):
        prompt = lengths.mean if lengths else earlier.work.prompt
        response = min(earlier.work.response, config.rollout.max_new_tokens)
        return by_earlier(config, work_of(config, prompt, response), earlier)
    if lengths is None:
        return None
    work = work_of(config, lengths.mean, config.rollout.max_new_tokens)
    partitions, known = partitions_of_cluster(config), list[StageFlops]()
    stages = [str(Stage.ROLLOUT), str(Stage.UPDATE)]
    stages[1:1] = [str(Stage.REWARD)] if has_scoring_models(config) else []
    for stage in stages:
        known += _flops_of(config, work, stage, partitions)
    return by_flops(config, known, set(stages) - {one.stage for one in known})


def has_scoring_models(config: Config) -> bool:
    """Whether the reward stage computes with models of its own; rules and services take what they take."""
    return bool(_scored_by(config) or config.reward.teachers_of(None)) or has_reference_in(
        config, ReferenceStage.REWARD
    )


def _scored_by(config: Config) -> list[Path]:
    """Return the directories of the models that the reward stage scores with."""
    found = config.reward.components_of(None).values()
    models = [one for one in found if isinstance(one, RewardModelConfig)]
    return [Path(one.path) for one in models if scores_with(config.reward, one) in (*Engine,)]


def _flops_of(
    config: Config, work: IterationWork, stage: str, partitions: Mapping[str, Partition]
) -> Iterator[StageFlops]:
    """Yield the FLOPs of a stage, where its card's peak is known and an engine of ours computes it."""
    card = card_of_task(config, stage, partitions)
    peak, gpus = peak_flops(card.kind) if card else None, gpus_of_task(config, 0, stage)
    if peak is None or not gpus or not _is_ours(config, stage):
        return
    share, why = _share_of(config, stage, card.kind if card else "", peak)
    yield StageFlops(stage, _flops(config, work, stage), peak * gpus * _at_once(config, stage), share, why)


def _is_ours(config: Config, stage: str) -> bool:
    if stage == Stage.UPDATE:
        return config.update.engine in (*TrainingEngine,)
    return stage != Stage.ROLLOUT or config.rollout.engine in (*Engine,)


def _share_of(config: Config, stage: str, kind: str, peak: float) -> tuple[float, str]:
    """Return the share of the peak that a stage reaches, and where that is from."""
    if stage == Stage.ROLLOUT:
        return GENERATING[Engine(config.rollout.engine)], _ASSUMED
    if stage == Stage.REWARD:
        return SCORING, _ASSUMED
    known = corrections().get(kind)
    if known is not None and (measured := known.numbers.get(Corrected.UPDATE_FLOPS)):
        return measured / peak, f"measured by the rehearsal on {kind}"
    return UPDATE, _ASSUMED


def _flops(config: Config, work: IterationWork, stage: str) -> float:
    """Return the model FLOPs of a stage of an iteration."""
    if stage == Stage.UPDATE:
        return 2 * read_shape(Path(config.model.policy)).parameters * work.tokens * work.update_passes
    if stage == Stage.ROLLOUT:
        return 2 * read_shape(Path(config.model.policy)).parameters * work.tokens
    models = _scored_by(config) + [Path(one.path) for one in config.reward.teachers_of(None).values()]
    if has_reference_in(config, ReferenceStage.REWARD):
        models.append(Path(config.model.reference or config.model.policy))
    return sum(2 * read_shape(path).parameters * work.tokens for path in models)


def _at_once(config: Config, stage: str) -> int:
    """Return how many processes with the GPUs of one work at a stage together, if all find a place."""
    if stage == Stage.UPDATE:
        return config.scheduler.num_update_ranks
    shards = config.rollout.num_shards
    if isinstance(config.scheduler, LocalConfig):
        return min(shards, local_limits(config).workers.get(stage, shards))
    return shards


def seconds_finding(config: Config, found: SecondsForecast) -> Finding:
    """Say what an iteration and the run will take."""
    each = ", ".join(f"{stage} {seconds_in_words(seconds)}" for stage, seconds in found.stages.items())
    less = f"; without {', '.join(found.left_out)}: not known" if found.left_out else ""
    text = (
        f"about {seconds_in_words(found.iteration)} an iteration ({each}), {duration(found.run)} the "
        f"{config.iterations} of the run, evaluations and waits in the queue left out{less}; {found.ground}"
    )
    hours = gpu_hours(config, found.stages)
    if hours:
        by_stage = ", ".join(f"{stage} {value:.3g}" for stage, value in hours.items())
        text += f"; GPU-hours of computing: {by_stage} (start-ups and waits come on top)"
    numbers = {"iteration_seconds": found.iteration, "run_seconds": found.run}
    numbers |= {f"{stage}_seconds": value for stage, value in found.stages.items()}
    return ok("seconds", text, **numbers, **{f"{stage}_gpu_hours": value for stage, value in hours.items()})


def gpu_hours(config: Config, stages: Mapping[str, float]) -> dict[str, float]:
    """Return by stage the GPU-hours of computing in the whole run, if all its tasks find a place at once.

    Args:
        stages: wall seconds of each in an iteration.
    """
    gpus = {
        stage: gpus_of_task(config, 0, stage) * _at_once(config, stage)
        for stage in stages
        if stage in (Stage.ROLLOUT, Stage.REWARD, Stage.UPDATE)
    }
    return {stage: stages[stage] * config.iterations * count / 3600 for stage, count in gpus.items() if count}


def prompt_lengths_of(config: Config) -> tuple[list[PromptLengths], list[str]]:
    """Return the lengths of the prompts of each file, or of a sample of a large one, and lines that say so,
    or why there are none."""
    make_importable(str(Path.cwd()))
    try:
        files, _, why_not = judged_files(config)
    except UserError as error:
        return [], [f"not checked: lengths of prompts ({error})"]
    measured = [judged for judged in files if prompt_lengths(judged)]
    if not measured:
        return [], [f"not checked: lengths of prompts ({why_not or 'no prompt can be used'})"]
    return all_prompt_lengths(measured), [
        f"{judged.key}: {lengths_in_words(judged, config)}" for judged in measured
    ]


def check_seconds(config: Config, lengths: PromptLengths | None) -> tuple[SecondsForecast | None, Finding]:
    """Return what an iteration will take, and the finding that says so."""
    try:
        found = forecast_seconds(config, lengths)
    except (ConfigError, OSError) as error:
        return None, skipped("seconds", f"seconds of an iteration ({error})")
    if found is None:
        lacks = _NO_CARD if lengths else _NO_LENGTHS
        return None, ok(
            "seconds", f"not known: there is no earlier run of such a model here, {lacks}; {_MEASURES}"
        )
    return found, seconds_finding(config, found)
