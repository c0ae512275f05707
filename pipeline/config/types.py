"""Types of the configuration's values: what is legal for a number, a name, a time."""

import re
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, JsonValue, ValidationInfo


def _text_of_number(value: object) -> object:
    """Return a bare integer, such as 90, as text: YAML reads it as a number."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _number_or_auto(least: int, most: int | None = None) -> Callable[[object], object]:
    """Make a validator of numbers from ``least`` on, up to ``most`` if that is given, which raises ValueError
    for anything else but auto."""
    legal = f"a number from {least} on" if most is None else f"a number from {least} to {most}"

    def check(value: object) -> object:
        is_number = isinstance(value, int) and not isinstance(value, bool)
        is_legal = is_number and value >= least and (most is None or value <= most)  # type: ignore[operator]
        if value == "auto" or is_legal:
            return value
        raise ValueError(f"write {legal}, or auto")

    return check


_GPU = re.compile(r"[0-9]{1,4}|(GPU|MIG)-[A-Za-z0-9/-]{1,99}")


def _gpus_or_names(value: object) -> object:
    """Return names as a tuple of texts, numbers as they are. Raises ValueError for anything else."""
    if value in ("auto", "shared") or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    given = value.split(",") if isinstance(value, str) else value
    names = tuple(map(str, given)) if isinstance(given, list | tuple) else ()
    if not names or not all(map(_GPU.fullmatch, names)):
        raise ValueError("write auto, shared, a number of GPUs, or names such as [0,1] or [GPU-8f3a...]")
    return names


def _one_or_several(value: object, info: ValidationInfo) -> object:
    """Return one path, or paths by name, as they were given. Raises ValueError for anything else."""
    named = value if isinstance(value, dict) else {}
    for name, path in named.items():
        if not re.fullmatch(_NAME, str(name)):
            raise ValueError(f"{name!r} is no name: write letters, digits, '_', '.' and '-'")
        if not isinstance(path, str) or not path:
            raise ValueError(f"{name} is {path!r} instead of a file")
    if not (named or value is None or (isinstance(value, str) and value)):
        raise ValueError(f"write FILE, or data.{info.field_name}.NAME=FILE for each of several")
    return value


_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$"
PositiveInt = Annotated[int, Field(gt=0, strict=True)]
NonNegativeInt = Annotated[int, Field(ge=0, strict=True)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1, strict=True)]
"""A number that programs and files with 64-bit integers can hold."""
Days = Annotated[int, Field(ge=1, le=36_500, strict=True)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
Weight = Annotated[float, Field(ge=1e-9, le=1e6, allow_inf_nan=False, strict=True)]
"""Share relative to others', of which many add up to a number that a size can be divided by."""
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False, strict=True)]
Fraction = Annotated[float, Field(ge=0, le=1, strict=True)]
OpenFraction = Annotated[float, Field(gt=0, le=1, strict=True)]
DecayRate = Annotated[float, Field(ge=0, lt=1, strict=True)]
Name = Annotated[str, Field(pattern=_NAME)]
MetricName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_./@:+-]{0,99}$")]
"""Name of a number of a row, such as ``evaluate/reward``."""
Text = Annotated[str, Field(min_length=1)]
Paths = Annotated[Text | dict[str, str], BeforeValidator(_one_or_several)]
"""One path, or several by name."""
SbatchWord = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:=@/+-]{1,200}$")]
Line = Annotated[str, Field(pattern=r"^[^\n\r]*$")]
WandbLine = Annotated[str, Field(pattern=r"^[^\n\r]+$", max_length=128)]
WandbTag = Annotated[str, Field(pattern=r"^[^\n\r]+$", max_length=64)]
"""What W&B takes as a name, group or job type, and as a tag."""
EnvironmentName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
OptionName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")]
Memory = Annotated[str, Field(pattern=r"^[1-9][0-9]*[KMGT]?$")]
Gpus = Annotated[str, Field(pattern=r"^([A-Za-z0-9_.-]+:)?[1-9][0-9]*$"), BeforeValidator(_text_of_number)]
Linger = NonNegativeInt | Literal["auto"]
"""Seconds that a process stays after its task to get another; 0: not at all."""
Count = Annotated[NonNegativeInt | Literal["auto"], BeforeValidator(_number_or_auto(0))]
"""A number, or what follows from other settings."""
Slots = Annotated[PositiveInt | Literal["auto"], BeforeValidator(_number_or_auto(1))]
"""Tasks at once, or what follows from the GPUs."""
TokenBudget = Annotated[PositiveInt | Literal["auto"], BeforeValidator(_number_or_auto(1))]
"""Tokens at once, or what follows from the device."""
ZeroStage = Annotated[NonNegativeInt | Literal["auto"], BeforeValidator(_number_or_auto(0, 3))]
"""DeepSpeed's ZeRO stage, or what follows from other settings."""
LocalGpus = Annotated[
    Literal["auto", "shared"] | NonNegativeInt | tuple[str, ...], BeforeValidator(_gpus_or_names)
]
"""GPUs of this machine: a number of them, or names as CUDA_VISIBLE_DEVICES has them."""

TimeLimit = Annotated[str, Field(pattern=r"^([0-9]+-)?[0-9]{1,3}:[0-5][0-9]:[0-5][0-9]$")]
PluginName = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]
SchedulerName = Annotated[str, Field(pattern=r"^(environment|[A-Za-z_][\w.]*:[A-Za-z_][\w.]*)$")]
RuleName = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*(:[A-Za-z_][\w.]*)?$")]
SourceName = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*(:[A-Za-z_][\w.]*)?$")]
ArgumentName = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]
_OF_THE_CALL = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "strftime_now",
    }
)
"""Names that calling a chat template gives a meaning of its own."""


def _not_of_the_call(name: object) -> object:
    """Return a name that is free for the user's value. Raises ValueError for others."""
    if name in _OF_THE_CALL:
        raise ValueError(f"{name} is set by the program itself; tools come from data.tools_column")
    return name


ChatArguments = dict[Annotated[ArgumentName, BeforeValidator(_not_of_the_call)], JsonValue]
"""Further values that a chat template is given, by name."""
HttpUrl = Annotated[str, Field(pattern=r"^https?://[A-Za-z0-9._\[\]:-]+(/[^\s@]*)?$")]
"""Address without user name and password, which would be secrets in a file."""

DeviceMap = Annotated[
    str, Field(pattern=r"^(auto|balanced(_low_0)?|sequential|(cpu|cuda|xpu|npu|hpu|mlu|musa|mps)(:\d+)?)$")
]
PoolName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,30}$")]
