"""Trial of the run's models before anything is computed: each is loaded as it will be used, without its
weights; these are read once, and must be finite. Problems that only the installed transformers can find show
here.
"""

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from pipeline.config.algorithm import Estimator
from pipeline.config.model_classes import why_unknown
from pipeline.config.model_files import BadModel, Tensor, read_header, read_json, read_tensors
from pipeline.config.model_rules import Use, UsedModel, used_models
from pipeline.config.reward import RewardModelConfig
from pipeline.config.schema import Config
from pipeline.config.trainable import quantisation_of
from pipeline.config.update import Precision, TrainingEngine
from stages.context import UserError
from stages.logs import log
from stages.models.numerics import choose_accelerator
from stages.models.tokenizers import check_step_token, check_tells_places, load_tokenizer, same_tokenizer

_EXPONENTS: dict[str, tuple[str, int]] = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "BF16": ("<u2", 0x7F80),
    "F16": ("<u2", 0x7C00),
    "F8_E5M2": ("<u1", 0x7C),
    "F8_E4M3": ("<u1", 0x7F),
}
"""Integer type and bit mask by format; the bits of the mask are all set where a number is NaN or infinite."""
_PIECE = 1 << 24
"""Bytes read at a time."""
_PAGE = 1 << 12
"""Least bytes read of a tensor of which only a share is."""


def check_finite(
    key: str, directory: Path, tensors: Sequence[tuple[str, Tensor]], most: int | None = None
) -> None:
    """Check every weight, and log how many there were.

    Args:
        key: configuration key that names the model.
        tensors: name and place of each weight, in any order.
        most: bytes to read; of larger models the beginning of each weight is. Default: all.

    Raises:
        UserError: one is NaN or infinite.
    """
    started, ordered = time.monotonic(), sorted(tensors, key=lambda item: (item[1].path, item[1].start))
    total = sum(tensor.size for _, tensor in tensors)
    share = 1.0 if most is None or total <= most else most / total
    for path, group in itertools.groupby(ordered, key=lambda item: item[1].path):
        _check_file(key, directory, path, group, share)
    seconds, counted = time.monotonic() - started, f"{len(tensors)} weights of {total / 2**30:.2f} GiB"
    if share < 1:
        counted = f"the first {share:.0%} of each of {counted}"
    log.info(f"{key}={directory}: {counted}, all finite ({seconds:.1f} s)")


def _check_file(
    key: str, directory: Path, path: Path, tensors: Iterable[tuple[str, Tensor]], share: float
) -> None:
    with path.open("rb", buffering=0) as file:
        for name, tensor in tensors:
            if not is_finite(file, tensor, share):
                raise UserError(
                    f"{key}={directory}: its weight {name} in {path.name} has NaN or infinite values; "
                    "copy the model again, or give another checkpoint"
                )


