"""Checks that model directories fit their use in a run, by their files' headers, without torch."""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pipeline.config.algorithm import ReferenceStage
from pipeline.config.engine_rules import scores_with
from pipeline.config.engines import Engine
from pipeline.config.hub import Kind, way_to_have
from pipeline.config.issue import ConfigIssue
from pipeline.config.model_classes import SEQUENCES, TOKENS, Classes, classes_of_tasks, scoring_class
from pipeline.config.model_files import (
    ADAPTER_SETTINGS,
    ROUTER_LOGITS,
    BadModel,
    Tensors,
    Vocabulary,
    architectures_of,
    embedding_rows,
    has_head,
    has_tokenizer,
    head_of,
    model_end_ids,
    num_labels,
    read_header,
    read_json,
    read_tensors,
    read_vocabulary,
    text_settings,
)
from pipeline.config.reward import RewardModelConfig, StepScore
from pipeline.config.routing_rules import why_not_replayed
from pipeline.config.schema import Config
from pipeline.config.trainable import (
    why_maimed,
    why_not_causal,
    why_not_known,
    why_not_of_class,
    why_other_depth,
    why_untrainable,
)
from pipeline.config.update import TrainingEngine
from slurm.sharedfiles import is_special

_SAME_VOCABULARY = 0.99
"""Least share of the ids common to two tokenizers that must stand for the same token: fine-tuned models
rename some."""
_GGUF = ".gguf"
_NOT_CAUSAL = ("Classification", "QuestionAnswering", "MaskedLM", "MultipleChoice", "RewardModel")
_NOT_SCORING = ("CausalLM", "LMHeadModel", "MaskedLM", "QuestionAnswering", "TokenClassification")


class Use(StrEnum):
    """A model's part in a run."""

    POLICY = "policy"
    REFERENCE = "reference"
    CRITIC = "critic"
    TEACHER = "teacher"
    REWARD = "reward model"


@dataclass(frozen=True)
class UsedModel:
    """A model directory of the configuration."""

    key: str
    """Key of the configuration."""
    directory: Path
    use: Use
    is_ours: bool
    """Whether an engine or trainer of slurm-ppo loads it; the user's own may read anything."""
    is_loaded: bool = False
    """Whether transformers loads it. vLLM has architectures of its own, and reports what it cannot take."""
    is_trained: bool = False
    """Whether a trainer of slurm-ppo trains it."""
    step_score: StepScore | None = None
    """How a reward model scores steps; None: it scores whole responses."""


@dataclass(frozen=True)
class Known:
    """The headers of a model directory."""

    settings: Mapping[str, Any]
    """Content of config.json."""
    tensors: Tensors
    vocabulary: Vocabulary | None
    """Ids of its tokenizer; None where they were not read, or need the tokenizer's library."""


def used_models(config: Config) -> Iterator[UsedModel]:
    """Yield every model that the configuration names."""
    model, trains = config.model, config.update.engine in (*TrainingEngine,)
    scores_reference = config.algorithm.kl.coef > 0 and (
        trains or config.algorithm.kl.reference_in is ReferenceStage.REWARD
    )
    generates = config.rollout.engine in (*Engine,)
    is_loaded = generates or trains or (scores_reference and model.reference is None)
    yield UsedModel("model.policy", Path(model.policy), Use.POLICY, is_loaded, is_loaded, trains)
    if model.reference:
        directory = Path(model.reference)
        yield UsedModel("model.reference", directory, Use.REFERENCE, scores_reference, scores_reference)
    if model.critic:
        yield UsedModel("model.critic", Path(model.critic), Use.CRITIC, trains, trains, trains)
    for name, component in config.reward.components.items():
        if isinstance(component, RewardModelConfig):
            engine = scores_with(config.reward, component)
            key, is_loaded = f"reward.components.{name}.path", engine == Engine.TRANSFORMERS
            by_steps = component.step_score if component.steps else None
            directory, is_ours = Path(component.path), engine in (*Engine,)
            yield UsedModel(key, directory, Use.REWARD, is_ours, is_loaded, step_score=by_steps)
    for name, teacher in config.reward.teachers.items():
        yield UsedModel(f"reward.teachers.{name}.path", Path(teacher.path), Use.TEACHER, True, is_loaded=True)