def is_finite(file: BinaryIO, tensor: Tensor, share: float = 1.0) -> bool:
    """Whether every number of a tensor, or of a share of it from its beginning, but at least a page, is
    finite; true of formats without NaN."""
    if tensor.dtype not in _EXPONENTS:
        return True
    kind, mask = _EXPONENTS[tensor.dtype]
    file.seek(tensor.start)
    left = tensor.size if share >= 1 else min(tensor.size, (int(tensor.size * share) // _PAGE + 1) * _PAGE)
    while left > 0:
        bits = np.frombuffer(file.read(min(left, _PIECE)), kind)
        if not bits.size or np.any((bits & mask) == mask):
            return False
        left -= bits.nbytes
    return True


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHOWN = 120
"""Characters of a library's error message that are quoted."""


def try_models(config: Config) -> None:
    """Try all models. Raises UserError for the first that cannot be loaded or has NaN or infinite weights."""
    for problem in itertools.chain(loading_problems(config), number_problems(config)):
        raise problem


def loading_problems(config: Config) -> Iterator[UserError]:
    """Yield why models cannot be loaded as they will be used, for each directory the first reason."""
    failed: set[Path] = set()
    for model in loaded_models(config):
        try:
            if model.directory not in failed:
                _try_loading(config, model)
        except UserError as error:
            failed.add(model.directory)
            yield error


def tokenizer_problems(config: Config) -> Iterator[UserError]:
    """Yield why tokenizers of models cannot be loaded, for each directory once; the user's own function is
    only called by tasks."""
    models = (one for one in used_models(config) if one.is_ours and one.use in (Use.POLICY, Use.REWARD))
    keys = {} if config.model.tokenizer else {model.directory: model.key for model in models}
    tokenizers = {}
    for directory, key in keys.items():
        try:
            tokenizers[directory] = tried_tokenizer(config, key, str(directory))
        except UserError as error:
            yield error
    yield from _step_problems(config, tokenizers)


def _step_problems(config: Config, tokenizers: Mapping[Path, Any]) -> Iterator[UserError]:
    """Yield why models cannot score steps, by the tokenizers of their directories."""
    policy = tokenizers.get(Path(config.model.policy))
    for name, component in config.reward.components.items():
        if not isinstance(component, RewardModelConfig) or component.steps is None:
            continue
        own = tokenizers.get(Path(component.path))
        if own is None or policy is None:
            continue
        try:
            if component.step_token:
                check_step_token(own, f"reward.components.{name}.step_token", component.step_token)
            if component.step_token or not same_tokenizer(own, policy):
                check_tells_places(own, component.path)
        except UserError as error:
            yield error


def number_problems(config: Config, most: int | None = None) -> Iterator[UserError]:
    """Yield, for each model with NaN or infinite weights, the first of them.

    Args:
        most: bytes to read of each model. Default: all.
    """
    seen: set[Path] = set()
    for model in used_models(config):
        if model.directory not in seen:
            seen.add(model.directory)
            try:
                check_finite(model.key, model.directory, _tensors(model), most)
            except UserError as error:
                yield error


def check_routers(config: Config) -> None:
    """Check that the policy's routers have the loss that the algorithm weighs. Raises UserError."""
    if config.algorithm.router_aux_loss_coef:
        from stages.ppo import routers

        routers.check_routers(config.model, config.algorithm.router_aux_loss_coef)


def check_lora(config: Config) -> None:
    """Check that the update can put adapters into the policy. Raises UserError."""
    if config.update.lora is not None:
        from stages.ppo.lora import check_fits

        check_fits(config.model, config.update.lora)


def loaded_models(config: Config) -> Iterator[UsedModel]:
    """Yield the models that transformers will load, a critic that starts as the policy among them."""
    has_critic = config.algorithm.estimator is Estimator.GAE
    for model in used_models(config):
        if model.is_loaded and (has_critic or model.use is not Use.CRITIC):
            yield model
        starts_critic = model.use is Use.POLICY and has_critic and not config.model.critic
        if starts_critic and config.update.engine in (*TrainingEngine,):
            yield replace(model, use=Use.CRITIC)


def _tensors(model: UsedModel) -> list[tuple[str, Tensor]]:
    """Return the tensors of all files that are read. Raises UserError where a file is missing or no longer
    valid."""
    try:
        if model.is_ours:
            return list(read_tensors(model.directory).items())
        headers = [read_header(path) for path in sorted(model.directory.glob("*.safetensors"))]
    except BadModel as error:
        raise UserError(f"{model.key}={model.directory}: {error}") from error
    return [item for header in headers for item in header.items()]


def _try_loading(config: Config, model: UsedModel) -> None:
    """Load a model without its weights, unless it is quantised: then only what it needs installed is looked
    for. Raises UserError where that fails."""
    settings = read_json(model.directory / "config.json") or {}
    if quantisation_of(settings):
        _check_quantiser(model, settings)
        log.warning(f"{model.key}={model.directory}: is quantised; it was not tried whether it loads")
        return
    trust = config.model.trust_remote_code
    _check_is_known(model, settings, trust)
    with _explained(model.key, model.directory, f"be loaded as a {model.use}"):
        _load_without_weights(model, trust)


def _check_quantiser(model: UsedModel, settings: Mapping[str, Any]) -> None:
    """Raise UserError where the method of quantisation is unknown, or needs a package that is not there. What
    needs a GPU is not judged: this task may have none."""
    from transformers.quantizers.auto import AutoHfQuantizer

    if isinstance(how := settings.get("quantization_config"), dict):
        with _explained(model.key, model.directory, "be loaded, as it is quantised"):
            try:
                AutoHfQuantizer.from_config(how, pre_quantized=True).validate_environment(device_map="cpu")
            except RuntimeError as error:
                log.warning(f"{model.key}={model.directory}: {error}")


def _load_without_weights(model: UsedModel, trust: bool) -> None:
    choose_accelerator()  # before transformers imports DeepSpeed
    from stages.models.loading import WITHOUT_WEIGHTS, load_causal_lm, load_reward_model, load_step_model
    from stages.ppo.critics import load_critic

    match model.use:
        case Use.CRITIC:
            load_critic(model.directory, Precision.FP32, trust, device_map=WITHOUT_WEIGHTS)
        case Use.REWARD:
            load = load_step_model if model.step_score else load_reward_model
            load(model.directory, Precision.FP32, trust, WITHOUT_WEIGHTS)
        case Use.POLICY | Use.REFERENCE | Use.TEACHER:
            load_causal_lm(model.directory, Precision.FP32, trust, WITHOUT_WEIGHTS)


@contextlib.contextmanager
def _explained(key: str, directory: str | Path, what: str) -> Iterator[None]:
    """Turn a library's errors about a model into UserError; errors of disks and memory are passed on."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{key}: {error}") from error
    except Exception as error:  # of transformers, of the model's own code; tokenizers raises Exception itself
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None):
            raise
        said = " ".join(str(error).split())[:_SHOWN] or type(error).__name__
        way_out = "" if isinstance(error, ImportError) else "; copy it again, or give another"
        raise UserError(f"{key}={directory}: cannot {what}: {said}{way_out}") from error


def _check_is_known(model: UsedModel, settings: dict[str, object], trust: bool) -> None:
    """Raise UserError for an architecture that neither the installed transformers nor trusted code has."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind, code = settings.get("model_type"), bool(settings.get("auto_map"))
    if why := why_unknown(kind, transformers.__version__, kind in CONFIG_MAPPING, code, trust):
        raise UserError(f"{model.key}={model.directory}: {why}")


def tried_tokenizer(config: Config, key: str, directory: str) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a model or service.

    Args:
        key: configuration key that names the directory.

    Raises:
        UserError: it cannot be loaded.
    """
    if config.model.tokenizer:  # what the user's function raises is the user's to read whole
        return load_tokenizer(directory, config.model)
    with _explained(key, directory, "load its tokenizer"):
        return load_tokenizer(directory, config.model)