def model_problems(config: Config) -> Iterator[ConfigIssue]:
    """Yield, for each model, the first thing that keeps it from being used."""
    known: dict[str, Known] = {}
    for model in used_models(config):
        try:
            known[model.key] = examine(model, with_tokenizer=config.model.tokenizer is None)
            if classes := classes_of_tasks(config):
                _check_class(model, known[model.key], classes, config.model.trust_remote_code)
        except BadModel as error:
            yield ConfigIssue(model.key, model.directory, str(error))
    replayed = text_settings(Path(config.model.policy)) if config.algorithm.router_replay else {}
    if replayed and "model.policy" in known and (why := why_not_replayed(replayed)):
        yield ConfigIssue("algorithm.router_replay", True, why)
    for model in used_models(config):
        mine, policy = known.get(model.key), known.get("model.policy")
        reads_tokens = model.is_ours and model.use in (Use.REFERENCE, Use.CRITIC, Use.TEACHER)
        if reads_tokens and mine and policy and (why := _other_vocabulary(mine, policy)):
            yield ConfigIssue(model.key, model.directory, why)


def model_notes(config: Config) -> Iterator[str]:
    """Yield warnings and notes about models that have no problem."""
    classes = classes_of_tasks(config)
    for model in used_models(config):
        settings = read_json(model.directory / "config.json") or {}
        named = f"{model.key}={model.directory}"
        if why := _tokens_without_room(config, model):
            yield f"warning: {named}: {why}"
        is_known = classes is not None and settings.get("model_type") in classes.types
        if model.is_loaded and is_known and settings.get("auto_map") and not config.model.trust_remote_code:
            yield (
                f"warning: {named}: the code that its auto_map names is not run, but transformers' own for "
                f"{settings['model_type']}; set model.trust_remote_code=true if it computes something else"
            )
        generates = model.use is Use.POLICY and config.rollout.engine == Engine.TRANSFORMERS
        if generates and text_settings(model.directory).get(ROUTER_LOGITS):
            yield f"{named}: {ROUTER_LOGITS} of its config.json is switched off to generate"


def _tokens_without_room(config: Config, model: UsedModel) -> str | None:
    """Return which tokens of a model's tokenizer it has no embedding for; None where it has all."""
    if not model.is_ours or config.model.tokenizer or model.use not in (Use.POLICY, Use.REWARD):
        return None
    known = examine(model, with_tokenizer=True)
    rows = embedding_rows(known.tensors)
    if not rows or not known.vocabulary or known.vocabulary.num_ids <= rows:
        return None
    beyond = [token for token, id_ in known.vocabulary.added.items() if id_ >= rows]
    return (
        f"has no embedding for {len(beyond)} tokens that were added to its tokenizer, such as {beyond[0]!r}; "
        "rows with them cannot be used"
    )


def examine(model: UsedModel, with_tokenizer: bool) -> Known:
    """Read a model's headers. Raises BadModel for what keeps the model from being used."""
    directory = model.directory
    if file := _gguf_of(directory):
        raise BadModel(_why_not_gguf(model.use, file))
    settings = _settings(directory)
    _check_numbers(model.use, directory)
    if model.is_ours:
        _check_architecture(model, settings)
    if model.is_trained and (why := why_untrainable(settings)):
        raise BadModel(why)
    if model.use is Use.REWARD:
        _check_outputs(model, num_labels(directory))
    tensors: Tensors = {}
    if model.is_ours:
        tensors = read_tensors(directory)
        _check_head(model, settings, tensors)
    else:
        for path in sorted(directory.glob("*.safetensors")):
            read_header(path)
    if model.use is Use.REWARD and model.is_ours:
        _check_padding(settings, embedding_rows(tensors))
    has_own = with_tokenizer and model.use in (Use.POLICY, Use.REWARD)
    if has_own and not has_tokenizer(directory):
        raise BadModel("has no tokenizer; copy the tokenizer's files (tokenizer.json ...) there")
    vocabulary = read_vocabulary(directory) if with_tokenizer else None
    rows = embedding_rows(tensors)
    if has_own and vocabulary and rows is not None and vocabulary.num_base > rows:
        # Tokens that were added to it are judged prompt by prompt.
        raise BadModel(
            f"has {rows} embeddings, and its tokenizer gives ids up to {vocabulary.num_base - 1}; it is not "
            "the model's own tokenizer, or the embeddings were not resized"
        )
    return Known(settings, tensors, vocabulary)


def _check_padding(settings: Mapping[str, Any], rows: int | None) -> None:
    """Raise BadModel for a padding id that a reward model cannot be given beside a shorter sequence."""
    pad = settings.get("pad_token_id")
    if isinstance(pad, int) and rows and not 0 <= pad < rows:
        raise BadModel(
            f"its config.json has pad_token_id={pad}, which is none of its {rows} embeddings; give the id of "
            "its tokenizer's padding token, or null"
        )


def _gguf_of(path: Path) -> Path | None:
    """Return the GGUF file that a path is, or that has the only weights in it; None for anything else."""
    if path.is_file():
        return path if path.suffix == _GGUF else None
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    return min(path.glob(f"*{_GGUF}"), default=None)


def _why_not_gguf(use: Use, file: Path) -> str:
    """Return why a GGUF file cannot be used as it is, and what makes a model directory of it."""
    why = "its weights are in GGUF, which is for inference"
    if use is Use.REWARD:
        return f"{why} and holds no head that makes a score; give the safetensors"
    command = shlex.join(["python", "-m", "stages.models.gguf", str(file), "DIR"])
    return f"{why}; make a model directory of it ({command}, with the extra gguf), and give that"


def _settings(directory: Path) -> dict[str, Any]:
    """Return config.json. Raises BadModel where the directory is not that of a model with safetensors."""
    if directory.is_file():
        raise BadModel("is a file; give the Hugging Face model directory that holds it")
    if not directory.is_dir():
        why = way_to_have(str(directory), Kind.MODEL)
        raise BadModel(
            f"no such directory, {why}"
            if why
            else "no such directory; give a Hugging Face model directory on this filesystem"
        )
    if no_file := next((one.name for one in sorted(directory.iterdir()) if is_special(one)), None):
        raise BadModel(f"its {no_file} is a pipe, socket or device; put the file itself in its place")
    if not (directory / "config.json").is_file():
        if (directory / ADAPTER_SETTINGS).is_file():
            raise BadModel(
                "holds no config.json but an adapter's settings; merge the adapter into its base model "
                "(peft's merge_and_unload, then save_pretrained) and give that directory"
            )
        raise BadModel(
            "holds no config.json, so it is not a Hugging Face model directory; give one that "
            "save_pretrained wrote"
        )
    if not any(directory.glob("*.safetensors")):
        raise BadModel(
            "holds no *.safetensors; other weight files are not read because they can carry code "
            "(convert with transformers' save_pretrained)"
        )
    settings = read_json(directory / "config.json")
    if settings is None:
        raise BadModel("its config.json is not JSON of a model's configuration; copy it again")
    return settings


def _check_numbers(use: Use, directory: Path) -> None:
    """Raise BadModel for settings that are read as numbers, and are none."""
    size = text_settings(directory).get("vocab_size")
    if size is not None and (type(size) is not int or size < 1):
        raise BadModel(
            f"its config.json has vocab_size={size!r:.40}, which is no number of tokens; copy it again"
        )
    if use is Use.POLICY:
        model_end_ids(directory)


def _check_outputs(model: UsedModel, outputs: int) -> None:
    """Raise BadModel for a reward model with another number of outputs than a score is made of."""
    if outputs == 1 or (outputs == 2 and model.step_score is StepScore.PROBABILITY):
        return
    way_out = "a reward model has 1"
    if model.step_score is StepScore.PROBABILITY:
        way_out = "a probability is made of 1 or 2: the second is that of a right step"
    elif model.step_score and outputs == 2:
        way_out = f"set {model.key.removesuffix('path')}step_score=probability, or give a model with 1"
    raise BadModel(f"has {outputs} outputs; {way_out}")


def _check_architecture(model: UsedModel, settings: Mapping[str, Any]) -> None:
    use = model.use
    kind = settings.get("model_type")
    if not isinstance(kind, str | None) or not (kind or settings.get("auto_map")):
        raise BadModel(
            "its config.json has no model_type, so that no class can be chosen; copy it again from where the "
            "model is from"
        )
    for name in architectures_of(settings):
        if use in (Use.POLICY, Use.REFERENCE, Use.TEACHER) and name.endswith(_NOT_CAUSAL):
            raise BadModel(f"is a {name}; a {use} is a language model (...ForCausalLM)")
        is_backbone = re.fullmatch(r"\w+Model", name) and "For" not in name
        if model.step_score and name.endswith("TokenClassification"):
            continue
        if use is Use.REWARD and (name.endswith(_NOT_SCORING) or is_backbone):
            raise BadModel(f"is a {name}; a reward model is a classifier (...ForSequenceClassification)")


def _check_class(model: UsedModel, known: Known, classes: Classes, is_trusted: bool) -> None:
    """Raise BadModel for a model that transformers cannot load for its use, or not all of it."""
    if not model.is_loaded:
        return
    if model.use is not Use.CRITIC:
        _check_auto_class(model, known, classes, is_trusted)
    elif why := why_not_known(known.settings, classes, is_trusted):  # its class is made for any backbone
        raise BadModel(why)
    if why := why_other_depth(known.settings, known.tensors, classes):
        raise BadModel(why)


def _check_auto_class(model: UsedModel, known: Known, classes: Classes, is_trusted: bool) -> None:
    auto_class, table = "AutoModelForCausalLM", classes.causal
    if model.use is Use.REWARD:
        auto_class = scoring_class(known.settings, model.step_score is not None)
        table = {SEQUENCES: classes.scoring, TOKENS: classes.tokens}.get(auto_class, {})
        if not table and not is_trusted:
            raise BadModel(
                "scores steps by Python code from its directory; if you trust it, set "
                "model.trust_remote_code=true"
            )
    if why := why_not_of_class(table, auto_class, known.settings, classes, is_trusted):
        raise BadModel(why)
    if model.is_trained:
        lost = why_maimed(known.settings, known.tensors, classes)
        if why := why_not_causal(known.settings, classes) or lost:
            raise BadModel(why)


def _check_head(model: UsedModel, settings: Mapping[str, Any], tensors: Tensors) -> None:
    use = model.use
    head = head_of(tensors) if use in (Use.REWARD, Use.CRITIC) else None
    if use is Use.REWARD and not settings.get("auto_map") and not has_head(tensors):
        raise BadModel("has no head that makes a score (score.weight): its scores would be random numbers")
    if model.step_score and scoring_class(settings, gives_steps=True) == SEQUENCES and head != "score":
        raise BadModel(
            "has no head that scores each token (score.weight), only one for whole sequences; give a "
            f"token-classification model, or leave {model.key.removesuffix('path')}steps out"
        )
    outputs = tensors[f"{head}.weight"].shape[0] if head else 1
    if use is Use.REWARD and model.step_score:
        _check_outputs(model, outputs)
    elif outputs != 1:
        raise BadModel(f"its head {head} has {outputs} outputs; a {use} has 1")


def _other_vocabulary(other: Known, policy: Known) -> str | None:
    """Return why a critic, reference or teacher cannot read the policy's tokens; None where it can."""
    rows, needed = embedding_rows(other.tensors), embedding_rows(policy.tensors)
    if needed and policy.vocabulary:  # embeddings beyond the tokenizer's are padding
        needed = min(needed, policy.vocabulary.num_ids)
    if rows and needed and rows < needed:
        return f"has {rows} embeddings, and the policy's tokens need {needed}; give a model of its vocabulary"
    if other.vocabulary and policy.vocabulary:
        mine, theirs = other.vocabulary.tokens(), policy.vocabulary.tokens()
        shared = mine.keys() & theirs.keys()
        if sum(mine[i] == theirs[i] for i in shared) < _SAME_VOCABULARY * len(shared):
            return "its tokenizer has other ids than the policy's; give a model of the policy's vocabulary"
    return None
